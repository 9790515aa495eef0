"""Bugs planted into the real code are found, so bugs of those kinds that are not planted would be."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice

import pytest

from tests.sim.planted import PLANTED
from tests.sim.scenario import Scenario
from tests.sim.shrink import shrink
from tests.sim.test_simulation import SEEDS
from tests.sim.world import run


def seeds_until_found(name: str) -> tuple[int, str]:
    """Return how many ordinary seeds find a planted fault, and what they say; all of them, and nothing, for none."""
    planted = next(planted for planted in PLANTED if planted.name == name)
    with planted.plant():
        for tried, seed in enumerate((*range(planted.first, SEEDS), *range(planted.first)), 1):
            outcome = run(Scenario(seed))
            if outcome.problem is not None:
                return tried, outcome.problem
    return SEEDS, ""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Future[tuple[int, str]]]]:
    """By fault, what finds it, to come; all cores work at them."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {planted.name: pool.submit(seeds_until_found, planted.name) for planted in PLANTED}
        pool.shutdown(cancel_futures=True)


def test_each_fault_finds_its_line_in_the_code() -> None:
    for planted in PLANTED:
        with planted.plant():
            pass


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [planted.name for planted in PLANTED])
def test_a_planted_fault_is_found_within_the_ordinary_seeds(
    found: dict[str, Future[tuple[int, str]]], name: str
) -> None:
    seeds, problem = found[name].result()
    assert problem, f"{name}: not found in {seeds} seeds"
    print(f"{name}: found after {seeds} seeds: {problem}")


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
