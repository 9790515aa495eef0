"""How long it takes to ask for many keys."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from kvoffd_client.bench.echo import Echo, echo_request
from kvoffd_client.bench.engine import KEY_BYTES, BenchEngine, random_keys
from kvoffd_client.bench.load_generators import Crowd
from kvoffd_client.bench.memcpy import Memcpy
from kvoffd_client.bench.meter import CpuMeter
from kvoffd_client.bench.report import Cost, Progress, Report, Result, median_percentile
from kvoffd_proto.codec import encode
from kvoffd_proto.messages import GroupKeys, Lookup, LookupReply

FLOOR = "a raw ZeroMQ echo of as many bytes each way, DEALER to ROUTER and back, in a process of its own"
PAGE_BYTES = 4096
STORE_KEYS = 1000
"""Keys of one store that fills the pool."""
LOADED_KEYS = 1000
CROWD_KEYS = 64
ENGINE_KEYS = 8
"""Keys of 1 MiB in each job of an engine that makes load."""
MIB = 2**20
FLOOR_BYTES = 64 * MIB
"""More than any cache holds."""
_TOKEN = bytes(16)
_LARGE = 2**62
"""Ids as long as real ones, which are random or count from a session's number."""


def bench_lookup(
    directory: Path,
    progress: Progress,
    key_counts: Sequence[int] = (64, 1_000, 10_000),
    rounds: int = 5,
    samples: int = 200,
    engines: int = 8,
    clients: int = 4,
    seconds: float = 2.0,
) -> Report:
    """Measure lookups of ``key_counts`` keys, all ready and all absent, alternating with the floor.

    Times are those of the public SchedulerClient: from ``lookup()`` to the waiting caller's wake-up. The daemon is idle
    when a lookup comes, but for a case in which ``engines`` processes store and load as fast as they can; the echo
    runs beside them too. Then ``clients`` processes look 64 keys up for ``seconds``, as fast as they can.
    Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    stored = random_keys(max(key_counts))
    with (
        Echo() as echo,
        CpuMeter(directory) as meter,
        BenchEngine(directory, "lookup", 1, STORE_KEYS, PAGE_BYTES) as engine,
    ):
        progress(f"storing {max(key_counts):,} keys")
        _fill(engine, stored)
        for count in key_counts:
            hits, misses = stored[: count * KEY_BYTES], random_keys(count)
            for name, keys in (("all hits", hits), ("all misses", misses)):
                progress(f"{count:,} keys, {name}")
                measured = _measure(engine, echo, keys, f"{count:,} keys, {name}", rounds, samples)
                cost = _cost(engine, meter, keys, samples)
                results += [replace(result, cpu=cost) for result in measured]
        progress(f"lookups while {engines} engines store and load")
        results += _under_load(directory, engine, echo, engines, rounds, samples)
        progress(f"lookups of {clients} clients at once")
        results.append(_many(directory, echo, meter, clients, seconds))
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


def _cost(engine: BenchEngine, meter: CpuMeter, keys: bytes, samples: int) -> Cost:
    """CPU time of a lookup and its release."""
    meter.start()
    for _ in range(samples):
        ticket, _ = engine.lookup(keys)
        if ticket.pinned:
            engine.scheduler.release(ticket.lease_id)
    meter.stop()
    return meter.cost(samples, "lookup")


def _under_load(
    directory: Path, engine: BenchEngine, echo: Echo, engines: int, rounds: int, samples: int
) -> list[Result]:
    keys = random_keys(LOADED_KEYS)
    with Memcpy(FLOOR_BYTES) as memcpy:
        floor = median(memcpy.speed(FLOOR_BYTES) for _ in range(rounds))
    with Crowd("copies", directory, ENGINE_KEYS, engines) as crowd:
        # What they store may push out what was stored before, so the keys are stored while they rest.
        _fill(engine, keys)
        crowd.start()
        results = _measure(
            engine, echo, keys, f"{LOADED_KEYS:,} keys while {engines} engines store and load", rounds, samples
        )
        done = crowd.stop()
    speed = sum(2 * ENGINE_KEYS * MIB * member.count / member.seconds for member in done)
    return [*results, Result(f"stores and loads of these {engines} engines", speed / 1e9, "GB/s", floor / 1e9)]


def _many(directory: Path, echo: Echo, meter: CpuMeter, clients: int, seconds: float) -> Result:
    meter.start()
    value, count = _crowd_speed("lookups", directory, clients, seconds)
    meter.stop()
    floor, _ = _crowd_speed("echoes", echo.directory, clients, seconds)
    case = f"{CROWD_KEYS} keys, {clients} clients at once"
    return Result(case, value, "lookups/s", floor, meter.cost(count, "lookup"))


def _crowd_speed(role: str, directory: Path, clients: int, seconds: float) -> tuple[float, int]:
    with Crowd(role, directory, CROWD_KEYS, clients) as crowd:
        crowd.start()
        time.sleep(seconds)
        done = crowd.stop()
    return sum(member.count / member.seconds for member in done), sum(member.count for member in done)


def _echo_request(states: list[bytes], keys: bytes) -> bytes:
    """An echo request of as many bytes as the lookup's frame, for as many as its reply's."""
    asked = Lookup(
        request_id=_LARGE, token=_TOKEN, namespace=bytes(32), lease_id=_LARGE, groups=[GroupKeys(group=0, keys=keys)]
    )
    told = LookupReply(
        request_id=_LARGE, epoch=_LARGE, lease_id=_LARGE, states=states, pinned=len(states[0]), ttl_ms=30_000
    )
    return echo_request(len(encode(asked)), len(encode(told)))
