"""Whose copy is next, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.host_engine import HostCopy
from kvoffd.transfer.lane import CopyProgress, Lane, Steps
from kvoffd.transfer.pace import OTHERS_WAIT, STOP, Pace, Slice
from kvoffd.transfer.plan import Direction, Outcome, Plan, concatenate
from tests.kit.copy_buffers import address_of, random_bytes
from tests.kit.waiting import wait_until

SLICE = Slice(1000, 10)
FOREVER = float("inf")


class Gate:
    """A copier that copies nothing, in steps of 100 bytes, once it may. Its plans have no pieces, only a length."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.other_may_go = threading.Event()
        """For the owner "other"."""
        self.copied: list[object] = []
        """Owner of each step."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def copy(self, transfer: Transfer, progress: CopyProgress) -> Steps:
        assert (self.other_may_go if transfer.owner == "other" else self.may_go).wait(10)
        while progress.copied_bytes < transfer.plan.nbytes:
            if (early := progress.must_end()) is not None:
                return early
            self.copied.append(transfer.owner)
            progress.pace.copied += 100
            progress.pace.used += 100
            if progress.turn_is_over():
                yield
        return Outcome.DONE


class Rig:
    """A lane behind a gate, and how its transfers ended."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = Gate()
        self.lane = Lane("test", lambda: self.now, [self.gate], SLICE)
        self.ended: list[tuple[Transfer, Outcome]] = []

    def queue(self, owner: str, nbytes: int = 100, **named: float | SlotChecksums) -> Transfer:
        empty = concatenate([])
        transfer = Transfer(
            Direction.LOAD,
            Plan(empty.destination, empty.source, empty.size, nbytes),
            on_done=lambda one, outcome, _: self.ended.append((one, outcome)),
            owner=owner,
            **({"deadline": FOREVER} | named),  # type: ignore[arg-type]
        )
        self.lane.submit(transfer)
        return transfer

    def begin(self, owner: str, nbytes: int = 100, **named: float) -> Transfer:
        """Queue a transfer and wait until it has the thread."""
        transfer = self.queue(owner, nbytes, **named)
        wait_until(lambda: self.lane.load().running == 1)
        return transfer

    def run(self, transfers: int) -> None:
        """Let all go and wait until so many have ended."""
        self.gate.other_may_go.set()
        self.gate.may_go.set()
        wait_until(lambda: len(self.ended) == transfers)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gate.may_go.set()
    rig.gate.other_may_go.set()
    rig.lane.stop()
    assert rig.lane.join(time.monotonic() + 10)


def turns(owners: list[object]) -> list[tuple[object, int]]:
    """Steps without another owner's in between."""
    found: list[tuple[object, int]] = []
    for owner in owners:
        before = found.pop() if found and found[-1][0] == owner else (owner, 0)
        found.append((owner, before[1] + 1))
    return found


def test_owners_take_turns_however_much_each_has_queued(rig: Rig) -> None:
    rig.begin("flood")
    for _ in range(20):
        rig.queue("flood")
    dropped = rig.queue("polite")
    for _ in range(2):
        rig.queue("polite")
    rig.queue("other")
    assert rig.lane.load().queued == 24
    assert rig.lane.cancel(dropped)
    assert not rig.lane.cancel(dropped)
    assert rig.lane.load().queued == 23
    rig.run(25)
    assert rig.gate.copied[:7] == ["flood", "polite", "other", "flood", "polite", "flood", "flood"]
    assert rig.lane.load().queued == 0


def test_a_small_transfer_waits_for_one_slice_of_each_other_owner_at_most(rig: Rig) -> None:
    rig.begin("flood", 100_000)
    rig.queue("flood", 100_000)
    rig.queue("flood too", 100_000)
    rig.queue("polite", 300)
    rig.run(4)
    assert turns(rig.gate.copied)[:4] == [("flood", 10), ("flood too", 10), ("polite", 3), ("flood", 10)]
    assert all(outcome is Outcome.DONE for _, outcome in rig.ended)
    assert rig.lane.load().bytes == 300_300


def test_an_owner_saves_nothing_up(rig: Rig) -> None:
    rig.gate.may_go.set()
    rig.queue("early", 5_000)
    wait_until(lambda: len(rig.ended) == 1)
    rig.gate.may_go.clear()
    rig.begin("flood", 20_000)
    rig.queue("early", 10_000)
    rig.queue("late", 10_000)
    rig.run(4)
    after = rig.gate.copied[50:]
    assert turns(after)[:4] == [("flood", 10), ("early", 10), ("late", 10), ("flood", 10)]


def test_while_nobody_else_waits_a_copy_goes_on(rig: Rig) -> None:
    transfer = rig.begin("alone", 50_000)
    behind = rig.queue("alone", 100)
    rig.run(2)
    assert [one for one, _ in rig.ended] == [transfer, behind]
    assert rig.lane.load().bytes == 50_100


def test_small_pieces_use_a_slice_up_as_bytes_do() -> None:
    source, to = random_bytes(100), np.zeros(100, np.uint8)
    at = np.arange(100, dtype=np.uint64)
    plan = Plan(at + np.uint64(address_of(to)), at + np.uint64(address_of(source)), np.ones(100, np.uint64), 100)
    pace = Pace.of(SLICE)
    pace.step_bytes, pace.step_pieces, pace.look = 100, 1, OTHERS_WAIT
    HostCopy(plan).run(pace)
    assert (pace.copied, pace.used) == (SLICE.pieces, SLICE.nbytes)


@pytest.mark.parametrize("look", [0, OTHERS_WAIT, STOP])
def test_a_loop_goes_on_unless_it_is_told_otherwise(look: int) -> None:
    source, to = random_bytes(8000), np.zeros(8000, np.uint8)
    columns = [np.array([number], dtype=np.uint64) for number in (address_of(to), address_of(source), 8000)]
    pace = Pace.of(SLICE)
    pace.step_bytes, pace.step_pieces, pace.look = 400, 1, look
    HostCopy(Plan(columns[0], columns[1], columns[2], 8000)).run(pace)
    assert pace.copied == {0: 8000, OTHERS_WAIT: 1200, STOP: 400}[look]
    assert np.array_equal(to[: pace.copied], source[: pace.copied])
    assert not to[pace.copied :].any()


def test_what_a_load_reads_to_compare_checksums_uses_slices_up_too(rig: Rig) -> None:
    read: list[object] = []

    def digests(slots: object) -> list[int]:
        read.append("flood")
        return [1]

    # One slot a step: they are longer than what is read at a time.
    slots = [(0, 9 << 20)] * 20
    rig.begin("before")
    rig.queue("flood", 100, checksums=SlotChecksums(digests, slots, [1] * 20))
    rig.queue("polite", 100)
    rig.gate.copied = read
    rig.run(3)
    assert turns(read)[:3] == [("before", 1), ("flood", 1), ("polite", 1)]
    assert rig.lane.load().checksum_bytes == 20 * (9 << 20)


@pytest.mark.parametrize("how", ["late", "abandoned", "stopped"])
def test_a_copy_that_rests_can_end(rig: Rig, how: str) -> None:
    """At its deadline at once, although the lane's thread hangs: nothing of it is in flight."""
    resting = rig.begin("flood", 100_000, deadline=5.0)
    other = rig.queue("other")
    rig.gate.may_go.set()
    wait_until(lambda: rig.lane.load().running == 2)
    assert rig.lane.load().bytes == 1000
    assert not rig.lane.cancel(resting)
    if how == "late":
        rig.now = 5.0
        rig.lane.expire()
        assert rig.ended == [(resting, Outcome.DEADLINE)]
    elif how == "abandoned":
        resting.abandoned = True
    else:
        rig.lane.stop()
    assert rig.lane.load().running == (1 if how == "late" else 2)
    rig.run(2)
    ended = dict(rig.ended)
    assert ended[resting] is (Outcome.DEADLINE if how == "late" else Outcome.FAILED)
    assert ended[other] is (Outcome.FAILED if how == "stopped" else Outcome.DONE)
    assert rig.lane.load().running == 0
