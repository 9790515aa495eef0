"""Bugs planted into the real code are found, so bugs of those kinds that are not planted would be."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.sim.planted import PLANTED, Planted
from tests.sim.scenario import Scenario
from tests.sim.shrink import shrink
from tests.sim.test_simulation import SEEDS
from tests.sim.world import run


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found_within_the_ordinary_seeds(planted: Planted) -> None:
    with planted.plant():
        for seed in range(SEEDS):
            outcome = run(Scenario(seed))
            if outcome.problem is not None:
                print(f"{planted.name}: found after {seed + 1} seeds: {outcome.problem}")
                return
    pytest.fail(f"{planted.name}: not found in {SEEDS} seeds")


def test_a_failure_is_shrunk_to_a_smaller_one_that_still_fails() -> None:
    planted = next(planted for planted in PLANTED if planted.name == "lose a completion")
    with planted.plant():
        found = (outcome for seed in range(SEEDS) if (outcome := run(Scenario(seed))).problem is not None)
        # The first one may be as small as it gets already.
        failing = max(islice(found, 3), key=lambda outcome: outcome.steps)
        small = shrink(failing)
        assert small.problem is not None
        assert small.steps < failing.steps
        assert small.scenario.seed == failing.scenario.seed
        assert run(small.scenario).digest == small.digest
