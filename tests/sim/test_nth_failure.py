"""Whatever fails, whenever it does: the run goes on, every job ends once, and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.sim.failing_operations import OPERATIONS
from tests.sim.scenario import CHANCES, TIMED, Scenario
from tests.sim.world import run

SEED = 7
MOST = 5
"""Up to this number every failure is tried; of later ones fewer and fewer, some ten in all."""
MANNERS = {"partial_store", "partial_load", "early_reuse", "beyond_credit", "invalidate", "reset"}
"""What happens besides: no faults, but all that changes what a store or load finds."""


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nth_failure_leaves_everything_in_order(operation: str) -> None:
    scenario = Scenario(SEED, check_every=4, max_requests=30, swarm=False).but(*{*CHANCES, *TIMED} - MANNERS)
    nth = 1
    while True:
        with OPERATIONS[operation].failing(nth) as done:
            outcome = run(scenario)
        assert outcome.problem is None, f"{operation} fails at its {nth}. time: {outcome.problem}"
        if done[0] < nth:
            break
        nth += 1 if nth < MOST else nth // 2
    assert nth > 1, f"{operation} never happens in this run"
