"""The engine for host memory: threads that copy between mapped memfds and take the checksums of what they store."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffd.system.native import native
from kvoffd.transfer.engine import Direction, DirectionLoad, Outcome, Transfer, TransferEngine
from kvoffd.transfer.host_copy import HostCopy, try_out
from kvoffd.transfer.lane import CopyProgress, Lane

# A deadline and an abandon are looked at once a step: 8 MiB are half a millisecond. After each the thread waits for the
# GIL, a tenth of a millisecond where the event loop is busy: steps of 2 MiB were 15 % slower.
STEP_BYTES = 8 << 20


class HostEngine(TransferEngine):
    """Copies by the CPU, with ``threads_per_direction`` threads each for stores and loads.

    Args:
        clock: what deadlines are measured on, in seconds.
        step: copies the next ``step_bytes`` of a plan and returns how many they were; tests pass their own.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        threads_per_direction: int = 1,
        step: Callable[[HostCopy, int], int] = HostCopy.step,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        try_out(native())
        copiers = [_HostCopier(step, step_bytes)] * threads_per_direction
        self._lanes = {direction: Lane(f"kvoffd-{direction.value}", clock, copiers) for direction in Direction}

    def submit(self, transfer: Transfer) -> None:
        self._lanes[transfer.direction].submit(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        return self._lanes[transfer.direction].cancel(transfer)

    def abandon(self, transfer: Transfer) -> None:
        transfer.abandoned = True

    def expire(self) -> None:
        for lane in self._lanes.values():
            lane.expire()

    def hangs_s(self, direction: Direction) -> float:
        return self._lanes[direction].hangs_s

    def load_of(self, direction: Direction) -> DirectionLoad:
        return self._lanes[direction].load()

    def close(self, timeout_s: float) -> bool:
        # Threads wait in real time whatever clock the deadlines are on.
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self._lanes.values())


class _HostCopier:
    """Copies step by step; has no state, so that threads may share it."""

    def __init__(self, step: Callable[[HostCopy, int], int], step_bytes: int) -> None:
        self._step = step
        self._step_bytes = step_bytes

    def open(self) -> None: ...

    def close(self) -> None: ...

    def copy(self, transfer: Transfer, turn: CopyProgress) -> Outcome:
        inspection = transfer.inspection if transfer.direction is Direction.STORE else None
        copy = HostCopy(transfer.plan, inspection.at_addresses() if inspection is not None else ())
        while turn.in_place < transfer.plan.nbytes:
            if (early := turn.ending()) is not None:
                return early
            turn.copied(self._step(copy, self._step_bytes))
        if inspection is None:
            return Outcome.DONE
        return turn.inspect(inspection, copy.sums())
