"""Loads that computing beats are skipped, and tried again; stores that vLLM waits for pause."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvoffd_client.vllm.connector_metadata import WorkerReport
from kvoffd_client.vllm.do_no_harm import (
    LEAST_LOAD_SAMPLES,
    LEAST_WAITS,
    SAMPLE_AGE_S,
    STORE_PAUSE_S,
    DoNoHarm,
    PrefillRate,
)
from kvoffd_client.vllm.manager import REPORT_EVERY_S
from kvoffd_client.vllm.metrics import SLOW_LOADS
from tests.kit.clock import Clock
from tests.vllm.manager_harness import KEYS, ManagerHarness
from tests.vllm.vllm_fakes import key


def measured(tokens_per_second: float, *loads: tuple[int, float], active: bool = True) -> DoNoHarm:
    """After loads of so many tokens in so many seconds, in an engine that computes as fast as that."""
    clock = Clock()
    found = DoNoHarm(clock, PrefillRate(clock, 1, 256), active=active)
    found.prefill.tokens_per_second = tokens_per_second
    for tokens, seconds in loads:
        found.note_load(tokens, seconds)
    return found


def test_load_is_skipped_where_enough_loads_of_its_length_were_slower() -> None:
    cases: list[tuple[list[tuple[int, float]], bool]] = [
        ([(1000, 0.5)] * LEAST_LOAD_SAMPLES, False),
        ([(1000, 0.5)] * (LEAST_LOAD_SAMPLES - 1), True),  # too few
        ([(1000, 30.0)] * 2, False),  # enough of those
        ([(1000, 30.0)], True),
        ([(1000, 4.0)] * 2, True),
        ([(1000, 0.19)] * 9, True),  # not clearly slower than the 0.1 s
        ([(1000, 0.5)] * 4 + [(1000, 0.01)] * 5, True),  # a bad moment
        ([(100, 0.5)] * 9, True),  # of another length
        ([(700, 0.35)] * 3 + [(900, 0.45)] * 2, False),  # of about that length
    ]
    for loads, pays in cases:
        assert measured(10_000, *loads).load_is_worth_it(1000) is pays, loads
    assert measured(1_000_000, *[(1000, 0.02)] * 9).load_is_worth_it(1000), "20 ms for 1 ms is nothing to speak of"
    assert not measured(1_000_000, *[(1000, 0.022)] * 9).load_is_worth_it(1000)
    assert measured(0, *[(1000, 9.0)] * 9).load_is_worth_it(1000), "the engine's rate is not known"
    assert measured(10_000, *[(1000, 9.0)] * 9, active=False).load_is_worth_it(1000)


def test_load_that_was_skipped_is_tried_again_after_a_while() -> None:
    clock = Clock()
    found = DoNoHarm(clock, PrefillRate(clock, 1, 256), active=True)
    found.prefill.tokens_per_second = 10_000
    for _ in range(2):
        for _ in range(LEAST_LOAD_SAMPLES):
            found.note_load(1000, 0.5)
        assert found.rates == (10_000, pytest.approx(2000))
        clock.now += SAMPLE_AGE_S
        assert not found.load_is_worth_it(1000)
        clock.now += 0.1
        assert found.load_is_worth_it(1000), "one bad minute does not stop loads for ever"


def test_stores_pause_where_vllm_waits_for_them_again_and_again(said: list[str]) -> None:
    clock = Clock()
    found = DoNoHarm(clock, PrefillRate(clock, 1, 256), active=True)
    for _ in range(100):
        found.note_wait(0.04)
    found.note_wait(20.0)  # a daemon that hung once
    for _ in range(LEAST_WAITS - 2):
        found.note_wait(2.0)
    assert clock.now >= found.stores_paused_until
    clock.now += 31.0
    for _ in range(LEAST_WAITS - 1):
        found.note_wait(2.0)
    assert clock.now >= found.stores_paused_until, "what was longer ago does not count"
    found.note_wait(2.0)
    assert clock.now < found.stores_paused_until
    assert any("waited 10.0 s" in line for line in said)
    clock.now += STORE_PAUSE_S
    assert clock.now >= found.stores_paused_until


def test_manager_counts_what_is_left_out_and_tells_the_daemon(said: list[str]) -> None:
    rig = ManagerHarness()
    rig.prefill.tokens_per_second = 10_000
    rig.request("r", {key(1)})
    for _ in range(LEAST_LOAD_SAMPLES):
        rig.manager.workers_report(WorkerReport(load_times={1: (1000, 0.5)}))
    assert not rig.manager.load_is_worth_it("r", 1000)
    assert not rig.manager.load_is_worth_it("r", 1000), "vLLM asks until it is scheduled"
    assert any("1000 tokens take 0.50 s here, and computing them 0.10 s" in line for line in said)
    for _ in range(LEAST_WAITS):
        rig.manager.workers_report(WorkerReport(waited_s=2.0))
    output = rig.manager.prepare_store(KEYS, ReqContext("r"))
    assert output is not None
    assert not list(output.keys_to_store)
    assert SLOW_LOADS in str(rig.manager.get_stats().data)
    late = rig.request("late")
    rig.clock.now += REPORT_EVERY_S
    rig.scan(late.req_id)
    rig.client.ready = False
    rig.manager.step_begins([1])
    assert rig.client.reports == [], "what is counted while the daemon is away is reported when it is back"
    rig.client.ready = True
    rig.manager.step_begins([1])
    rig.clock.now += REPORT_EVERY_S
    rig.manager.step_begins([1])
    counts = [figures[2:] for figures in rig.client.reports]
    assert counts == [(1, 1, 1), (0, 0, 0)], "the second one since the daemon may be another"
