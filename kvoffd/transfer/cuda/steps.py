"""Cuts plans into what a copy engine is given at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.transfer.plan import Direction, Plan, UInt64Array

# Pieces are cut where their pool address is a multiple of this, so that none is longer. Boundaries between pinned
# chunks are multiples too: the driver refuses a copy that lies in two registrations.
STEP_BYTES = 8 << 20

# The copy engine starts when the call returns, so short batches overlap with their predecessors; and drivers have
# crashed on batches of tens of thousands (vllm-project/vllm#49276).
STEP_PIECES = 512

# From this size on one call a piece costs less than the copy itself takes, batches gain nothing.
PLAIN_BYTES = 256 << 10

# Looked at at a time, so that the thread never holds the GIL for long.
_PIECES_AT_A_TIME = 4096

IsPinned = Callable[[UInt64Array], npt.NDArray[np.bool_]]
"""Says for each pool address, [pieces], whether its chunk is pinned by now."""


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
            yield _step(destination[taken], source[taken], size[taken], nbytes, direction, is_pinned)
            first, done = last, done + nbytes


def _step(
    destination: UInt64Array,
    source: UInt64Array,
    size: UInt64Array,
    nbytes: int,
    direction: Direction,
    is_pinned: IsPinned,
) -> Step:
    plain = (size >= PLAIN_BYTES) | ~is_pinned(_pool_side(destination, source, direction))
    if not plain.any():
        return Step(destination, source, size, [], nbytes)
    alone = list(zip(destination[plain].tolist(), source[plain].tolist(), size[plain].tolist(), strict=True))
    batched = ~plain
    return Step(destination[batched], source[batched], size[batched], alone, nbytes)


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
