"""What ``lru`` evicts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import keys

PAGE_BYTES = 4096
IN_POOL = 2**21 // (4 * PAGE_BYTES)
"""Blocks that the pool has room for."""
KEYS = keys(1, 2, 3, 4)


@pytest.fixture(scope="module")
def module_daemon() -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with DaemonProcess("2MiB", eviction_policy="lru") as running:
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


def test_what_was_asked_for_last_is_evicted_last(engine: FakeEngine) -> None:
    for first in range(1000, 1000 + 2 * IN_POOL, 16):
        store_others(engine, first, 16)
        assert engine.lookup(KEYS[:2]) == 2, "it was evicted while others lay idle"
        engine.release()
    assert engine.lookup(KEYS[2:3]) == engine.lookup(KEYS[3:]) == 0
