"""Steps copy what the plan does, in bites that a copy engine takes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.transfer.cuda.engine import PLAIN_BYTES, STEP_BYTES, STEPS_IN_FLIGHT, GpuCopier, PinnedChunks
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import Direction, Outcome, Plan
from kvoffd_proto.cuda import BATCH_FORMS, PROTOTYPES, Cuda, argument_types

GPU = 7 << 44
POOL = 1 << 40


@dataclass
class Step:
    """What went into the stream before an event."""

    batch: list[tuple[int, int, int]] = field(default_factory=list)
    plain: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def copies(self) -> list[tuple[int, int, int]]:
        return self.batch + self.plain


class Recorder:
    """Functions for the copy loop that note their calls and copy nothing."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.in_flight: list[int] = []
        self.most_in_flight = 0
        self._open = Step()
        self.stop_after = 1 << 30
        """Steps, after which ``stop`` is called."""
        self.stop: Callable[[], None] = lambda: None
        functions = {
            "copy": (PROTOTYPES["cuMemcpyAsync"], self._copy),
            "batch": (BATCH_FORMS[13000], self._batch),
            "record": (PROTOTYPES["cuEventRecord"], self._record),
            "wait": (PROTOTYPES["cuEventSynchronize"], self._wait),
            "sync": (PROTOTYPES["cuStreamSynchronize"], self._sync),
        }
        self._kept = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *argument_types(declared))(function)
            for name, (declared, function) in functions.items()
        }
        self.calls = {name: ctypes.cast(one, ctypes.c_void_p).value for name, one in self._kept.items()}

    def _copy(self, to: int, source: int, size: int, stream: int) -> int:
        self._open.plain.append((to, source, size))
        return 0

    def _batch(self, *arguments: Any) -> int:
        assert not self._open.batch, "a step is one batch"
        columns = [column[: arguments[3]] for column in arguments[:3]]
        self._open.batch = list(zip(*columns, strict=True))
        return 0

    def _record(self, event: int, stream: int) -> int:
        assert event not in self.in_flight
        self.in_flight.append(event)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.steps.append(self._open)
        self._open = Step()
        if len(self.steps) == self.stop_after:
            self.stop()
        return 0

    def _sync(self, stream: int) -> int:
        raise AssertionError("no call failed")

    def _wait(self, event: int) -> int:
        assert self.in_flight.pop(0) == event, "the oldest is waited for first"
        return 0


class Driver:
    """As much of a Cuda as a copier asks of one."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._event = 10

    def set_context(self, context: int) -> None: ...

    def create_stream(self, *, urgent: bool) -> int:
        return 1

    def create_event(self) -> int:
        self._event += 1
        return self._event

    def current_context(self) -> int:
        return 1

    def destroy_stream(self, stream: int) -> None: ...

    def destroy_event(self, event: int) -> None: ...

    def copy_calls(self) -> dict[str, int | None]:
        return self._recorder.calls


def steps_of(
    plan: Plan, direction: Direction, limit_pieces: int, not_pinned: Sequence[int], stop_after: int | None
) -> list[Step]:
    """Run a plan, until so many steps were launched, and return its steps. Nothing is in flight then."""
    recorder = Recorder()
    flags = np.ones(1 << 12, dtype=np.bool_)
    flags[list(not_pinned)] = False
    pinned = PinnedChunks(flags, STEP_BYTES, POOL // STEP_BYTES)
    copier = GpuCopier(cast(Cuda, Driver(recorder)), direction, pinned, step_pieces=limit_pieces)
    transfer = Transfer(direction, plan, float("inf"), lambda *_: None)
    if stop_after is not None:
        recorder.stop_after, recorder.stop = stop_after, lambda: transfer.must_end(Outcome.FAILED)
        if not stop_after:
            recorder.stop()
    copier.copy(transfer)
    assert not recorder.in_flight
    assert recorder.most_in_flight <= STEPS_IN_FLIGHT
    return recorder.steps


def plan_of(pool: list[int], size: list[int], direction: Direction) -> Plan:
    gaps = np.cumsum([0, *size])[: len(size)] + np.arange(len(size)) * 10
    columns = [np.array(pool, dtype=np.uint64) + np.uint64(POOL), (gaps + GPU).astype(np.uint64)]
    if direction is Direction.LOAD:
        columns.reverse()
    return Plan(*columns, np.array(size, dtype=np.uint64), sum(size))


def whole(copies: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sorted, and what continues its neighbour joined to it."""
    joined: list[tuple[int, int, int]] = []
    for to, source, size in sorted(copies):
        if joined and (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]) == (to, source):
            to, source, size = *joined[-1][:2], joined.pop()[2] + size
        joined.append((to, source, size))
    return joined


sizes = st.one_of(
    st.integers(1, 70000), st.sampled_from([PLAIN_BYTES - 1, PLAIN_BYTES]), st.integers(1, 3 * STEP_BYTES + 7)
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(sizes, st.integers(0, 100000)), max_size=60),
    st.sampled_from(Direction),
    st.sets(st.integers(0, 9)),
    st.none() | st.integers(0, 40),
)
def test_steps_copy_what_the_plan_does_within_their_bounds(
    pieces: list[tuple[int, int]], direction: Direction, not_pinned: set[int], stop_after: int | None
) -> None:
    size = [piece[0] for piece in pieces]
    pool = (np.cumsum([0, *size[:-1]]) + np.cumsum([piece[1] for piece in pieces] or [0])).tolist()[: len(size)]
    plan = plan_of(pool, size, direction)
    steps = steps_of(plan, direction, 7, sorted(not_pinned), stop_after)
    copies = [copy for step in steps for copy in step.copies]
    assert stop_after is None or len(steps) <= stop_after
    if len(steps) != stop_after:
        expected = list(zip(plan.destination.tolist(), plan.source.tolist(), size, strict=True))
        assert whole(copies) == whole(expected)
    side = 0 if direction is Direction.STORE else 1
    for step in steps:
        assert 0 < sum(size for _, _, size in step.copies) <= STEP_BYTES
        assert len(step.copies) <= 7
        for copy in step.copies:
            chunk = (copy[side] - POOL) // STEP_BYTES
            assert (copy in step.batch) == (copy[2] < PLAIN_BYTES and chunk not in not_pinned)
            assert chunk == (copy[side] + copy[2] - 1 - POOL) // STEP_BYTES, "it lies in two pinned chunks"
