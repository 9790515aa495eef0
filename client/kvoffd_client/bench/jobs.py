"""How long the smallest jobs take, and how many there can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from kvoffd_client.bench.echo import Echo, Way, echo_request
from kvoffd_client.bench.engine import KEY_BYTES, BenchEngine, random_keys
from kvoffd_client.bench.meter import CpuMeter
from kvoffd_client.bench.report import BenchFailed, Progress, Report, Result, median_percentile
from kvoffd_proto.codec import encode
from kvoffd_proto.messages import Completions, GroupTransfer, JobResult, Load, Store

FLOOR = "as many bytes over the same kinds of socket, DEALER to ROUTER and back by PUB to SUB, with no copy in between"
PAGE_BYTES = 4096
_ZERO = np.zeros(1, dtype=np.int32)
_LARGE = 2**62
"""Ids as long as real ones."""


def bench_jobs(directory: Path, progress: Progress, rounds: int = 5, samples: int = 200, in_flight: int = 64) -> Report:
    """Measure stores and loads of one key of 4 KiB one by one, then stores with ``in_flight`` of them at once.

    Times are those of the public WorkerClient: from ``store()`` to the waiting caller's wake-up with the result. A
    load's lookup comes before: it is not in its time, but in its cost. Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    with Echo() as echo, CpuMeter(directory) as meter, BenchEngine(directory, "jobs", 1, 1, PAGE_BYTES) as engine:
        key = random_keys(1)
        engine.store(key, _ZERO)
        for name, job, request in (
            ("store", lambda: engine.store(random_keys(1), _ZERO), _store_request()),
            ("load", lambda: engine.load(key, _ZERO), _load_request()),
        ):
            progress(f"{name}s of 1 key, one by one")
            meter.start()
            measured = _one_by_one(job, echo, request, f"{name} of 1 key", rounds, samples)
            meter.stop()
            cost = meter.cost(rounds * samples, "job")
            results += [replace(result, cpu=cost) for result in measured]
        progress(f"stores of 1 key, {in_flight} in flight")
        count = max(in_flight, 5 * samples)
        meter.start()
        speeds = [(_many(engine, count, in_flight), _many_echoes(echo, count, in_flight)) for _ in range(rounds)]
        meter.stop()
        value, floor = (median(column) for column in zip(*speeds, strict=True))
        cost = meter.cost(rounds * count, "job")
        results.append(Result(f"stores of 1 key, {in_flight} in flight", value, "jobs/s", floor, cost))
    return Report("jobs", FLOOR, results)


def _one_by_one(
    job: Callable[[], float], echo: Echo, request: bytes, case: str, rounds: int, samples: int
) -> list[Result]:
    taken: list[list[float]] = []
    floors: list[list[float]] = []
    for _ in range(rounds):
        taken.append([])
        floors.append([])
        for _ in range(samples):
            taken[-1].append(job() * 1e6)
            floors[-1].append(echo.round_trip(request, Way.PUB) * 1e6)
    return [
        Result(f"{case}, {name}", median_percentile(taken, share), "µs", median_percentile(floors, share))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    ]


def _many(engine: BenchEngine, count: int, in_flight: int) -> float:
    """Jobs per second when a new store is sent for each that ended."""
    names = random_keys(count)
    sent = ended = 0
    begin = time.perf_counter()
    while ended < count:
        while sent < min(count, ended + in_flight):
            engine.begin_store(names[sent * KEY_BYTES : (sent + 1) * KEY_BYTES], _ZERO)
            sent += 1
        results = engine.results(1)
        if failed := [result.error for result in results if not result.ok]:
            reason = failed[0].sentence if failed[0] is not None else "The daemon gave no reason."
            raise BenchFailed(f"A store of one key failed: {reason}")
        ended += len(results)
    return count / (time.perf_counter() - begin)


def _many_echoes(echo: Echo, count: int, in_flight: int) -> float:
    """Messages per second when a new one is sent for each answer."""
    request = _store_request()
    begin = time.perf_counter()
    for index in range(count):
        echo.send(request)
        if index >= in_flight:
            echo.receive(Way.PUB)
    for _ in range(min(in_flight, count)):
        echo.receive(Way.PUB)
    return count / (time.perf_counter() - begin)


def _store_request() -> bytes:
    store = Store(request_id=_LARGE, token=bytes(16), registration_id=bytes(16), job_id=1000, groups=[_transfer()])
    return echo_request(len(encode(store)), _completion_bytes(), Way.PUB)


def _load_request() -> bytes:
    load = Load(
        request_id=_LARGE,
        token=bytes(16),
        registration_id=bytes(16),
        job_id=1000,
        lease_id=_LARGE,
        groups=[_transfer()],
    )
    return echo_request(len(encode(load)), _completion_bytes(), Way.PUB)


def _transfer() -> GroupTransfer:
    return GroupTransfer(group=0, keys=bytes(KEY_BYTES), block_ids=bytes(4))


def _completion_bytes() -> int:
    result = JobResult(job_id=1000, ok=True, bytes=PAGE_BYTES, seconds=1e-4)
    batch = Completions(epoch=_LARGE, session_id=1, sequence=1000, credit_bytes=2**30, results=[result])
    return len(encode(batch))
