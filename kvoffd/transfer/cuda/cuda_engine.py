"""The engine for one GPU: its copy engines, driven by a load and a store thread. No kernels.

Two more threads take the checksums of what the store thread's copies have left in the pool.

What a transfer may touch, and until when: a step that was given to the driver runs to its end, whatever happens; so a
transfer ends (``on_done``) only when the last of its steps has been waited for. On a GPU that hangs that may be never.
``expire`` then tells the owner (``on_overdue``), who may answer a store, since nothing reads its slots before they are
committed, but must not answer a load, since its bytes may still land in the engine's blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.system.numa import NOWHERE, Locality, run_near
from kvoffd.transfer.cuda.driver import BatchCopy, CudaDriver, CudaError
from kvoffd.transfer.engine import Direction, DirectionLoad, Outcome, Transfer
from kvoffd.transfer.lane import ChecksumThreads, CopyProgress, Lane, LaneEngine, Slice, Steps
from kvoffd.transfer.plan import Plan, UInt64Array

_log = logging.getLogger(__name__)

# Steps that the GPU has at a time: enough to keep it busy while the thread waits for the GIL, few enough that a load
# behind them on a shared copy engine waits for 24 MiB at most, which is half a millisecond on PCIe 5.
STEPS_IN_FLIGHT = 3
# A copy engine on PCIe 5 writes 55 GB/s; one thread reads 30 to 40 of what is in memory, not in a cache.
CHECKSUM_THREADS = 2
# The copy thread should not be away from its stream for longer than the steps in flight take.
INLINE_BYTES = 1 << 20

# Pieces are cut where their pool address is a multiple of this, so that none is longer. Boundaries between pinned
# chunks are multiples too: the driver refuses a copy that lies in two registrations.
STEP_BYTES = 8 << 20

# The copy engine starts when the call returns, so short batches overlap with their predecessors; and drivers have
# crashed on batches of tens of thousands (vllm-project/vllm#49276).
STEP_PIECES = 512

# From this size on one call a piece costs less than the copy itself takes, batches gain nothing.
PLAIN_BYTES = 256 << 10

# For how long pieces are copied one by one after a batch was refused; then a batch is tried again.
BATCH_PAUSE_S = 30.0

# Pieces cut at a time, so that the thread never holds the GIL for long.
_PIECES_AT_A_TIME = 4096

IsPinned = Callable[[UInt64Array], npt.NDArray[np.bool_]]
"""Tells for each pool address, [pieces], whether its chunk is pinned by now."""


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
        is_pinned: IsPinned,
        *,
        name: str = "GPU",
        locality: Locality = NOWHERE,
        clock: Callable[[], float] = time.monotonic,
        step_pieces: int = STEP_PIECES,
    ) -> None:
        self._calls = CopyCalls(driver, name, clock)

        def lane(direction: Direction, checksum_threads: ChecksumThreads | None) -> Lane:
            copier = _GpuCopier(driver, context, direction, is_pinned, self._calls, locality, step_pieces)
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

    @property
    def lost(self) -> bool:
        return self._calls.lost

    def load_of(self, direction: Direction) -> DirectionLoad:
        return super().load_of(direction)._replace(refused_batches=self._calls.refused_batches[direction])


class CopyCalls:
    """Makes one GPU's copies: in batches; for BATCH_PAUSE_S after one of them was refused, one by one.

    Attributes:
        lost: the context is lost; whatever is called in it fails.
        refused_batches: how many the driver refused that single copies could do.
    """

    def __init__(self, driver: CudaDriver, name: str, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._name = name
        self._clock = clock
        self.lost = False
        self.refused_batches = dict.fromkeys(Direction, 0)
        self._batch: BatchCopy | None = driver.batch_copy()
        self._resume_at = clock()
        self._refusing = False
        if self._batch is None:
            _log.info("%s: no batches, by the setting or the driver (CUDA 12.8 has them): single copies.", name)

    def launch(self, step: Step, direction: Direction, stream: int) -> None:
        """Put a step into the stream. Raises CudaError; a part of the step may be in the stream all the same."""
        count = step.size.size
        batch = self._batch
        if count and batch is not None and self._clock() >= self._resume_at:
            try:
                batch(step.destination.ctypes.data, step.source.ctypes.data, step.size.ctypes.data, count, stream)
            except CudaError as error:
                # Copying a piece twice does no harm, so it does not matter how far the batch came.
                self._launch_plain(step, stream)
                # Single copies do work, so it was the batch.
                self.refused_batches[direction] += 1
                self._resume_at = self._clock() + BATCH_PAUSE_S
                if not self._refusing:
                    sentence = "%s: a batch failed; pieces are copied one by one, a batch is tried each %.0f s: %s"
                    _log.warning(sentence, self._name, BATCH_PAUSE_S, error)
                self._refusing = True
            else:
                self._refusing = False
        elif count:
            self._launch_plain(step, stream)
        for destination, source, size in step.plain:
            self._driver.copy(destination, source, size, stream)

    def _launch_plain(self, step: Step, stream: int) -> None:
        columns = (step.destination.tolist(), step.source.tolist(), step.size.tolist())
        for destination, source, size in zip(*columns, strict=True):
            self._driver.copy(destination, source, size, stream)


@dataclass(eq=False)
class _GpuCopier:
    """One copy thread: its stream, and an event for each step that may be in it."""

    _driver: CudaDriver
    _context: int
    _direction: Direction
    _is_pinned: IsPinned
    _calls: CopyCalls
    _locality: Locality
    _step_pieces: int
    _stream: int = 0
    _events: deque[int] = field(default_factory=deque)
    """The next to be recorded first."""
    _in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    """(event, bytes) of the steps in the stream, oldest first."""

    def open(self) -> None:
        run_near(self._locality)
        self._driver.set_context(self._context)
        self._stream = self._driver.create_stream(urgent=self._direction is Direction.LOAD)
        self._events.extend(self._driver.create_event() for _ in range(STEPS_IN_FLIGHT))

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Steps:
        steps = iterate_steps(transfer.plan, self._direction, self._is_pinned, self._step_pieces)
        outcome = None
        while outcome is None:
            try:
                outcome = self._launch_slice(steps, progress)
                while self._in_flight:
                    self._wait_oldest(progress)
            except BaseException:
                self._drain(progress)
                raise
            if outcome is None:
                yield
        return outcome

    def close(self) -> None:
        try:
            for event in self._events:
                self._driver.destroy_event(event)
            self._driver.destroy_stream(self._stream)
        except CudaError as error:
            _log.warning("A stream could not be destroyed: %s", error.message)

    def _launch_slice(self, steps: Iterator[Step], progress: CopyProgress) -> Outcome | None:
        """Launch steps until there are no more, the transfer must end, or its turn is over: then None is returned."""
        for step in steps:
            if len(self._in_flight) == STEPS_IN_FLIGHT:
                self._wait_oldest(progress)
            if (early := progress.must_end()) is not None:
                return early
            event = self._events[0]
            self._calls.launch(step, self._direction, self._stream)
            self._driver.record_event(event, self._stream)
            self._events.rotate(-1)
            self._in_flight.append((event, step.nbytes))
            if progress.turn_is_over(step.nbytes, step.size.size + len(step.plain)):
                return None
        return Outcome.DONE

    def _wait_oldest(self, progress: CopyProgress) -> None:
        event, nbytes = self._in_flight[0]
        self._driver.wait_event(event)
        self._in_flight.popleft()
        progress.copied_bytes += nbytes

    def _drain(self, progress: CopyProgress) -> None:
        """After an error: wait for whatever is in the stream, a step that was launched in part included."""
        try:
            self._driver.record_event(self._events[0], self._stream)
            self._driver.wait_event(self._events[0])
        except CudaError as error:
            # The context's work is lost with it: the driver has taken it off the GPU.
            _log.error("The daemon's context on a GPU is lost, all its engines there must register again: %s", error)
            self._calls.lost = True
        else:
            progress.copied_bytes += sum(nbytes for _, nbytes in self._in_flight)
        self._in_flight.clear()


class Step(NamedTuple):
    """A few hundred pieces at most, of at most STEP_BYTES together."""

    destination: UInt64Array
    """For one batch call; contiguous arrays of the same length, maybe 0."""
    source: UInt64Array
    size: UInt64Array
    plain: list[tuple[int, int, int]]
    """(destination, source, size) for one call each: what is large, or not pinned."""
    nbytes: int


def iterate_steps(
    plan: Plan, direction: Direction, is_pinned: IsPinned, limit_pieces: int = STEP_PIECES
) -> Iterator[Step]:
    """Cuts a plan into steps of up to ``limit_pieces`` pieces, which together copy just what the plan does."""
    for begin in range(0, plan.pieces, _PIECES_AT_A_TIME):
        part = slice(begin, begin + _PIECES_AT_A_TIME)
        destination, source, size = _cut(plan.destination[part], plan.source[part], plan.size[part], direction)
        ends = np.cumsum(size)
        first, done = 0, 0
        while first < size.size:
            last = int(np.searchsorted(ends, done + STEP_BYTES, side="right"))
            last = min(max(last, first + 1), first + limit_pieces)
            taken = slice(first, last)
            nbytes = int(ends[last - 1]) - done
            to, origin, sizes = destination[taken], source[taken], size[taken]
            plain = (sizes >= PLAIN_BYTES) | ~is_pinned(_pool_side(to, origin, direction))
            alone: list[tuple[int, int, int]] = []
            if plain.any():
                alone = list(zip(to[plain].tolist(), origin[plain].tolist(), sizes[plain].tolist(), strict=True))
                to, origin, sizes = to[~plain], origin[~plain], sizes[~plain]
            yield Step(to, origin, sizes, alone, nbytes)
            first, done = last, done + nbytes


def _cut(
    destination: UInt64Array, source: UInt64Array, size: UInt64Array, direction: Direction
) -> tuple[UInt64Array, UInt64Array, UInt64Array]:
    """Cuts pieces that cross a multiple of STEP_BYTES in the pool. All pieces have at least one byte."""
    step = np.uint64(STEP_BYTES)
    pool = _pool_side(destination, source, direction)
    first = pool // step
    parts = ((pool + size - np.uint64(1)) // step - first + np.uint64(1)).astype(np.int64)
    if parts.max() == 1:
        return destination, source, size
    piece = np.repeat(np.arange(size.size), parts)
    number = (np.arange(piece.size) - np.repeat(np.cumsum(parts) - parts, parts)).astype(np.uint64)
    begin = np.maximum(pool[piece], (first[piece] + number) * step)
    end = np.minimum(pool[piece] + size[piece], (first[piece] + number + np.uint64(1)) * step)
    offset = begin - pool[piece]
    return destination[piece] + offset, source[piece] + offset, end - begin


def _pool_side(destination: UInt64Array, source: UInt64Array, direction: Direction) -> UInt64Array:
    return destination if direction is Direction.STORE else source
