"""The daemon's directory: made, locked against a second daemon, cleared of a dead one's sockets."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from kvoffd.errors import KvoffdError
from kvoffd.system.files import on_error, try_lock
from kvoffd_proto.sockets import SocketPaths

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o750
SOCKET_MODE = 0o660


class DirectoryError(KvoffdError):
    """The directory cannot be used. The message says why and what to do."""


class DaemonDirectory:
    """Owns ``directory`` while the daemon lives. The lock dies with the process, so it is never stale."""

    def __init__(self, directory: Path) -> None:
        self.sockets = SocketPaths(directory)
        self._lock_fd = -1

    def acquire(self) -> None:
        """Make and lock the directory; remove sockets that a dead daemon left.

        Raises:
            DirectoryError: it cannot be made or written, its path is too long, or another daemon has it.
        """
        directory = self.sockets.directory
        if problem := self.sockets.problem():
            raise DirectoryError(problem)
        try:
            if not directory.is_dir():
                directory.mkdir(mode=DIRECTORY_MODE, parents=True)
                directory.chmod(DIRECTORY_MODE)  # the umask may have taken bits away
            lock_fd = os.open(directory / "kvoffd.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryError(
                f"The directory {directory} cannot be used ({error.strerror}); "
                "choose another with --directory, or make it writable for this user."
            ) from error
        with on_error(partial(os.close, lock_fd)):
            if not try_lock(lock_fd):
                holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise DirectoryError(
                    f"Another kvoffd (pid {holder}) serves {directory}; stop it first or choose another --directory."
                )
            try:
                os.ftruncate(lock_fd, 0)
                os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
            except OSError as error:
                raise DirectoryError(
                    f"The lock file in {directory} cannot be written ({error.strerror}); make room there, or choose "
                    "another directory with --directory."
                ) from error
            if stale := self._unlink_sockets():
                logger.info("Removed %d sockets that an earlier daemon left in %s.", stale, directory)
        self._lock_fd = lock_fd

    def open_to_group(self, path: Path) -> None:
        """Give a socket that was just bound its mode."""
        path.chmod(SOCKET_MODE)

    def release(self, keep_lock: bool = False) -> None:
        """Remove the sockets and give the directory up. The lock file stays: removing it would be a race.

        ``keep_lock`` leaves it locked until the last thread of the process is gone: for when one still hangs in a call
        that may write into the pool, which a successor would have taken over by then.
        """
        if self._lock_fd < 0:
            return
        try:
            self._unlink_sockets()
        finally:
            if not keep_lock:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _unlink_sockets(self) -> int:
        removed = 0
        for path in (self.sockets.jobs, self.sockets.events, self.sockets.lifeline):
            try:
                path.unlink()
                removed += 1
            except FileNotFoundError:
                pass
            except OSError as error:
                raise DirectoryError(f"{path} cannot be removed ({error.strerror}); remove it by hand.") from error
        return removed
