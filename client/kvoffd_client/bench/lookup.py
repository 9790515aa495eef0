"""How long it takes to ask for many keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvoffd_client.bench.echo import Echo, echo_request
from kvoffd_client.bench.engine import KEY_BYTES, BenchEngine, random_keys
from kvoffd_client.bench.report import Progress, Report, Result, median_percentile
from kvoffd_proto.codec import encode
from kvoffd_proto.messages import GroupKeys, Lookup, LookupReply

FLOOR = "a raw ZeroMQ echo of as many bytes each way, DEALER to ROUTER and back, in a process of its own"
PAGE_BYTES = 4096
STORE_KEYS = 1000
"""Keys of one store that fills the pool."""
_TOKEN = bytes(16)
_LARGE = 2**62
"""Ids as long as real ones, which are random or count from a session's number."""


def bench_lookup(
    directory: Path,
    progress: Progress,
    key_counts: Sequence[int] = (64, 1_000, 10_000),
    rounds: int = 5,
    samples: int = 200,
) -> Report:
    """Measure lookups of ``key_counts`` keys, all ready and all absent, alternating with the floor.

    Times are those of the public SchedulerClient: from ``lookup()`` to the waiting caller's wake-up. The daemon is idle
    when a lookup comes. Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    stored = random_keys(max(key_counts))
    with Echo() as echo, BenchEngine(directory, "lookup", 1, STORE_KEYS, PAGE_BYTES) as engine:
        progress(f"storing {max(key_counts):,} keys")
        _fill(engine, stored)
        for count in key_counts:
            hits, misses = stored[: count * KEY_BYTES], random_keys(count)
            for name, keys in (("all hits", hits), ("all misses", misses)):
                progress(f"{count:,} keys, {name}")
                results += _measure(engine, echo, keys, f"{count:,} keys, {name}", rounds, samples)
    return Report("lookup", FLOOR, results)


def _fill(engine: BenchEngine, keys: bytes) -> None:
    for begin in range(0, len(keys), STORE_KEYS * KEY_BYTES):
        part = keys[begin : begin + STORE_KEYS * KEY_BYTES]
        engine.store(part, np.arange(len(part) // KEY_BYTES, dtype=np.int32))


def _measure(engine: BenchEngine, echo: Echo, keys: bytes, case: str, rounds: int, samples: int) -> list[Result]:
    request = _echo_request(engine.lookup(keys)[0].states, keys)
    taken: list[list[float]] = []
    floors: list[list[float]] = []
    for _ in range(rounds):
        taken.append([])
        floors.append([])
        for _ in range(samples):
            ticket, seconds = engine.lookup(keys)
            taken[-1].append(seconds * 1e6)
            engine.release(ticket)
            floors[-1].append(echo.round_trip(request) * 1e6)
    return [
        Result(f"{case}, {name}", median_percentile(taken, share), "µs", median_percentile(floors, share))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _echo_request(states: list[bytes], keys: bytes) -> bytes:
    """An echo request of as many bytes as the lookup's frame, for as many as its reply's."""
    asked = Lookup(
        request_id=_LARGE, token=_TOKEN, namespace=bytes(32), lease_id=_LARGE, groups=[GroupKeys(group=0, keys=keys)]
    )
    told = LookupReply(
        request_id=_LARGE, epoch=_LARGE, lease_id=_LARGE, states=states, pinned=len(states[0]), ttl_ms=30_000
    )
    return echo_request(len(encode(asked)), len(encode(told)))
