"""Copies in host memory that never come back: no engine waits for them for ever, and none hears that they ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvoffd_client import ErrorCode
from tests.kit.checked import CheckedEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

FOR_EVER = "slow 100000"
EXIT_STUCK = 70
"""Of sysexits.h. A service manager starts the daemon again."""
KEYS = keys(*range(8))


@pytest.fixture
def daemon(pool_file: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess("16MiB", faults=True, pool_file=str(pool_file), limits={"job_deadline_s": 1.5}) as running:
        yield running


def test_hang_of_a_load_ends_the_daemon_and_the_next_serves(daemon: DaemonProcess) -> None:
    with CheckedEngine(daemon) as engine:
        engine.put(range(8))
        with daemon.fault(f"load {FOR_EVER}"):
            assert engine.lookup(KEYS) == 8
            # Not before the process is gone: bytes may land in the blocks until then.
            assert engine.load(KEYS, range(8, 16), timeout_s=60).error is ErrorCode.SESSION_ENDED
        assert daemon.process.wait(30) == EXIT_STUCK
        assert "A copy in host memory hangs" in daemon.log
        daemon.start()
        assert engine.wait_ready(30)
        assert engine.has(range(8))


def test_hang_of_a_store_is_answered_and_holds_its_memory(daemon: DaemonProcess) -> None:
    """Its engine learns at the deadline that it failed, others are served; the memory is not released to anybody."""
    with CheckedEngine(daemon) as engine, CheckedEngine(daemon, engine.truth) as other:
        engine.put(range(4))
        with daemon.fault(f"store {FOR_EVER}"):
            assert engine.store(KEYS[4:], range(4, 8), timeout_s=60).error is ErrorCode.DEADLINE
            with suppress(OSError):  # it ends soon
                wait_until(lambda: not any(client.jobs for client in books(daemon.directory).clients))
            assert daemon.running, "it ends for that only after it has answered"
            assert other.get(range(8)) == [*range(4)]
            confirmed = engine.workers[0].unregister(1.0)
            assert not (confirmed and daemon.running)
            assert daemon.process.wait(60) == EXIT_STUCK
