"""Shared memory of the daemon, mapped and touched: a sealed memfd, or a part of a file."""

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
    MappedSegment,
    madvise,
    map_memfd,
    map_pages,
    map_shared,
    view_of,
)
from kvoffd.system.numa import NOWHERE, run_near, usable_cpus

# Touched by one thread at a time: short enough to stop soon and to show progress, long enough to cost nothing.
TOUCH_CHUNK_BYTES = 32 << 20
PAUSE_S = 0.01


class PoolMemory:
    """``size_bytes`` of shared memory, mapped in ``segment``; made by a class method. Owns ``fd``."""

    def __init__(self, fd: int, segment: MappedSegment) -> None:
        self.fd = fd
        self.size_bytes = segment.size_bytes
        self.segment = segment

    @classmethod
    def create(cls, size_bytes: int, name: str) -> PoolMemory:
        """Makes a memfd, sealed against any change of its size; no page of it is resident yet.

        ``name`` is shown by /proc/self/maps.

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
        """Maps a memfd that ``create`` made, also in another process. Keeps a copy of ``fd``.

        Raises:
            UnsafeSegment: it is no such memfd, or it is smaller.
        """
        segment = map_memfd(fd, size_bytes)
        with OnError(segment.close):
            return cls(os.dup(fd), segment)

    @classmethod
    def of_file(cls, fd: int, size_bytes: int, offset: int) -> PoolMemory:
        """Maps a part of a file that only the daemon has open, from ``offset`` on. Keeps a copy of ``fd``.

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
        """All bytes, to be read and written; they must stay mapped until the view is released."""
        return view_of(self.segment.address, self.size_bytes)

    def touch(
        self,
        threads: int,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        segments: Sequence[PoolSegment] = (),
    ) -> int:
        """Makes every page resident, in parallel, without changing its content; returns the bytes touched.

        It asks for huge pages, which the kernel gives shared memory only where an administrator allows it
        (``shmem_enabled``): measured, one thread touches 6.4 to 20 GB/s of huge pages instead of 1.3 to 1.6 GB/s where
        memory is in one piece, and 0.75 to 1.6 GB/s where the kernel has to compact memory first.

        Args:
            threads: how many to use; 0 for one per CPU this process may run on, at most 16.
            on_progress: called with the bytes touched so far. An exception from it ends the touching.
            should_stop: asked by the threads between chunks; touching ends early once it returns True.
            segments: all parts of the memory. Threads near its NUMA node touch each, so that its pages lie there.

        Raises:
            PoolTooLarge: the memory is not there.
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
        """Fills the page tables of memory that is resident, so that no copy faults.

        In steps: nothing is mapped or unmapped during one. Ends early once ``should_stop`` returns True, and waits
        while ``is_busy`` does: copies map what they need themselves, and have the cores for it.
        """
        self._ask_for_huge_pages()
        end = self.segment.address + self.size_bytes
        for address in range(self.segment.address, end, STEP_BYTES):
            while is_busy() and not should_stop():
                time.sleep(PAUSE_S)
            if should_stop() or not map_pages(address, min(STEP_BYTES, end - address)):
                return

    def _ask_for_huge_pages(self) -> None:
        """A kernel without them refuses; that is fine."""
        madvise(self.segment.address, self.size_bytes, mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmaps and closes; a second call does nothing. No copy may be using the memory."""
        self.segment.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _populate(address: int, length: int) -> None:
    """Makes the pages of [address, address + length) resident and writable."""
    while code := madvise(address, length, MADV_POPULATE_WRITE):
        if code in (errno.EINTR, errno.EAGAIN):
            continue
        if code in (errno.EINVAL, errno.EPERM, errno.ENOSYS):
            _populate_by_writing(address, length)
            return
        raise PoolTooLarge(
            f"The machine ran out of memory while the pool was touched ({os.strerror(code)}); "
            "choose a smaller pool or give the daemon more memory."
        )


def _populate_by_writing(address: int, length: int) -> None:
    """For kernels before 5.14, and seccomp filters: writes one byte of every page back to where it came from."""
    pages = np.frombuffer(view_of(address, length), dtype=np.uint8)[:: mmap.PAGESIZE]
    np.bitwise_or(pages, 0, out=pages)
