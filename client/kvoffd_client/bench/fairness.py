"""``kvoffd-cli bench fairness``: what one engine keeps of its rates beside another one that asks for all it can get."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench import COPIED_BLOCK_BYTES, FLOOD_CONNECTIONS, FLOOD_KEYS
from kvoffd_client.bench.load_generators import COPY_LAYERS, COPY_PAGE_BYTES, LoadGenerators
from kvoffd_client.bench.results import Progress, Report, Result, median_percentile
from kvoffd_client.bench.synthetic_engine import SyntheticEngine, random_keys

ROUNDS = 5
SECONDS = 1.0
LOOKUP_KEYS = 64
LOAD_KEYS = 1
FLOOR = (
    "of the engine's rates half of what it has alone, its share beside one other process; of its times those it has "
    "alone; of the flood what it has alone"
)


@dataclass
class _Case:
    """What the engine does again and again, and what was measured of it, by round.

    Attributes:
        run: does it once, and returns the seconds of what is measured.
        alone, beside: seconds of each time, without and with the flood.
        rates_alone, rates_beside: times per second.
    """

    name: str
    unit: str
    run: Callable[[], float]
    alone: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    rates_alone: list[float] = field(default_factory=list)
    rates_beside: list[float] = field(default_factory=list)

    def measure(self, seconds: float, times: list[list[float]], rates: list[float]) -> None:
        took: list[float] = []
        begin = time.perf_counter()
        while (passed := time.perf_counter() - begin) < seconds or not took:
            took.append(self.run() * 1e6)
        times.append(took)
        rates.append(len(took) / passed)

    def results(self) -> Iterator[Result]:
        yield Result(f"{self.name} beside a flood", median(self.rates_beside), self.unit, median(self.rates_alone) / 2)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            floor = median_percentile(self.alone, share)
            yield Result(f"{self.name}, {name}", median_percentile(self.beside, share), "µs", floor)


def bench_fairness(
    directory: Path,
    progress: Progress,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    connections: int = FLOOD_CONNECTIONS,
) -> Report:
    """Measure an engine's lookups and loads, one after the other, alone and beside a flood, alternating.

    The flood is one process: jobs that load FLOOD_KEYS blocks each, some at a time, and lookups over ``connections``
    connections, all as fast as they are answered. Raises BenchFailed, DaemonUnavailable.
    """
    ids = np.arange(LOOKUP_KEYS, dtype=np.int32)
    with (
        AdminClient(directory) as admin,
        SyntheticEngine(directory, "fairness", COPY_LAYERS, LOOKUP_KEYS, COPY_PAGE_BYTES) as engine,
        LoadGenerators("floods", directory, connections, 1) as flood,
    ):
        keys = random_keys(LOOKUP_KEYS)
        engine.store(keys, ids)

        def look_up() -> float:
            future, took = engine.lookup(keys)
            engine.scheduler.release(future.lease_id)
            return took

        def load() -> float:
            return engine.load(keys[: LOAD_KEYS * len(keys) // LOOKUP_KEYS], ids[:LOAD_KEYS])

        cases = (
            _Case(f"lookups of {LOOKUP_KEYS} keys", "lookups/s", look_up),
            _Case(f"loads of {LOAD_KEYS * COPIED_BLOCK_BYTES >> 20} MiB", "loads/s", load),
        )
        got_alone, got_beside = _Flood(admin), _Flood(admin)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for case in cases:
                case.measure(seconds, case.alone, case.rates_alone)
            flood.start()
            with got_alone.measured():
                time.sleep(seconds)
            with got_beside.measured():
                for case in cases:
                    case.measure(seconds, case.beside, case.rates_beside)
            flood.stop()
        measured = [result for case in cases for result in case.results()]
        return Report("fairness", FLOOR, [*measured, *got_beside.results(got_alone)])


@dataclass
class _Flood:
    """What the daemon did, nearly all of it for the flood."""

    admin: AdminClient
    requests: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """GB/s."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        before, begin = self.admin.stats(), time.perf_counter()
        yield
        after, passed = self.admin.stats(), time.perf_counter() - begin
        self.requests.append((after.requests - before.requests) / passed)
        self.loads.append((after.load.bytes - before.load.bytes) / passed / 1e9)

    def results(self, alone: _Flood) -> Iterator[Result]:
        yield Result("all requests meanwhile", median(self.requests), "requests/s", median(alone.requests))
        loaded = f"all loads meanwhile, {FLOOD_KEYS * COPIED_BLOCK_BYTES >> 20} MiB each but for those above"
        yield Result(loaded, median(self.loads), "GB/s", median(alone.loads))
