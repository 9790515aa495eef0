"""The daemon's own files: opened, locked against a second daemon, allocated, read and written past the page cache."""

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

_MOST_BUFFERS = 1024  # IOV_MAX


class FileCalls:
    """The system calls on a file, in one place so that tests can stand in for the kernel. All may raise OSError."""

    def open(self, path: str, directory_fd: int, create: bool) -> int:
        """Opens the file; ``create`` makes it, readable for its owner alone, where there is none."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o600, dir_fd=directory_fd)

    def lock(self, fd: int) -> bool:
        return try_lock(fd)

    def set_direct(self, fd: int, direct: bool) -> None:
        """Sets whether reads and writes go past the page cache (O_DIRECT)."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def stat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserves room for a part of the file. What is there already stays as it is."""
        os.posix_fallocate(fd, offset, length)

    def has_data(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether a part of the file may have been written to."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA) < offset + nbytes
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing at all from there on
                return False
            raise

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As preadv: returns the number of bytes read, which may be fewer than asked for."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As pwritev: returns the number of bytes written, which may be fewer than asked for."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Returns when what was written is on the device."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)


class OnError:
    """Calls ``undo`` where the block raises, whatever it raises. Stores enter it: a generator takes twice as long."""

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
    """The file ended before all was read."""


def open_directory(directory: Path) -> int:
    """A descriptor of the directory. Raises OSError."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def claim_file(
    calls: FileCalls, name: str, directory_fd: int, *, create: bool, check: Callable[[int, os.stat_result], None]
) -> int:
    """Opens and locks a file of the daemon's own. Raises OSError, as FileNotFoundError where it is not to be made.

    Args:
        check: looks at the open file before it is locked, and raises where it is not the daemon's.

    Raises:
        FileInUse: another process has it.
    """
    while True:
        fd = calls.open(name, directory_fd, create)
        with OnError(partial(calls.close, fd)):
            check(fd, calls.stat(fd))
            if not calls.lock(fd):
                raise FileInUse(name)
            # Another daemon may have put a new file in its place before the lock was ours.
            if calls.stat(fd).st_nlink:
                return fd
        calls.close(fd)


def try_lock(fd: int) -> bool:
    """Locks the file against a second owner; False when there is one. The lock goes with the last descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_regular(status: os.stat_result) -> bool:
    """Whether it is a regular file with at most one name."""
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def begins_as(content: bytes, magic: bytes) -> bool:
    """Whether a file that begins with ``content`` is one of ours: it has the magic, or most of it where bits flipped.

    Else, or where nothing is behind, it is plainly something else.
    """
    alike = sum(map(eq, content, magic))
    return alike == len(magic) or (len(content) > len(magic) and alike >= len(magic) * 3 // 4)


def foreign_owner(status: os.stat_result, what: str) -> str:
    """Why ``what`` is not to be trusted to this file, from the verb on; empty where only this user may open it."""
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return ""
    return (
        f"belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; {what} is used only if "
        f"it belongs to the daemon's user ({os.geteuid()}) and nobody else may open it (0600)"
    )


def allocate_in_steps(calls: FileCalls, fd: int, size_bytes: int, step_bytes: int) -> Iterator[int]:
    """Reserves room for the whole file; yields, before each step, how many bytes have room. Raises OSError.

    A signal undoes a running fallocate, so a large file is made in steps.
    """
    for offset in range(0, size_bytes, step_bytes):
        yield offset
        calls.allocate(fd, offset, min(step_bytes, size_bytes - offset))


def text_of(path: Path) -> str:
    """What a file of the kernel's says, without the white space around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def held_bytes(status: os.stat_result) -> int:
    """What a file has taken of its file system: of memory on tmpfs or hugetlbfs, of the device on a disk."""
    return status.st_blocks * 512


def read_all(calls: FileCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fills the buffers from ``offset`` on. Raises OSError, as ShortRead where the file ends before that."""
    end = _move_all(calls.read, fd, buffers, offset)
    if end < offset + sum(map(len, buffers)):
        raise ShortRead(0, f"nothing is left to read at offset {end}")


def write_all(calls: FileCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes the buffers from ``offset`` on. Raises OSError."""
    end = _move_all(calls.write, fd, buffers, offset)
    if end < offset + sum(map(len, buffers)):
        raise OSError(0, f"nothing was written at offset {end}")


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeros at an address that O_DIRECT takes. Their memory is freed with the last view."""
    return memoryview(mmap.mmap(-1, nbytes))


def address_of(buffer: memoryview) -> int:
    """Where a buffer begins, which has some bytes and may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _move_all(
    move: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview], offset: int
) -> int:
    """Calls ``move`` until all buffers are done or it does nothing; returns the offset where it ended."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left and (count := move(fd, left[:_MOST_BUFFERS], offset)):
        offset += count
        left = _behind(left, count)
    return offset


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind the first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def read_boot_id() -> bytes:
    """16 bytes that change with every boot of the machine; zeros where the kernel does not tell."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)
