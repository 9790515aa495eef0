"""Fewer, larger calls for the host engine: evenly spaced pieces of a plan become one strided copy. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvoffd.transfer.plan import Plan, UInt64Array

Int64Array = npt.NDArray[np.int64]


# (destination, source, size, inner, inner destination step, inner source step, outer, outer destination step, outer
# source step): ``outer * inner`` pieces of ``size`` bytes, piece (i, j) being i outer and j inner steps from the first.
# A plain tuple: there is one per copy call, and a named one costs as much to make as a copy of 8 KiB.
Stroke = tuple[int, int, int, int, int, int, int, int, int]

# Planned at a time, so that the copy thread never holds the GIL for long.
_PIECES_AT_A_TIME = 4096

# Looking for series by numpy costs about 90 µs however few pieces there are: as much as so many copy calls do.
_FEW_PIECES = 16


def iterate_strokes(plan: Plan, limit_bytes: int) -> Iterator[list[Stroke]]:
    """Cuts a plan into strokes of at most ``limit_bytes`` each, which together copy just what the plan does.

    They come in lists for up to 4096 pieces each. Any two pieces of one size are evenly spaced, so a stroke has at
    least two pieces wherever sizes agree; where layers are evenly spaced it has all layers of two blocks or more. Of
    a plan of few pieces each may be a stroke.
    """
    if (few := _few_strokes(plan, limit_bytes)) is not None:
        yield few
        return
    for begin in range(0, plan.pieces, _PIECES_AT_A_TIME):
        part = slice(begin, begin + _PIECES_AT_A_TIME)
        yield _strokes(*_cut(plan.destination[part], plan.source[part], plan.size[part], limit_bytes), limit_bytes)


def _few_strokes(plan: Plan, limit_bytes: int) -> list[Stroke] | None:
    """The strokes of a small plan, such as one block's: its layers at once, or each by itself. None for all others."""
    count = plan.pieces
    if not 0 < count <= _FEW_PIECES * 4 or plan.nbytes > limit_bytes:
        return None
    to, source, size = plan.destination.tolist(), plan.source.tolist(), plan.size.tolist()
    if count > 1 and size.count(size[0]) == count:
        to_step, source_step = to[1] - to[0], source[1] - source[0]
        if all(a + to_step == b for a, b in pairwise(to)) and all(a + source_step == b for a, b in pairwise(source)):
            return [(to[0], source[0], size[0], count, to_step, source_step, 1, 0, 0)]
    if count > _FEW_PIECES:
        return None
    return [(*piece, 1, 0, 0, 1, 0, 0) for piece in zip(to, source, size, strict=True)]


def _strokes(destination: Int64Array, source: Int64Array, size: Int64Array, limit_bytes: int) -> list[Stroke]:
    first, inner = _series(destination, source, size[1:] == size[:-1], limit_bytes // size)
    inner_destination_step, inner_source_step = _steps(destination, source, first, inner)
    destination, source, size = destination[first], source[first], size[first]
    alike = np.ones(first.size - 1, dtype=np.bool_)
    for column in (size, inner, inner_destination_step, inner_source_step):
        alike &= column[1:] == column[:-1]
    second, outer = _series(destination, source, alike, limit_bytes // (size * inner))
    outer_destination_step, outer_source_step = _steps(destination, source, second, outer)
    columns = (
        *(c[second] for c in (destination, source, size, inner, inner_destination_step, inner_source_step)),
        *(outer, outer_destination_step, outer_source_step),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _cut(
    destinations: UInt64Array, sources: UInt64Array, sizes: UInt64Array, limit_bytes: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The arrays as int64 (so that steps may be negative), pieces above the limit cut."""
    destination, source, size = (a.astype(np.int64) for a in (destinations, sources, sizes))
    if int(size.max()) <= limit_bytes:
        return destination, source, size
    parts = -(-size // limit_bytes)
    piece = np.repeat(np.arange(size.size), parts)
    part = np.arange(piece.size) - np.repeat(np.cumsum(parts) - parts, parts)
    offset = part * limit_bytes
    return destination[piece] + offset, source[piece] + offset, np.minimum(size[piece] - offset, limit_bytes)


def _series(
    destination: Int64Array, source: Int64Array, alike: npt.NDArray[np.bool_], most: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Groups neighbouring items into arithmetic series; returns the first index and the length of each.

    ``alike[i]`` says that items i and i + 1 may share a series; ``most`` bounds the length per item. Series of three
    and more are found first, what they leave is paired up.
    """
    count = destination.size
    if count == 1:
        return np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    index = np.arange(count)
    destination_step, source_step = np.diff(destination), np.diff(source)
    # Runs of equal edges, an edge being the step from an item to the next.
    goes_on = alike[1:] & alike[:-1]
    goes_on &= (destination_step[1:] == destination_step[:-1]) & (source_step[1:] == source_step[:-1])
    run_first = np.concatenate((np.zeros(1, dtype=np.int64), np.flatnonzero(~goes_on) + 1))
    run_length = np.diff(run_first, append=count - 1)
    run_first, run_length = run_first[run_length >= 2], run_length[run_length >= 2]
    run_last = run_first + run_length  # last item, inclusive
    # Two runs in touch share an item; the earlier one keeps it.
    run_first[1:] += run_first[1:] == run_last[:-1]
    depth = np.zeros(count + 1, dtype=np.int64)
    depth[run_first] += 1
    np.add.at(depth, run_last + 1, -1)
    in_run = np.cumsum(depth[:count]) > 0
    begins = np.zeros(count + 1, dtype=np.bool_)
    begins[0] = True
    begins[run_first] = True
    begins[run_last + 1] = True
    begins[1:count] |= ~alike
    position = index - np.maximum.accumulate(np.where(begins[:count], index, 0))
    heads = np.flatnonzero(position % np.where(in_run, most, np.minimum(most, 2)) == 0)
    return heads, np.diff(heads, append=count)


def _steps(
    destination: Int64Array, source: Int64Array, first: Int64Array, length: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Step of each series; 0 where it has one item."""
    after = np.where(length > 1, first + 1, first)
    return destination[after] - destination[first], source[after] - source[first]
