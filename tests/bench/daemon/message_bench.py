"""The benches lookup and jobs: how long messages take and how many there can be, beside an echo."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from tests.bench.daemon import (
    COPIED_BLOCK_BYTES,
    DECODE_RANKS,
    DECODE_SEQUENCES,
    ENGINE_KEYS,
    IN_FLIGHT_JOBS,
    LOADED_KEYS,
    LOOKUP_CLIENTS,
    LOOKUP_ENGINES,
    LOOKUP_KEY_COUNTS,
    MIB,
    PAGE_BYTES,
)
from tests.bench.daemon.echo import Echo, ReplySocket
from tests.bench.daemon.host_device import Memcpy
from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.daemon.results import Cost, CpuMeter, Progress, Report, Result, measure_latency
from tests.bench.daemon.step_bench import STEP_JOBS, bench_decode, bench_fences, bench_steps, jobs_echo, lookup_echo
from tests.bench.daemon.synthetic_engine import KEY_BYTES, SyntheticEngine, random_keys

LOOKUP_FLOOR = "a raw ZeroMQ echo of as many bytes each way, DEALER to ROUTER and back, in a process of its own"
JOBS_FLOOR = (
    "as many bytes over the same kinds of socket, DEALER to ROUTER and back by PUB to SUB, with no copy in between; "
    "of decoding, the jobs that its steps have"
)
ROUNDS = 5
SAMPLES = 200
STORE_KEYS = 1000
"""Keys of one store that fills the pool."""
CLIENT_KEYS = 64
"""Keys of a lookup of one of several clients."""
MEMCPY_BYTES = 64 * MIB
"""More than any cache holds."""
_BLOCK_IDS = np.zeros(1, dtype=np.int32)


def bench_lookup(
    directory: Path,
    progress: Progress,
    key_counts: Sequence[int] = LOOKUP_KEY_COUNTS,
    rounds: int = ROUNDS,
    samples: int = SAMPLES,
    engines: int = LOOKUP_ENGINES,
    clients: int = LOOKUP_CLIENTS,
    seconds: float = 2.0,
) -> Report:
    """Measure lookups of ``key_counts`` keys, all ready and all absent, alternating with the floor.

    Times are those of the public SchedulerClient: from ``lookup()`` to the waiting caller's wake-up. The daemon is idle
    when a lookup comes, but for a case in which ``engines`` processes store and load as fast as they can; the echo
    runs beside them too. Then ``clients`` processes look CLIENT_KEYS keys up for ``seconds``, as fast as they can.
    Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    stored = random_keys(max(key_counts))
    with (
        Echo() as echo,
        CpuMeter(directory) as meter,
        SyntheticEngine(directory, "lookup", 1, STORE_KEYS, PAGE_BYTES) as engine,
    ):
        progress(f"storing {max(key_counts):,} keys")
        _store_keys(engine, stored)
        for count in key_counts:
            for name, keys in (("all hits", stored[: count * KEY_BYTES]), ("all misses", random_keys(count))):
                progress(f"{count:,} keys, {name}")
                measured = _measure_lookups(engine, echo, keys, f"{count:,} keys, {name}", rounds, samples)
                cost = _lookup_cost(engine, meter, keys, samples)
                results += [replace(result, cpu=cost) for result in measured]
        progress(f"lookups while {engines} engines store and load")
        results += _lookups_under_load(directory, engine, echo, engines, rounds, samples)
        progress(f"lookups of {clients} clients at once")
        results.append(_lookups_of_clients(directory, echo, meter, clients, seconds))
    return Report("lookup", LOOKUP_FLOOR, results)


def _store_keys(engine: SyntheticEngine, keys: bytes) -> None:
    for begin in range(0, len(keys), STORE_KEYS * KEY_BYTES):
        part = keys[begin : begin + STORE_KEYS * KEY_BYTES]
        engine.store(part, np.arange(len(part) // KEY_BYTES, dtype=np.int32))


def _measure_lookups(
    engine: SyntheticEngine, echo: Echo, keys: bytes, case: str, rounds: int, samples: int
) -> list[Result]:
    request = lookup_echo(keys, engine.lookup(keys)[0].states)

    def look_up() -> float:
        future, seconds = engine.lookup(keys)
        engine.release_and_wait(future)
        return seconds

    return measure_latency(case, rounds, samples, look_up, partial(echo.round_trip, request))


def _lookup_cost(engine: SyntheticEngine, meter: CpuMeter, keys: bytes, samples: int) -> Cost:
    with meter.measure():
        for _ in range(samples):
            future, _ = engine.lookup(keys)
            if future.pinned:
                engine.scheduler.release(future.lease_id)
    return meter.cost(samples, "lookup")


def _lookups_under_load(
    directory: Path, engine: SyntheticEngine, echo: Echo, engines: int, rounds: int, samples: int
) -> list[Result]:
    keys = random_keys(LOADED_KEYS)
    with Memcpy(MEMCPY_BYTES) as memcpy:
        floor = median(memcpy.speed(MEMCPY_BYTES) for _ in range(rounds))
    with LoadGenerators("copies", directory, ENGINE_KEYS, engines) as load:
        # What the engines store may evict what was stored before, so the keys are stored while the engines rest.
        _store_keys(engine, keys)
        load.start()
        case = f"{LOADED_KEYS:,} keys while {engines} engines store and load"
        results = _measure_lookups(engine, echo, keys, case, rounds, samples)
        speed = sum(2 * ENGINE_KEYS * COPIED_BLOCK_BYTES * work.rate for work in load.stop())
    return [*results, Result(f"stores and loads of these {engines} engines", speed / 1e9, "GB/s", floor / 1e9)]


def _lookups_of_clients(directory: Path, echo: Echo, meter: CpuMeter, clients: int, seconds: float) -> Result:
    with meter.measure():
        value, count = _rate_of_clients("lookups", directory, clients, seconds)
    floor, _ = _rate_of_clients("echoes", echo.directory, clients, seconds)
    case = f"{CLIENT_KEYS} keys, {clients} clients at once"
    return Result(case, value, "lookups/s", floor, meter.cost(count, "lookup"))


def _rate_of_clients(role: str, directory: Path, clients: int, seconds: float) -> tuple[float, int]:
    """Return how often all clients together did their work, per second and in all."""
    with LoadGenerators(role, directory, CLIENT_KEYS, clients) as load:
        load.start()
        time.sleep(seconds)
        works = load.stop()
    return sum(work.rate for work in works), sum(work.count for work in works)


def bench_jobs(
    directory: Path,
    progress: Progress,
    rounds: int = ROUNDS,
    samples: int = SAMPLES,
    in_flight: int = 64,
    sequences: int = DECODE_SEQUENCES,
    ranks: int = DECODE_RANKS,
    engines: int = LOOKUP_ENGINES,
) -> Report:
    """Measure stores and loads of one key of PAGE_BYTES one by one and many at once, steps of them, fences, decoding.

    Times are those of the public WorkerClient: from ``store()`` to the waiting caller's wake-up with the result. A
    load's lookup comes before: it is not in its time, but in its cost. Raises BenchFailed, DaemonUnavailable.
    """
    results: list[Result] = []
    with (
        Echo() as echo,
        CpuMeter(directory) as meter,
        SyntheticEngine(directory, "jobs", 1, STEP_JOBS, PAGE_BYTES) as engine,
    ):
        key = random_keys(1)
        engine.store(key, _BLOCK_IDS)
        for name, job, request in (
            ("store", lambda: engine.store(random_keys(1), _BLOCK_IDS), jobs_echo(1)),
            ("load", lambda: engine.load(key, _BLOCK_IDS), jobs_echo(0, 1)),
        ):
            progress(f"{name}s of 1 key, one by one")
            with meter.measure():
                measured = measure_latency(
                    f"{name} of 1 key", rounds, samples, job, partial(echo.round_trip, request, ReplySocket.PUB)
                )
            cost = meter.cost(rounds * samples, "job")
            results += [replace(result, cpu=cost) for result in measured]
        progress(f"stores of 1 key, {in_flight} in flight")
        count = max(in_flight, IN_FLIGHT_JOBS * samples // SAMPLES)
        with meter.measure():
            rates = [
                (_store_rate(engine, count, in_flight), _echo_rate(echo, jobs_echo(1), count, in_flight))
                for _ in range(rounds)
            ]
        value, floor = (median(column) for column in zip(*rates, strict=True))
        cost = meter.cost(rounds * count, "job")
        results.append(Result(f"stores of 1 key, {in_flight} in flight", value, "jobs/s", floor, cost))
        results += bench_steps(engine, echo, meter, progress, rounds, samples)
        results += bench_fences(directory, engine, echo, progress, engines, rounds, samples)
        results += bench_decode(directory, engine, echo, meter, progress, sequences, ranks, rounds, samples)
    return Report("jobs", JOBS_FLOOR, results)


def _store_rate(engine: SyntheticEngine, count: int, in_flight: int) -> float:
    """Return the jobs per second when a new store is sent for each that ended; what was stored before is dropped."""
    engine.drop_blocks()
    keys = random_keys(count)
    sent = ended = 0
    begin = time.perf_counter()
    while ended < count:
        while sent < min(count, ended + in_flight):
            engine.begin_store(keys[sent * KEY_BYTES : (sent + 1) * KEY_BYTES], _BLOCK_IDS)
            sent += 1
        results = engine.wait_results(1)
        engine.check("store", results, len(results), "one key")
        ended += len(results)
    return count / (time.perf_counter() - begin)


def _echo_rate(echo: Echo, request: bytes, count: int, in_flight: int) -> float:
    """Return the messages per second when a new one is sent for each answer."""
    begin = time.perf_counter()
    for index in range(count):
        echo.send(request)
        if index >= in_flight:
            echo.receive(ReplySocket.PUB)
    for _ in range(min(in_flight, count)):
        echo.receive(ReplySocket.PUB)
    return count / (time.perf_counter() - begin)
