"""An engine that has one lane for each direction."""

from __future__ import annotations

import time

from kvoffd.transfer.engine import DirectionLoad, Transfer, TransferEngine
from kvoffd.transfer.lane import Lane
from kvoffd.transfer.plan import Direction


class LaneEngine(TransferEngine):
    def __init__(self, lanes: dict[Direction, Lane]) -> None:
        self._lanes = lanes

    def submit(self, transfer: Transfer) -> None:
        self._lanes[transfer.direction].submit(transfer)

    def cancel(self, transfer: Transfer) -> bool:
        return self._lanes[transfer.direction].cancel(transfer)

    def abandon(self, transfer: Transfer) -> None:
        self._lanes[transfer.direction].abandon(transfer)

    def expire(self) -> None:
        for lane in self._lanes.values():
            lane.expire()

    def load_of(self, direction: Direction) -> DirectionLoad:
        return self._lanes[direction].load()

    def close(self, timeout_s: float) -> bool:
        # Threads wait in real time whatever clock the deadlines are on.
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self._lanes.values())
