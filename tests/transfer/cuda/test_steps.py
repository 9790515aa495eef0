"""Steps copy what the plan does, in bites that a copy engine takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.transfer.cuda.cuda_engine import PLAIN_BYTES, STEP_BYTES, STEP_PIECES, Step, iterate_steps
from kvoffd.transfer.plan import Direction, Plan

GPU = 7 << 44
KIB = 1 << 10


def pinned(addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    return np.ones(addresses.size, dtype=np.bool_)


def plan_of(pool: list[int], size: list[int], direction: Direction) -> Plan:
    gaps = np.cumsum([0, *size[:-1]]) + np.arange(len(size)) * 10
    columns = [np.array(pool, dtype=np.uint64), (gaps + GPU).astype(np.uint64)]
    if direction is Direction.LOAD:
        columns.reverse()
    return Plan(*columns, np.array(size, dtype=np.uint64), sum(size))


def copies_of(steps: list[Step]) -> list[tuple[int, int, int]]:
    copies: list[tuple[int, int, int]] = []
    for step in steps:
        columns = (step.destination.tolist(), step.source.tolist(), step.size.tolist())
        copies += list(zip(*columns, strict=True)) + step.plain
    return copies


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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(sizes, st.integers(0, 100000)), min_size=1, max_size=60), st.sampled_from(Direction))
def test_steps_copy_what_the_plan_does_and_stay_in_their_bounds(
    pieces: list[tuple[int, int]], direction: Direction
) -> None:
    size = [piece[0] for piece in pieces]
    pool = (np.cumsum([0, *size[:-1]]) + np.cumsum([piece[1] for piece in pieces]) + (1 << 40)).tolist()
    plan = plan_of(pool, size, direction)
    steps = list(iterate_steps(plan, direction, pinned, limit_pieces=7))
    copies = copies_of(steps)
    expected = list(zip(plan.destination.tolist(), plan.source.tolist(), size, strict=True))
    assert whole(copies) == whole(expected)
    for step in steps:
        assert step.nbytes == int(step.size.sum()) + sum(piece[2] for piece in step.plain)
        assert step.nbytes <= STEP_BYTES
        assert step.size.size + len(step.plain) <= 7
        assert all(column.flags.c_contiguous for column in step[:3])
    side = 0 if direction is Direction.STORE else 1
    for copy in copies:
        assert copy[side] // STEP_BYTES == (copy[side] + copy[2] - 1) // STEP_BYTES, "it lies in two pinned chunks"


def test_a_large_plan_is_cut_into_full_batches() -> None:
    count = 10000
    plan = plan_of([i * 5000 for i in range(count)], [4096] * count, Direction.STORE)
    steps = list(iterate_steps(plan, Direction.STORE, pinned))
    assert max(step.size.size for step in steps) == STEP_PIECES
    assert len(steps) <= count // STEP_PIECES + 3


def test_large_pieces_are_copied_one_by_one_and_small_ones_in_a_batch() -> None:
    plan = plan_of([0, 1 << 20, 2 << 20], [64 * KIB, 512 * KIB, 64 * KIB], Direction.LOAD)
    (step,) = iterate_steps(plan, Direction.LOAD, pinned)
    assert step.size.tolist() == [64 * KIB, 64 * KIB]
    assert [piece[2] for piece in step.plain] == [512 * KIB]


@pytest.mark.parametrize("direction", list(Direction))
def test_what_is_not_pinned_is_in_no_batch(direction: Direction) -> None:
    plan = plan_of([0, STEP_BYTES, 2 * STEP_BYTES], [4096] * 3, direction)
    (step,) = iterate_steps(plan, direction, lambda pool: pool != np.uint64(STEP_BYTES))
    side = step.destination if direction is Direction.STORE else step.source
    assert side.tolist() == [0, 2 * STEP_BYTES]
    assert len(step.plain) == 1


def test_an_empty_plan_has_no_steps() -> None:
    empty = np.empty(0, dtype=np.uint64)
    assert list(iterate_steps(Plan(empty, empty, empty, 0), Direction.LOAD, pinned)) == []
