"""The engine for one GPU: its copy engines, driven by a load and a store thread. No kernels, but for ``Staging``.

Two more threads take the checksums of what the store thread's copies have left in the pool.

What a transfer may touch, and until when: a step that was given to the driver runs to its end, whatever happens; so a
transfer ends (``on_done``) only when the last of its steps has been waited for. On a GPU that hangs that may be never.
``expire`` then tells the owner (``on_overdue``), who may answer a store, since nothing reads its slots before they are
committed, but must not answer a load, since its bytes may still land in the engine's blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvoffd.system.numa import NOWHERE, Locality, run_near
from kvoffd.transfer.cuda.driver import CudaDriver, CudaError
from kvoffd.transfer.cuda.gpu_copy import STEP_BYTES, STEP_PIECES, STEPS_IN_FLIGHT, GpuCopy, GpuStream, PinnedChunks
from kvoffd.transfer.cuda.staging import Staging
from kvoffd.transfer.engine import DirectionLoad, Transfer
from kvoffd.transfer.lane import ChecksumThreads, CopyProgress, Lane, Steps
from kvoffd.transfer.lane_engine import LaneEngine
from kvoffd.transfer.pace import Slice
from kvoffd.transfer.plan import Direction, Outcome

_log = logging.getLogger(__name__)

# A copy engine on PCIe 5 writes 55 GB/s; one thread reads 30 to 40 of what is in memory, not in a cache.
CHECKSUM_THREADS = 2
# The copy thread should not be away from its stream for longer than the steps in flight take.
INLINE_BYTES = 1 << 20

# For how long pieces are copied one by one after a batch was refused; then a batch is tried again.
BATCH_PAUSE_S = 30.0


class CudaEngine(LaneEngine):
    """Copies between the pool and one GPU's memory.

    ``open`` and ``close`` make calls of CUDA and belong to the GPU's control thread; the rest never does.

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
        self._batches = Batches(driver, name, clock)

        def lane(direction: Direction, checksum_threads: ChecksumThreads | None) -> Lane:
            copier = _GpuCopier(driver, context, direction, pinned, self._batches, locality, step_pieces)
            one_slice = Slice(STEPS_IN_FLIGHT * STEP_BYTES, STEPS_IN_FLIGHT * step_pieces)
            return Lane(f"kvoffd-gpu-{direction.value}", clock, [copier], one_slice, checksum_threads)

        threads = ChecksumThreads(CHECKSUM_THREADS, INLINE_BYTES, lambda: run_near(locality))
        super().__init__({Direction.STORE: lane(Direction.STORE, threads), Direction.LOAD: lane(Direction.LOAD, None)})

    def open(self) -> None:
        """Wait until both threads have their streams. Raises CudaError when one has not; then ``close`` the engine."""
        for lane in self._lanes.values():
            lane.wait_open()

    @property
    def hangs(self) -> bool:
        """Whether a transfer is far beyond its deadline and its thread has not come back from the driver."""
        return any(lane.hangs for lane in self._lanes.values())

    def load_of(self, direction: Direction) -> DirectionLoad:
        return super().load_of(direction)._replace(refused_batches=self._batches.refused[direction])


class Batches:
    """Whether one GPU's pieces are copied in batches, and gathered: not for BATCH_PAUSE_S after one was refused.

    Attributes:
        refused: how many the driver refused that single copies could do.
    """

    def __init__(self, driver: CudaDriver, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self.refused = dict.fromkeys(Direction, 0)
        self.call = driver.batch_copy()
        self._resume_at = clock()
        self._refusing = False
        if self.call is None:
            _log.info(
                "%s: no batches, by the setting, the driver (CUDA 12.8 has them) or the GPU: single copies.", name
            )

    def allowed(self) -> bool:
        return self._clock() >= self._resume_at

    def note(self, copy: GpuCopy, direction: Direction) -> None:
        """Note how the batches of the copy's last run went."""
        if error := copy.refused:
            self.refused[direction] += 1
            self._resume_at = self._clock() + BATCH_PAUSE_S
            if not self._refusing:
                sentence = "%s: a batch failed; pieces are copied one by one, a batch is tried each %.0f s: %s"
                _log.warning(sentence, self._name, BATCH_PAUSE_S, error)
            self._refusing = True
        elif copy.taken:
            self._refusing = False


@dataclass(eq=False)
class _GpuCopier:
    """One copy thread: its stream, and an event for each step that may be in it."""

    _driver: CudaDriver
    _context: int
    _direction: Direction
    _pinned: PinnedChunks
    _batches: Batches
    _locality: Locality
    _step_pieces: int
    _stream: GpuStream = field(init=False)
    _staging: Staging | None = None

    def open(self) -> None:
        run_near(self._locality)
        self._driver.set_context(self._context)
        stream = self._driver.create_stream(urgent=self._direction is Direction.LOAD)
        events = [self._driver.create_event() for _ in range(STEPS_IN_FLIGHT)]
        if self._driver.gathers and self._driver.has_host_addresses():
            try:
                self._staging = Staging(self._driver, STEPS_IN_FLIGHT, STEP_BYTES, self._step_pieces)
            except CudaError as error:
                _log.warning("Small pieces are not gathered, since the GPU does not allow it: %s", error.message)
        self._stream = GpuStream(
            self._driver,
            self._driver.copy_calls(self._batches.call),
            stream,
            events,
            self._direction,
            self._pinned,
            self._step_pieces,
            self._staging,
        )

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Steps:
        copy = GpuCopy(self._stream, transfer.plan, progress.pace)
        outcome = None
        while outcome is None:
            try:
                outcome = self._launch_slice(copy, progress)
                copy.wait()
            except BaseException:
                self._drain(copy)
                raise
            if outcome is None:
                yield
        return outcome

    def close(self) -> None:
        try:
            if self._staging is not None:
                self._staging.close()
            for event in self._stream.events:
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self._stream.stream)
        except CudaError as error:
            _log.warning("A stream could not be destroyed: %s", error.message)

    def _launch_slice(self, copy: GpuCopy, progress: CopyProgress) -> Outcome | None:
        """Launch steps until there are no more, the transfer must end, or its turn is over: then None is returned."""
        while not copy.launched:
            if (early := progress.must_end()) is not None:
                return early
            copy.run(batch=self._batches.allowed())
            self._batches.note(copy, self._direction)
            if not copy.launched and progress.turn_is_over():
                return None
        return Outcome.DONE

    def _drain(self, copy: GpuCopy) -> None:
        """After an error: wait for whatever is in the stream, a step that was launched in part included."""
        try:
            copy.drain()
        except CudaError as error:
            try:
                self._driver.wait_stream(self._stream.stream)
            except CudaError:
                pass  # the context is lost, and its work with it: the driver has taken it off the GPU
            self._driver.lose(error)
