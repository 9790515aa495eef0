"""Runs seed after seed: ``python -m tests.sim.soak``.

The first seed that fails is shrunk and printed with its trace; then it ends with status 1. Control-C ends it with 0.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from tests.sim.scenario import KINDS, Scenario
from tests.sim.world import Outcome, run

PRINT_EVERY_S = 10.0
LONG_EVERY = 50
"""Each seed of this number is a long run."""
MOST_TRIED = 200
"""Runs, to shrink one."""


def scenario_of(seed: int) -> Scenario:
    """Most are short, some are long; what a seed means never changes."""
    if seed % LONG_EVERY == LONG_EVERY - 1:
        return Scenario(seed, duration_s=20.0, max_requests=150, check_every=64)
    return Scenario(seed)


def soak(first: int, count: int | None, seconds: float | None) -> int:
    """Run seeds from ``first`` on, for so many or so long; the exit status."""
    started = printed = time.monotonic()
    seeds = steps = 0
    counts: Counter[str] = Counter()
    try:
        while (count is None or seeds < count) and (seconds is None or time.monotonic() - started < seconds):
            outcome = run(scenario_of(first + seeds))
            seeds += 1
            steps += outcome.steps
            counts.update(outcome.counts)
            if outcome.problem is not None:
                _print_progress(first, seeds, steps, started, counts)
                print_failure(outcome)
                return 1
            if time.monotonic() - printed > PRINT_EVERY_S:
                printed = time.monotonic()
                _print_progress(first, seeds, steps, started, counts)
    except KeyboardInterrupt:
        print()
    _print_progress(first, seeds, steps, started, counts)
    return 0


class Part(NamedTuple):
    """What some seeds brought: sentences of the first that failed, how often what happened, each one's digest."""

    failures: list[str]
    counts: Counter[str]
    digests: dict[int, str]


def run_part(seeds: Iterable[int]) -> Part:
    """Run seeds up to the first that fails, which is printed."""
    part = Part([], Counter(), {})
    for seed in seeds:
        outcome = run(Scenario(seed))
        part.counts.update(outcome.counts)
        part.digests[seed] = outcome.digest
        if outcome.problem is not None:
            print_failure(outcome)
            part.failures.append(f"seed {seed}: {outcome.problem}")
            break
    return part


def print_failure(outcome: Outcome) -> None:
    print(f"\nSeed {outcome.scenario.seed} fails: {outcome.problem}\nShrinking ...")
    small = shrink(outcome)
    print("\n".join(small.trace[-200:]))
    print(f"\n{small.problem}\nin {small.steps} steps of {small.scenario}")


def shrink(outcome: Outcome) -> Outcome:
    """A failing run with fewer kinds of faults, engines, requests and seconds; ``outcome`` itself if none is found.

    Audits come after every step in what is returned, so that the failure is seen where it happens.
    """
    best = outcome
    runs = 0
    improved = True
    while improved and runs < MOST_TRIED:
        improved = False
        for smaller in _smaller(best):
            runs += 1
            tried = run(smaller)
            if tried.problem is not None:
                best, improved = tried, True
                break
            if runs >= MOST_TRIED:
                break
    return best


def _smaller(outcome: Outcome) -> Iterable[Scenario]:
    scenario = outcome.scenario
    if scenario.check_every > 1:
        yield replace(scenario, check_every=1)
    if scenario.max_engines > 1:
        yield replace(scenario, max_engines=scenario.max_engines - 1)
    if scenario.duration_s > 0.1:
        yield replace(scenario, duration_s=scenario.duration_s * 0.6)
    if scenario.max_requests > 1:
        yield replace(scenario, max_requests=scenario.max_requests // 2)
    happened = [kind for kind in KINDS if outcome.counts[kind] and kind not in scenario.without]
    if len(happened) > 3:
        yield scenario.but(*happened[: len(happened) // 2])
        yield scenario.but(*happened[len(happened) // 2 :])
    for kind in happened:
        yield scenario.but(kind)


def _print_progress(first: int, seeds: int, steps: int, started: float, counts: Counter[str]) -> None:
    seconds = max(time.monotonic() - started, 1e-9)
    rates = f"{seeds / seconds:.0f} seeds/s, {steps / seconds:.0f} steps/s"
    print(f"\nseeds {first} to {first + seeds - 1}: {steps} steps, {rates}")
    print("  faults:", ", ".join(f"{kind} {counts[kind]}" for kind in KINDS if counts[kind]))
    print("  else:  ", ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()) if kind not in KINDS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=int(time.time()) * 1000, help="first seed (default: by the clock)")
    parser.add_argument("--count", type=int, help="end after so many seeds")
    parser.add_argument("--seconds", type=float, help="end after so long")
    given = parser.parse_args()
    return soak(given.first, given.count, given.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
