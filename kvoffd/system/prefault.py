"""Faults engine memory into the daemon's page tables before the first copy needs it, off the event loop."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading

import numpy as np

from kvoffd.system.mappings import MADV_POPULATE_WRITE, MappedSegment, madvise, map_memfd

_log = logging.getLogger(__name__)

# Between two steps a segment may be unmapped, so a step is what the event loop waits for at most: about 1 ms.
STEP_BYTES = 4 << 20
CLOSE_S = 5.0

_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_mincore.restype = ctypes.c_int


class FaultedSegment(MappedSegment):
    """A mapped segment whose pages a PageFaulter faults in. Closing it waits for the step that is running."""

    __slots__ = ("_faulter",)

    def __init__(self, segment: MappedSegment, faulter: PageFaulter) -> None:
        super().__init__(segment.address, segment.size_bytes)
        self._faulter = faulter

    def close(self) -> None:
        self._faulter.forget(self)
        super().close()


class PageFaulter:
    """One thread that faults in mapped segments, a step of each in turn. Copies may run meanwhile.

    A copy into pages that the daemon has not faulted in runs at a tenth of its speed. Only pages that exist are faulted
    in: a page that the engine never touched would be allocated here and charged to the daemon.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[FaultedSegment, int] = {}  # bytes faulted in so far, by segment
        self._in_step: FaultedSegment | None = None  # the segment that the thread works at: it must stay mapped
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvoffd-fault", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether all segments are faulted in."""
        with self._changed:
            return not self._waiting

    def map_memfd(self, fd: int, size_bytes: int) -> MappedSegment:
        """As ``kvoffd.system.mappings.map_memfd``; the thread then faults the pages in."""
        segment = FaultedSegment(map_memfd(fd, size_bytes), self)
        with self._changed:
            self._waiting[segment] = 0
            self._changed.notify_all()
        return segment

    def forget(self, segment: FaultedSegment) -> None:
        """Stop working at a segment. Waits for the step that is running: when this returns, it may be unmapped."""
        with self._changed:
            self._waiting.pop(segment, None)
            while self._in_step is segment:
                self._changed.wait()

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (step := self._next()) is not None:
            segment, done = step
            length = min(STEP_BYTES, segment.size_bytes - done)
            supported = _fault_in(segment.address + done, length)
            with self._changed:
                self._in_step = None
                self._changed.notify_all()
                # It goes to the end of the queue, so that no other segment waits behind one of terabytes.
                if self._waiting.pop(segment, None) is not None and supported and done + length < segment.size_bytes:
                    self._waiting[segment] = done + length

    def _next(self) -> tuple[FaultedSegment, int] | None:
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if self._stopped:
                return None
            step = next(iter(self._waiting.items()))
            self._in_step = step[0]
            return step


def _fault_in(address: int, length: int) -> bool:
    """Maps the pages of the range that exist; False where the kernel cannot do it (before 5.14)."""
    pages = -(-length // mmap.PAGESIZE)
    exists = np.zeros(pages, dtype=np.uint8)
    if _mincore(address, length, exists.ctypes.data) != 0:
        return False
    edges = np.flatnonzero(np.diff(exists & 1, prepend=0, append=0))
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        start, stop = first * mmap.PAGESIZE, min(end * mmap.PAGESIZE, length)
        if code := madvise(address + start, stop - start, MADV_POPULATE_WRITE):
            _log.debug("Memory of an engine is not faulted in ahead of its copies (errno %d).", code)
            return False
    return True
