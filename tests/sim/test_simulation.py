"""The simulator's seeds: no promise breaks, and a seed means the same run everywhere and always."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest

from kvoffd_client import ClientOptions
from tests.kit.amount import TIMES
from tests.sim.client import OPTIONS
from tests.sim.daemon import job_end_bound_s
from tests.sim.parts import make_config
from tests.sim.scenario import CHANCES, KINDS, TIMED, Scenario
from tests.sim.shared import CHANCES as SHARED_CHANCES
from tests.sim.soak import Part, run_part
from tests.sim.world import run

SEEDS = range(11, 11 + 35 * TIMES**2)
"""Among the first of these is one that resets a namespace on all nodes, which is rare."""
EVENTS = (
    *KINDS,
    *(f"shared_{fault}" for fault in SHARED_CHANCES),
    *("load_failed", "store_failed", "fence_abandoned", "tier_given_up", "read_given_up"),
)
"""What has to happen in them, or the run would prove nothing."""
PARTS = 4
SAME = 2
"""So many seeds are run in another process too."""


@cache
def part(number: int) -> Part:
    """What a part of the seeds brought. They run once, for all tests of this file."""
    return run_part(map(Scenario, SEEDS[number::PARTS]))


@pytest.mark.parametrize("number", range(PARTS))
def test_seeds_break_no_promise(number: int) -> None:
    assert part(number).failures == []


def test_seeds_bring_every_fault() -> None:
    counts = sum((part(number).counts for number in range(PARTS)), start=Counter[str]())
    assert [kind for kind in EVENTS if not counts[kind]] == []
    assert counts["shared_read"] > 20
    assert counts["disk_read"] > 10
    assert counts["tier_awaited"] > 50
    assert counts["promoted_awaited"] > 20
    assert counts["load_ok"] > 150
    assert counts["store_ok"] > 150
    assert counts["load_failed"] > 30
    assert counts["store_failed"] > 30


def test_seeds_give_the_same_trace_in_any_process() -> None:
    seeds = SEEDS[::PARTS][:SAME]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # it hashes strings otherwise than here
        elsewhere = pool.submit(run_part, list(map(Scenario, seeds))).result().digests
    assert elsewhere == {seed: part(0).digests[seed] for seed in seeds}
    assert len(set(elsewhere.values())) == SAME, "other seeds give other traces"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [3, 13])
def test_long_runs_keep_every_promise(seed: int) -> None:
    """In the second, engines serve prompts long after the last fault, and have their quiet time only after them."""
    outcome = run(Scenario(seed, duration_s=30.0, max_requests=400, check_every=64, swarm=seed % 2 == 0))
    assert outcome.problem is None
    assert outcome.counts["load_ok"] > 10


def test_hanging_copies_hold_nothing_beyond_its_deadline() -> None:
    """One copy in a hundred hangs for ever."""
    others = [kind for kind in KINDS if kind != "copy_hang"]
    hung = 0
    longest_lookup_s = longest_job_s = 0.0
    for seed in range(2 * TIMES):
        scenario = Scenario(seed, duration_s=14.0, max_requests=140, check_every=64, swarm=False).but(*others)
        outcome = run(scenario)
        assert outcome.problem is None
        hung += outcome.counts["copy_hang"]
        longest_lookup_s = max(longest_lookup_s, outcome.longest_lookup_s)
        longest_job_s = max(longest_job_s, outcome.longest_job_s)
        assert outcome.longest_job_s < job_end_bound_s(make_config(scenario.rng("config")))
    print(f"{hung} copies hung; longest lookup {longest_lookup_s:.3f} s, longest job {longest_job_s:.2f} s")
    assert hung > 1
    assert longest_lookup_s <= OPTIONS.request_timeout_s <= ClientOptions().request_timeout_s == 2.0


def test_without_faults_nothing_fails() -> None:
    for seed in range(2 * TIMES**2):
        outcome = run(Scenario(seed).but(*CHANCES, *TIMED))
        assert outcome.problem is None
        assert not [kind for kind in KINDS if outcome.counts[kind]]
