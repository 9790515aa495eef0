"""The daemon's directory: made, locked against a second daemon, cleared of a dead one's sockets."""

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
        self._made: list[Path] = []
        """Directories that were missing, the innermost first."""
        self._bound: dict[Path, int] = {}
        """The inodes of the sockets that were bound: others may have been put in their place since."""

    def acquire(self) -> None:
        """Make and lock the directory; remove sockets that a dead daemon left. Where that fails, all is as before.

        Raises:
            DirectoryError: it cannot be made or written, its path is too long, or another daemon has it.
        """
        directory = self.sockets.directory
        if problem := self.sockets.problem():
            raise DirectoryError(problem)
        self._made = [one for one in (directory, *directory.parents) if not one.exists()]
        with OnError(partial(self.release, served=False)):
            try:
                if self._made:
                    directory.mkdir(mode=DIRECTORY_MODE, parents=True)
                    directory.chmod(DIRECTORY_MODE)  # the umask may have taken bits away
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
                if ") Z " in text_of(Path(f"/proc/{holder}/stat")):
                    what = (
                        f"The kvoffd that served {directory} (pid {holder}) was killed, and the kernel has not ended "
                        "it: a call to a disk or a GPU does not return. See dmesg, or choose another --directory."
                    )
                raise DirectoryError(what) from error
            except OSError as error:
                raise _unusable(directory, error) from error
            finally:
                os.close(directory_fd)
            if stale := sum(map(_unlink, (self.sockets.jobs, self.sockets.events, self.sockets.lifeline))):
                logger.info("Removed %d sockets that an earlier daemon left in %s.", stale, directory)

    def _check_lock(self, fd: int, found: os.stat_result) -> None:
        """Another user who may write in the directory could have put a link there, to a file that would be emptied."""
        if not is_regular(found) or found.st_uid not in (0, os.geteuid()):
            raise DirectoryError(
                f"{self.sockets.directory}/{LOCK_FILE} is not the daemon's own: it is no regular file, has other names "
                f"too, or belongs to uid {found.st_uid}. Somebody else made it; remove it."
            )

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

    def release(self, *, served: bool = True, keep_lock: bool = False) -> None:
        """Remove the sockets that were bound here and give the directory up. Repeatable.

        Args:
            served: engines may know the directory; else it goes too, if it was made here.
            keep_lock: leaves it locked until the last thread of the process is gone: for when one still hangs in a call
                that may write into the pool, which a successor would have taken over by then.
        """
        try:
            for path, inode in self._bound.items():
                if _inode(path) == inode:
                    _unlink(path)
        finally:
            self._bound.clear()
            if not served and self._made:
                if self._lock_fd >= 0:
                    (self.sockets.directory / LOCK_FILE).unlink(missing_ok=True)
                for directory in self._made:
                    with suppress(OSError):
                        directory.rmdir()
            if self._lock_fd >= 0 and not keep_lock:
                os.close(self._lock_fd)
                self._lock_fd = -1


def _unusable(directory: Path, error: OSError) -> DirectoryError:
    return DirectoryError(
        f"The directory {directory} cannot be used or locked against a second daemon ({error.strerror}); make it "
        "writable for this user, or choose another with --directory."
    )


def _unlink(path: Path) -> bool:
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
