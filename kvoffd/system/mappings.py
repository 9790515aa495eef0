"""Shared memory, mapped so that nothing other processes do to it can kill the daemon, and faulted in before copies."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from kvoffd.errors import UnsafeSegment
from kvoffd.system.files import held_bytes, open_directory
from kvoffd.system.threads import TaskThread

_log = logging.getLogger(__name__)

# linux/magic.h
TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6

# linux/mman.h; Python's mmap does not have them all.
MADV_DONTDUMP = 16
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

STEP_BYTES = 4 << 20
"""What is faulted in at a time, in about 1 ms: other segments wait for it."""
UNMAP_BYTES = 256 << 20
"""What is unmapped in one call, of some milliseconds: other threads that map memory wait for it."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_int, _size, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mincore, _fstatfs = _libc.mincore, _libc.fstatfs
_mmap.argtypes, _mmap.restype = (_pointer, _size, _int, _int, _int, ctypes.c_int64), _pointer
_munmap.argtypes = (_pointer, _size)
_madvise.argtypes = (_pointer, _size, _int)
_mincore.argtypes = (_pointer, _size, _pointer)
_fstatfs.argtypes = (_int, _pointer)


class MappedSegment:
    """A shared read-write mapping of ``size_bytes`` at ``address``. It stays when its descriptor is closed.

    After ``close`` it has no address any more, so that nothing uses it.
    """

    __slots__ = ("address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes

    @property
    def closed(self) -> bool:
        return not hasattr(self, "address")

    def close(self) -> None:
        """Unmaps the memory; a second call does nothing. A copy that still uses it would crash the daemon."""
        if self.closed:
            return
        address = self.address
        del self.address
        for offset in range(0, self.size_bytes, UNMAP_BYTES):
            if _munmap(address + offset, min(UNMAP_BYTES, self.size_bytes - offset)) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def close_segments(segments: Sequence[MappedSegment], on_closed: Callable[[], None]) -> None:
    """Unmaps them, then calls ``on_closed``."""
    for segment in segments:
        segment.close()
    on_closed()


_NOT_WRITABLE = "send a descriptor opened for both, without a seal against writing."
_NO_ADDRESSES = "raise the daemon's limits of address space (ulimit -v) and of mappings (vm.max_map_count)."


def map_memfd(fd: int, size_bytes: int, *, whole: bool = False) -> MappedSegment:
    """Maps the first ``size_bytes`` of a memfd, shared, for reading and writing.

    The mapping needs no descriptor: ``fd`` is neither kept, duplicated nor closed, and stays the caller's. ``whole``
    demands that every page of the file is allocated: the kernel charges a page to the process that touches it first,
    be it by reading, and that must not be the daemon for a client's memory.

    Raises:
        UnsafeSegment: it is no memfd, is not sealed against shrinking, is smaller than ``size_bytes``, is not
            ``whole``, may not be written, or the kernel refuses the mapping.
    """
    _check_memfd(fd, size_bytes, whole)
    try:
        return map_shared(fd, size_bytes)
    except OSError as error:
        raise UnsafeSegment(
            f"The memory segment of {size_bytes} bytes cannot be mapped for reading and writing ({error.strerror}); "
            + (_NO_ADDRESSES if error.errno == errno.ENOMEM else _NOT_WRITABLE)
        ) from error


def map_shared(fd: int, size_bytes: int, offset: int = 0) -> MappedSegment:
    """Maps a part of a file, shared, for reading and writing; ``fd`` stays the caller's. Raises OSError.

    Checks nothing: only for files that no other process can shrink.
    """
    address = _mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # A core dump of the pool would take minutes, the next daemon waiting for it, and put prompts on a disk.
    madvise(address, size_bytes, MADV_DONTDUMP)
    return MappedSegment(address, size_bytes)


def check_descriptor(fd: int) -> None:
    """Raise UnsafeSegment unless the descriptor is a memfd, or of the kinds that a GPU's driver exports."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # a path too long for the kernel to tell: of a file, since what drivers export has short ones
            target = "/"
        if target.startswith(("/dev/nvidia", "/dmabuf:", "anon_inode:[dmabuf]")):  # VMM handles, or dma-buf
            return
        kind = target.partition(":")[0] if target[:1] != "/" else "file or device"
        raise UnsafeSegment(
            f"The descriptor is a {kind} and neither a memfd nor what a GPU's driver exports; attach memory."
        ) from None


def _check_memfd(fd: int, size_bytes: int, whole: bool) -> None:
    if size_bytes < 1:
        raise UnsafeSegment(f"A memory segment of {size_bytes} bytes cannot be mapped; send at least one byte.")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise UnsafeSegment(
            f"The descriptor is not a memfd ({error.strerror}); make the memory by memfd_create with MFD_ALLOW_SEALING."
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise UnsafeSegment(
            "The memfd is not sealed against shrinking, and a shrunk file would kill the daemon; add F_SEAL_SHRINK."
        )
    # The order matters: only behind the seal can the size no longer fall.
    found = os.fstat(fd)
    if found.st_size < size_bytes:
        raise UnsafeSegment(
            f"The memfd has {found.st_size} bytes but was declared with {size_bytes}; size it before it is sent."
        )
    if whole and (allocated := held_bytes(found)) < found.st_size:
        raise UnsafeSegment(
            f"Of the memfd's {found.st_size} bytes only {allocated} are allocated; write to every page before it is "
            "sent, as with MADV_POPULATE_WRITE."
        )
    # A fault that finds no huge page left is a SIGBUS.
    if filesystem_magic(fd) != TMPFS_MAGIC:
        raise UnsafeSegment(
            "The memfd uses huge pages, which can run out under the daemon; create it without MFD_HUGETLB."
        )


def view_of(address: int, nbytes: int) -> memoryview:
    """Mapped memory as bytes to be read and written. It must stay mapped until the view is released."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def madvise(address: int, length: int, advice: int) -> int:
    """Gives the kernel advice on mapped memory, see madvise(2); returns 0 or the errno of its refusal."""
    return 0 if _madvise(address, length, advice) == 0 else ctypes.get_errno()


def filesystem_magic(fd: int) -> int:
    """``f_type`` of the descriptor's file system (the first word of struct statfs on 64-bit Linux); 0 if unknown."""
    buffer = (ctypes.c_long * 32)()
    if _fstatfs(fd, buffer) != 0:
        return 0
    return int(buffer[0])


def is_hugetlbfs(directory: Path) -> bool:
    """Whether files in the directory are made of huge pages; False where it cannot be opened."""
    try:
        fd = open_directory(directory)
    except OSError:
        return False
    try:
        return filesystem_magic(fd) == HUGETLBFS_MAGIC
    finally:
        os.close(fd)


class PageFaulter:
    """A thread that faults in clients' memory, a step of each segment in turn, while copies run, and closes it.

    A copy into pages that the daemon has not faulted in runs at a tenth of its speed. Only pages that exist are faulted
    in: a page that the engine never touched would be allocated here and charged to the daemon.
    """

    def __init__(self) -> None:
        self._thread = TaskThread("kvoffd-fault")
        self._closed = False

    def map_memfd(self, fd: int, size_bytes: int) -> MappedSegment:
        """As the function ``map_memfd``, for the whole memory of a client; the thread then faults the pages in. Only
        ``close_segments`` may close it.
        """
        segment = map_memfd(fd, size_bytes, whole=True)
        self._thread.put(partial(self._fault, segment, 0))
        return segment

    def close_segments(self, segments: Sequence[MappedSegment], on_closed: Callable[[], None]) -> None:
        """As the function ``close_segments``, in the thread: where their client is gone, closing them frees its memory,
        which takes tenths of a second for each GiB.
        """
        self._thread.put(partial(close_segments, segments, on_closed))

    def close_descriptor(self, fd: int) -> None:
        """Close what a client sent, in the thread too: it may be the last that holds a dead client's memory."""
        self._thread.put(partial(os.close, fd))

    def close(self) -> None:
        """End the thread once memory is unmapped. It is not waited for."""
        self._closed = True
        self._thread.stop()

    def _fault(self, segment: MappedSegment, done: int) -> None:
        if segment.closed or self._closed:
            return
        length = min(STEP_BYTES, segment.size_bytes - done)
        if _fault_in(segment.address + done, length) and (done := done + length) < segment.size_bytes:
            self._thread.put(partial(self._fault, segment, done))  # behind all others, lest they wait for terabytes


def _fault_in(address: int, length: int) -> bool:
    """Maps the pages of the range that exist; False where the kernel cannot do it (before 5.14)."""
    pages = -(-length // mmap.PAGESIZE)
    exists = np.zeros(pages, dtype=np.uint8)
    if _mincore(address, length, exists.ctypes.data) != 0:
        return False
    edges = np.flatnonzero(np.diff(exists & 1, prepend=0, append=0))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start, stop = first * mmap.PAGESIZE, min(end * mmap.PAGESIZE, length)
        if not map_pages(address + start, stop - start):
            return False
    return True


def map_pages(address: int, length: int) -> bool:
    """Fill the page tables of shared memory that is there; False where the kernel cannot do it (before 5.14).

    As if it were read: the kernel maps 16 pages at a fault, and what is shared may be written then without another
    one. Measured, a third of the time that it takes as if it were written, page by page.
    """
    if code := madvise(address, length, MADV_POPULATE_READ):
        _log.debug("Memory is not faulted in ahead of its copies (errno %d).", code)
    return not code
