"""Maps memory, private or so shared that no other process can kill the daemon by it; faults it in before copies."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvoffd.errors import UnsafeSegment
from kvoffd.system.files import held_bytes
from kvoffd.system.threads import TaskThread

_log = logging.getLogger(__name__)

# linux/magic.h
TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6

# linux/mman.h; Python's mmap lacks some.
MAP_NORESERVE = 0x4000
MADV_DONTFORK, MADV_DONTDUMP = 10, 16
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

# linux/fs.h; struct pm_scan_arg has twelve numbers: size, flags, begin, end, walk_end, vec, vec_len, max_pages, and the
# categories that are inverted, wanted, wanted in part, and returned.
PAGEMAP_SCAN, PAGE_IS_HUGE = 0xC0606610, 1 << 6
_PM_SCAN_ARG_BYTES = 96

HUGE_PAGE_BYTES = 2 << 20
"""A huge page of x86-64, and of aarch64 with pages of 4 KiB."""
STEP_BYTES = 4 << 20
"""Memory faulted in at a time, in about 1 ms; other segments wait for it."""
SCANNED_BYTES = 64 << 20
"""Memory whose page table the kernel examines in one call. That takes less than a millisecond, in which no other thread
can map or unmap memory."""
MAX_SCANS = 1024
"""Limit of these calls for one mapping."""
UNMAP_BYTES = 256 << 20
"""Memory unmapped by one call, in a few milliseconds; other threads that map memory wait for it."""

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


class HostMapping:
    """A read-write mapping of ``size_bytes`` at ``address``, which outlives its descriptor.

    After ``close`` it has no address, so that nothing can use it.
    """

    __slots__ = ("address", "size_bytes")

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes

    @property
    def closed(self) -> bool:
        return not hasattr(self, "address")

    def close(self) -> None:
        """Unmap the memory. Idempotent. A copy that still uses it would crash the daemon."""
        if self.closed:
            return
        address = self.address
        del self.address
        for offset in range(0, self.size_bytes, UNMAP_BYTES):
            left = self.size_bytes - offset
            if _munmap(address + offset, min(UNMAP_BYTES, left)) == 0:
                continue
            # Of a huge page of 1 GiB no part can be unmapped.
            if ctypes.get_errno() == errno.EINVAL and _munmap(address + offset, left) == 0:
                return
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def close_segments(segments: Sequence[HostMapping], on_closed: Callable[[], None]) -> None:
    """Unmap the segments, then call ``on_closed``."""
    for segment in segments:
        segment.close()
    on_closed()


_NOT_WRITABLE = "send a descriptor opened for reading and writing, without a write seal."
_NO_ADDRESSES = "raise the daemon's limits of address space (ulimit -v) and of mappings (vm.max_map_count)."


def map_memfd(fd: int, size_bytes: int, *, whole: bool = False, may_be_huge: bool = False) -> HostMapping:
    """Map the first ``size_bytes`` of a memfd, shared, for reading and writing. ``fd`` stays the caller's.

    ``whole`` requires that every page of the file is allocated: the kernel charges a page to the process that touches
    it first, even by reading, and the daemon must not be charged for a client's memory. ``may_be_huge`` allows reserved
    huge pages if all are allocated.

    Raises:
        UnsafeSegment: it is not a memfd, is not sealed against shrinking, is smaller than ``size_bytes``, is not
            ``whole``, is not writable, or the kernel refuses the mapping.
    """
    _check_memfd(fd, size_bytes, whole, may_be_huge)
    try:
        return map_shared(fd, size_bytes)
    except OSError as error:
        raise UnsafeSegment(
            f"The memory segment of {size_bytes} bytes cannot be mapped read-write ({error.strerror}); "
            + (_NO_ADDRESSES if error.errno == errno.ENOMEM else _NOT_WRITABLE)
        ) from error


def map_shared(
    fd: int, size_bytes: int, offset: int = 0, access: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> HostMapping:
    """Map a part of a file, shared, for reading and writing unless ``access`` says less; ``fd`` stays the caller's.

    Raises OSError.

    Checks nothing, so it is only for files that no other process can shrink.
    """
    address = _mmap(None, size_bytes, access, mmap.MAP_SHARED, fd, offset)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _keep_to_this_process(address, size_bytes)
    return HostMapping(address, size_bytes)


def map_private(size_bytes: int) -> HostMapping:
    """Map new memory, all zeros, that no other process can map. It begins at a multiple of HUGE_PAGE_BYTES.

    A page takes memory from its first touch on, as in a memfd. Raises OSError.
    """
    whole_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    # A huge page more than is needed has a multiple in it; what is before and behind the aligned part is unmapped.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    found = _mmap(None, whole_bytes + HUGE_PAGE_BYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if found is None or found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    address = -(-found // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    before_bytes = address - found
    for begin, length in ((found, before_bytes), (address + whole_bytes, HUGE_PAGE_BYTES - before_bytes)):
        if length:
            _munmap(begin, length)
    _keep_to_this_process(address, size_bytes)
    return HostMapping(address, size_bytes)


def _keep_to_this_process(address: int, size_bytes: int) -> None:
    """Leave memory out of core dumps and child processes.

    A core dump of the pool would take minutes, delay the next daemon, and write prompts to a disk. After a fork each
    write to private memory would copy its page.
    """
    madvise(address, size_bytes, MADV_DONTDUMP)
    madvise(address, size_bytes, MADV_DONTFORK)


def check_descriptor(fd: int) -> None:
    """Raise UnsafeSegment unless the descriptor is a memfd or exported by a GPU's driver."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # a path too long for readlink, so a file: drivers' exports have short ones
            target = "/"
        if target.startswith(("/dev/nvidia", "/dmabuf:", "anon_inode:[dmabuf]")):  # VMM handles, or dma-buf
            return
        kind = target.partition(":")[0] if target[:1] != "/" else "file or device"
        raise UnsafeSegment(
            f"The descriptor is a {kind}, neither a memfd nor exported by a GPU's driver; attach memory."
        ) from None


def _check_memfd(fd: int, size_bytes: int, whole: bool, may_be_huge: bool) -> None:
    if size_bytes < 1:
        raise UnsafeSegment(f"A memory segment of {size_bytes} bytes cannot be mapped; send at least one byte.")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise UnsafeSegment(
            f"The descriptor is not a memfd ({error.strerror}); use memfd_create with MFD_ALLOW_SEALING."
        ) from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise UnsafeSegment(
            "The memfd is not sealed against shrinking, which would kill the daemon; add F_SEAL_SHRINK."
        )
    # The order matters: the size is final only once it is sealed.
    found = os.fstat(fd)
    if found.st_size < size_bytes:
        raise UnsafeSegment(
            f"The memfd has {found.st_size} bytes but was declared with {size_bytes}; resize it before you send it."
        )
    if whole and (allocated := held_bytes(found)) < found.st_size:
        raise UnsafeSegment(
            f"Only {allocated} of the memfd's {found.st_size} bytes are allocated; touch every page before you send "
            "it, for example with MADV_POPULATE_WRITE."
        )
    # A fault without a free huge page is a SIGBUS.
    if filesystem_magic(fd) != TMPFS_MAGIC and not (may_be_huge and held_bytes(found) >= found.st_size):
        raise UnsafeSegment(
            "The memfd uses huge pages, which can run out under the daemon; create it without MFD_HUGETLB."
        )


def huge_page_bytes(mapping: HostMapping) -> int | None:
    """Return the bytes of a mapping that are in huge pages; None if the kernel cannot tell (before 6.7).

    For a large mapping it is an estimate from MAX_SCANS pieces.
    """
    found, scanned, size_bytes = 0, 0, mapping.size_bytes
    step = SCANNED_BYTES * max(1, -(-size_bytes // (MAX_SCANS * SCANNED_BYTES)))
    regions = np.zeros((SCANNED_BYTES // HUGE_PAGE_BYTES + 1, 3), np.uint64)  # begin, end and categories of each
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for offset in range(0, size_bytes, step):
                length, begin = min(SCANNED_BYTES, size_bytes - offset), mapping.address + offset
                asked = _PM_SCAN_ARG_BYTES, 0, begin, begin + length, 0, regions.ctypes.data, len(regions), 0
                argument = array("Q", (*asked, 0, PAGE_IS_HUGE, 0, PAGE_IS_HUGE))
                count = fcntl.ioctl(pagemap, PAGEMAP_SCAN, argument)
                # A huge page at an end of the piece is reported whole.
                found += min(length, int((regions[:count, 1] - regions[:count, 0]).sum()))
                scanned += length
    except OSError:
        return None
    return found * size_bytes // scanned


def view_of(address: int, nbytes: int) -> memoryview:
    """Return a writable view of mapped memory, which must stay mapped until the view is released."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def madvise(address: int, length: int, advice: int) -> int:
    """Call madvise(2); return 0 or its errno."""
    return 0 if _madvise(address, length, advice) == 0 else ctypes.get_errno()


def filesystem_magic(fd: int) -> int:
    """Return ``f_type`` of the file system (the first word of struct statfs on 64-bit Linux); 0 if unknown."""
    buffer = (ctypes.c_long * 32)()
    if _fstatfs(fd, buffer) != 0:
        return 0
    return int(buffer[0])


class PageFaulter:
    """A thread that faults in clients' memory while copies run, a step of each segment in turn, and unmaps it.

    A copy into pages that the daemon has not faulted in runs at a tenth of the speed. Only existing pages are faulted
    in: a page that the engine never touched would be allocated here and charged to the daemon.
    """

    def __init__(self) -> None:
        self._thread = TaskThread("kvoffd-fault")
        self._closed = False

    def map_memfd(self, fd: int, size_bytes: int) -> HostMapping:
        """Map a client's memory as the function ``map_memfd`` does, and have the thread fault it in.

        Only ``close_segments`` may close it.
        """
        segment = map_memfd(fd, size_bytes, whole=True)
        self._thread.put(partial(self._fault, segment, 0))
        return segment

    def close_segments(self, segments: Sequence[HostMapping], on_closed: Callable[[], None]) -> None:
        """Close segments in the thread: if their client is gone, that frees its memory, at tenths of a second a GiB."""
        self._thread.put(partial(close_segments, segments, on_closed))

    def close_descriptor(self, fd: int) -> None:
        """Close a client's descriptor in the thread: it may be the last reference to a dead client's memory."""
        self._thread.put(partial(os.close, fd))

    def close(self) -> None:
        """End the thread after its tasks, without waiting for it."""
        self._closed = True
        self._thread.stop()

    def _fault(self, segment: HostMapping, done: int) -> None:
        if segment.closed or self._closed:
            return
        length = min(STEP_BYTES, segment.size_bytes - done)
        if _fault_in(segment.address + done, length) and (done := done + length) < segment.size_bytes:
            self._thread.put(partial(self._fault, segment, done))  # after the others, which may be much smaller


def _fault_in(address: int, length: int) -> bool:
    """Map the existing pages of a range; return False if the kernel cannot (before 5.14)."""
    pages = -(-length // mmap.PAGESIZE)
    exists = np.zeros(pages, dtype=np.uint8)
    if _mincore(address, length, exists.ctypes.data) != 0:
        return False
    # First page and end of each run of existing pages, alternating.
    edges = np.flatnonzero(np.diff(exists & 1, prepend=0, append=0))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start, stop = first * mmap.PAGESIZE, min(end * mmap.PAGESIZE, length)
        if not map_pages(address + start, stop - start):
            return False
    return True


def map_pages(address: int, length: int) -> bool:
    """Fill the page tables of existing shared memory; return False if the kernel cannot (before 5.14).

    Read faults map 16 pages at a time, and shared pages are writable then without another fault. That takes a third of
    the time of write faults, page by page.
    """
    if code := madvise(address, length, MADV_POPULATE_READ):
        _log.debug("Memory is not faulted in before its copies (errno %d).", code)
    return not code
