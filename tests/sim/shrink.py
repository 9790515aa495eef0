"""Makes a failing run as small as it gets while it still fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.sim.scenario import KINDS, Scenario
from tests.sim.world import Outcome, run

MAX_RUNS = 200


def shrink(outcome: Outcome) -> Outcome:
    """A failing run with fewer kinds of faults, engines, requests and seconds; ``outcome`` itself if none is found.

    Audits come after every step in what is returned, so that the failure is seen where it happens.
    """
    best = outcome
    runs = 0
    improved = True
    while improved and runs < MAX_RUNS:
        improved = False
        for smaller in _smaller(best):
            runs += 1
            tried = run(smaller)
            if tried.problem is not None:
                best, improved = tried, True
                break
            if runs >= MAX_RUNS:
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
