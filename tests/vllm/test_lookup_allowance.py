"""How long a lookup's answer is waited for, and what late answers change."""

from __future__ import annotations

import pytest

from kvoffd_client import Lookup
from kvoffd_client.vllm.do_no_harm import PrefillRate
from kvoffd_client.vllm.lookup_allowance import (
    ASSUMED_RATE,
    LEAST_SHARE,
    LEAST_UNKNOWN_S,
    MAX_GIVEN_UP,
    STEP,
    LookupAllowance,
)
from tests.kit.clock import Clock

DEADLINE_S = 0.2
TOKENS, LONG = 64, 1500
RATE = 10_000.0
FULL_S = TOKENS / RATE


class Harness:
    """An allowance over a clock; the engine computes 10,000 tokens a second unless a test says otherwise."""

    def __init__(self, rate: float = RATE, *, active: bool = True) -> None:
        self.clock = Clock()
        self.prefill = PrefillRate({}, self.clock)
        self.prefill.tokens_per_second = rate
        self.allowance = LookupAllowance(self.prefill, DEADLINE_S, self.clock, active=active)

    def give_up(self, tokens: int = TOKENS) -> Lookup:
        """A lookup that is given up when its allowance is over."""
        future = Lookup(1)
        sent_at = self.clock.now
        self.clock.now += self.allowance.seconds_for(tokens)
        self.allowance.give_up(future, sent_at, tokens)
        return future

    def share(self, tokens: int = TOKENS) -> float:
        return self.allowance.seconds_for(tokens) / self.allowance.full_s(tokens)


def test_it_is_as_long_as_computing_takes() -> None:
    harness = Harness()
    assert harness.allowance.seconds_for(TOKENS) == pytest.approx(FULL_S)
    assert harness.allowance.seconds_for(LONG) == pytest.approx(LONG / RATE)


def test_the_deadline_is_the_most() -> None:
    assert Harness().allowance.seconds_for(100_000) == DEADLINE_S


def test_a_rate_is_assumed_while_it_is_not_known_and_20_ms_are_the_least() -> None:
    """A restarted engine's first prompts are those that the daemon has."""
    harness = Harness(rate=0.0)
    assert (ASSUMED_RATE, LEAST_UNKNOWN_S) == (10_000, 0.02)
    waits = [harness.allowance.seconds_for(tokens) for tokens in (0, TOKENS, LONG, 100_000)]
    assert waits == pytest.approx([0.02, 0.02, 0.15, DEADLINE_S])
    assert LookupAllowance(harness.prefill, 0.005, harness.clock).seconds_for(TOKENS) == 0.005, "the deadline is less"


def test_each_late_answer_halves_it_to_a_sixteenth() -> None:
    harness = Harness()
    shares = []
    for _ in range(5):
        harness.give_up()
        harness.clock.now += FULL_S
        harness.allowance.settle()
        shares.append(harness.share())
    assert shares == pytest.approx([1 / 2, 1 / 4, 1 / 8, LEAST_SHARE, LEAST_SHARE])


def test_answers_that_are_late_together_halve_it_once() -> None:
    """As those of many prompts that wait out one stop of the daemon."""
    harness = Harness()
    sent_at = harness.clock.now
    harness.clock.now += FULL_S
    for _ in range(16):
        harness.allowance.give_up(Lookup(1), sent_at, TOKENS)
    assert harness.share() == pytest.approx(1 / 2)
    harness.give_up()
    harness.clock.now += FULL_S
    harness.allowance.settle()
    assert harness.share() == pytest.approx(1 / 4)


def test_answers_in_time_restore_it_step_by_step() -> None:
    harness = Harness()
    harness.give_up()
    assert harness.share() == pytest.approx(1 / 2)
    for wanted in (1 / 2 + STEP, 1 / 2 + 2 * STEP, 1 / 2 + 3 * STEP, 1.0, 1.0):
        harness.allowance.answered(TOKENS)
        assert harness.share() == pytest.approx(wanted)


def test_it_recovers_by_itself_where_answers_need_more_than_is_left_of_it() -> None:
    """Nobody waits long enough to see these answers, which would have been in time."""
    harness = Harness()
    for _ in range(4):
        harness.give_up()
        harness.clock.now += 1.0
        harness.allowance.settle()
    assert harness.share() == pytest.approx(LEAST_SHARE)
    for _ in range(5):
        sent_at = harness.clock.now
        future = harness.give_up()
        harness.clock.now = sent_at + FULL_S / 2
        future.answered_at, future.done = harness.clock.now, True
        harness.clock.now += 1.0  # the next prompt comes long after
        harness.allowance.settle()
    assert harness.allowance.seconds_for(TOKENS) > FULL_S / 2, "the next such answer is waited for"


def test_an_answer_that_is_read_late_is_late() -> None:
    harness = Harness()
    late = harness.give_up()
    late.answered_at, late.done = harness.clock.now + FULL_S, True
    harness.allowance.settle()
    assert harness.share() == pytest.approx(1 / 2)


def test_one_lookup_counts_once() -> None:
    harness = Harness()
    harness.give_up()
    for _ in range(3):
        harness.clock.now += 1.0
        harness.allowance.settle()
    assert harness.share() == pytest.approx(1 / 2)


def test_a_late_answer_counts_for_shorter_prompts_and_not_for_longer_ones() -> None:
    """What is late for 64 tokens is in time for 1,500, which are 150 ms of computing."""
    harness = Harness()
    harness.give_up(TOKENS)
    assert [harness.share(tokens) for tokens in (1, TOKENS, LONG)] == pytest.approx([1 / 2, 1 / 2, 1.0])
    harness.give_up(LONG)
    assert [harness.share(tokens) for tokens in (1, TOKENS, LONG)] == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    harness.allowance.answered(LONG)
    assert harness.share(TOKENS) == pytest.approx(1 / 4), "it says nothing of shorter ones"
    harness.allowance.answered(TOKENS)
    assert [harness.share(tokens) for tokens in (TOKENS, LONG)] == pytest.approx([3 / 8, 3 / 4])


def test_lookups_that_nobody_answers_are_bounded() -> None:
    harness = Harness(rate=1.0)
    harness.give_up()  # the daemon's answer may come in a minute
    for number in range(2 * MAX_GIVEN_UP):
        harness.allowance.give_up(Lookup(number), harness.clock.now, TOKENS)
    assert len(harness.allowance._given_up) == MAX_GIVEN_UP


def test_switched_off_it_is_the_deadline_whatever_comes_late() -> None:
    harness = Harness(active=False)
    harness.give_up()
    harness.clock.now += 1.0
    harness.allowance.settle()
    assert [harness.allowance.seconds_for(tokens) for tokens in (0, TOKENS, LONG)] == [DEADLINE_S] * 3
