"""The engine for host memory: threads that copy between mapped memfds and take the checksums of what they store.

The copy loop is ``host_copy.c``, compiled when kvoffd is installed and called without the GIL. It is in C since
checksums cost nothing when they are taken of bytes that are in registers anyway. Measured on one core of an EPYC in
pieces of 16, 64 and 256 KiB, memcpy of one large buffer being 1: loops of numpy made 0.7, 0.95 and 1.1, or 0.65, 0.75
and 0.8 with checksums by a library right behind the copy; this makes 0.9, 1.15 and 1.2 with checksums.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvoffd.system.native import Native, NotCompiled, native
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.lane import CopyProgress, Lane, Steps
from kvoffd.transfer.lane_engine import LaneEngine
from kvoffd.transfer.pace import Pace, Slice
from kvoffd.transfer.plan import Direction, Outcome, Plan

# Between two looks at whether others wait or the transfer must end, which take no GIL: 50 to 100 microseconds.
STEP_BYTES = 1 << 20
# As much as that takes in small pieces.
STEP_PIECES = 512
# A slice, while others wait. After it the thread waits for the GIL, a tenth of a millisecond where the loop is busy.
SLICE_STEPS = 4

_STRIPE_BYTES = 64


class _Copying(ctypes.Structure):
    """``struct copying`` of host_copy.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("destination", "source", "size")),
        ("pieces", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("slot", "slot_bytes", "sum")),
        ("slots", ctypes.c_uint64),
        *((name, ctypes.c_uint64) for name in ("piece", "piece_done", "at_slot", "filled")),
        ("sums", ctypes.c_uint64 * 8),
    )


class HostCopy:
    """One plan, copied step by step. The addresses must be mapped: a wrong one kills the process.

    ``slots`` are address and length in bytes of the slots that a store fills, in the plan's order; their checksums are
    taken along the way. Raises NotCompiled when kvoffd was installed without the library.
    """

    def __init__(self, plan: Plan, slots: Sequence[tuple[int, int]] = (), library: Native | None = None) -> None:
        self.plan = plan
        self._copy = (library or native()).host_copy
        self._columns = [
            np.ascontiguousarray(column, dtype=np.uint64) for column in (plan.destination, plan.source, plan.size)
        ]
        pieces = [column.ctypes.data for column in self._columns]
        # A small copy takes less time than to make arrays of numpy.
        self._slots = array("Q", [address for address, _ in slots]), array("Q", [length for _, length in slots])
        self._sums = array("Q", bytes(8 * len(slots)))
        addresses = [column.buffer_info()[0] for column in (*self._slots, self._sums)]
        self._copying = _Copying(*pieces, plan.pieces, *addresses, len(slots))
        self._reference = ctypes.byref(self._copying)

    def run(self, pace: Pace, steps: int = 2**63) -> None:
        """Copy so many steps, or until all is copied or the pace says otherwise.

        A step has the pace's ``step_bytes``, up to twice that, or its ``step_pieces``.
        """
        self._copy(self._reference, ctypes.byref(pace), steps)

    def sums(self) -> list[int]:
        """Return the XXH3 checksum (64 bits) of each full slot; 0 where others must take it.

        That is of a slot of less than 241 bytes, of one that is not filled from its first byte on, or hashes to 0.
        """
        return self._sums.tolist()


def try_out(library: Native) -> None:
    """Copy a little in pieces of odd sizes: a loop that was compiled wrongly must not write engines' memory."""
    source = np.arange(4096, dtype=np.uint8) * np.uint8(7)
    pool = np.zeros(4096 + _STRIPE_BYTES, dtype=np.uint8)
    begin = -pool.ctypes.data % _STRIPE_BYTES
    cuts = np.array([0, 1, 65, 1089, 3000, 4096], dtype=np.uint64)
    size = np.diff(cuts)
    plan = Plan(cuts[:-1] + np.uint64(pool.ctypes.data + begin), cuts[:-1] + np.uint64(source.ctypes.data), size, 4096)
    copy = HostCopy(plan, [(pool.ctypes.data + begin, 4096)], library)
    pace = Pace(step_bytes=1000, step_pieces=STEP_PIECES)
    for _ in range(plan.nbytes // pace.step_bytes + plan.pieces):
        copy.run(pace)  # on a busy machine a thread may come back after any step
    copied = pool[begin : begin + 4096]
    if not np.array_equal(copied, source) or copy.sums() != [xxhash.xxh3_64_intdigest(source.data)]:
        raise NotCompiled("The daemon's copy loop was compiled wrongly; install kvoffd again with another C compiler.")


class HostEngine(LaneEngine):
    """Copies by the CPU, with ``threads_per_direction`` threads each for stores and loads.

    Args:
        clock: what deadlines are measured on, in seconds.
        run: copies a plan, as HostCopy.run; tests pass their own.
        step_bytes: of its steps; a slice has SLICE_STEPS of them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        threads_per_direction: int = 1,
        run: Callable[[HostCopy, Pace], None] = HostCopy.run,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        try_out(native())
        copiers = [_HostCopier(run, step_bytes)] * threads_per_direction
        one_slice = Slice(SLICE_STEPS * step_bytes, SLICE_STEPS * STEP_PIECES)
        super().__init__(
            {direction: Lane(f"kvoffd-{direction.value}", clock, copiers, one_slice) for direction in Direction}
        )

    def hangs_s(self, direction: Direction) -> float:
        return self._lanes[direction].hangs_s


@dataclass(frozen=True)
class _HostCopier:
    """It has no state, so that threads may share it."""

    _run: Callable[[HostCopy, Pace], None]
    _step_bytes: int

    def open(self) -> None: ...

    def close(self) -> None: ...

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Steps:
        checksums = transfer.checksums if transfer.direction is Direction.STORE else None
        copy = HostCopy(transfer.plan, checksums.slot_addresses() if checksums is not None else ())
        progress.pace.step_bytes, progress.pace.step_pieces = self._step_bytes, STEP_PIECES
        while progress.copied_bytes < transfer.plan.nbytes:
            if (early := progress.must_end()) is not None:
                return early
            self._run(copy, progress.pace)
            if progress.turn_is_over():
                yield
        if checksums is None:
            return Outcome.DONE
        return (yield from progress.take_checksums(checksums, copy.sums()))
