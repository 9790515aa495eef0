"""Files and sockets of a daemon that serves are removed, or belong to another: it serves on, and says what is wrong."""

from __future__ import annotations

from pathlib import Path

from tests.kit.checked import CheckedEngine, Truth, over_disk, wait_disk
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import books

BLOCKS = 64
ALL = range(BLOCKS)
SOCKETS = ("jobs.sock", "events.sock", "lifeline.sock")
NOTICED_S = 5 * 1.0
"""A daemon that looks at its files does so once a second."""


# --- files that are removed ------------------------------------------------------------------------


def test_a_daemon_serves_on_without_its_files(pool_file: Path) -> None:
    """The pool's file was removed: health says so, bytes stay right, and the next daemon says why its pool is empty."""
    with DaemonProcess("16MiB", pool_file=str(pool_file)) as lasting:
        truth = Truth()
        with CheckedEngine(lasting, truth) as engine:
            engine.put(ALL)
            for path in pool_file.parent.iterdir():
                path.unlink()
            assert engine.has(ALL)
        wait_until(lambda: books(lasting.directory).health == "degraded", NOTICED_S)
        assert any("pool" in name for name in books(lasting.directory).problems)
        lasting.kill()
        before = len(lasting.log)
        lasting.start()
        assert any("WARNING" in line and "empty" in line for line in lasting.log[before:].splitlines())
        with CheckedEngine(lasting, truth) as engine:
            assert engine.get(ALL) == []
            engine.put(range(4))
            assert engine.has(range(4))


def test_a_disk_without_its_file_serves_right_bytes(tmp_path: Path) -> None:
    truth = Truth()
    with over_disk(tmp_path, "4MiB") as daemon:
        wait_disk(daemon)
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
        wait_disk(daemon)
        with CheckedEngine(daemon, truth) as engine:
            engine.get(range(2 * BLOCKS))


# --- sockets ---------------------------------------------------------------------------------------


def test_a_stopping_daemon_leaves_its_successors_sockets(tmp_path: Path) -> None:
    """Its lock file and sockets were cleaned away, so that a second daemon could start there."""
    with DaemonProcess("16MiB", environ={"STATE_DIRECTORY": str(tmp_path)}) as first:
        for name in (*SOCKETS, "kvoffd.lock"):
            (first.directory / name).unlink()
        with DaemonProcess("16MiB", first.directory) as second:
            assert first.stop() == 0
            assert second.running
            assert {path.name for path in first.directory.iterdir()} >= set(SOCKETS)
