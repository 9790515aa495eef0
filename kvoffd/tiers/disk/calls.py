"""The system calls of a disk tier, in one place so that tests can stand in for the kernel."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence

_MOST_BUFFERS = 1024  # IOV_MAX
# A signal undoes a running fallocate, so large files are made in steps.
ALLOCATE_BYTES = 1 << 30


class DiskCalls:
    """Calls on one file; every method may raise OSError."""

    def open(self, path: str, directory_fd: int) -> int:
        """Opens the file, which is made where there is none, readable for its owner alone."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(path, flags, 0o600, dir_fd=directory_fd)

    def lock(self, fd: int) -> bool:
        """Locks the file against a second owner; False when there is one. The lock goes with the descriptor."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def set_direct(self, fd: int, direct: bool) -> None:
        """Past the page cache, or through it."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def stat(self, fd: int) -> os.stat_result:
        """As fstat."""
        return os.fstat(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserves room on the device; what is there already stays as it is."""
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, size: int) -> None:
        """Sets the size."""
        os.ftruncate(fd, size)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As preadv: bytes read, which may be fewer."""
        return os.preadv(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As pwritev: bytes written, which may be fewer."""
        return os.pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        """Returns when what was written is on the device."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """As close."""
        os.close(fd)


class ShortRead(OSError):
    """The file ended before all was read."""


def read_all(calls: DiskCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fills the buffers from ``offset`` on. Raises OSError, ShortRead among them."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = calls.read(fd, left[:_MOST_BUFFERS], offset)
        if count == 0:
            raise ShortRead(0, f"nothing is left to read at offset {offset}")
        offset += count
        left = _behind(left, count)


def write_all(calls: DiskCalls, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Writes the buffers from ``offset`` on. Raises OSError."""
    left = [buffer for buffer in buffers if len(buffer)]
    while left:
        count = calls.write(fd, left[:_MOST_BUFFERS], offset)
        if count == 0:
            raise OSError(0, f"nothing was written at offset {offset}")
        offset += count
        left = _behind(left, count)


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeros at an address that O_DIRECT takes; memory is let go with the last view."""
    return memoryview(mmap.mmap(-1, nbytes))


def view_of(address: int, nbytes: int) -> memoryview:
    """Mapped memory as bytes to be read and written. It must stay mapped for as long as the view is used."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def _behind(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers behind the first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
