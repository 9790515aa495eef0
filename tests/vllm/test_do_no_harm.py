"""Loads that computing beats are skipped, and tried again; stores that vLLM waits for pause; the rate of prompts."""

from __future__ import annotations

from itertools import product

import pytest
from vllm.config import SchedulerConfig
from vllm.v1.kv_offload.base import ReqContext

from kvoffd_client.vllm.connector_metadata import LoadTime, WorkerNews
from kvoffd_client.vllm.do_no_harm import (
    MIN_LOAD_SAMPLES,
    MIN_WAITS,
    SAMPLE_AGE_S,
    STORE_PAUSE_S,
    DoNoHarm,
)
from kvoffd_client.vllm.engine_facts import prompt_step_tokens_of
from kvoffd_client.vllm.engine_reports import REPORT_EVERY_S
from kvoffd_client.vllm.metrics import SLOW_LOADS
from kvoffd_client.vllm.prefill_rate import PrefillRate
from tests.kit.cases import case
from tests.kit.clock import Clock
from tests.vllm.manager_harness import HASHES, KEYS, ManagerHarness
from tests.vllm.vllm_fakes import key


def measured(tokens_per_second: float, *loads: tuple[int, float], active: bool = True) -> DoNoHarm:
    """After loads of so many tokens in so many seconds, in an engine that computes as fast as that."""
    clock = Clock()
    prefill = PrefillRate(clock, 1, 256)
    prefill.tokens_per_second = tokens_per_second
    found = DoNoHarm(clock, prefill, active=active)
    for tokens, seconds in loads:
        found.record_load(tokens, seconds)
    return found


def is_loaded(harm: DoNoHarm, tokens: int = 1000) -> bool:
    return not harm.skips_load(tokens)


def test_load_is_skipped_where_enough_loads_of_its_length_were_slower() -> None:
    cases: list[tuple[list[tuple[int, float]], bool]] = [
        ([(1000, 0.5)] * MIN_LOAD_SAMPLES, False),
        ([(1000, 0.5)] * (MIN_LOAD_SAMPLES - 1), True),  # too few
        ([(1000, 30.0)] * 2, False),  # enough of those
        ([(1000, 30.0)], True),
        ([(1000, 4.0)] * 2, True),
        ([(1000, 0.19)] * 9, True),  # not clearly slower than the 0.1 s
        ([(1000, 0.5)] * 4 + [(1000, 0.01)] * 5, True),  # a bad moment
        ([(100, 0.5)] * 9, True),  # of another length
        ([(700, 0.35)] * 3 + [(900, 0.45)] * 2, False),  # of about that length
    ]
    for loads, pays in cases:
        assert is_loaded(measured(10_000, *loads)) is pays, loads
    assert is_loaded(measured(1_000_000, *[(1000, 0.02)] * 9)), "20 ms for 1 ms is nothing to speak of"
    assert not is_loaded(measured(1_000_000, *[(1000, 0.022)] * 9))
    assert is_loaded(measured(0, *[(1000, 9.0)] * 9)), "the engine's rate is not known"
    assert is_loaded(measured(10_000, *[(1000, 9.0)] * 9, active=False))


def test_load_that_was_skipped_is_tried_again_after_a_while() -> None:
    clock = Clock()
    prefill = PrefillRate(clock, 1, 256)
    prefill.tokens_per_second = 10_000
    found = DoNoHarm(clock, prefill, active=True)
    for _ in range(2):
        for _ in range(MIN_LOAD_SAMPLES):
            found.record_load(1000, 0.5)
        assert found.rates == (10_000, pytest.approx(2000))
        clock.now += SAMPLE_AGE_S - 0.1
        assert not is_loaded(found)
        clock.now += 0.1
        assert is_loaded(found), "one bad minute does not stop loads for ever"


def test_stores_pause_where_vllm_waits_for_them_again_and_again(said: list[str]) -> None:
    clock = Clock()
    found = DoNoHarm(clock, PrefillRate(clock, 1, 256), active=True)
    for _ in range(100):
        found.record_store_wait(0.04)
    found.record_store_wait(20.0)  # a daemon that hung once
    for _ in range(MIN_WAITS - 2):
        found.record_store_wait(2.0)
    assert clock.now >= found.stores_paused_until
    clock.now += 31.0
    for _ in range(MIN_WAITS - 1):
        found.record_store_wait(2.0)
    assert clock.now >= found.stores_paused_until, "what was longer ago does not count"
    found.record_store_wait(2.0)
    assert clock.now < found.stores_paused_until
    assert any("waited 10.0 s" in line for line in said)
    clock.now += STORE_PAUSE_S
    assert clock.now >= found.stores_paused_until


def end_loads(rig: ManagerHarness, count: int, *seconds: float) -> None:
    """Have loads of 1,000 tokens end in one worker after the other, in as many seconds."""
    for number in range(count):
        context = rig.request(f"load {number}", HASHES)
        rig.manager.prepare_load(KEYS, context)
        for worker_s in seconds:
            rig.manager.handle_news(WorkerNews(load_times={context.req_id: LoadTime(1000, worker_s)}))
        rig.manager.complete_load(KEYS, context)


def test_a_load_takes_as_long_as_in_its_slowest_worker() -> None:
    rig = ManagerHarness()
    end_loads(rig, MIN_LOAD_SAMPLES, 0.5, 0.1)
    assert rig.manager.harm.load_s(1000) == 0.5


def test_manager_counts_what_is_left_out_and_tells_the_daemon(said: list[str]) -> None:
    rig = ManagerHarness()
    rig.prefill.tokens_per_second = 10_000
    rig.request("r", {key(1)})
    end_loads(rig, MIN_LOAD_SAMPLES, 0.5)
    for _ in range(2):  # vLLM asks until it is scheduled
        assert rig.manager.skip_slow_load(rig.manager.requests["r"], 1000)
    assert any("1000 tokens take 0.50 s, computing them 0.10 s" in line for line in said)
    for _ in range(MIN_WAITS):
        rig.manager.handle_news(WorkerNews(waited_s=2.0))
    output = rig.manager.prepare_store(KEYS, ReqContext("r"))
    assert output is not None
    assert not list(output.keys_to_store)
    assert SLOW_LOADS in str(rig.manager.get_stats().data)
    late = rig.request("late")
    rig.clock.now += REPORT_EVERY_S
    rig.scan(late.req_id)
    rig.client.ready = False
    rig.manager.begin_step([1])
    assert rig.client.reports == [], "what is counted while the daemon is away is reported when it is back"
    rig.client.ready = rig.client.is_full = True
    rig.clock.now += 15.0
    rig.manager.begin_step([1])
    assert rig.client.reports == [], "so is what the queue to it does not take"
    rig.client.is_full = False
    rig.clock.now += 15.0
    rig.manager.begin_step([1])
    rig.clock.now += REPORT_EVERY_S
    rig.manager.begin_step([1])
    counts = [figures[1:] for figures in rig.client.reports]
    assert counts == [(1, 1, 1, 0), (0, 0, 0, 0)], "the second one since the daemon may be another"
    assert rig.client.late_ages_s == [30.0, 0.0], "it was late then"


# --- the rate of computing prompts -----------------------------------------------------------------

IDLE, DECODING = (), (1,) * 8
Step = tuple[tuple[int, ...], float]
"""Tokens of each request, and the seconds that they take; IDLE: as long as there is nothing to do."""


def rate_after(*steps: Step, most_running: int = 1, first: Step = ((2048,), 9.0), chunk: int = 2048) -> PrefillRate:
    """As vLLM's loop begins steps, and takes their outputs when as many run as may or none is to begin."""
    clock, ends = Clock(), [0.0]
    rate = PrefillRate(clock, most_running, chunk)
    running: list[float] = []

    def end_first() -> None:
        clock.now = max(clock.now, running.pop(0))
        rate.step_ended()

    for tokens, seconds in (first, (IDLE, 1.0), *steps):
        rate.begin_step(tokens)
        ends.append(max(ends[-1], clock.now) + (seconds if tokens else 0.0))
        running.append(ends[-1])
        while running and (len(running) == most_running or not tokens):
            end_first()
        clock.now += 0.0 if tokens else seconds
    while running:
        end_first()
    return rate


DEPTHS = 1, 2, 5
"""Synchronous, asynchronous and pipelined engines."""


def test_a_single_prompt_is_timed_whatever_goes_before_and_follows() -> None:
    around: tuple[list[Step], ...] = [(IDLE, 60.0)], [(DECODING, 0.01)] * 9
    for depth, before, after in product(DEPTHS, around, around):
        with case(depth, before, after):
            rate = rate_after(*before, ((2048, *DECODING), 0.2056), *after, most_running=depth)
            assert rate.tokens_per_second == pytest.approx(10_000)


def test_what_is_not_mostly_prompts_or_too_short_tells_nothing() -> None:
    loads: tuple[list[Step], ...] = (
        [((1,) * 300, 0.03)] * 50,  # many users
        [((4,) * 300, 0.03)] * 50,  # with speculative tokens
        [((1000,) + (1,) * 400, 0.1)] * 5,
        [((40,) * 30, 0.1)] * 5,  # short ends of prompts that were found
        [((500,), 0.1), (DECODING, 0.01)] * 9,
        [((500,), 0.1), (IDLE, 60.0)] * 9,
        [((200,), 0.1)] * 9,
    )
    for depth, steps in product(DEPTHS, loads):
        with case(depth, steps[0]):
            assert rate_after(*steps, most_running=depth).tokens_per_second == 0.0


def test_an_engine_that_computes_little_of_a_prompt_in_a_step_is_timed() -> None:
    for batched, threshold, chunk in ((128, 0, 128), (2048, 40, 40), (4096, 0, 4096)):
        given = {"max_num_batched_tokens": batched, "long_prefill_token_threshold": threshold}
        config = SchedulerConfig(max_model_len=1024, is_encoder_decoder=False, max_num_seqs=8, **given)
        with case(given):
            assert prompt_step_tokens_of(config) == chunk
            prompts = [((chunk - 8, *DECODING), chunk / 10_000)] * (2048 // chunk + 2)
            assert rate_after(*prompts, chunk=chunk).tokens_per_second == pytest.approx(10_000)
            assert rate_after(*[((4,) * 300, 0.03)] * 50, chunk=chunk).tokens_per_second == 0.0, "speculative tokens"


def test_the_first_steps_in_which_an_engine_compiles_tell_nothing() -> None:
    assert rate_after(first=((2048,), 4.0)).tokens_per_second == 0.0
    rate = rate_after(((2048,), 4.0), ((2048,), 0.1), first=((500,), 0.1))
    assert rate.tokens_per_second == pytest.approx(20_480)


def test_steps_that_failed_never_end() -> None:
    clock = Clock()
    rate = PrefillRate(clock, 2, 2048)
    rate.begin_step([2048])
    rate.step_ended()
    for tokens in (1, 2048):
        rate.begin_step([tokens])
    clock.now += 60.0
    for tokens in (2048, 1):
        rate.begin_step([tokens])
    for seconds in (0.2048, 0.01):
        clock.now += seconds
        rate.step_ended()
    assert rate.tokens_per_second == pytest.approx(10_000)
