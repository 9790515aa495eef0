"""The most hits that any policy could have: it evicts, or does not store, the block used farthest in the future.

Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966; with bypass, because a
pool need not store what is offered. A block is never used before its predecessors, so chains have no holes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvoffd.simulate.trace import KEY_BYTES, RequestTrace


class Uses(NamedTuple):
    """All accesses of a trace, in order."""

    keys: list[int]
    """Keys, numbered from 0."""
    next_uses: list[int]
    """Index of the access by which the next request uses the key; 0 if there is none."""
    bounds: list[int]
    """Index of the first access of each request, and the end of the last."""


def uses_of(trace: RequestTrace) -> Uses:
    """Compute what the optimum needs to know of a trace, for any pool size."""
    lengths = np.array([len(request) // KEY_BYTES for request in trace.requests], dtype=np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    asked_by = np.repeat(np.arange(len(lengths)), lengths)
    _, keys = np.unique(np.frombuffer(b"".join(trace.requests), dtype=np.uint64), return_inverse=True)
    order = np.argsort(keys, kind="stable")  # all accesses, by key and then by time
    is_followed = np.diff(keys[order]) == 0
    next_use = np.zeros(len(keys), dtype=np.int64)
    next_use[order[:-1][is_followed]] = order[1:][is_followed]
    # A request that has a key several times uses it once: none of these accesses is the next use of another.
    for at in np.flatnonzero((next_use > 0) & (asked_by[next_use] == asked_by))[::-1]:
        next_use[at] = next_use[next_use[at]]
    return Uses(keys.tolist(), next_use.tolist(), bounds.tolist())


def optimum_percent(uses: Uses, blocks: int) -> float:
    """Return the largest possible share of hits, in percent, with a pool of this many blocks."""
    keys, next_uses, bounds = uses
    kept_until = [0] * len(keys)  # there are not more different ones
    """[keys] next use if the block is kept, else 0."""
    farthest: list[int] = []
    """Heap of the next uses of kept blocks, negative; some are of blocks that were used or evicted since."""
    hits = held = 0
    for begin, end in pairwise(bounds):
        for key in keys[begin:end]:
            if kept_until[key]:
                hits += 1
        for at in range(begin, end):
            key, use = keys[at], next_uses[at]
            if kept_until[key]:
                held -= 1
            kept_until[key] = use
            if use:
                held += 1
                heappush(farthest, -use)
        while held > blocks:
            use = -heappop(farthest)
            key = keys[use]
            if kept_until[key] == use:
                kept_until[key] = 0
                held -= 1
    return 100 * hits / max(1, len(keys))
