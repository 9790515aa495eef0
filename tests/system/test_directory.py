"""The daemon's directory when the file system fails: one sentence, and the lock is released."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kvoffd.errors import KvoffdError
from kvoffd.system.directory import DaemonDirectory
from tests.kit.waiting import wait_until


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", MagicMock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(KvoffdError, match="locked against a second daemon"):
        DaemonDirectory(tmp_path).acquire()


KILLED_IN_A_CALL = """
import ctypes, sys, threading, time
from pathlib import Path
from unittest.mock import MagicMock
from kvoffd.system.directory import DaemonDirectory
DaemonDirectory(Path(sys.argv[1])).acquire()
threading.Thread(target=time.sleep, args=(600,)).start()
print(flush=True)
libc = ctypes.CDLL(None)
libc.pthread_exit(None)
"""
"""Its first thread ends, as all do that no call to the kernel keeps; another one stays."""


def test_a_daemon_that_was_killed_in_a_call_that_does_not_return_is_named_so(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED_IN_A_CALL, tmp_path], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        status = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: ") Z " in status.read_text())
        with pytest.raises(
            KvoffdError, match=f"pid {process.pid}.* was killed.*memory is being freed.*Try again.*dmesg"
        ):
            DaemonDirectory(tmp_path).acquire()
    finally:
        process.kill()
        process.communicate()


def test_a_lock_that_somebody_else_put_there_is_not_touched(tmp_path: Path) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    directory.mkdir()
    lock = directory / "kvoffd.lock"
    for put in (lambda: lock.symlink_to(victim), lambda: lock.hardlink_to(victim), lambda: os.mkfifo(lock)):
        put()
        with pytest.raises(KvoffdError):
            DaemonDirectory(directory).acquire()
        lock.unlink()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with pytest.raises(KvoffdError, match="belongs to uid 12345"):
        DaemonDirectory(other).acquire()
    assert not list(other.iterdir())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kvoffd.lock").touch()
    os.chown(mine / "kvoffd.lock", 12345, 12345)
    with pytest.raises(KvoffdError, match="belongs to uid 12345"):
        DaemonDirectory(mine).acquire()
