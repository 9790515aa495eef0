"""Bugs planted into the real code are found, so bugs of those kinds that are not planted would be."""

from __future__ import annotations

import pytest

from tests.sim.planted import PLANTED, fault, recorded_seeds, search
from tests.sim.scenario import Scenario
from tests.sim.world import run

SIMULATED = [planted.name for planted in PLANTED if planted.simulated]


def test_planted_faults_find_their_lines() -> None:
    for planted in PLANTED:
        with planted.plant():
            pass


@pytest.mark.parametrize("name", SIMULATED)
def test_planted_fault_is_found(name: str) -> None:
    """In one of the recorded seeds. After a change of the simulator, record others: python -m tests.sim.planted."""
    with fault(name).plant():
        outcomes = (run(Scenario(seed)) for seed in recorded_seeds().get(name, []))
        problem = next((outcome.problem for outcome in outcomes if outcome.problem is not None), None)
    assert problem is not None
    print(problem)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SIMULATED)
def test_planted_fault_is_found_by_a_search(name: str) -> None:
    assert search(name)
