"""The most hits that any policy could have had: what is used farthest in the future goes, or is not stored at all.

Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966; with bypass, since
a pool need not store what is offered. A block is never used before the ones that it continues: no chain gets a hole.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvoffd.simulate.trace import KEY_BYTES, Trace


class Uses(NamedTuple):
    """All accesses of a trace, in order."""

    keys: list[int]
    """By number from 0 up."""
    next_uses: list[int]
    """Number of the next request that has the key, counted from 1 up; 0 where there is none."""
    ranks: list[int]
    """Least for what is to go first: the next use, how deep the key is in its request, and the key, in one number."""
    bounds: list[int]
    """Where the requests begin, and the last one's end."""
    distinct: int
    per_use: int
    """Ranks of one next use."""


def uses_of(trace: Trace) -> Uses:
    """What the optimum needs to know of a trace, whatever the size of the pool."""
    lengths = np.array([len(request) // KEY_BYTES for request in trace.requests], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    number = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    depth = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    every, keys = np.unique(np.frombuffer(b"".join(trace.requests), dtype=np.uint64), return_inverse=True)
    order = np.argsort(keys, kind="stable")  # accesses of each key, in order
    last = np.append(np.diff(keys[order]) != 0, True)
    asked_by = number[order]
    follows = np.append(asked_by[1:], 0)
    follows[last] = 0
    for at in np.flatnonzero(follows == asked_by)[::-1]:  # a request that has a key twice
        follows[at] = follows[at + 1]
    next_use = np.empty_like(follows)
    next_use[order] = follows
    deepest = int(lengths.max(initial=1))
    assert (len(lengths) + 1) * deepest * len(every) < 2**62
    rank = -((next_use * deepest + depth) * len(every) + keys)
    return Uses(keys.tolist(), next_use.tolist(), rank.tolist(), bounds.tolist(), len(every), deepest * len(every))


def optimum_percent(uses: Uses, blocks: int) -> float:
    """The share of the accesses that could be hits, with a pool of so many blocks."""
    keys, next_uses, ranks, bounds, distinct, per_use = uses
    kept_until = [0] * distinct
    """By key: its next use where it is kept, else 0."""
    farthest: list[int] = []
    hits = held = 0
    for begin, end in pairwise(bounds):
        for at in range(begin, end):
            key, use = keys[at], next_uses[at]
            if kept_until[key]:
                hits += 1
                held -= 1
            kept_until[key] = use
            if use:
                held += 1
                heappush(farthest, ranks[at])
        while held > blocks:
            first = -heappop(farthest)
            key = first % distinct
            if kept_until[key] == first // per_use:
                kept_until[key] = 0
                held -= 1
    return 100 * hits / max(1, len(keys))
