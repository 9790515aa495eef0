"""The daemon's directory: made, locked against a second daemon, cleared of a dead one's sockets."""

from __future__ import annotations

import logging
import os
import stat
from functools import partial
from pathlib import Path

from kvoffd.errors import KvoffdError
from kvoffd.system.files import OnError, is_regular, try_lock
from kvoffd_proto.paths import SocketPaths

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o750
SOCKET_MODE = 0o660


class DirectoryError(KvoffdError):
    """The directory cannot be used. The message says why and what to do."""


def _check_owner(directory: Path) -> None:
    """Refuse a directory whose owner could put other sockets into it. Raises OSError, DirectoryError."""
    found = directory.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise DirectoryError(
            f"The directory {directory} belongs to uid {found.st_uid}, who could take the place of this daemon (uid "
            f"{os.geteuid()}) there; give it to the daemon's user (chown) or choose another with --directory."
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        logger.warning("Everybody may write in %s and take the daemon's place there; `chmod o-w` it.", directory)


class DaemonDirectory:
    """Owns ``directory`` while the daemon lives. The lock dies with the process, so it is never stale."""

    def __init__(self, directory: Path) -> None:
        self.sockets = SocketPaths(directory)
        self._lock_fd = -1
        self._bound: dict[Path, int] = {}
        """The inodes of the sockets that were bound: others may have been put in their place since."""

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
            _check_owner(directory)
            # Whoever may write in the directory could have put a link there, to a file that is emptied below.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock_fd = os.open(directory / "kvoffd.lock", flags, 0o600)
        except OSError as error:
            raise DirectoryError(
                f"The directory {directory} cannot be used ({error.strerror}); "
                "choose another with --directory, or make it writable for this user."
            ) from error
        with OnError(partial(os.close, lock_fd)):
            lock = os.fstat(lock_fd)
            if not is_regular(lock) or lock.st_uid not in (0, os.geteuid()):
                raise DirectoryError(
                    f"{directory}/kvoffd.lock is not the daemon's own: it is no regular file, has other names "
                    f"too, or belongs to uid {lock.st_uid}. Somebody else made it; remove it."
                )
            try:
                locked = try_lock(lock_fd)
            except OSError as error:
                raise DirectoryError(
                    f"The directory {directory} cannot be locked against a second daemon ({error.strerror}), as on "
                    "some network file systems; choose another with --directory."
                ) from error
            if not locked:
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
            if stale := sum(self._unlink(path) for path in self._sockets):
                logger.info("Removed %d sockets that an earlier daemon left in %s.", stale, directory)
        self._lock_fd = lock_fd

    def open_to_group(self, path: Path) -> None:
        """Give a socket that was just bound its mode, and know it again."""
        path.chmod(SOCKET_MODE)
        self._bound[path] = path.stat().st_ino

    def lost_sockets(self) -> str:
        """Why no engine can connect, a sentence: sockets were removed or replaced. Empty where they were not."""
        lost = [path.name for path, inode in self._bound.items() if _inode(path) != inode]
        if not lost:
            return ""
        return (
            f"No engine can connect: {', '.join(lost)} in {self.sockets.directory} {'were' if lost[1:] else 'was'} "
            "removed or replaced. Leave the daemon's sockets alone, and restart it."
        )

    def release(self, keep_lock: bool = False) -> None:
        """Remove the sockets that were bound here and give the directory up. The lock file stays: removing it would be
        a race.

        ``keep_lock`` leaves it locked until the last thread of the process is gone: for when one still hangs in a call
        that may write into the pool, which a successor would have taken over by then.
        """
        if self._lock_fd < 0:
            return
        try:
            for path, inode in self._bound.items():
                if _inode(path) == inode:
                    self._unlink(path)
        finally:
            self._bound.clear()
            if not keep_lock:
                os.close(self._lock_fd)
                self._lock_fd = -1

    @property
    def _sockets(self) -> tuple[Path, ...]:
        return self.sockets.jobs, self.sockets.events, self.sockets.lifeline

    def _unlink(self, path: Path) -> bool:
        """Remove a socket; False where there is none. Raises DirectoryError."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DirectoryError(f"{path} cannot be removed ({error.strerror}); remove it by hand.") from error
        return True


def _inode(path: Path) -> int:
    """The inode of what is there; -1 where that is nothing."""
    try:
        return path.lstat().st_ino
    except OSError:
        return -1
