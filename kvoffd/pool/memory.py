"""Shared memory of the daemon: a sealed memfd, or a part of a file, mapped and populated."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain

import numpy as np

from kvoffd.errors import PoolTooLarge, UnsafeSegment
from kvoffd.pool.allocator import PoolSegment
from kvoffd.system.files import OnError
from kvoffd.system.mappings import (
    MADV_POPULATE_WRITE,
    STEP_BYTES,
    HostMapping,
    madvise,
    map_memfd,
    map_pages,
    map_shared,
    view_of,
)
from kvoffd.system.numa import NOWHERE, run_near, usable_cpus

# Bytes that a thread touches at once: short enough to stop soon and to show progress, long enough to cost nothing.
TOUCH_CHUNK_BYTES = 32 << 20
PAUSE_S = 0.01


class PoolMemory:
    """``size_bytes`` of shared memory, mapped as ``segment``; made by a class method. Owns ``fd``."""

    def __init__(self, fd: int, segment: HostMapping) -> None:
        self.fd = fd
        self.size_bytes = segment.size_bytes
        self.segment = segment

    @classmethod
    def create(cls, size_bytes: int, name: str) -> PoolMemory:
        """Make a memfd whose size is sealed; no page of it is resident yet.

        /proc/self/maps shows ``name``.

        Raises:
            PoolTooLarge: the kernel refuses a file or a mapping of that size.
        """
        with ExitStack() as undo:
            try:
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
                made = cls(fd, map_memfd(fd, size_bytes))
            except (OSError, UnsafeSegment) as error:
                raise PoolTooLarge(
                    f"The kernel refuses {size_bytes} bytes of shared memory ({error}); choose a smaller pool."
                ) from error
            undo.pop_all()
            return made

    @classmethod
    def of_memfd(cls, fd: int, size_bytes: int) -> PoolMemory:
        """Map a memfd that ``create`` made, in this or another process. Keeps a duplicate of ``fd``.

        Raises:
            UnsafeSegment: the descriptor is not such a memfd, or it is smaller.
        """
        segment = map_memfd(fd, size_bytes)
        with OnError(segment.close):
            return cls(os.dup(fd), segment)

    @classmethod
    def of_file(cls, fd: int, size_bytes: int, offset: int) -> PoolMemory:
        """Map a part of a file that only the daemon has open, beginning at ``offset``. Keeps a duplicate of ``fd``.

        Raises:
            PoolTooLarge: the kernel refuses the mapping.
        """
        copy = os.dup(fd)
        try:
            return cls(copy, map_shared(copy, size_bytes, offset))
        except OSError as error:
            os.close(copy)
            raise PoolTooLarge(
                f"The kernel refuses to map {size_bytes} bytes of the pool file ({error}); choose a smaller pool."
            ) from error

    @property
    def buffer(self) -> memoryview:
        """All bytes, readable and writable; they must stay mapped until the view is released."""
        return view_of(self.segment.address, self.size_bytes)

    def touch(
        self,
        threads: int,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        segments: Sequence[PoolSegment] = (),
    ) -> int:
        """Make every page resident, in parallel, without changing its content; return the bytes touched.

        Requests huge pages, which the kernel grants shared memory only if an administrator allows it
        (``shmem_enabled``). Measured for one thread: 6.4 to 20 GB/s with huge pages from unfragmented memory, 0.75 to
        1.6 GB/s if the kernel has to compact memory first, and 1.3 to 1.6 GB/s with small pages.

        Args:
            threads: number of threads; 0 for one per usable CPU, at most 16.
            on_progress: called with the bytes touched so far. If it raises, touching ends.
            should_stop: called by the threads between chunks; once it returns True, touching ends early.
            segments: all parts of the memory. Threads near its NUMA node touch each, which places its pages there.

        Raises:
            PoolTooLarge: the memory is not available.
        """
        self._ask_for_huge_pages()
        threads = threads or min(16, len(usable_cpus()))
        touched_bytes, failed = 0, False

        def touch_chunk(offset: int, length: int) -> int:
            if failed or should_stop():
                return 0
            _populate(self.segment.address + offset, length)
            return length

        parts = segments or [PoolSegment(0, self.size_bytes, NOWHERE)]
        share = max(1, threads // len(parts))
        with ExitStack() as executors:
            chunks: list[Iterator[int]] = []
            for begin, end, near in parts:
                executor = executors.enter_context(ThreadPoolExecutor(share, "kvoffd-touch", run_near, (near,)))
                offsets = range(begin, end, TOUCH_CHUNK_BYTES)
                chunks.append(executor.map(touch_chunk, offsets, [min(TOUCH_CHUNK_BYTES, end - at) for at in offsets]))
            try:
                for length in chain(*chunks):
                    touched_bytes += length
                    on_progress(touched_bytes)
            except BaseException:
                failed = True
                raise
        return touched_bytes

    def map_pages(self, should_stop: Callable[[], bool], is_busy: Callable[[], bool]) -> None:
        """Fill the page tables of resident memory, so that copies do not fault.

        Works in steps, in which no other thread can map or unmap memory. Ends early once ``should_stop`` returns True,
        and pauses while ``is_busy`` does: copies then map what they need, and have the CPUs for it.
        """
        self._ask_for_huge_pages()
        end = self.segment.address + self.size_bytes
        for address in range(self.segment.address, end, STEP_BYTES):
            while is_busy() and not should_stop():
                time.sleep(PAUSE_S)
            if should_stop() or not map_pages(address, min(STEP_BYTES, end - address)):
                return

    def _ask_for_huge_pages(self) -> None:
        """Request huge pages. A kernel without them refuses, which is harmless."""
        madvise(self.segment.address, self.size_bytes, mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap and close; a second call does nothing. No copy may be using the memory."""
        self.segment.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _populate(address: int, length: int) -> None:
    """Make the pages of [address, address + length) resident and writable."""
    while code := madvise(address, length, MADV_POPULATE_WRITE):
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code in (errno.EINVAL, errno.EPERM, errno.ENOSYS):  # kernels before 5.14, and behind seccomp filters
            pages = np.frombuffer(view_of(address, length), dtype=np.uint8)[:: mmap.PAGESIZE]
            np.bitwise_or(pages, 0, out=pages)  # rewrites one byte of every page with itself
            return
        raise PoolTooLarge(
            f"The machine ran out of memory while the pool was touched ({os.strerror(code)}); "
            "choose a smaller pool or give the daemon more memory."
        )
