"""The most hits that any policy could have had: what is used farthest in the future goes, or is not stored at all.

Source: L. A. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", 1966; with bypass, since
a pool need not store what is offered. A block is never used before the ones that it continues: no chain gets a hole.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvoffd.simulate.trace import KEY_BYTES, Trace


def optimum_percent(trace: Trace, blocks: int) -> float:
    """The share of the accesses that could be hits, with a pool of so many blocks."""
    requests = [_keys(request) for request in trace.requests]
    next_use: dict[bytes, int] = {}
    later: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        keys = requests[number]
        later.append([next_use.get(key, 0) for key in keys])
        next_use.update(dict.fromkeys(keys, number))
    later.reverse()
    resident: dict[bytes, int] = {}
    farthest: list[tuple[int, int, bytes]] = []
    hits = 0
    for keys, uses in zip(requests, later, strict=True):
        for depth, (key, use) in enumerate(zip(keys, uses, strict=True)):
            hits += resident.pop(key, None) is not None
            if use:
                resident[key] = use
                heappush(farthest, (-use, -depth, key))
        while len(resident) > blocks:
            use, _, key = heappop(farthest)
            if resident.get(key) == -use:
                del resident[key]
    return 100 * hits / max(1, trace.accesses)


def _keys(request: bytes) -> list[bytes]:
    return [request[at : at + KEY_BYTES] for at in range(0, len(request), KEY_BYTES)]
