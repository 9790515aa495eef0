"""The engine for one GPU: a load and a store thread drive its copy engines. No kernels.

More threads compute the checksums of stored slots. A submitted step cannot be cancelled, so a transfer ends only after
the wait for its last step.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import VOID_P, declare, native
from kvoffd.system.numa import NOWHERE, Locality, run_near, usable_cpus
from kvoffd.system.structures import GPU_COPYING
from kvoffd.transfer.engine import CopyEngine, CopyQueue, CopyWork, Transfer, WorkByDirection
from kvoffd.transfer.plan import Direction
from kvoffd_proto.cuda import Cuda, CudaError

declare(keep_gil=False, gpu_copy=(None, VOID_P, VOID_P))

_log = logging.getLogger(__name__)

# Steps in flight: enough to keep the GPU busy, few enough that a load behind them on a shared copy engine waits for at
# most 24 MiB, half a millisecond on PCIe 5.
STEPS_IN_FLIGHT = 3
# Longer pieces are split, and those across two pinned chunks: the driver refuses a copy across two registrations.
STEP_BYTES = 8 << 20
# Small: a copy starts when its call returns, so batches overlap with their predecessors. Drivers have crashed on
# batches of tens of thousands (vllm-project/vllm#49276).
STEP_PIECES = 512
# Smaller pieces are copied as rows, if there are at least MIN_ROWS. To the GPU: the driver makes any other copy of such
# pieces with the multiprocessors, which the engine's kernels need: its steps then take a third longer, and the load ten
# times as long (H200, driver 580). From the GPU: rows are faster than a batch if they have 128 KiB together.
ROWS_BYTES = {Direction.LOAD: 32 << 10, Direction.STORE: 16 << 10}
MIN_ROWS = {Direction.LOAD: 1, Direction.STORE: 32}
_UNBOUNDED_S = 1e9

# Names of the driver's calls, by their numbers in gpu_copy.c.
_CALLS = (
    *("", "cuMemcpy2DAsync_v2", "cuMemcpyBatchAsync", "cuMemcpyAsync"),
    *("cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"),
)


@dataclass(frozen=True)
class PinnedChunks:
    """Parts of the pool that are pinned.

    Attributes:
        flags: bool, [chunks]; may change at any time from False to True.
        chunk_bytes: a chunk is between two multiples of this.
        first: the number of the first chunk, its address divided by ``chunk_bytes``.
    """

    flags: npt.NDArray[np.bool_]
    chunk_bytes: int
    first: int


class _GpuCopying(ctypes.Structure):
    """``struct gpu_copying`` of gpu_copy.c."""

    __slots__ = ()
    _fields_ = GPU_COPYING


def checksum_threads() -> int:
    """Return half of the CPUs that the caller may use, 2 to 8.

    A copy engine on PCIe 5 writes 53 GB/s; a thread reads 8 to 10 GB/s from memory.
    """
    return min(8, max(2, len(usable_cpus()) // 2))


class GpuCopier:
    """One direction's stream. Created and closed in a thread with the GPU's context.

    After the driver has refused a batch or a row, that kind of copy is not used again.
    """

    def __init__(self, driver: Cuda, direction: Direction, pinned: PinnedChunks, name: str, work: CopyWork) -> None:
        self._driver, self._name, self._work = driver, name, work
        self._pinned = pinned  # keeps the flags, of which C has the address
        self._context = driver.current_context()
        self._batch = np.empty((3, STEP_PIECES), dtype=np.uint64)
        destinations, sources, sizes = (column.ctypes.data for column in self._batch)
        with ExitStack() as undo:
            stream = driver.create_stream(urgent=direction is Direction.LOAD)
            undo.callback(driver.destroy_stream, stream)
            self._events = (ctypes.c_void_p * STEPS_IN_FLIGHT)()
            for index in range(STEPS_IN_FLIGHT):
                self._events[index] = event = driver.create_event()
                undo.callback(driver.destroy_event, event)
            self._copying = _GpuCopying(
                **driver.copy_calls(),
                stream=stream,
                at_event=ctypes.addressof(self._events),
                in_flight=STEPS_IN_FLIGHT,
                at_pinned=pinned.flags.ctypes.data,
                chunk_bytes=pinned.chunk_bytes,
                first_chunk=pinned.first,
                from_pool=direction is Direction.LOAD,
                step_bytes=STEP_BYTES,
                step_pieces=STEP_PIECES,
                rows_bytes=ROWS_BYTES[direction],
                fewest_rows=MIN_ROWS[direction],
                most_rows=STEP_PIECES,
                at_to=destinations,
                at_from=sources,
                at_sizes=sizes,
            )
            self._undo = undo.pop_all()
        if not self._copying.at_batch:
            _log.info("%s: batched copies are off (driver older than CUDA 12.8, or no GPU support).", name)

    def copy(self, transfer: Transfer) -> None:
        """Copy. Raises CudaError; if the wait for submitted steps failed too, the context is lost."""
        copying, plan, driver = self._copying, transfer.plan(), self._driver
        driver.set_context(self._context)  # the current context is per thread
        copying.at_destination, copying.at_source, copying.at_size = (
            column.ctypes.data for column in (plan.destination, plan.source, plan.size)
        )
        copying.at_allocation, copying.allocations = plan.allocations.ctypes.data, len(plan.allocations)
        copying.pieces = len(plan.size)
        native().gpu_copy(ctypes.byref(copying), ctypes.byref(transfer.stop))
        if copying.lost:
            driver.lose(driver.error("cuStreamSynchronize", copying.lost))
        for at in range(copying.refusals):
            self._work.add(refused=1)
            error = driver.error(_CALLS[copying.refused[at]], copying.refused_status[at])
            _log.warning("%s: a combined copy was refused, its kind is not used again: %s", self._name, error.message)
        if copying.failed:
            raise driver.error(_CALLS[copying.failed], copying.status)

    def close(self) -> None:
        """Destroy the stream. No copy may be running."""
        try:
            self._undo.close()
        except CudaError as error:
            _log.warning("%s: a stream could not be destroyed: %s", self._name, error.message)


class GpuEngine(CopyEngine):
    """Copies between the pool and one GPU's memory.

    Created and destroyed in the GPU's control thread, with the GPU's context. Raises CudaError.

    Args:
        work: of each direction, to which it adds its own.
        name: of the GPU, for logs.
        locality: preferred CPUs of its threads.
        clock: for deadlines, in seconds.
    """

    def __init__(
        self,
        driver: Cuda,
        pinned: PinnedChunks,
        work: WorkByDirection,
        *,
        name: str = "GPU",
        locality: Locality = NOWHERE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        copiers: dict[Direction, GpuCopier] = {}
        queues: dict[Direction, CopyQueue] = {}
        with ExitStack() as undo:  # which stops both queues before it destroys a stream
            for one in Direction:
                copier = copiers[one] = GpuCopier(driver, one, pinned, name, work[one])
                undo.callback(copier.close)
            for one, copier in copiers.items():
                readers = checksum_threads() if one is Direction.STORE else 0
                queues[one] = CopyQueue(
                    f"kvoffd-gpu-{one.value}",
                    clock,
                    work[one],
                    [copier.copy],
                    readers,
                    on_start=partial(run_near, locality),
                )
                undo.callback(queues[one].stop)
            self._undo = undo.pop_all()
        super().__init__(queues)

    def destroy(self) -> None:
        """Close the engine, waiting for its copies without a limit, and destroy its streams."""
        self.close(_UNBOUNDED_S)
        self._undo.close()
