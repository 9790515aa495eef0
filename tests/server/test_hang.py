"""Copies in host memory that never come back: no engine waits for them for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.server.daemon import EXIT_STUCK
from kvoffd.server.engine_memory import STUCK_AFTER_S
from kvoffd.transfer.lane import OVERDUE_GRACE_S
from kvoffd_client.testing import FakeEngine
from kvoffd_proto.errors import ErrorCode
from tests.kit.daemon import DaemonProcess

FOR_EVER = "slow 100000"
DEADLINE_S = 0.5
KEYS = [number.to_bytes(32, "big") for number in range(8)]


@pytest.fixture
def daemon(pool_file: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess("16MiB", faults=True, pool_file=str(pool_file), job_deadline=f"{DEADLINE_S}s") as running:
        yield running


def test_a_load_that_hangs_ends_the_daemon_and_the_next_one_serves_its_blocks(daemon: DaemonProcess) -> None:
    with FakeEngine(daemon.directory, blocks=16) as engine:
        engine.fill(range(8), seed=1)
        assert engine.store(KEYS, range(8)).ok
        with daemon.fault(f"load {FOR_EVER}"):
            assert engine.lookup(KEYS) == 8
            started = time.monotonic()
            result = engine.load(KEYS, range(8, 16), timeout_s=30)
            waited_s = time.monotonic() - started
        assert result.error is ErrorCode.SESSION_ENDED
        assert waited_s > DEADLINE_S + OVERDUE_GRACE_S + STUCK_AFTER_S
        assert daemon.process.wait(10) == EXIT_STUCK
        assert "A copy in host memory does not end" in daemon.log
        daemon.start()
        assert engine.wait_ready(20)
        assert engine.lookup(KEYS) == 8
        assert engine.load(KEYS, range(8, 16)).ok
        assert engine.checksums(range(8)) == engine.checksums(range(8, 16))


def test_a_store_that_hangs_is_answered_before_the_daemon_ends_for_it(daemon: DaemonProcess) -> None:
    with FakeEngine(daemon.directory, blocks=16) as engine:
        engine.fill(range(8), seed=1)
        assert engine.store(KEYS[:4], range(4)).ok
        with daemon.fault(f"store {FOR_EVER}"):
            assert engine.store(KEYS[4:], range(4, 8), timeout_s=30).error is ErrorCode.DEADLINE
            assert engine.lookup(KEYS) == 4
            assert engine.load(KEYS[:4], range(8, 12)).ok
            assert daemon.process.wait(30) == EXIT_STUCK


def test_memory_is_not_said_to_be_let_go_of_while_a_copy_of_it_hangs(daemon: DaemonProcess) -> None:
    with FakeEngine(daemon.directory, blocks=16) as engine:
        with daemon.fault(f"store {FOR_EVER}"):
            assert engine.store(KEYS, range(8), timeout_s=0.2).error is ErrorCode.DEADLINE
            # The store was given up; that the daemon has answered it for itself by now must make no difference.
            time.sleep(DEADLINE_S + OVERDUE_GRACE_S + 0.75)
            assert engine.workers[0].wait_ready(10)
            confirmed = engine.workers[0].unregister(1.0)
        assert not (confirmed and daemon.running)
        assert daemon.process.wait(30) == EXIT_STUCK
