"""Runs seed after seed: ``python -m tests.sim.soak``.

The first seed that fails is shrunk and printed with its trace; then it ends with status 1. Control-C ends it with 0.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import count, takewhile
from typing import NamedTuple

from tests.sim.scenario import KINDS, Scenario
from tests.sim.world import Outcome, run

PRINT_EVERY = 500
LONG_EVERY = 50
"""Each seed of this number is a long run."""
MAX_TRIED = 200
"""Runs, to shrink one."""


def scenario_of(seed: int) -> Scenario:
    """Most are short, some are long; what a seed means never changes."""
    if seed % LONG_EVERY == LONG_EVERY - 1:
        return Scenario(seed, duration_s=20.0, max_requests=150, check_every=64)
    return Scenario(seed)


class Part(NamedTuple):
    """What some seeds brought: sentences of the first that failed, how often what happened, each one's digest."""

    failures: list[str]
    counts: Counter[str]
    digests: dict[int, str]


def run_part(scenarios: Iterable[Scenario]) -> Part:
    """Run scenarios up to the first that fails, which is shrunk and printed."""
    part = Part([], Counter(), {})
    for scenario in scenarios:
        outcome = run(scenario)
        part.counts.update(outcome.counts)
        part.digests[scenario.seed] = outcome.digest
        if outcome.problem is not None:
            print(f"\nSeed {scenario.seed} fails: {outcome.problem}\nShrinking ...")
            small = shrink(outcome)
            print("\n".join(small.trace[-200:]))
            print(f"\n{small.problem}\nin {small.steps} steps of {small.scenario}")
            part.failures.append(f"seed {scenario.seed}: {outcome.problem}")
            break
        if len(part.digests) % PRINT_EVERY == 0:
            print(f"up to seed {scenario.seed}:", dict(part.counts), flush=True)
    return part


def shrink(outcome: Outcome) -> Outcome:
    """A failing run with fewer kinds of faults, engines, requests and seconds; ``outcome`` itself if none is found.

    Audits come after every step in what is returned, so that the failure is seen where it happens.
    """
    best = outcome
    runs = 0
    improved = True
    while improved and runs < MAX_TRIED:
        improved = False
        for smaller in _smaller(best):
            runs += 1
            tried = run(smaller)
            if tried.problem is not None:
                best, improved = tried, True
                break
            if runs >= MAX_TRIED:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=int(time.time()) * 1000, help="first seed (default: by the clock)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long")
    given = parser.parse_args()
    deadline = time.monotonic() + given.seconds
    with suppress(KeyboardInterrupt):
        seeds = takewhile(lambda _: time.monotonic() < deadline, count(given.first))
        return int(bool(run_part(map(scenario_of, seeds)).failures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
