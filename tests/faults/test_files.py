"""Files and sockets of a daemon that serves are removed, or belong to another: it serves on, and says what is wrong."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

from tests.faults.checked import CheckedEngine, Command, Truth, over_disk, wait_serving
from tests.kit.daemon import DaemonProcess
from tests.kit.ports import free_ports
from tests.kit.waiting import wait_until
from tests.kit.wire import books

BLOCKS = 64
ALL = range(BLOCKS)
SOCKETS = ("jobs.sock", "events.sock", "lifeline.sock")
NOTICED_S = 4.0
"""A daemon that looks at its files looks more often than that."""


# --- files that are removed ------------------------------------------------------------------------


def test_a_daemon_serves_on_without_its_files(lasting: DaemonProcess, pool_file: Path) -> None:
    """The pool's file was removed: health says so, bytes stay right, and the next daemon says why its pool is empty."""
    truth = Truth()
    with CheckedEngine(lasting, truth) as engine:
        engine.put(ALL)
        for path in pool_file.parent.iterdir():
            path.unlink()
        assert engine.get(ALL) == list(ALL)
    wait_until(lambda: books(lasting.directory).health == "degraded", NOTICED_S)
    assert any("pool" in name for name in books(lasting.directory).problems)
    lasting.kill()
    before = len(lasting.log)
    lasting.start()
    assert any("WARNING" in line and "empty" in line for line in lasting.log[before:].splitlines())
    with CheckedEngine(lasting, truth) as engine:
        assert engine.get(ALL) == []
        engine.put(range(4))
        assert engine.get(range(4)) == list(range(4))


def test_a_disk_without_its_file_serves_right_bytes(tmp_path: Path) -> None:
    truth = Truth()
    with over_disk(tmp_path, "4MiB") as daemon:
        wait_serving(daemon)
        with CheckedEngine(daemon, truth) as engine:
            engine.put(ALL)
            for path in tmp_path.iterdir():
                path.unlink()
            engine.put(range(BLOCKS, 2 * BLOCKS))
            assert engine.get(range(2 * BLOCKS))
        wait_until(lambda: books(daemon.directory).health == "degraded", NOTICED_S)
        assert any("disk" in name for name in books(daemon.directory).problems)
        daemon.kill()
        daemon.start()
        wait_serving(daemon)
        with CheckedEngine(daemon, truth) as engine:
            engine.get(range(2 * BLOCKS))


# --- sockets ---------------------------------------------------------------------------------------


def http_status(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_removed_sockets_are_reported_wherever_it_is_asked(command: Command) -> None:
    """A cleaner of /tmp removed them: engines that are connected are served, and a restart mends the rest."""
    (port,), truth = free_ports(1), Truth()
    with (
        DaemonProcess("16MiB", http_address=f"127.0.0.1:{port}") as daemon,
        CheckedEngine(daemon, truth) as engine,
    ):
        for name in SOCKETS:
            (daemon.directory / name).unlink()
        status, text = command(daemon, "health")
        assert status != 0
        assert "touched" not in text, text
        assert "socket" in text, text
        code, text = http_status(port, "/healthz")
        assert code != 200
        assert "socket" in text, text
        engine.put(ALL)
        assert engine.get(ALL) == list(ALL)
        assert daemon.stop() == 0
        truth.drop()  # the pool dies with this daemon
        daemon.start()
        assert engine.wait_ready(30.0)
        engine.put(ALL)
        assert engine.get(ALL) == list(ALL)


def test_a_stopping_daemon_leaves_its_successors_sockets() -> None:
    """Its lock file and sockets were cleaned away, so that a second daemon could start there."""
    with DaemonProcess("16MiB") as first:
        for name in (*SOCKETS, "kvoffd.lock"):
            (first.directory / name).unlink()
        with DaemonProcess("16MiB", first.directory) as second:
            assert first.stop() == 0
            assert second.running
            assert {path.name for path in first.directory.iterdir()} >= set(SOCKETS)
