"""Blocks that stay: those an operator pinned, and under ``lru`` those that were asked for last."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_client import BlockClient
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import books, keys

PAGE_BYTES = 4096
IN_POOL = 2**21 // (4 * PAGE_BYTES)
"""Blocks that the pool has room for."""
KEYS = keys(1, 2, 3, 4)


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with DaemonProcess("2MiB", block_access="write", eviction_policy="lru") as running:
        yield running


@pytest.fixture
def engine(shared_daemon: DaemonProcess) -> Iterator[FakeEngine]:
    """An engine that has stored four blocks."""
    with FakeEngine(shared_daemon.directory, "tiny", blocks=32, page_bytes=PAGE_BYTES) as running:
        running.fill(range(4), seed=1)
        assert running.store(KEYS, range(4)).ok
        yield running


def store_others(engine: FakeEngine, first: int, count: int) -> None:
    for start in range(first, first + count, 16):
        assert engine.store(keys(*range(start, start + 16)), range(16, 32)).ok


def test_pins_keep_blocks_until_they_are_taken_back(shared_daemon: DaemonProcess, engine: FakeEngine) -> None:
    with BlockClient(shared_daemon.directory) as client:
        assert client.pin("tiny", KEYS[:2]) == 2
        assert client.pin("tiny", KEYS[:2]) == 0
    found = books(shared_daemon.directory)
    assert (found.pinned_bytes, found.leases) == (2 * 4 * PAGE_BYTES, 0)
    store_others(engine, 1000, 2 * IN_POOL)
    assert engine.lookup(KEYS[2:3]) == engine.lookup(KEYS[3:]) == 0
    assert engine.lookup(KEYS[:2]) == 2
    assert engine.load(KEYS[:2], [4, 5]).ok
    assert engine.checksums([4, 5]) == engine.checksums([0, 1])
    with BlockClient(shared_daemon.directory) as client:
        assert client.unpin("tiny", KEYS) == 2
    assert books(shared_daemon.directory).pinned_bytes == 0
    store_others(engine, 5000, 2 * IN_POOL)
    assert engine.lookup(KEYS[:1]) == 0
    assert books(shared_daemon.directory).balanced


def test_what_was_asked_for_last_is_evicted_last(engine: FakeEngine) -> None:
    for first in range(1000, 1000 + 2 * IN_POOL, 16):
        store_others(engine, first, 16)
        assert engine.lookup(KEYS[:2]) == 2, "it was evicted while others lay idle"
        engine.release()
    assert engine.lookup(KEYS[2:3]) == engine.lookup(KEYS[3:]) == 0
