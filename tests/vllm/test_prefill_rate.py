"""The engine's rate of computing prompts, and what is not waited for because of it."""

from __future__ import annotations

from itertools import product

import pytest
from vllm.config import SchedulerConfig

from kvoffd_client.vllm.do_no_harm import PrefillRate, largest_chunk_of
from tests.kit.cases import case
from tests.kit.clock import Clock

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
        rate.step_begins(tokens)
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
        [((900,), 0.1), (DECODING, 0.01)] * 9,
        [((900,), 0.1), (IDLE, 60.0)] * 9,
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
            assert largest_chunk_of(config) == chunk
            prompts = [((chunk - 8, *DECODING), chunk / 10_000)] * (2048 // chunk + 2)
            assert rate_after(*prompts, chunk=chunk).tokens_per_second == pytest.approx(10_000)
            assert rate_after(*[((4,) * 300, 0.03)] * 50, chunk=chunk).tokens_per_second == 0.0, "speculative tokens"


def test_the_first_steps_in_which_an_engine_compiles_tell_nothing() -> None:
    assert rate_after(first=((2048,), 4.0)).tokens_per_second == 0.0
    rate = rate_after(((2048,), 4.0), ((2048,), 0.1), first=((900,), 0.1))
    assert rate.tokens_per_second == pytest.approx(20_480)


def test_steps_that_failed_never_end() -> None:
    clock = Clock()
    rate = PrefillRate(clock, 2, 2048)
    rate.step_begins([2048])
    rate.step_ended()
    for tokens in (1, 2048):
        rate.step_begins([tokens])
    clock.now += 60.0
    for tokens in (2048, 1):
        rate.step_begins([tokens])
    for seconds in (0.2048, 0.01):
        clock.now += seconds
        rate.step_ended()
    assert rate.tokens_per_second == pytest.approx(10_000)
