"""Load generators work between start and stop, and end with the process that started them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from tests.bench.daemon.echo import Echo
from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.daemon.results import BenchFailed
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until


def test_every_process_works_from_each_start_to_the_next_stop_and_says_how_much() -> None:
    with Echo() as echo, LoadGenerators("echoes", echo.directory, 1, 2) as load:

        def all_work() -> bool:
            """On a busy machine one may have no CPU all the time."""
            load.start()
            time.sleep(0.05)
            done = load.stop()
            assert len(done) == 2
            assert all(work.seconds > 0 for work in done)
            return all(work.count > 0 for work in done)

        for _ in range(3):
            wait_until(all_work)


@pytest.mark.parametrize("role", ["lookups", "copies"])
def test_clients_of_a_daemon_leave_nothing_behind(role: str, daemon: DaemonProcess) -> None:
    with LoadGenerators(role, daemon.directory, 4, 2) as load:
        load.start()
        load.stop()
    with AdminClient(daemon.directory) as admin:
        stats = admin.stats()
    assert stats.pool.of("free") == stats.pool.size_bytes
    assert stats.errors == {}


def test_a_process_that_cannot_begin_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BenchFailed, match="ended before its time"):
        LoadGenerators("nonsense", tmp_path, 1, 2)
    assert "KeyError" in capfd.readouterr().err


def test_a_process_ends_with_its_parent() -> None:
    with Echo() as echo:
        command = (sys.executable, "-m", "tests.bench.daemon.load_generators", "echoes", str(echo.directory), "1")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"ready\n"
            process.stdin.write(b"\n")
            process.stdin.close()
            assert process.wait(timeout=10) == 0
