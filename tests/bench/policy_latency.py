"""What a policy costs lookups: `python -m tests.bench.policy_latency [--policies lru,learned] [--pairs N] [--cpus 0,1]`

Two daemons live at once, one with each policy. In short rounds both are measured, one after the other, in another order
than in the round before, as `kvoffd-cli bench lookup` does: what else the machine does changes from round to round.
What the placement of a daemon does stays with it as long as it lives (two with one policy differed by 4 and 7 %), so
there are several such pairs, one after the other. Told is the mean ratio of the second policy's times to the first
one's over all pairs, with the interval in which it is with 95 % (bootstrap, by pairs), and the same of the CPU time
that the daemons took for a lookup.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.bench.cpu_time import process_cpu_s
from tests.bench.daemon import ENGINE_KEYS, PAGE_BYTES
from tests.bench.daemon.load_generators import LoadGenerators
from tests.bench.daemon.synthetic_engine import SyntheticEngine, random_keys
from tests.bench.intervals import ratio_text
from tests.kit.daemon import DaemonProcess

KEYS = 1000
PERCENTILES = (50.0, 99.0)
SETTLING = 10
"""Lookups before those of a round: what the store left behind is done by then."""
POOL = "512MiB"


@dataclass
class Measured:
    """Of one policy and case, by round."""

    microseconds: list[NDArray[np.float64]] = field(default_factory=list)
    cpu_microseconds: list[float] = field(default_factory=list)


class Side:
    """A daemon with one policy, and who asks it."""

    def __init__(self, policy: str, engines: int, cpu: int | None, stack: ExitStack) -> None:
        self.daemon = stack.enter_context(DaemonProcess(POOL, eviction_policy=policy))
        if cpu is not None:
            os.sched_setaffinity(self.daemon.pid, {cpu})  # its first thread, which is the loop's
        self._engine = stack.enter_context(SyntheticEngine(self.daemon.directory, "latency", 1, KEYS, PAGE_BYTES))
        self._load = stack.enter_context(LoadGenerators("copies", self.daemon.directory, ENGINE_KEYS, engines))
        self._ready, self._absent = random_keys(KEYS), random_keys(KEYS)
        beside = "an engine" if engines == 1 else f"{engines} engines"
        self.cases: dict[str, Callable[[int], NDArray[np.float64]]] = {
            f"{KEYS:,} keys, all hits": lambda samples: self._look_up(self._ready, samples),
            f"{KEYS:,} keys, all misses": lambda samples: self._look_up(self._absent, samples),
            f"{KEYS:,} keys, stores and loads of {beside}": self._beside,
        }

    def _store(self) -> None:
        self._engine.drop_blocks()
        self._engine.store(self._ready, np.arange(KEYS, dtype=np.int32))

    def _look_up(self, keys: bytes, samples: int) -> NDArray[np.float64]:
        found = []
        for _ in range(samples):
            future, seconds = self._engine.lookup(keys)
            self._engine.release_and_wait(future)
            found.append(1e6 * seconds)
        return np.array(found)

    def _beside(self, samples: int) -> NDArray[np.float64]:
        self._load.start()
        try:
            return self._look_up(self._ready, samples)
        finally:
            self._load.stop()

    def measure(self, case: str, samples: int, into: Measured) -> None:
        self._store()  # what engines stored may have taken their room
        self.cases[case](SETTLING)
        before = process_cpu_s(self.daemon.pid)
        into.microseconds.append(self.cases[case](samples))
        into.cpu_microseconds.append(1e6 * (process_cpu_s(self.daemon.pid) - before) / samples)


def ratio_of(one: Sequence[float], other: Sequence[float]) -> str:
    """The mean ratio over pairs of daemons, and where it is with 95 %."""
    return ratio_text(np.log(np.array(other) / np.array(one)), np.mean)


def compare(first: Sequence[Measured], second: Sequence[Measured]) -> list[str]:
    """Cells of the table: by percentile both times and their ratio, and the CPU times."""
    columns = [
        [[float(np.percentile(one.microseconds, percentile)) for one in side] for side in (first, second)]
        for percentile in PERCENTILES
    ]
    columns.append([[float(np.median(one.cpu_microseconds)) for one in side] for side in (first, second)])
    cells = []
    for one, other in columns:
        cells += [f"{np.median(one):,.0f}", f"{np.median(other):,.0f}", ratio_of(one, other)]
    return cells


def measure_pair(names: Sequence[str], given: argparse.Namespace, number: int) -> list[dict[str, Measured]]:
    """By policy, in the order of ``names``, and case: what a pair of new daemons took."""
    cpus = [int(cpu) for cpu in given.cpus.split(",")] if given.cpus else [None, None]
    own = os.sched_getaffinity(0)
    with ExitStack() as stack:
        order = names if number % 2 else names[::-1]
        sides = [Side(name, given.engines, cpus[0], stack) for name in order]
        measured = [{case: Measured() for case in side.cases} for side in sides]
        if cpus[1] is not None:
            os.sched_setaffinity(0, {cpus[1]})  # the loads' processes run already
        try:
            for case in sides[0].cases:
                for turn in range(given.rounds + 1):
                    for which in (0, 1) if turn % 2 else (1, 0):
                        into = measured[which][case] if turn else Measured()  # the first one warms up
                        sides[which].measure(case, given.samples, into)
        finally:
            os.sched_setaffinity(0, own)
    return measured if number % 2 else measured[::-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="lru,learned", help="two, of which the first is compared with")
    parser.add_argument("--pairs", type=int, default=8, help="of daemons, one after the other")
    parser.add_argument("--rounds", type=int, default=8, help="of each pair")
    parser.add_argument("--samples", type=int, default=60, help="lookups of each case in a round")
    parser.add_argument("--cpus", help="two: of the daemons' loops, and of who asks; else where the kernel puts them")
    parser.add_argument("--engines", type=int, default=1, help="that store and load beside")
    given = parser.parse_args()
    names = given.policies.split(",")
    pairs = [measure_pair(names, given, number) for number in range(given.pairs)]
    one, other = names
    print(f"{given.pairs} pairs of daemons, {given.rounds} rounds of {given.samples} lookups each, microseconds\n")
    titles = [f"{what} {who}" for what in ("p50", "p99", "CPU") for who in (one, other, "ratio")]
    print(f"| case | {' | '.join(titles)} |\n|{'---|' * (len(titles) + 1)}")
    for case in pairs[0][0]:
        cells = compare([pair[0][case] for pair in pairs], [pair[1][case] for pair in pairs])
        print(f"| {case} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
