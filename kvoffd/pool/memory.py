"""Memory of the daemon, mapped and populated: private, or shared in a sealed memfd or a part of a file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from math import inf

import numpy as np

from kvoffd.errors import NoMoreThreads, PoolTooLarge, UnsafeSegment
from kvoffd.pool.allocator import PoolSegment
from kvoffd.system.files import FileCalls, OnError
from kvoffd.system.limits import memory_limit
from kvoffd.system.mappings import (
    HUGETLBFS_MAGIC,
    MADV_POPULATE_WRITE,
    STEP_BYTES,
    HostMapping,
    filesystem_magic,
    huge_page_bytes,
    madvise,
    map_memfd,
    map_pages,
    map_private,
    map_shared,
    view_of,
)
from kvoffd.system.numa import NOWHERE, run_near, usable_cpus
from kvoffd.system.threads import submit

# Bytes that a thread touches at once: short enough to stop soon and to show progress, long enough to cost nothing.
TOUCH_CHUNK_BYTES = 32 << 20
PAUSE_S = 0.01
ALLOCATE_STEP_BYTES = 256 << 20
"""Memory of a file allocated at a time."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of a memfd whose size nobody can change."""
SAMPLE_BYTES, SAMPLE_PIECES = 32 << 20, 8
"""Memory that ``slowdown`` reads, and the number of places over which it lies."""
SPARE_SAMPLES = 8
"""``slowdown`` measures only if memory for this many samples is available; it takes that of two."""
SAMPLE_ROUNDS = 3


class PoolMemory:
    """``size_bytes`` of memory, mapped as ``mapping``; made by a class method. Owns ``fd``, which is -1 if no other
    process can map it.

    Attributes:
        reserved: it is in huge pages that the administrator had reserved.
    """

    def __init__(self, fd: int, mapping: HostMapping, *, reserved: bool = False) -> None:
        self.fd, self.reserved = fd, reserved
        self.size_bytes = mapping.size_bytes
        self.mapping = mapping

    @classmethod
    def create_private(cls, size_bytes: int) -> PoolMemory:
        """Map memory of this process alone: the kernel gives it huge pages without a setting. No page is resident yet.

        Raises:
            PoolTooLarge: the kernel refuses a mapping of that size.
        """
        try:
            return cls(-1, map_private(size_bytes))
        except OSError as error:
            raise PoolTooLarge(
                f"The kernel refuses {size_bytes} bytes of memory ({error}); choose a smaller pool."
            ) from error

    @classmethod
    def take_reserved(
        cls,
        size_bytes: int,
        name: str,
        on_progress: Callable[[int], None],
        should_stop: Callable[[], bool],
        segments: Sequence[PoolSegment],
    ) -> PoolMemory | None:
        """Make a memfd as ``create`` does, all of it in reserved huge pages and resident; None if the kernel refuses.

        A cgroup may have a limit of them. ``on_progress``: called with the bytes allocated so far. ``should_stop``: see
        ``allocate_near``. ``segments``: see ``touch``. Raises NoMoreThreads.
        """
        with ExitStack() as undo:
            try:
                fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
                undo.callback(os.close, fd)
                os.ftruncate(fd, size_bytes)
                parts = segments or [PoolSegment(0, size_bytes, NOWHERE)]
                for done_bytes in allocate_near(FileCalls(), fd, parts, should_stop):
                    on_progress(done_bytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
                made = cls(fd, map_shared(fd, size_bytes), reserved=True)
            except OSError:
                return None
            undo.pop_all()
            return made

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
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
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
        mapping = map_memfd(fd, size_bytes, may_be_huge=True)
        with OnError(mapping.close):
            return cls._of(os.dup(fd), mapping)

    @classmethod
    def of_file(cls, fd: int, size_bytes: int, offset: int) -> PoolMemory:
        """Map a part of a file that only the daemon has open, beginning at ``offset``. Keeps a duplicate of ``fd``.

        Raises:
            PoolTooLarge: the kernel refuses the mapping.
        """
        copy = os.dup(fd)
        try:
            mapping = map_shared(copy, size_bytes, offset)
        except OSError as error:
            os.close(copy)
            raise PoolTooLarge(
                f"The kernel refuses to map {size_bytes} bytes of the pool file ({error}); choose a smaller pool."
            ) from error
        return cls._of(copy, mapping)

    @classmethod
    def _of(cls, fd: int, mapping: HostMapping) -> PoolMemory:
        return cls(fd, mapping, reserved=filesystem_magic(fd) == HUGETLBFS_MAGIC)

    @property
    def buffer(self) -> memoryview:
        """All bytes, readable and writable; they must stay mapped until the view is released."""
        return view_of(self.mapping.address, self.size_bytes)

    def touch(
        self,
        threads: int,
        on_progress: Callable[[int], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
        segments: Sequence[PoolSegment] = (),
    ) -> int:
        """Make every page resident, in parallel, without changing its content; return the bytes touched.

        Requests huge pages, which the kernel grants private memory nearly always, and shared memory only if an
        administrator allows it (``shmem_enabled``). Measured for one thread: 6.4 to 20 GB/s with huge pages from
        unfragmented memory, 0.75 to 1.6 GB/s if the kernel has to compact memory first, and 1.3 to 1.6 GB/s with small
        pages.

        Args:
            threads: number of threads; 0 for one per usable CPU, at most 16.
            on_progress: called with the bytes touched so far. If it raises, touching ends.
            should_stop: called by the threads between chunks; once it returns True, touching ends early.
            segments: all parts of the memory. Threads near its NUMA node touch each, which places its pages there.

        Raises:
            PoolTooLarge: the memory is not available.
            NoMoreThreads: one of the threads cannot be started.
        """
        self._ask_for_huge_pages()
        threads = threads or min(16, len(usable_cpus()))
        touched_bytes, failed = 0, False

        def touch_chunk(offset: int, length: int) -> int:
            if failed or should_stop():
                return 0
            _populate(self.mapping.address + offset, length)
            return length

        parts = segments or [PoolSegment(0, self.size_bytes, NOWHERE)]
        threads_per_part = max(1, threads // len(parts))
        with ExitStack() as executors:
            chunks: list[Future[int]] = []
            try:
                for begin, end, near in parts:
                    executor = ThreadPoolExecutor(threads_per_part, "kvoffd-touch", run_near, (near,))
                    executors.enter_context(executor)
                    chunks += [
                        submit(executor, touch_chunk, at, min(TOUCH_CHUNK_BYTES, end - at))
                        for at in range(begin, end, TOUCH_CHUNK_BYTES)
                    ]
                for chunk in chunks:
                    touched_bytes += chunk.result()
                    on_progress(touched_bytes)
            except BaseException:
                failed = True  # the executors end only after all that was submitted
                raise
        return touched_bytes

    def map_pages(self, should_stop: Callable[[], bool], is_busy: Callable[[], bool]) -> None:
        """Fill the page tables of resident memory, so that copies do not fault.

        Works in steps, in which no other thread can map or unmap memory. Ends early once ``should_stop`` returns True,
        and pauses while ``is_busy`` does: copies then map what they need, and have the CPUs for it.
        """
        self._ask_for_huge_pages()
        end = self.mapping.address + self.size_bytes
        for address in range(self.mapping.address, end, STEP_BYTES):
            while is_busy() and not should_stop():
                time.sleep(PAUSE_S)
            if should_stop() or not map_pages(address, min(STEP_BYTES, end - address)):
                return

    def slowdown(self) -> float:
        """Measure how many times as long reading this resident memory takes as reading memory in huge pages.

        0.0 if the kernel has no huge pages, or too little memory, to compare with, or refuses a thread. Takes up to
        tenths of a second.
        """
        sample_bytes = min(SAMPLE_BYTES, self.size_bytes)
        if memory_limit().bytes < SPARE_SAMPLES * sample_bytes:  # the kernel would kill the daemon for the last of it
            return 0.0
        with ExitStack() as opened:
            try:
                other = opened.enter_context(closing(PoolMemory.create_private(2 * sample_bytes)))
                other.touch(1)
            except (PoolTooLarge, NoMoreThreads):
                return 0.0
            huge_bytes = huge_page_bytes(other.mapping)
            if huge_bytes is not None and huge_bytes < 2 * sample_bytes:
                return 0.0
            # The first half of ``other`` is read for comparison, and the second takes the bytes of both.
            piece_bytes, into = sample_bytes // SAMPLE_PIECES, other.mapping.address + sample_bytes
            apart = (self.size_bytes - piece_bytes) // max(1, SAMPLE_PIECES - 1)

            def seconds(begin: int, step: int) -> float:
                """Read the sample's pieces, each ``step`` bytes behind the one before; return the time."""
                began = time.perf_counter()
                for at in range(SAMPLE_PIECES):
                    ctypes.memmove(into + at * piece_bytes, begin + at * step, piece_bytes)
                return time.perf_counter() - began

            own_s = huge_s = inf
            for _ in range(SAMPLE_ROUNDS):  # in turns, as other processes slow both down
                own_s = min(own_s, seconds(self.mapping.address, apart))
                huge_s = min(huge_s, seconds(other.mapping.address, piece_bytes))
        return own_s / huge_s

    def _ask_for_huge_pages(self) -> None:
        """Request huge pages. A kernel without them refuses, which is harmless."""
        madvise(self.mapping.address, self.size_bytes, mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap and close; a second call does nothing. No copy may be using the memory."""
        self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def allocate_near(
    calls: FileCalls, fd: int, parts: Sequence[PoolSegment], should_stop: Callable[[], bool]
) -> Iterator[int]:
    """Allocate parts of a file of memory in steps, each by a thread near its NUMA node, which places its pages there;
    yield before each step how many bytes are allocated. End after a step once ``should_stop`` returns True. Raises
    OSError, NoMoreThreads."""
    done_bytes = 0
    for begin, end, near in parts:
        with ThreadPoolExecutor(1, "kvoffd-allocate", run_near, (near,)) as executor:
            for offset in range(begin, end, ALLOCATE_STEP_BYTES):
                yield done_bytes
                length = min(ALLOCATE_STEP_BYTES, end - offset)
                submit(executor, calls.allocate, fd, offset, length).result()
                done_bytes += length
                if should_stop():
                    return


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
