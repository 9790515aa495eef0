"""The engine for one GPU: its copy engines, driven by a load and a store thread. No kernels.

Two more threads take the checksums of what the store thread's copies have left in the pool. A step that was given to
the driver runs to its end, whatever happens; so a transfer ends only when the last of its steps was waited for.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import native
from kvoffd.system.numa import NOWHERE, Locality, run_near
from kvoffd.transfer.cuda.driver import CopyCalls, CudaDriver, CudaError
from kvoffd.transfer.engine import CopyEngine, CopyQueue, CopyStats, Transfer
from kvoffd.transfer.plan import Direction

_log = logging.getLogger(__name__)

# Steps that the GPU has at a time: enough to keep it busy, few enough that a load behind them on a shared copy engine
# waits for 24 MiB at most, which is half a millisecond on PCIe 5.
STEPS_IN_FLIGHT = 3
# Pieces are cut where their pool address is a multiple of this, so that none is longer. Boundaries between pinned
# chunks are multiples too: the driver refuses a copy that lies in two registrations.
STEP_BYTES = 8 << 20
# The copy engine starts when the call returns, so short batches overlap with their predecessors; and drivers have
# crashed on batches of tens of thousands (vllm-project/vllm#49276).
STEP_PIECES = 512
# From this size on one call a piece costs less than the copy itself takes, batches gain nothing.
PLAIN_BYTES = 256 << 10
# A copy engine on PCIe 5 writes 55 GB/s; one thread reads 30 to 40 of what is in memory, not in a cache.
CHECKSUM_THREADS = 2

_CALLS = ("", "cuMemcpyBatchAsync", "cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize")


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
        *((name, ctypes.c_void_p) for name in ("stream", "event")),
        ("in_flight", ctypes.c_uint64),
        ("pinned", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("chunk_bytes", "first_chunk", "from_pool")),
        *((name, ctypes.c_uint64) for name in ("step_bytes", "step_pieces", "plain_bytes")),
        *((name, ctypes.c_void_p) for name in ("to", "from", "sizes", "destination", "source", "size")),
        *((name, ctypes.c_uint64) for name in ("pieces", "piece", "piece_done", "next_event", "steps")),
        *((name, ctypes.c_uint64) for name in ("refused", "failed", "status", "lost")),
    )


class GpuCopier:
    """One copy thread's stream.

    Attributes:
        refused_batches: how many the driver refused that single copies could do; after one there are no more.
    """

    def __init__(
        self,
        driver: CudaDriver,
        context: int,
        direction: Direction,
        pinned: PinnedChunks,
        name: str = "GPU",
        locality: Locality = NOWHERE,
        step_pieces: int = STEP_PIECES,
    ) -> None:
        self._driver, self._context, self._direction = driver, context, direction
        self._pinned, self._name, self._locality = pinned, name, locality
        self.refused_batches = 0
        self._events = (ctypes.c_void_p * STEPS_IN_FLIGHT)()
        self._room = np.empty((3, step_pieces), dtype=np.uint64)
        self._copying = _GpuCopying(
            event=ctypes.addressof(self._events),
            in_flight=STEPS_IN_FLIGHT,
            pinned=pinned.flags.ctypes.data,
            chunk_bytes=pinned.chunk_bytes,
            first_chunk=pinned.first,
            from_pool=direction is Direction.LOAD,
            step_bytes=STEP_BYTES,
            step_pieces=step_pieces,
            plain_bytes=PLAIN_BYTES,
            to=self._room[0].ctypes.data,
            sizes=self._room[2].ctypes.data,
        )
        setattr(self._copying, "from", self._room[1].ctypes.data)

    def open(self) -> None:
        driver = self._driver
        run_near(self._locality)
        driver.set_context(self._context)
        self._copying.stream = driver.create_stream(urgent=self._direction is Direction.LOAD)
        for index in range(STEPS_IN_FLIGHT):
            self._events[index] = driver.create_event()
        if (batch := driver.batch_copy()) is None:
            _log.info("%s: no batches, by the setting, the driver (CUDA 12.8 has them) or the GPU.", self._name)
        self._copying.calls = driver.copy_calls(batch)

    def copy(self, transfer: Transfer) -> None:
        """Raises CudaError; a context whose work could not be waited for is lost, and its work with it."""
        copying, plan = self._copying, transfer.plan
        columns = [np.ascontiguousarray(one, dtype=np.uint64) for one in (plan.destination, plan.source, plan.size)]
        copying.destination, copying.source, copying.size = (column.ctypes.data for column in columns)
        copying.pieces = plan.pieces
        native().gpu_copy(ctypes.byref(copying), ctypes.byref(transfer.stop))
        if copying.lost:
            self._driver.lose(self._driver.error(_CALLS[-1], copying.lost))
        if copying.refused:
            self.refused_batches += 1
            error = self._driver.error(_CALLS[1], copying.refused)
            _log.warning("%s: a batch failed; from now on pieces are copied one by one: %s", self._name, error.message)
        if copying.failed:
            raise self._driver.error(_CALLS[copying.failed], copying.status)

    def close(self) -> None:
        try:
            for event in filter(None, self._events):
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self._copying.stream)
        except CudaError as error:
            _log.warning("A stream could not be destroyed: %s", error.message)


class GpuEngine(CopyEngine):
    """Copies between the pool and one GPU's memory.

    ``open`` and ``close`` wait for calls of CUDA and belong to the GPU's control thread; the rest never does.

    Args:
        context: the device's primary context, retained by the caller until after ``close``.
        name: of the GPU, for logs.
        locality: where its copy threads should run.
        clock: what deadlines are measured on, in seconds.
        step_pieces: most pieces in a batch.
    """

    def __init__(
        self,
        driver: CudaDriver,
        context: int,
        pinned: PinnedChunks,
        *,
        name: str = "GPU",
        locality: Locality = NOWHERE,
        clock: Callable[[], float] = time.monotonic,
        step_pieces: int = STEP_PIECES,
    ) -> None:
        self._copiers = {
            direction: GpuCopier(driver, context, direction, pinned, name, locality, step_pieces)
            for direction in Direction
        }
        super().__init__(
            {
                direction: CopyQueue(
                    f"kvoffd-gpu-{direction.value}",
                    clock,
                    [copier],
                    CHECKSUM_THREADS if direction is Direction.STORE else 0,
                    lambda: run_near(locality),
                )
                for direction, copier in self._copiers.items()
            }
        )

    def open(self) -> None:
        """Wait until both threads have their streams. Raises CudaError when one has not; then ``close`` the engine."""
        for queue in self._queues.values():
            queue.wait_open()

    @property
    def hangs(self) -> bool:
        """Whether a transfer is far beyond its deadline and its thread has not come back from the driver."""
        return any(queue.hangs for queue in self._queues.values())

    def stats(self, direction: Direction) -> CopyStats:
        return super().stats(direction)._replace(refused_batches=self._copiers[direction].refused_batches)
