"""Loads that computing beats are skipped, and tried again; stores that vLLM waits for pause."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from vllm.v1.kv_offload.base import ReqContext

from kvoffd_client.vllm import metrics as stats
from kvoffd_client.vllm.do_no_harm import (
    LEAST_LOAD_SAMPLES,
    LEAST_WAITS,
    REPORT_EVERY_S,
    SAMPLE_AGE_S,
    STORE_PAUSE_S,
    DoNoHarm,
    LoadTimes,
    PrefillRate,
    StorePause,
)
from kvoffd_client.vllm.log import logger
from tests.kit.clock import Clock
from tests.kit.manager_harness import KEYS, ManagerHarness
from tests.kit.vllm_fakes import key

SUFFIX = (0).to_bytes(4, "big")


def computing(clock: Clock, tokens_per_second: float) -> PrefillRate:
    rate = PrefillRate(clock)
    rate.tokens_per_second = tokens_per_second
    return rate


def times(tokens_per_second: float, *loads: tuple[int, float]) -> LoadTimes:
    """After loads of so many tokens in so many seconds, in an engine that computes as fast as that."""
    clock = Clock()
    found = LoadTimes(computing(clock, tokens_per_second), clock)
    for tokens, seconds in loads:
        found.note(tokens, seconds)
    return found


@pytest.mark.parametrize(
    ("loads", "pays"),
    [
        ([(1000, 0.5)] * LEAST_LOAD_SAMPLES, False),
        ([(1000, 0.5)] * (LEAST_LOAD_SAMPLES - 1), True),  # too few
        ([(1000, 30.0)] * 2, False),  # enough of those
        ([(1000, 30.0)], True),
        ([(1000, 4.0)] * 2, True),
        ([(1000, 0.19)] * 9, True),  # not clearly slower than the 0.1 s
        ([(1000, 0.5)] * 4 + [(1000, 0.01)] * 5, True),  # a bad moment
        ([(1000, 0.01)] * 5 + [(1000, 9.0)] * 4, True),
        ([(100, 0.5)] * 9, True),  # of another length
        ([(700, 0.35)] * 3 + [(900, 0.45)] * 2, False),  # of about that length
    ],
)
def test_a_load_is_skipped_only_where_enough_loads_of_its_length_were_clearly_slower(
    loads: list[tuple[int, float]], pays: bool
) -> None:
    assert times(10_000, *loads).is_worth_it(1000) is pays


def test_what_costs_nothing_to_speak_of_is_loaded_and_so_is_what_is_not_known() -> None:
    assert times(1_000_000, *[(1000, 0.02)] * 9).is_worth_it(1000), "20 ms for 1 ms"
    assert not times(1_000_000, *[(1000, 0.022)] * 9).is_worth_it(1000)
    assert times(0, *[(1000, 9.0)] * 9).is_worth_it(1000), "the engine's rate is not known"
    empty = times(10_000, (0, 1.0))
    assert empty.seconds_for(1000) is None
    assert empty.tokens_per_second == 0.0


def test_after_a_while_it_is_tried_again() -> None:
    clock = Clock()
    found = LoadTimes(computing(clock, 10_000), clock)
    for _ in range(LEAST_LOAD_SAMPLES):
        found.note(1000, 0.5)
    assert found.tokens_per_second == pytest.approx(2000)
    clock.now += SAMPLE_AGE_S
    assert not found.is_worth_it(1000)
    clock.now += 0.1
    assert found.is_worth_it(1000), "one bad minute does not stop loads for ever"
    for _ in range(LEAST_LOAD_SAMPLES):
        found.note(1000, 0.5)
    assert not found.is_worth_it(1000), "it was not the minute"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the connector's log has, some of it twice: whether vLLM's loggers pass on what they get is its matter."""
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_stores_pause_where_vllm_waits_for_them_again_and_again(said: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pause = StorePause(clock)
    for _ in range(100):
        pause.waited(0.04)
    pause.waited(20.0)  # a daemon that hung once
    for _ in range(LEAST_WAITS - 2):
        pause.waited(2.0)
    assert clock.now >= pause.paused_until
    clock.now += 31.0
    for _ in range(LEAST_WAITS - 1):
        pause.waited(2.0)
    assert clock.now >= pause.paused_until, "what was longer ago does not count"
    pause.waited(2.0)
    assert clock.now < pause.paused_until
    (line,) = {record.getMessage() for record in said.records}
    assert "waited 10.0 s" in line
    clock.now += STORE_PAUSE_S
    assert clock.now >= pause.paused_until


def harness(do_no_harm: bool = True) -> tuple[ManagerHarness, DoNoHarm]:
    rig = ManagerHarness(do_no_harm=do_no_harm)
    rig.prefill.tokens_per_second = 10_000
    return rig, rig.manager._harm


def test_the_manager_counts_what_is_left_out_and_tells_the_daemon(said: pytest.LogCaptureFixture) -> None:
    rig, harm = harness()
    rig.request("r", {key(1)})
    for _ in range(LEAST_LOAD_SAMPLES):
        rig.manager.load_ended([1], 0.5)
    assert not rig.manager.load_is_worth_it("r", 1000)
    assert not rig.manager.load_is_worth_it("r", 1000), "vLLM asks until it is scheduled"
    (line,) = {record.getMessage() for record in said.records if record.levelno == logging.WARNING}
    assert "1000 tokens take 0.50 s here, and computing them 0.10 s" in line
    for _ in range(LEAST_WAITS):
        rig.manager.workers_report(None, 2.0)
    output = rig.manager.prepare_store(KEYS, ReqContext("r"))
    assert output is not None
    assert not list(output.keys_to_store)
    told = rig.manager.get_stats()
    assert told is not None
    assert f"{stats.SLOW_LOADS}" in str(told.data)
    rig.manager.step_begins([1])
    assert rig.client.reports == []
    late = rig.request("late")
    rig.clock.now += REPORT_EVERY_S
    rig.scan(late.req_id)
    rig.client.ready = False
    rig.manager.step_begins([1])
    rig.client.ready = True
    assert rig.client.reports == [], "what is counted while the daemon is away is reported when it is back"
    rig.manager.step_begins([1])
    assert rig.client.reports == [(10_000, pytest.approx(2000), 1, 1, 1)]
    rig.clock.now += REPORT_EVERY_S
    rig.manager.step_begins([1])
    assert rig.client.reports[1:] == [(10_000, pytest.approx(2000), 0, 0, 0)], "the daemon may be another"
    assert harm.skipped_loads == 0
