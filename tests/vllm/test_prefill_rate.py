"""The engine's rate of computing prompts, and what is not waited for because of it."""

from __future__ import annotations

from math import inf

import pytest
from support.vllm_fakes import Clock, key

from kvoffd_client.vllm.prefill_rate import AHEAD, STEPS, PrefillRate

TOKENS = {(0).to_bytes(4, "big"): 16, (7).to_bytes(4, "big"): 64}


def rate_after(*steps: tuple[int, float]) -> PrefillRate:
    """Of steps of so many tokens that take so many seconds."""
    clock = Clock()
    rate = PrefillRate(TOKENS, clock)
    for tokens, seconds in steps:
        rate.step(tokens)
        clock.now += seconds
    rate.step(0)
    return rate


def test_steps_of_prompts_in_a_row_are_timed() -> None:
    rate = rate_after(*[(2048, 0.1)] * STEPS)
    assert rate.tokens_per_second == pytest.approx(20_480)
    assert rate.seconds_for([key(1), key(2)]) == pytest.approx(32 / 20_480)
    assert rate.seconds_for([key(1), key(2), key(3, 7)]) == pytest.approx(64 / 20_480), "groups are computed together"
    assert rate.seconds_for([]) == 0.0


def test_it_follows_slowly() -> None:
    rate = rate_after(*[(2048, 0.1)] * 2 * STEPS, *[(2048, 0.2)] * STEPS)
    assert rate.tokens_per_second == pytest.approx(0.7 * 20_480 + 0.3 * 10_240)


def test_the_first_steps_in_which_an_engine_compiles_are_forgotten() -> None:
    assert rate_after(*[(2048, 4.0)] * STEPS).tokens_per_second == pytest.approx(512)
    rate = rate_after(*[(2048, 4.0)] * STEPS, *[(2048, 0.1)] * STEPS)
    assert rate.tokens_per_second == pytest.approx(20_480)


def pipelined(ahead: int, *steps: tuple[int, float]) -> PrefillRate:
    """As vLLM begins steps, so many before those before them have ended."""
    clock, ends, ended = Clock(), [0.0] * (ahead + 1), 0.0
    rate = PrefillRate(TOKENS, clock)
    for tokens, seconds in steps:
        clock.now = max(clock.now, ends[-1 - ahead])
        rate.step(tokens)
        ended = max(ended, clock.now) + seconds
        ends.append(ended)
        clock.now += 1e-4
    return rate


@pytest.mark.parametrize("ahead", [0, 1, AHEAD])
@pytest.mark.parametrize("before", [[], [(8, 0.01)] * 5], ids=["idle", "decoding"])
def test_a_single_prompt_is_timed_up_to_its_first_tokens(ahead: int, before: list[tuple[int, float]]) -> None:
    rate = pipelined(ahead, *before, (2048, 0.2), (952, 0.1), *[(9, 0.01)] * 6)
    assert rate.tokens_per_second == pytest.approx(10_000, rel=0.04)


@pytest.mark.parametrize(
    "steps",
    [
        [(2048, 0.1)] * (STEPS - 1),
        [(64, 0.01)] * 50,
        [(2048, 0.1), (1, 0.01)] * 20,
        [(900, 0.1), *[(1, 0.01)] * 4],  # so short a prompt is not what is loaded
        [(2048, 0.1), *[(1, 0.02)] * 4],  # hardly longer than decoding
        [(2048, 0.1), *[(1, 0.01)] * 3, (0, 60.0), *[(1, 0.01)] * 4],
        [(2048, 0.1), (1, 0.01), (1, 0.01), (0, 60.0), (40, 0.01), *[(1, 0.01)] * 4],
    ],
)
def test_what_cannot_be_told_from_decoding_and_pauses_tells_nothing(steps: list[tuple[int, float]]) -> None:
    rate = rate_after(*steps)
    assert rate.tokens_per_second == 0.0
    assert rate.seconds_for([key(1)]) == inf


def test_what_runs_into_more_prompts_is_timed_with_them_alone() -> None:
    rate = rate_after(*[(2048, 0.1)] * (STEPS + 1), *[(1, 0.001)] * 4)
    assert rate.tokens_per_second == pytest.approx(20_480)


def test_a_pause_of_the_engine_is_no_slow_step() -> None:
    rate = rate_after(*[(2048, 0.1)] * (STEPS - 1), (1, 60.0), *[(2048, 0.1)] * STEPS)
    assert rate.tokens_per_second == pytest.approx(20_480)
