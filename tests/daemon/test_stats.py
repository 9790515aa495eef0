"""What the daemon says of itself: hits and misses add up, so do the pool's bytes, and a quota holds."""

from __future__ import annotations

import random
from pathlib import Path

from kvoffd_client import AdminClient, ErrorCode, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import NAMESPACE, PAGE_BYTES, Books, NamespaceStats, WireClient, books, keys

OTHER = bytes(reversed(NAMESPACE))


def wait_balanced(daemon: DaemonProcess) -> Books:
    """Until all adds up: why keys were missed is counted after the answer."""

    def unbalanced() -> list[object]:
        found = books(daemon.directory)
        assert found.balanced, found
        assert 0 <= found.pool.pinned_bytes <= found.pool.size_bytes
        return [space for space in found.namespaces.values() if not adds_up(space)]

    wait_until(lambda: not unbalanced(), explain=unbalanced)
    return books(daemon.directory)


def adds_up(space: NamespaceStats) -> bool:
    found = sum(space.found_keys.values())
    gone = space.evicted_blocks + space.invalidated_blocks
    hits_and_misses = space.asked_keys == found + sum(space.misses.values())
    return hits_and_misses and space.stored_blocks == space.ready_blocks + gone


def test_the_books_balance_whatever_is_done() -> None:
    """Stores, lookups, loads, invalidated keys, resets and evictions in a pool of 64 blocks, in two namespaces."""
    choose = random.Random(35)
    with DaemonProcess("1MiB", limits={"leased_share": 1}) as daemon, SharedMemory(64 * PAGE_BYTES, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
            caches = {}
            for space in (NAMESPACE, OTHER):
                worker.open_namespace(space)
                scheduler.open_namespace(space)
                caches[space] = worker.register(memory, namespace=space)
            asked = dict.fromkeys(caches, 0)
            hits = dict.fromkeys(caches, 0)
            loaded = dict.fromkeys(caches, 0)
            for lease in range(1, 200):
                space = choose.choice((NAMESPACE, OTHER))
                start = choose.randrange(120)
                numbers = range(start, start + choose.randrange(1, 8))
                act = choose.choice(("store", "store", "look up", "look up", "invalidate", "reset"))
                if act == "store":
                    worker.store(caches[space], keys(*numbers), [number % 64 for number in numbers])
                elif act == "look up":
                    states = scheduler.lookup(lease, keys(*numbers), space).states
                    ready = len(states) - len(states.lstrip("R"))
                    asked[space] += len(numbers)
                    hits[space] += states.count("R")
                    if ready:
                        wanted = keys(*numbers[:ready])
                        done = worker.load(caches[space], scheduler.lease(lease), wanted, list(range(ready)))
                        assert done.ok
                        loaded[space] += ready * PAGE_BYTES
                    scheduler.release(lease)
                elif act == "invalidate":
                    scheduler.invalidate(keys(*numbers), space)
                elif choose.random() < 0.1:
                    scheduler.reset(space)
                if not lease % 20:
                    wait_balanced(daemon)
            found = wait_balanced(daemon)
            for space, one in found.namespaces.items():
                assert (one.asked_keys, one.found_keys.get("pool", 0)) == (asked[space], hits[space])
                assert one.loaded_bytes == loaded[space]
                assert one.evicted_blocks, "or nothing was evicted, and this proves little"
                assert set(one.misses) >= {"unknown", "evicted"}
            assert (found.load.failed_jobs, found.store.failed_jobs) == (0, 0)
            assert found.load.bytes == sum(loaded.values())


# --- quotas ----------------------------------------------------------------------------------------

QUOTA_BLOCKS = 32
BLOCK_BYTES = 4 * PAGE_BYTES


def set_quota(daemon: DaemonProcess, label: str, most: str) -> tuple[int, str]:
    return command(daemon, "namespaces", "quota", label, "--max", most)


def store_blocks(daemon: DaemonProcess, label: str, count: int) -> int:
    """Store so many new blocks; how many the namespace has then."""
    with FakeEngine(daemon.directory, label, blocks=16) as engine:
        first = books(daemon.directory).namespaces[engine.namespace.fingerprint].stored_blocks
        for start in range(first, first + count, 8):
            assert engine.store(keys(*range(start, start + 8)), range(8)).ok
        found = books(daemon.directory).namespaces[engine.namespace.fingerprint]
        return found.ready_bytes // BLOCK_BYTES


def test_a_quota_holds_and_outlives_the_daemon(pool_file: Path) -> None:
    """The maximum of one namespace takes nothing from the others."""
    with DaemonProcess("16MiB", pool_file=str(pool_file), eviction_policy="lru") as daemon:
        assert store_blocks(daemon, "polite", 64) == 64
        assert store_blocks(daemon, "flood", 8) == 8
        assert set_quota(daemon, "flood", f"{QUOTA_BLOCKS * BLOCK_BYTES}")[0] == 0
        assert store_blocks(daemon, "flood", 160) == QUOTA_BLOCKS
        for end in (daemon.kill, daemon.stop):
            end()
            daemon.start()
            assert store_blocks(daemon, "flood", 80) == QUOTA_BLOCKS
            assert store_blocks(daemon, "polite", 8) >= 64
            maxima = {space.model: space.quota_bytes for space in books(daemon.directory).namespaces.values()}
            assert maxima == {"flood": QUOTA_BLOCKS * BLOCK_BYTES, "polite": None}
        assert set_quota(daemon, "flood", "none")[0] == 0
        assert store_blocks(daemon, "flood", 80) > QUOTA_BLOCKS


def test_what_a_quota_takes_is_a_miss_by_the_quota_and_not_for_want_of_space() -> None:
    with DaemonProcess("16MiB", eviction_policy="lru") as daemon, FakeEngine(daemon.directory, "tiny") as engine:
        assert set_quota(daemon, "tiny", f"{4 * BLOCK_BYTES}")[0] == 0
        assert engine.store(keys(*range(4)), range(4)).ok
        assert engine.store(keys(4, 5), range(2)).ok
        assert engine.lookup(keys(*range(6))) == 2, "the chain's tail, 2 and 3, made space for 4 and 5"
        with AdminClient(daemon.directory) as admin:
            assert admin.stats().since_start.misses == {"quota": 2}
            assert admin.health().level == "ok"
            lost = engine.store(keys(6, 7, 8), range(3))
            assert (lost.error, len(lost.failed_keys)) == (ErrorCode.NO_SPACE, 3), "all that it has is leased"
            (cause,) = admin.health().causes
            assert cause.reason == "stores_without_space"
            ends = "a namespace was at its quota, all of it pinned, being written, or of the same prompt (tiny "
            assert f"3 blocks that engines offered were not stored: {ends}" in cause.sentence
            assert cause.sentence.endswith("`kvoffd-cli namespaces quota` raises it.")
            assert admin.stats().since_start.no_space_causes == {"quota": 3}
            assert engine.lookup(keys(6)) == 0
            assert admin.stats().since_start.misses == {"quota": 3}


def test_a_namespace_without_a_quota_is_not_named_for_one() -> None:
    """Health names another one, even if this one's quota refused more until it was removed."""
    with DaemonProcess("16MiB", eviction_policy="lru") as daemon, AdminClient(daemon.directory) as admin:
        with FakeEngine(daemon.directory, "free") as free, FakeEngine(daemon.directory, "tiny") as tiny:
            for engine, name, lost in ((free, "free", 3), (tiny, "tiny", 1)):
                assert set_quota(daemon, name, f"{4 * BLOCK_BYTES}")[0] == 0
                assert engine.store(keys(*range(4)), range(4)).ok
                assert engine.lookup(keys(*range(4))) == 4, "all that it has is leased"
                assert len(engine.store(keys(*range(4, 4 + lost)), range(lost)).failed_keys) == lost
            assert set_quota(daemon, "free", "none")[0] == 0
            (cause,) = admin.health().causes
            assert "at its quota, all of it pinned, being written, or of the same prompt (tiny " in cause.sentence


def test_what_a_reset_took_is_a_miss_by_that() -> None:
    with DaemonProcess("16MiB") as daemon, FakeEngine(daemon.directory, "tiny") as engine:
        with AdminClient(daemon.directory) as admin:
            assert engine.store(keys(0, 1, 2), range(3)).ok
            assert engine.scheduler.reset()
            admin.stats()  # by then the slots are free
            assert engine.lookup(keys(0, 1, 2, 3)) == 0
            assert admin.stats().since_start.misses == {"invalidated": 3, "unknown": 1}


def test_a_quota_that_is_none_changes_nothing(shared_daemon: DaemonProcess) -> None:
    with FakeEngine(shared_daemon.directory, "tiny"):
        wrong = ("tiny", "lots", "not a size"), ("tiny", "-1", ""), ("nobody", "1MiB", "No open namespace")
        for label, most, why in wrong:
            status, text = set_quota(shared_daemon, label, most)
            assert (status, why in text) == (2, True), text
        assert all(space.quota_bytes is None for space in books(shared_daemon.directory).namespaces.values())
