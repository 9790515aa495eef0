"""The simulator's seeds: no promise breaks, and a seed means the same run everywhere and always."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from kvoffd_client import ClientOptions
from tests.sim.client import OPTIONS
from tests.sim.daemon import job_end_bound_s
from tests.sim.parts import make_config
from tests.sim.scenario import CHANCES, KINDS, TIMED, Scenario
from tests.sim.shared import CHANCES as SHARED_CHANCES
from tests.sim.soak import Part, run_part
from tests.sim.world import run

SEEDS = 1200
PARTS = 8


@pytest.fixture(scope="module")
def parts() -> Iterator[list[Future[Part]]]:
    """What the ordinary seeds bring, to come; all cores work at them."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield [pool.submit(run_part, range(part, SEEDS, PARTS)) for part in range(PARTS)]
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_promise_breaks_in_any_of_the_ordinary_seeds(parts: list[Future[Part]], part: int) -> None:
    assert parts[part].result().failures == []


@pytest.mark.timeout(300)
def test_every_fault_happens_within_the_ordinary_seeds(parts: list[Future[Part]]) -> None:
    counts = sum((part.result().counts for part in parts), start=Counter[str]())
    assert [kind for kind in (*KINDS, *(f"shared_{fault}" for fault in SHARED_CHANCES)) if not counts[kind]] == []
    assert counts["shared_read"] > 100
    assert counts["load_ok"] > 300
    assert counts["store_ok"] > 300
    assert counts["load_failed"] > 30
    assert counts["store_failed"] > 30


@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_trace_in_any_process(parts: list[Future[Part]]) -> None:
    digests: dict[int, str] = {}
    for part in parts:
        digests |= part.result().digests
    # Each of those processes had hashes of strings of its own, as this one has.
    assert [digests[seed] for seed in range(40)] == [run(Scenario(seed)).digest for seed in range(40)]
    assert len(set(digests.values())) == SEEDS, "other seeds give other traces"


@pytest.mark.parametrize("seed", range(4))
def test_a_long_run_keeps_every_promise(seed: int) -> None:
    outcome = run(Scenario(seed, duration_s=30.0, max_requests=400, check_every=64, swarm=seed % 2 == 0))
    assert outcome.problem is None
    assert outcome.counts["load_ok"] > 10


@pytest.mark.parametrize("seed", [23, 39])
def test_engines_that_serve_prompts_long_after_the_last_fault_have_their_quiet_time_after_them(seed: int) -> None:
    outcome = run(Scenario(seed, duration_s=30.0, max_requests=400, check_every=64, swarm=seed % 2 == 0))
    assert outcome.problem is None


def test_with_a_copy_in_a_hundred_hanging_for_ever_nothing_is_waited_for_beyond_its_deadline() -> None:
    others = [kind for kind in KINDS if kind != "copy_hang"]
    hung = 0
    longest_lookup_s = longest_job_s = 0.0
    for seed in range(16):
        scenario = Scenario(seed, duration_s=20.0, max_requests=200, check_every=64, swarm=False).but(*others)
        outcome = run(scenario)
        assert outcome.problem is None
        hung += outcome.counts["copy_hang"]
        longest_lookup_s = max(longest_lookup_s, outcome.longest_lookup_s)
        longest_job_s = max(longest_job_s, outcome.longest_job_s)
        assert outcome.longest_job_s < job_end_bound_s(make_config(scenario.rng("config")))
    print(f"{hung} copies hung; longest lookup {longest_lookup_s:.3f} s, longest job {longest_job_s:.2f} s")
    assert hung > 20
    assert longest_lookup_s <= OPTIONS.request_timeout_s <= ClientOptions().request_timeout_s == 2.0


def test_without_faults_nothing_fails() -> None:
    for seed in range(20):
        outcome = run(Scenario(seed).but(*CHANCES, *TIMED))
        assert outcome.problem is None
        assert not [kind for kind in KINDS if outcome.counts[kind]]
