"""``kvoffd-cli bench fairness``: what one engine keeps of its rates beside another one that asks for all it can get."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench import COPIED_BLOCK_BYTES, FLOOD_CONNECTIONS, FLOOD_KEYS
from kvoffd_client.bench.load_generators import COPY_LAYERS, COPY_PAGE_BYTES, LoadGenerators
from kvoffd_client.bench.results import BenchFailed, Progress, Report, Result, median_percentile
from kvoffd_client.bench.synthetic_engine import KEY_BYTES, WAIT_S, SyntheticEngine, random_keys
from kvoffd_client.scheduler_client import Lookup
from kvoffd_proto.messages import GroupKeys

ROUNDS = 5
SECONDS = 1.0
LOOKUP_KEYS = 64
LOOKUPS_IN_FLIGHT = 8
LOADS_IN_FLIGHT = 4
LEASED_KEYS = 16
"""Keys of a lookup for loads, which load them one by one; the next lookup is under way meanwhile."""
FLOOR = (
    "of the engine's rates half of what it has alone, its share beside one other process; of its times those it has "
    "alone; of the flood what it has alone"
)

Times: TypeAlias = list[float]


@dataclass
class _Case:
    """What the engine does as often as it can, and what was measured of it, by round.

    Attributes:
        run: does it for so many seconds, and returns the seconds that each took.
        alone, beside: microseconds of each, without and with the flood.
        rates_alone, rates_beside: how often per second.
    """

    name: str
    unit: str
    run: Callable[[float], Times]
    alone: list[Times] = field(default_factory=list)
    beside: list[Times] = field(default_factory=list)
    rates_alone: Times = field(default_factory=list)
    rates_beside: Times = field(default_factory=list)

    def measure(self, seconds: float, times: list[Times], rates: Times) -> None:
        begin = time.perf_counter()
        took = self.run(seconds)
        rates.append(len(took) / (time.perf_counter() - begin))
        times.append([one * 1e6 for one in took])

    def results(self) -> Iterator[Result]:
        yield Result(f"{self.name} beside a flood", median(self.rates_beside), self.unit, median(self.rates_alone) / 2)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            floor = median_percentile(self.alone, share)
            yield Result(f"{self.name}, {name}", median_percentile(self.beside, share), "µs", floor)


class _Engine:
    """An engine that asks for what it can use, some at a time, and reads its answers."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self._engine = engine
        self._keys = random_keys(LOOKUP_KEYS)
        self._ids = np.arange(LOOKUP_KEYS, dtype=np.int32)
        engine.store(self._keys, self._ids)

    def look_up(self, seconds: float) -> Times:
        """Look all keys up, LOOKUPS_IN_FLIGHT at a time."""
        took: Times = []
        asked: deque[tuple[float, Lookup]] = deque()
        end = time.perf_counter() + seconds
        while asked or time.perf_counter() < end:
            while len(asked) < LOOKUPS_IN_FLIGHT and time.perf_counter() < end:
                asked.append((time.perf_counter(), self._ask(self._keys)))
            began, future = asked.popleft()
            self._wait(future)
            took.append(time.perf_counter() - began)
            self._engine.scheduler.release(future.lease_id)
        return took

    def load(self, seconds: float) -> Times:
        """Load key by key, LOADS_IN_FLIGHT at a time."""
        took: Times = []
        running: dict[int, tuple[float, int]] = {}
        free = list(range(LOADS_IN_FLIGHT))
        keys = self._keys[: LEASED_KEYS * KEY_BYTES]
        ahead, lease_id, place = self._ask(keys), 0, LEASED_KEYS
        used: deque[int] = deque()
        end = time.perf_counter() + seconds
        while running or time.perf_counter() < end:
            while free and time.perf_counter() < end:
                if place == LEASED_KEYS:
                    self._wait(ahead)
                    used.append(lease_id)
                    lease_id, place, ahead = ahead.lease_id, 0, self._ask(keys)
                key, block = keys[place * KEY_BYTES : (place + 1) * KEY_BYTES], free.pop()
                began = time.perf_counter()
                job = self._engine.begin_load(lease_id, key, self._ids[block : block + 1], keep_lease=True)
                running[job] = (began, block)
                place += 1
            for result in self._engine.wait_results(1):
                began, block = running.pop(result.job_id)
                self._engine.check("load", [result], 1)
                took.append(time.perf_counter() - began)
                free.append(block)
            # At most LOADS_IN_FLIGHT loads run, all of them under the last two leases.
            while len(used) > 1:
                self._release(used.popleft())
        self._wait(ahead)
        for one in (*used, lease_id, ahead.lease_id):
            self._release(one)
        return took

    def _release(self, lease_id: int) -> None:
        if lease_id:
            self._engine.scheduler.release(lease_id)

    def _ask(self, keys: bytes) -> Lookup:
        return self._engine.scheduler.lookup((GroupKeys(group=0, keys=keys),))

    def _wait(self, future: Lookup) -> None:
        if not future.wait(WAIT_S) or future.failed:
            raise BenchFailed("A lookup was not answered; see the log of the daemon.")


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
    with (
        AdminClient(directory) as admin,
        SyntheticEngine(directory, "fairness", COPY_LAYERS, LOOKUP_KEYS, COPY_PAGE_BYTES) as synthetic,
        LoadGenerators("floods", directory, connections, 1) as flood,
    ):
        engine = _Engine(synthetic)
        cases = (
            _Case(f"lookups of {LOOKUP_KEYS} keys", "lookups/s", engine.look_up),
            _Case(f"loads of {COPIED_BLOCK_BYTES >> 20} MiB", "loads/s", engine.load),
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
