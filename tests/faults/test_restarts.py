"""Kills, restarts and damaged pools: what was dropped stays away, what is left is right, and the operator learns why.

Comparisons are by ``CheckedEngine``; ``test_a_load_that_lies_is_seen`` shows that they can fail.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, GroupKeys, SharedMemory
from tests.kit.checked import CheckedEngine, Truth
from tests.kit.command import command
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import tmpfs
from tests.kit.wire import WireClient, books, keys

BLOCKS = 128
ALL = range(BLOCKS)
MIB = 1 << 20
NAMESPACES = 64


@pytest.fixture
def lasting(pool_file: Path) -> Iterator[DaemonProcess]:
    """A running daemon with a pool of 16 MiB in a file."""
    with DaemonProcess("16MiB", pool_file=str(pool_file)) as running:
        yield running


def test_a_load_that_lies_is_seen() -> None:
    """The control of this folder: a daemon that delivers other bytes fails every comparison."""
    with DaemonProcess("16MiB", faults=True) as daemon, CheckedEngine(daemon) as engine:
        engine.put(range(8))
        assert engine.has(range(8))
        with daemon.fault("load lies"), pytest.raises(AssertionError, match="wrong bytes"):
            engine.get(range(8))
        engine.truth.drop()
        with pytest.raises(AssertionError, match="after they were dropped"):
            engine.get(range(8))


def reset(daemon: DaemonProcess, engine: CheckedEngine) -> None:
    assert engine.scheduler.reset()


def clear(daemon: DaemonProcess, engine: CheckedEngine) -> None:
    with AdminClient(daemon.directory) as admin:
        assert admin.clear()


def invalidate(daemon: DaemonProcess, engine: CheckedEngine) -> None:
    engine.scheduler.invalidate([GroupKeys(0, b"".join(keys(*ALL)))])
    assert engine.lookup(keys(0)) == 0  # behind the invalidation: it was done


@pytest.mark.parametrize("rounds", [1, pytest.param(8, marks=[pytest.mark.nightly, pytest.mark.timeout(300)])])
def test_a_kill_right_after_a_drop_brings_nothing_back(lasting: DaemonProcess, rounds: int) -> None:
    """And what is stored after it, under the same keys, is what comes back."""
    truth = Truth()
    with CheckedEngine(lasting, truth) as engine:
        for drop in (reset, invalidate, clear) * rounds:
            engine.put(ALL)
            assert engine.lookup(keys(*range(32))) == 32, "what is leased goes too"
            drop(lasting, engine)
            truth.drop()
            engine.put(range(8))
            lasting.kill()
            lasting.start()
            assert engine.wait_ready(30.0)
            assert engine.get(ALL) == list(range(8)), drop.__name__
    assert books(lasting.directory).health == "ok"


def fill(place: Path) -> None:
    """Take all the room of a file system."""
    with (place / "filler").open("wb", buffering=0) as filler:
        for size in (MIB, 4096):
            with suppress(OSError):
                while filler.write(bytes(size)):
                    pass


def test_blocks_whose_namespace_found_no_room_are_logged(lasting: DaemonProcess) -> None:
    """The slot table has space for some of them. A restart loses the blocks of the others, and says why."""
    with SharedMemory(64 * 4096, "test") as memory:
        for number in range(NAMESPACES):
            with WireClient(lasting.directory) as worker:
                rng = random.Random(number)  # takes space, however it is packed
                namespace = rng.randbytes(32)
                worker.open_namespace(namespace, description=rng.randbytes(1000).hex())
                cache = worker.register(memory, 4096, namespace=namespace)
                assert worker.store(cache, keys(1, 2), [1, 2]).ok
    lasting.kill()
    assert "Too many namespaces" in lasting.log
    before = len(lasting.log)
    lasting.start()
    logged = lasting.log[before:]
    assert "lack shards" not in logged, logged
    assert re.search(r"Dropped \d+ pool slots at recovery: their namespaces were reset, left out,", logged)


def test_a_full_file_system_below_the_pool(tmp_path: Path) -> None:
    """Below the daemon's directory too. Stores and loads go on. What cannot be written down is refused with the reason,
    and a restart has all blocks."""
    with tmpfs(tmp_path / "memory", "24m") as place:
        truth = Truth()
        (place / "run").mkdir(0o700)
        with DaemonProcess("16MiB", place / "run", pool_file=str(place / "pool")) as daemon:
            with CheckedEngine(daemon, truth) as engine:
                engine.put(range(64))
                fill(place)
                engine.put(range(64, 128))
                assert engine.has(ALL)
            status, text = command(daemon, "namespaces", "quota", "demo", "--max", "8MiB")
            assert (status, "space" in text or "room" in text) == (2, True), text
            daemon.kill()
            daemon.start()
            with CheckedEngine(daemon, truth) as engine:
                assert engine.has(ALL)


def test_a_file_system_too_small_for_the_pool(tmp_path: Path) -> None:
    """The daemon says both sizes and leaves nothing behind."""
    with tmpfs(tmp_path / "memory", "8m") as place:
        daemon = DaemonProcess("64MiB", pool_file=str(place / "pool"))
        with closing(daemon):
            assert daemon.start(wait=False).process.wait(60) != 0
            assert "64.0 MiB" in daemon.log
            assert "8.00 MiB" in daemon.log
            assert os.listdir(place) == []
