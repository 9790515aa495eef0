"""The part of the bench jobs about steps: what a worker sends in one message while its engine decodes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from kvoffd_client.jobs import GroupTransfer, Job, submit_of
from kvoffd_proto.codec import encode
from kvoffd_proto.messages import (
    Completions,
    GroupKeys,
    JobResult,
    Lookup,
    LookupReply,
)
from kvoffd_proto.units import plural
from tests.bench.daemon import BLOCK_STEPS, ENGINE_KEYS, JOBS_STEP_S
from tests.bench.daemon.echo import Echo, ReplySocket, echo_request
from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.daemon.results import Cost, CpuMeter, Progress, Result, measure_latency
from tests.bench.daemon.synthetic_engine import KEY_BYTES, SyntheticEngine, random_keys

STEP_JOBS = 256
"""One-block stores of the large step."""
LOOKUP_KEYS = 1000
FENCED_JOBS = 16
"""One-block stores that a fence is for."""
LOOKUP_PAUSE_S = 0.003
_LARGE = 2**62
"""An id that is encoded in as many bytes as real ones, which are random or count from a session's number."""


def bench_steps(
    engine: SyntheticEngine, echo: Echo, meter: CpuMeter, progress: Progress, rounds: int, samples: int
) -> list[Result]:
    """Measure steps of one store and of STEP_JOBS, and what each further one costs. ``engine`` has as many blocks."""
    results: list[Result] = []
    medians: list[Result] = []
    costs: list[float] = []
    for jobs in (1, STEP_JOBS):
        progress(f"steps of {jobs} store{plural(jobs)} of 1 key")
        keys = iter([random_keys(jobs) for _ in range(rounds * samples)])
        with meter.measure():
            measured = measure_latency(
                f"step of {jobs} store{plural(jobs)} of 1 key",
                rounds,
                samples,
                lambda: engine.store_step(next(keys)),  # noqa: B023 - called within this turn
                partial(echo.round_trip, jobs_echo(jobs), ReplySocket.PUB),
            )
        cost = meter.cost(rounds * samples, "step")
        results += [Result(one.case, one.value, one.unit, one.floor, cost) for one in measured]
        medians.append(measured[0])
        costs.append(cost.seconds)
    (one, many), further = medians, STEP_JOBS - 1
    cost = Cost((costs[1] - costs[0]) / further, "job")
    # The floor's further bytes may take no time that can be measured.
    floor = max(many.floor - one.floor, 1e-3) / further
    return [
        *results,
        Result("each further store of a step, p50", (many.value - one.value) / further, "µs", floor, cost),
    ]


def bench_decode(
    directory: Path,
    engine: SyntheticEngine,
    echo: Echo,
    meter: CpuMeter,
    progress: Progress,
    sequences: int,
    ranks: int,
    rounds: int,
    samples: int,
) -> list[Result]:
    """Measure ``ranks`` workers of one engine that decodes ``sequences``, and lookups of LOOKUP_KEYS keys meanwhile.

    Each sequence fills a block every BLOCK_STEPS steps: a worker sends ``sequences / BLOCK_STEPS`` stores of one key
    every JOBS_STEP_S.
    """
    jobs = max(1, sequences // BLOCK_STEPS)
    case = f"{sequences} sequences on {ranks} rank{plural(ranks)}"
    progress(case)
    keys = random_keys(LOOKUP_KEYS)

    def look_up() -> float:
        time.sleep(LOOKUP_PAUSE_S)
        return engine.lookup(keys)[1]

    with LoadGenerators("steps", directory, jobs, ranks) as load:
        load.start()
        began = time.perf_counter()
        with meter.measure():
            lookups = measure_latency(
                f"lookup of {LOOKUP_KEYS:,} absent keys meanwhile",
                rounds,
                samples,
                look_up,
                partial(echo.round_trip, lookup_echo(keys, [bytes(LOOKUP_KEYS)])),
            )
            works = load.stop()
        seconds = time.perf_counter() - began
    rate = sum(work.rate for work in works) * jobs
    return [Result(case, rate, "jobs/s", jobs * ranks / JOBS_STEP_S, meter.cost(seconds, "s")), *lookups]


def bench_fences(
    directory: Path, engine: SyntheticEngine, echo: Echo, progress: Progress, engines: int, rounds: int, samples: int
) -> list[Result]:
    """Measure fences for FENCED_JOBS stores that were sent right before, as vLLM makes them where blocks are short.

    While nothing else runs, and while ``engines`` processes store and load as fast as they can. A fence drops stores
    whose copies do not begin in time; the share of those that were stored is told.
    """
    results = _fences("", engine, echo, progress, rounds, samples)
    if not engines:
        return results
    with LoadGenerators("copies", directory, ENGINE_KEYS, engines) as load:
        load.start()
        results += _fences(f" while {engines} engines store and load", engine, echo, progress, rounds, samples)
        load.stop()
    return results


def _fences(
    meanwhile: str, engine: SyntheticEngine, echo: Echo, progress: Progress, rounds: int, samples: int
) -> list[Result]:
    case = f"fence for {FENCED_JOBS} stores just sent{meanwhile}"
    progress(case)
    survived = 0

    def fence() -> float:
        nonlocal survived
        seconds, stored = engine.fence_step(random_keys(FENCED_JOBS))
        survived += stored
        return seconds

    measured = measure_latency(
        case, rounds, samples, fence, partial(echo.round_trip, jobs_echo(FENCED_JOBS), ReplySocket.PUB)
    )
    share = survived / (rounds * samples * FENCED_JOBS)
    return [*measured, Result(f"stores that survive such fences{meanwhile}", 100 * share, "%", 100.0)]


def jobs_echo(stores: int, loads: int = 0) -> bytes:
    """Return an echo request of as many bytes as the frame of jobs of one key, for as many as their completions'."""
    transfer = GroupTransfer(group=0, keys=bytes(KEY_BYTES), block_ids=bytes(4))
    store, load = Job(1000, [transfer]), Job(1000, [transfer], _LARGE)
    job = submit_of(_LARGE, bytes(16), KEY_BYTES, [store] * stores + [load] * loads)
    results = [JobResult(job_id=1000, ok=True, bytes=4096, seconds=1e-4)] * (stores + loads)
    completions = Completions(sequence=1000, credit_bytes=2**30, results=results)
    return echo_request(len(encode(job)), len(encode(completions)), ReplySocket.PUB)


def lookup_echo(keys: bytes, states: list[bytes]) -> bytes:
    """Return an echo request of as many bytes as the lookup's frame, for as many as its reply's."""
    request = Lookup(request_id=_LARGE, namespace=bytes(32), lease_id=_LARGE, groups=[GroupKeys(group=0, keys=keys)])
    reply = LookupReply(request_id=_LARGE, lease_id=_LARGE, states=states, pinned=len(states[0]), ttl_ms=30_000)
    return echo_request(len(encode(request)), len(encode(reply)))
