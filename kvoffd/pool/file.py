"""The pool in a file on tmpfs or hugetlbfs: memory with a name, which a new daemon finds wherever it is started."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvoffd.errors import KvoffdError, PoolTooLarge
from kvoffd.pool.backing import PoolMappings, held_bytes, try_lock
from kvoffd.pool.format import BadTable, Geometry, check_geometry, is_table
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.limits import MemoryLimit, memory_limit
from kvoffd.system.mappings import HUGETLBFS_MAGIC, TMPFS_MAGIC, filesystem_magic
from kvoffd_proto.units import format_size

# Where the pool begins in the file: a multiple of this and of the file system's pages. So tmpfs can use huge pages.
_ALIGNMENT = 2 << 20
# A signal undoes a running fallocate, so large files are made in steps.
_ALLOCATE_BYTES = 256 << 20


class PoolFileError(KvoffdError):
    """The pool file cannot be used. The message says why and what to do."""


class FileHome:
    """One file at ``path``: the slot table at its start, the pool behind it. Locked while the daemon lives.

    The file has all its memory from the start, so that no write finds the file system full, which would be a SIGBUS.
    It appears under its name when it is complete, and is the daemon's alone (mode 0600).

    Raises:
        PoolFileError: not on tmpfs or hugetlbfs, no file of kvoffd's, another's, or in use by another daemon.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directory_fd = _open_directory(path.parent)
        self._fd = -1
        try:
            self._huge = _check_filesystem(self._directory_fd, path)
            self._page_bytes = os.fstatvfs(self._directory_fd).f_bsize
            self._fd = self._claim()
        except BaseException:
            self.close()
            raise

    def limit(self) -> MemoryLimit:
        """The least of what the machine, its cgroups and the file system give; and what the file has taken already."""
        held = held_bytes(self._fd) if self._fd >= 0 else 0
        if self._huge:
            return MemoryLimit(2**63 - 1, "huge pages are counted when they are taken")
        space = os.fstatvfs(self._directory_fd)
        limits = [memory_limit()]
        if space.f_blocks:  # else the file system was mounted without a limit
            free = space.f_bavail * space.f_frsize
            limits.append(MemoryLimit(free, f"free space on {self._path.parent}; see df, and mount's option size"))
        least = min(limits, key=lambda limit: limit.bytes)
        return MemoryLimit(least.bytes + held, least.source)

    def find(self, geometry: Geometry) -> PoolMappings | None:
        if self._fd < 0:
            return None
        check_geometry(self._fd, geometry)
        wanted, size = self._file_bytes(geometry), os.fstat(self._fd).st_size
        if size != wanted:
            raise BadTable(f"The pool file has {size} bytes and should have {wanted}.")
        if held_bytes(self._fd) < wanted:
            self._allocate(self._fd, wanted)  # somebody punched holes into it
        return self._map(geometry)

    def make(self, geometry: Geometry) -> PoolMappings:
        size = self._file_bytes(geometry)
        try:
            if self._fd >= 0:
                os.unlink(self._path.name, dir_fd=self._directory_fd)
                os.close(self._fd)
                self._fd = -1
            self._fd = os.open(self._path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(self._fd, 0o600)
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise PoolFileError(
                f"The pool file {self._path} cannot be made ({error.strerror}); make {self._path.parent} writable for "
                "the daemon's user, or name another file."
            ) from error
        locked = try_lock(self._fd)
        assert locked, "nobody else can know a file without a name"
        self._allocate(self._fd, size)
        return self._map(geometry)

    def publish(self) -> None:
        """Gives a new file its name; nothing to do for an old one. The table must have its header."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink:
            return
        try:
            # Only with a directory's descriptor does Python follow the link, as is meant here.
            os.link(f"/proc/self/fd/{self._fd}", self._path.name, src_dir_fd=self._fd, dst_dir_fd=self._directory_fd)
        except OSError as error:
            raise PoolFileError(
                f"The pool file {self._path} cannot be named ({error.strerror}); if another daemon just made it, give "
                "each daemon a pool file of its own."
            ) from error

    def close(self) -> None:
        """Lets the descriptors go; the mappings have their own."""
        for fd in (self._fd, self._directory_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory_fd = -1

    def _claim(self) -> int:
        """Opens and locks what is there, after looking whether it is ours; -1 where there is nothing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        while True:
            try:
                fd = os.open(self._path.name, flags, dir_fd=self._directory_fd)
            except FileNotFoundError:
                return -1
            except OSError as error:
                raise PoolFileError(
                    f"The pool file {self._path} cannot be opened ({error.strerror}); remove it or name another."
                ) from error
            try:
                self._check_ours(fd)
                if not try_lock(fd):
                    raise PoolFileError(
                        f"Another kvoffd has the pool file {self._path} in use; stop it first or name another file."
                    )
                # Another daemon may have put a new file in its place before the lock was ours.
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _check_ours(self, fd: int) -> None:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or (status.st_size and not is_table(fd)):
            raise PoolFileError(
                f"{self._path} is no pool file of kvoffd's and is left as it is; name another file, or remove it."
            )
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PoolFileError(
                f"The pool file {self._path} belongs to user {status.st_uid} and has mode "
                f"{stat.S_IMODE(status.st_mode):04o}; a pool is believed only if it belongs to the daemon's user "
                f"({os.geteuid()}) and nobody else may open it (0600). Remove it or name another."
            )

    def _file_bytes(self, geometry: Geometry) -> int:
        return self._pool_at(geometry) + self._aligned(geometry.pool_bytes)

    def _pool_at(self, geometry: Geometry) -> int:
        return self._aligned(geometry.size_bytes)

    def _aligned(self, nbytes: int) -> int:
        step = max(_ALIGNMENT, self._page_bytes)
        return -(-nbytes // step) * step

    def _allocate(self, fd: int, size_bytes: int) -> None:
        for offset in range(0, size_bytes, _ALLOCATE_BYTES):
            try:
                os.posix_fallocate(fd, offset, min(_ALLOCATE_BYTES, size_bytes - offset))
            except OSError as error:
                what = "huge pages" if self._huge else "memory"
                raise PoolTooLarge(
                    f"{self._path.parent} has not the {what} for a pool file of {size_bytes} bytes "
                    f"({format_size(size_bytes)}): {error.strerror}. Choose a smaller pool or make room."
                ) from error

    def _map(self, geometry: Geometry) -> PoolMappings:
        # Whole pages of the file system: huge ones are mapped whole or not at all.
        table_bytes = self._pool_at(geometry)
        pool = PoolMemory.of_file(self._fd, self._aligned(geometry.pool_bytes), table_bytes)
        try:
            return PoolMappings(pool, PoolMemory.of_file(self._fd, table_bytes, 0))
        except BaseException:
            pool.close()
            raise


def _open_directory(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PoolFileError(
            f"The directory {directory} of the pool file cannot be opened ({error.strerror}); "
            "mount a tmpfs there or name another file."
        ) from error


def _check_filesystem(directory_fd: int, path: Path) -> bool:
    """Whether it is hugetlbfs. Raises PoolFileError when it is not tmpfs either."""
    magic = filesystem_magic(directory_fd)
    if magic not in (TMPFS_MAGIC, HUGETLBFS_MAGIC):
        raise PoolFileError(
            f"The pool file {path} would lie on a disk: its file system is neither tmpfs nor hugetlbfs. "
            "Name a file on one of these, such as /dev/shm/kvoffd.pool."
        )
    return magic == HUGETLBFS_MAGIC
