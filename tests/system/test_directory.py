"""The daemon's directory when the file system fails: one sentence, and the lock is let go."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffd.system.directory import DaemonDirectory, DirectoryError
from tests.kit.waiting import wait_until


def fail(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
def test_a_lock_file_that_cannot_be_written_is_refused_and_let_go(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DirectoryError, match="No space left"):
            DaemonDirectory(tmp_path).acquire()
    again = DaemonDirectory(tmp_path)
    again.acquire()
    again.release()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(DirectoryError, match="locked against a second daemon"):
        DaemonDirectory(tmp_path).acquire()


def test_the_lock_can_be_kept_while_the_sockets_go(tmp_path: Path) -> None:
    directory = DaemonDirectory(tmp_path)
    directory.acquire()
    directory.sockets.jobs.touch()
    directory.open_to_group(directory.sockets.jobs)
    directory.release(keep_lock=True)
    assert not directory.sockets.jobs.exists()
    with pytest.raises(DirectoryError):
        DaemonDirectory(tmp_path).acquire()
    directory.release()
    DaemonDirectory(tmp_path).acquire()


KILLED_IN_A_CALL = """
import ctypes, sys, threading, time
from pathlib import Path
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
        with pytest.raises(DirectoryError, match=f"pid {process.pid}.* was killed.*dmesg"):
            DaemonDirectory(tmp_path).acquire()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "fifo"])
def test_a_lock_that_somebody_else_put_there_is_not_touched(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "run"
    directory.mkdir()
    lock = directory / "kvoffd.lock"
    if kind == "fifo":
        os.mkfifo(lock)
    else:
        (lock.symlink_to if kind == "symbolic link" else lock.hardlink_to)(victim)
    with pytest.raises(DirectoryError):
        DaemonDirectory(directory).acquire()
    assert victim.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    with pytest.raises(DirectoryError, match="belongs to uid 12345"):
        DaemonDirectory(other).acquire()
    assert not list(other.iterdir())
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kvoffd.lock").touch()
    os.chown(mine / "kvoffd.lock", 12345, 12345)
    with pytest.raises(DirectoryError, match="belongs to uid 12345"):
        DaemonDirectory(mine).acquire()


def test_what_was_made_for_a_start_that_is_refused_goes(tmp_path: Path) -> None:
    refused = DaemonDirectory(tmp_path / "run" / "kvoffd")
    refused.acquire()
    refused.release(served=False)
    assert not list(tmp_path.iterdir())
    there = DaemonDirectory(tmp_path)
    there.acquire()
    there.release(served=False)
    assert tmp_path.is_dir()
