"""Hints of clients: retained blocks go last until their time is over, released ones first, prefetched ones come up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_client import GroupKeys, HintAction, SharedMemory
from tests.kit.checked import CheckedEngine, over_disk, put_on_disk, wait_disk
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import NAMESPACE, PAGE_BYTES, NamespaceStats, WireClient, books, keys, refused

IN_POOL = 64
MAX_RETAINED = 16


class Hinted:
    """A daemon with a pool of 64 blocks, a worker that stores one block after the other, and a scheduler."""

    def __init__(self, daemon: DaemonProcess, memory: SharedMemory, worker: WireClient, scheduler: WireClient) -> None:
        self.daemon, self.worker, self.scheduler = daemon, worker, scheduler
        worker.open_namespace()
        scheduler.open_namespace()
        self._registration = worker.register(memory)

    def store(self, *numbers: int) -> None:
        for first in range(0, len(numbers), 8):
            some = numbers[first : first + 8]
            self.worker.store(self._registration, keys(*some), list(range(len(some))))

    def prompt(self, giver: int, *numbers: int) -> None:
        """A prompt of this giver that misses some keys and computes them."""
        self.there(*numbers, giver=giver)
        self.store(*numbers)

    def there(self, *numbers: int, giver: int = 0) -> int:
        found = self.scheduler.lookup(1, keys(*numbers), giver=giver).states
        self.scheduler.release(1)
        return found.count("R")

    @property
    def counts(self) -> NamespaceStats:
        return books(self.daemon.directory).namespaces[NAMESPACE]

    @property
    def retained_bytes(self) -> int:
        return books(self.daemon.directory).pool.retained_bytes


@pytest.fixture(params=["lru", "learned", "arc"])
def hinted(request: pytest.FixtureRequest) -> Iterator[Hinted]:
    with (
        DaemonProcess("1MiB", eviction_policy=request.param) as daemon,
        SharedMemory(IN_POOL * PAGE_BYTES, "test") as memory,
        WireClient(daemon.directory) as worker,
        WireClient(daemon.directory, "scheduler") as scheduler,
    ):
        yield Hinted(daemon, memory, worker, scheduler)


def test_retained_blocks_go_last_and_released_ones_first(hinted: Hinted) -> None:
    hinted.prompt(1, *range(8))
    assert hinted.scheduler.hint("retain", keys(*range(8)), priority=50) == 8
    hinted.store(*range(100, 300))
    assert hinted.there(*range(8), giver=1) == 8
    assert hinted.retained_bytes == 8 * PAGE_BYTES
    hinted.scheduler.hint("release", keys(*range(8)))
    hinted.store(*range(300, 308))
    assert hinted.there(*range(8)) == 0
    counts = hinted.counts
    assert (counts.retained_blocks, counts.retained_found_keys, counts.released_blocks) == (8, 8, 8)
    assert hinted.retained_bytes == 0


def test_a_release_of_another_giver_takes_nothing_of_a_shared_prompt(hinted: Hinted) -> None:
    hinted.prompt(1, *range(8))
    hinted.scheduler.hint("retain", keys(*range(8)), priority=100, ttl_s=3600)
    hinted.prompt(1, *range(10, 18))
    hinted.prompt(2, *range(8), *range(10, 18), *range(20, 24))
    hinted.scheduler.hint("release", keys(*range(8), *range(10, 18), *range(20, 24)), giver=2)
    assert hinted.counts.released_blocks == 4
    hinted.store(*range(100, 140))
    assert (hinted.there(*range(8)), hinted.there(*range(10, 18))) == (8, 8)
    hinted.store(*range(200, 280))
    assert hinted.there(*range(8)) == 8


def test_a_release_does_not_wait_for_blocks_that_others_will_store(hinted: Hinted) -> None:
    hinted.scheduler.hint("release", keys(*range(8)), giver=2)
    hinted.prompt(1, *range(8))
    hinted.store(*range(100, 140))
    assert hinted.there(*range(8)) == 8


def test_a_higher_priority_and_another_session_get_what_a_lower_one_retains(hinted: Hinted) -> None:
    hinted.store(*range(100, 116))
    hinted.store(*range(16))
    hinted.scheduler.hint("retain", keys(*range(100, 116)), priority=0, ttl_s=86400, giver=2)
    hinted.scheduler.hint("retain", keys(*range(4)), priority=100)
    with WireClient(hinted.daemon.directory, "scheduler") as other:
        other.open_namespace()
        other.hint("retain", keys(*range(4, 16)), priority=0, giver=3)
    hinted.store(*range(200, 400))
    assert hinted.there(*range(4)) == 4
    assert hinted.there(*range(4, 16)) == 8
    assert hinted.retained_bytes == MAX_RETAINED * PAGE_BYTES


def test_a_retained_block_does_not_outlive_its_time(hinted: Hinted) -> None:
    hinted.store(*range(8))
    hinted.scheduler.hint("retain", keys(*range(8)), ttl_s=0.2)
    wait_until(lambda: not hinted.retained_bytes)
    hinted.store(*range(100, 300))
    assert hinted.there(*range(8)) == 0


def test_no_more_than_a_part_is_retained_and_the_rest_is_counted(hinted: Hinted) -> None:
    hinted.scheduler.hint("retain", keys(*range(40)))
    hinted.store(*range(40))
    assert hinted.retained_bytes == MAX_RETAINED * PAGE_BYTES
    assert hinted.counts.unretained_blocks == 40 - MAX_RETAINED


def test_wrong_hints_are_refused_and_change_nothing(hinted: Hinted) -> None:
    hinted.store(1)
    assert refused(hinted.scheduler.hint, "pin", keys(1)) == "malformed"
    assert refused(hinted.scheduler.hint, "retain", keys(1), priority=101) == "malformed"
    assert refused(hinted.scheduler.hint, "retain", keys(1), ttl_s=1e9) == "malformed"
    assert refused(hinted.scheduler.hint, "retain", [b"short"]) == "bad_keys"
    assert refused(hinted.scheduler.hint, "retain", keys(*range(1025))) == "too_many"
    assert refused(hinted.worker.hint, "retain", keys(1)) == "wrong_role"
    assert hinted.retained_bytes == 0


def test_prefetched_blocks_come_up_from_disk_though_nobody_waits(tmp_path: Path) -> None:
    with over_disk(tmp_path, "2MiB", "16MiB") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            space = engine.namespace.fingerprint
            put_on_disk(daemon, engine, 96)
            engine.scheduler.hint(HintAction.PREFETCH, [GroupKeys(0, b"".join(keys(*range(8))))])
            wait_until(lambda: books(daemon.directory).tiers.promoted_blocks >= 8)
            assert books(daemon.directory).namespaces[space].prefetched_keys == 8
            assert books(daemon.directory).pool.pinned_bytes == 0
            assert engine.has(range(8))
