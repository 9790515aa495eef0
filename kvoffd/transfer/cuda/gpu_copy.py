"""One plan's way through one stream: the loop of ``gpu_copy.c``, which runs without the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import native
from kvoffd.transfer.cuda.driver import CopyCalls, CudaDriver, CudaError
from kvoffd.transfer.cuda.staging import STAGED_BYTES, Staging
from kvoffd.transfer.pace import Pace
from kvoffd.transfer.plan import Direction, Plan

# Steps that the GPU has at a time: enough to keep it busy while the thread waits for the GIL, few enough that a load
# behind them on a shared copy engine waits for 24 MiB at most, which is half a millisecond on PCIe 5. IN_FLIGHT in C.
STEPS_IN_FLIGHT = 3

# Pieces are cut where their pool address is a multiple of this, so that none is longer. Boundaries between pinned
# chunks are multiples too: the driver refuses a copy that lies in two registrations.
STEP_BYTES = 8 << 20

# The copy engine starts when the call returns, so short batches overlap with their predecessors; and drivers have
# crashed on batches of tens of thousands (vllm-project/vllm#49276).
STEP_PIECES = 512

# From this size on one call a piece costs less than the copy itself takes, batches gain nothing.
PLAIN_BYTES = 256 << 10

_CALLS = ("", "cuMemcpyBatchAsync", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuLaunchKernel")


@dataclass(frozen=True)
class PinnedChunks:
    """Which parts of the pool are pinned by now.

    Attributes:
        flags: bool, [chunks]; may change at any time from False to True.
        chunk_bytes: a chunk lies between two multiples of this; a multiple of STEP_BYTES.
        first: the number of the first chunk, its address divided by ``chunk_bytes``.
    """

    flags: npt.NDArray[np.bool_]
    chunk_bytes: int
    first: int


class _GpuCopying(ctypes.Structure):
    """``struct gpu_copying`` of gpu_copy.c."""

    _fields_ = (
        ("calls", CopyCalls),
        ("stream", ctypes.c_void_p),
        ("event", ctypes.c_void_p * STEPS_IN_FLIGHT),
        *((name, ctypes.c_void_p) for name in ("destination", "source", "size")),
        ("pieces", ctypes.c_uint64),
        ("from_pool", ctypes.c_uint64),
        ("pinned", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("chunk_bytes", "first_chunk", "cut_bytes", "plain_bytes")),
        *((name, ctypes.c_void_p) for name in ("to", "from", "sizes", "kernel")),
        *((name, ctypes.c_uint64) for name in ("staged_bytes", "staging", "table")),
        *((name, ctypes.c_uint64) for name in ("use_batch", "taken", "refused_call", "refused")),
        *((name, ctypes.c_uint64) for name in ("piece", "piece_done", "next_event", "steps")),
        ("nbytes", ctypes.c_uint64 * STEPS_IN_FLIGHT),
        ("failed", ctypes.c_uint64),
        ("status", ctypes.c_uint64),
    )


class GpuStream:
    """A copy thread's stream, its events, and all else that its copies have in common.

    Args:
        calls: the driver's functions.
        events: STEPS_IN_FLIGHT of them, for nobody else.
        step_pieces: most pieces in a batch.
        staging: by way of which small pieces are copied, of as many steps and pieces; None for none.
    """

    def __init__(
        self,
        driver: CudaDriver,
        calls: CopyCalls,
        stream: int,
        events: Sequence[int],
        direction: Direction,
        pinned: PinnedChunks,
        step_pieces: int = STEP_PIECES,
        staging: Staging | None = None,
    ) -> None:
        self.driver, self.stream, self.events = driver, stream, events
        self.step_pieces = step_pieces
        self.kernel = 0 if staging is None else staging.kernel
        room = np.empty((3, step_pieces), dtype=np.uint64)
        self._kept = (room, pinned.flags)  # the structure points to them
        self.copying = _GpuCopying(
            calls=calls,
            stream=stream,
            event=(ctypes.c_void_p * STEPS_IN_FLIGHT)(*events),
            from_pool=direction is Direction.LOAD,
            pinned=pinned.flags.ctypes.data,
            chunk_bytes=pinned.chunk_bytes,
            first_chunk=pinned.first,
            cut_bytes=STEP_BYTES,
            plain_bytes=PLAIN_BYTES,
            to=room[0].ctypes.data,
            sizes=room[2].ctypes.data,
        )
        setattr(self.copying, "from", room[1].ctypes.data)
        if staging is not None:
            self.copying.staged_bytes, self.copying.staging = STAGED_BYTES, staging.buffer
            self.copying.table = staging.tables


class GpuCopy:
    """One plan, copied as its pace says. Its calls are made in the stream's thread, which has the GPU's context.

    Nothing else may be in flight in the stream while one of them runs.
    """

    def __init__(self, stream: GpuStream, plan: Plan, pace: Pace) -> None:
        self._stream = stream
        self._driver = stream.driver
        self._pace = pace
        pace.step_bytes, pace.step_pieces = STEP_BYTES, stream.step_pieces
        self._columns = [
            np.ascontiguousarray(one, dtype=np.uint64) for one in (plan.destination, plan.source, plan.size)
        ]
        copying = self._copying = _GpuCopying.from_buffer_copy(stream.copying)
        copying.destination, copying.source, copying.size = (column.ctypes.data for column in self._columns)
        copying.pieces = plan.pieces
        self._arguments = (ctypes.byref(copying), ctypes.byref(pace))

    @property
    def launched(self) -> bool:
        """Whether all of the plan was given to the driver."""
        return bool(self._copying.piece == self._copying.pieces)

    @property
    def taken(self) -> int:
        """Batches, and launches of the kernel that gathers, which the driver took in the last ``run``."""
        return int(self._copying.taken)

    @property
    def refused(self) -> CudaError | None:
        """Why the driver refused one in the last ``run`` that single copies could do."""
        if not self._copying.refused:
            return None
        return self._driver.error(_CALLS[self._copying.refused_call], self._copying.refused)

    def run(self, *, batch: bool) -> None:
        """Give steps to the driver until it has all or the pace says otherwise; up to STEPS_IN_FLIGHT may be in flight.

        ``batch`` allows batches and the kernel; what follows one that the driver refuses is copied without its kind.
        Raises CudaError; steps may be in flight, one of them in part: then only ``drain`` may be called.
        """
        self._copying.use_batch = batch and bool(self._copying.calls.batch)
        self._copying.kernel = self._stream.kernel if batch else 0
        self._copying.taken = self._copying.refused = 0
        native().gpu_copy(*self._arguments)
        self._check()

    def wait(self) -> None:
        """Wait for all steps in flight. Raises CudaError as ``run`` does."""
        native().gpu_wait(*self._arguments)
        self._check()

    def drain(self) -> None:
        """After an error: wait for whatever is in the stream. Raises CudaError where the context is lost."""
        self._driver.record_event(self._stream.events[0], self._stream.stream)
        self._driver.wait_event(self._stream.events[0])
        copying = self._copying
        first = copying.next_event - copying.steps
        self._pace.copied += sum(copying.nbytes[(first + step) % STEPS_IN_FLIGHT] for step in range(copying.steps))
        copying.steps = 0

    def _check(self) -> None:
        if self._copying.failed:
            raise self._driver.error(_CALLS[self._copying.failed], self._copying.status)
