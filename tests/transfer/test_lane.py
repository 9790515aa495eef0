"""Whose copy is next."""

from __future__ import annotations

import threading
import time

from support.waiting import wait_until

from kvoffd.transfer.engine import Direction, Outcome, Transfer
from kvoffd.transfer.lane import CopyProgress, Lane
from kvoffd.transfer.plan import concatenate


class Gate:
    """A copier that copies nothing, once it may."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.copied: list[object] = []

    def open(self) -> None: ...

    def close(self) -> None: ...

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Outcome:
        assert self.may_go.wait(10)
        self.copied.append(transfer.owner)
        return Outcome.DONE


def test_owners_take_turns_however_much_each_has_queued() -> None:
    gate = Gate()
    lane = Lane("test", time.monotonic, [gate])
    ended: list[Transfer] = []

    def queue(owner: str) -> Transfer:
        transfer = Transfer(
            Direction.LOAD, concatenate([]), time.monotonic() + 60, lambda one, *_: ended.append(one), owner=owner
        )
        lane.submit(transfer)
        return transfer

    try:
        queue("flood")
        wait_until(lambda: lane.load().running == 1)
        for _ in range(20):
            queue("flood")
        dropped = queue("polite")
        for _ in range(2):
            queue("polite")
        queue("other")
        assert lane.load().queued == 24
        assert lane.cancel(dropped)
        assert not lane.cancel(dropped)
        assert lane.load().queued == 23
        gate.may_go.set()
        wait_until(lambda: len(ended) == 25)
        assert gate.copied[:7] == ["flood", "flood", "polite", "other", "flood", "polite", "flood"]
        assert lane.load().queued == 0
    finally:
        lane.stop()
        assert lane.join(time.monotonic() + 10)
