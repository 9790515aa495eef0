"""The daemon's directory: created, locked against a second daemon, and cleared of stale sockets."""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvoffd.errors import KvoffdError
from kvoffd.system.files import FileCalls, FileInUse, OnError, claim_file, is_regular, open_directory, text_of
from kvoffd_proto.paths import SocketPaths

logger = logging.getLogger(__name__)

LOCK_FILE = "kvoffd.lock"
DIRECTORY_MODE = 0o750
SOCKET_MODE = 0o660
STARTING_MODE = 0o640
STARTING_BYTES = 100
"""Length to which the text of the start's progress is padded, so that it overwrites all of a longer one."""


def _check_owner(directory: Path) -> None:
    """Refuse a directory whose owner could put other sockets into it. Raises OSError, KvoffdError."""
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise KvoffdError(
            f"The directory {directory} belongs to uid {found.st_uid}, who could impersonate this daemon (uid "
            f"{os.geteuid()}) there; give it to the daemon's user (chown) or choose another with --directory."
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        logger.warning("Every user may write to %s and impersonate the daemon there; `chmod o-w` it.", directory)


class DaemonDirectory:
    """Owns ``directory`` while the daemon runs. The kernel releases the lock with the process, so none is stale."""

    def __init__(self, directory: Path) -> None:
        self.sockets = SocketPaths(directory)
        self._lock_fd = self._starting_fd = -1
        self._made: list[Path] = []
        """Directories that ``acquire`` created, innermost first."""
        self._bound: dict[Path, int] = {}
        """Inodes of the bound sockets, to detect that a path was replaced."""
        self.was_killed = False
        """Whether an earlier daemon left its sockets."""

    def acquire(self) -> None:
        """Create and lock the directory, and remove stale sockets. An error leaves everything as it was.

        Raises:
            KvoffdError: it cannot be created or written, its path is too long, or another daemon uses it.
        """
        directory = self.sockets.directory
        if problem := self.sockets.problem():
            raise KvoffdError(problem)
        self._made = [one for one in (directory, *directory.parents) if not one.exists()]
        with OnError(partial(self.release, served=False)):
            try:
                if self._made:
                    directory.mkdir(mode=DIRECTORY_MODE, parents=True)
                    directory.chmod(DIRECTORY_MODE)  # mkdir applied the umask
                _check_owner(directory)
                directory_fd = open_directory(directory)
            except OSError as error:
                raise _unusable(directory, error) from error
            try:
                self._lock_fd = claim_file(FileCalls(), LOCK_FILE, directory_fd, create=True, check=self._check_lock)
                os.ftruncate(self._lock_fd, 0)
                os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
            except FileInUse as error:
                holder = text_of(directory / LOCK_FILE)[:32] or "unknown"
                what = f"Another kvoffd (pid {holder}) serves {directory}; stop it first or choose another --directory."
                # A zombie keeps its lock until its last thread has returned from the kernel.
                if ") Z " in text_of(Path(f"/proc/{holder}/stat")):
                    what = (
                        f"The kvoffd that served {directory} (pid {holder}) was killed and is still exiting: its "
                        "memory is being freed, or a call to a disk or a GPU does not return. Try again in seconds; "
                        "then see dmesg, or choose another --directory."
                    )
                raise KvoffdError(what) from error
            except OSError as error:
                raise _unusable(directory, error) from error
            finally:
                os.close(directory_fd)
            if stale := sum(map(_unlink, (self.sockets.jobs, self.sockets.events, self.sockets.lifeline))):
                logger.info("Removed %d sockets that an earlier daemon left in %s.", stale, directory)
            self.was_killed = bool(stale)
            with suppress(OSError):
                _unlink(self.sockets.starting)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._starting_fd = os.open(self.sockets.starting, flags, STARTING_MODE)
            self.tell_starting("starting")

    def _check_lock(self, fd: int, found: os.stat_result) -> None:
        """Refuse a lock file that another user may have linked to a file, which would be truncated."""
        if not is_regular(found) or found.st_uid not in (0, os.geteuid()):
            raise KvoffdError(
                f"{self.sockets.directory}/{LOCK_FILE} is not the daemon's own: it is not a regular file, has several "
                f"hard links, or belongs to uid {found.st_uid}. Another user created it; remove it."
            )

    def tell_starting(self, text: str) -> None:
        """Tell clients, which find no sockets yet, how far the start is."""
        if self._starting_fd >= 0:
            with suppress(OSError):
                os.pwrite(self._starting_fd, text.ljust(STARTING_BYTES).encode(), 0)

    def started(self) -> None:
        """Remove the file of ``tell_starting``: the sockets are open, or the start has failed. Idempotent."""
        if self._starting_fd >= 0:
            os.close(self._starting_fd)
            self._starting_fd = -1
            with suppress(OSError):
                self.sockets.starting.unlink()

    def open_to_group(self, path: Path) -> None:
        """Set the mode of a socket that was just bound, and remember its inode."""
        path.chmod(SOCKET_MODE)
        self._bound[path] = path.stat().st_ino

    def lost_sockets(self) -> str:
        """Return a sentence that names the sockets that were removed or replaced; empty if all are there."""
        lost = [path.name for path, inode in self._bound.items() if _inode(path) != inode]
        if not lost:
            return ""
        return (
            f"No engine can connect: {', '.join(lost)} in {self.sockets.directory} {'were' if lost[1:] else 'was'} "
            "removed or replaced. Leave the daemon's sockets alone, and restart it."
        )

    def release(self, *, served: bool = True, keep_lock: bool = False) -> None:
        """Remove the sockets that were bound here and unlock the directory. Idempotent.

        Args:
            served: engines may know the directory. If not, remove it too, if ``acquire`` created it.
            keep_lock: leave it locked until the process is gone, because a thread hangs in a call that may still write
                to the pool: a successor must not open the pool before.
        """
        try:
            for path, inode in self._bound.items():
                if _inode(path) == inode:
                    _unlink(path)
        finally:
            self._bound.clear()
            self.started()
            if not served and self._made:
                if self._lock_fd >= 0:
                    (self.sockets.directory / LOCK_FILE).unlink(missing_ok=True)
                for directory in self._made:
                    with suppress(OSError):
                        directory.rmdir()
            if self._lock_fd >= 0 and not keep_lock:
                os.close(self._lock_fd)
                self._lock_fd = -1


def _unusable(directory: Path, error: OSError) -> KvoffdError:
    return KvoffdError(
        f"The directory {directory} cannot be used or locked against a second daemon ({error.strerror}); make it "
        "writable for this user, or choose another with --directory."
    )


def _unlink(path: Path) -> bool:
    """Remove a socket; return False if there is none. Raises KvoffdError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise KvoffdError(f"{path} cannot be removed ({error.strerror}); remove it by hand.") from error
    return True


def _inode(path: Path) -> int:
    """Return the inode of a path; -1 if there is none."""
    try:
        return path.lstat().st_ino
    except OSError:
        return -1
