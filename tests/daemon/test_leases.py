"""Leases of real use: over a reset, several at once, over a load that failed, and for as long as a request waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_client import SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import WireClient, books, keys


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives: its copies can be made to fail."""
    with DaemonProcess(faults=True) as running:
        yield running


def test_leases_end_with_a_reset(
    shared_daemon: DaemonProcess, worker: WireClient, scheduler: WireClient, memory: SharedMemory
) -> None:
    """Whoever resets has other weights: what was leased before is not loaded."""
    cache = worker.register(memory)
    assert worker.store(cache, keys(1), [0]).ok
    assert scheduler.lookup(1, keys(1)).pinned == 1
    before = memory.view.tobytes()
    with WireClient(shared_daemon.directory, "scheduler") as other:
        other.open_namespace()
        assert other.reset() == 1
    assert worker.load(cache, scheduler.lease(1), keys(1), [9]).error == "unknown_lease"
    assert memory.view.tobytes() == before
    found = books(shared_daemon.directory)
    assert (found.leases, found.pool.pinned_bytes, found.leaving_bytes) == (0, 0, 0)


def test_leases_are_released_together(
    shared_daemon: DaemonProcess, worker: WireClient, scheduler: WireClient, memory: SharedMemory
) -> None:
    worker.store(worker.register(memory), keys(1, 2, 3), [0, 1, 2])
    for number in (1, 2, 3):
        assert scheduler.lookup(number, keys(number)).pinned == 1
    assert scheduler.release(3, 9, 1, 1) == 2
    assert (books(shared_daemon.directory).leases, scheduler.release(2)) == (1, 1)
    assert books(shared_daemon.directory).pool.pinned_bytes == 0


def test_leases_outlast_loads_that_fail(
    shared_daemon: DaemonProcess, worker: WireClient, scheduler: WireClient, memory: SharedMemory
) -> None:
    """The engine may try again."""
    cache = worker.register(memory)
    worker.store(cache, keys(1), [0])
    assert scheduler.lookup(1, keys(1)).pinned == 1
    with shared_daemon.fault("load fails"):
        assert not worker.load(cache, scheduler.lease(1), keys(1), [9]).ok
    assert worker.load(cache, scheduler.lease(1), keys(1), [9]).ok
    assert books(shared_daemon.directory).leases == 0


def test_leases_of_an_engine_live_until_it_loads(memory: SharedMemory) -> None:
    """However long its request waits: those of sessions that end go beside it."""
    with DaemonProcess() as daemon, FakeEngine(daemon.directory) as engine:
        engine.fill([0], seed=1)
        assert engine.store(keys(1), [0]).ok
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
            for client in (worker, scheduler):
                client.open_namespace()
            assert worker.store(worker.register(memory), keys(1), [0]).ok
            assert engine.lookup(keys(1)) == 1
            assert scheduler.lookup(1, keys(1)).pinned == 1
            assert books(daemon.directory).leases == 2
        wait_until(lambda: books(daemon.directory).leases == 1, interval_s=0.05)
        assert engine.load(keys(1), [1]).ok
        assert engine.checksums([0]) == engine.checksums([1])
