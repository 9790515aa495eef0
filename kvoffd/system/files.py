"""The daemon's own files: opened, locked against a second daemon, allocated, and read and written with O_DIRECT."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import eq
from pathlib import Path
from uuid import UUID

_MAX_BUFFERS = 1024
"""Buffers of one preadv or pwritev: the kernel's IOV_MAX."""


class FileCalls:
    """System calls on a file, which tests can replace. All may raise OSError."""

    def open(self, path: str, directory_fd: int, create: bool) -> int:
        """Open the file; ``create`` creates it with mode 0600 if it is missing."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o600, dir_fd=directory_fd)

    def lock(self, fd: int) -> bool:
        return try_lock(fd)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Set whether reads and writes bypass the page cache (O_DIRECT)."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Allocate a range of the file. Existing data stays."""
        os.posix_fallocate(fd, offset, length)

    def has_data(self, fd: int, offset: int, nbytes: int) -> bool:
        """Return whether a range of the file may have been written."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA) < offset + nbytes
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data up to the end of the file
                return False
            raise

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read as preadv does, and return the number of bytes read, which may be fewer than requested."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write as pwritev does, and return the number of bytes written, which may be fewer than requested."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Wait until written data is on the device."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


class OnError:
    """Calls ``undo`` if the ``with`` block raises."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self._undo()


class FileInUse(Exception):
    """Another process has the file locked."""


class ShortRead(OSError):
    """The file ended before all bytes were read."""


def open_directory(directory: Path) -> int:
    """Return a descriptor of the directory. Raises OSError."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def claim_file(
    calls: FileCalls, name: str, directory_fd: int, *, create: bool, check: Callable[[int, os.stat_result], None]
) -> int:
    """Open and lock one of the daemon's files.

    Args:
        check: called with the open file before it is locked; raises if the file is not the daemon's.

    Raises:
        FileInUse: another process has locked it.
        OSError: FileNotFoundError if it is missing and not ``create``.
    """
    while True:
        fd = calls.open(name, directory_fd, create)
        with OnError(partial(calls.close, fd)):
            check(fd, calls.stat(fd))
            if not calls.lock(fd):
                raise FileInUse(name)
            # Another daemon may have replaced the file before it was locked here.
            if calls.stat(fd).st_nlink:
                return fd
        calls.close(fd)


def try_lock(fd: int) -> bool:
    """Lock the file (flock); return False if another process has. Closing the last descriptor unlocks it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_regular(status: os.stat_result) -> bool:
    """Return whether it is a regular file with at most one hard link."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def begins_as(content: bytes, magic: bytes) -> bool:
    """Return whether a file that begins with ``content`` is one of the daemon's, perhaps damaged: 3/4 of the magic's
    bytes are right. A file as short as a magic could be anybody's, and has all of it."""
    matches = sum(map(eq, content, magic))
    return matches == len(magic) or (len(content) > len(magic) and matches >= len(magic) * 3 // 4)


def foreign_owner(status: os.stat_result, what: str) -> str:
    """Return why ``what`` is not used from this file: other users could open it. Empty if none can.

    It is the end of a sentence whose subject is the file.
    """
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return (
        f"belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; {what} is used only if "
        f"it belongs to the daemon's user ({os.geteuid()}) and nobody else may open it (0600)"
    )


def allocate_in_steps(calls: FileCalls, fd: int, size_bytes: int, step_bytes: int) -> Iterator[int]:
    """Allocate the whole file; yield before each step how many bytes are allocated. Raises OSError.

    A signal undoes a running fallocate, so a large file is allocated in steps.
    """
    for offset in range(0, size_bytes, step_bytes):
        yield offset
        calls.allocate(fd, offset, min(step_bytes, size_bytes - offset))


def text_of(path: Path) -> str:
    """Return the text of a file in /proc or /sys without white space around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def held_bytes(status: os.stat_result) -> int:
    """Return the bytes that are allocated for a file: of memory on tmpfs or hugetlbfs, of the device on a disk."""
    return status.st_blocks * 512


def read_all(calls: FileCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill the buffers from ``offset`` on. Raises OSError; ShortRead if the file ends too early."""
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        if not (count := calls.read(fd, rest[:_MAX_BUFFERS], offset)):
            raise ShortRead(0, f"the file ends at offset {offset}")
        offset, rest = offset + count, drop_bytes(rest, count)


def write_all(calls: FileCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write the buffers from ``offset`` on. Raises OSError."""
    rest = [buffer for buffer in buffers if len(buffer)]
    while rest:
        if not (count := calls.write(fd, rest[:_MAX_BUFFERS], offset)):
            raise OSError(0, f"nothing was written at offset {offset}")
        offset, rest = offset + count, drop_bytes(rest, count)


def aligned_buffer(nbytes: int) -> memoryview:
    """Return zeroed memory at an address that O_DIRECT accepts. It is freed with its last view."""
    return memoryview(mmap.mmap(-1, nbytes))


def address_of(buffer: memoryview) -> int:
    """Return the address of a writable buffer; 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


def drop_bytes(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def read_boot_id() -> bytes:
    """Return 16 bytes that change with every boot of the machine; zeros if unknown."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)
