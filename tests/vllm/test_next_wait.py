"""The table of what a waiting prompt waits for, and how long a wait for a tier lasts."""

from __future__ import annotations

from math import inf

import pytest

from kvoffd_client.vllm.next_wait import LOAD_PAUSE_S, NO_WAIT, AwaitedEvent, NextWait, WaitFacts, next_wait
from kvoffd_client.vllm.waits import ASK_SHARE, DOUBT_SHARE, MIN_COMPUTED_S, TierWait

NOW, ASK_AT, JUDGE_AT, LATE_AT = 100.0, 101.0, 102.0, 103.0


@pytest.mark.parametrize(
    ("facts", "event", "until"),
    [
        (["answer_comes", "needs_answer"], AwaitedEvent.ANSWER, LATE_AT),
        (["answer_comes", "needs_answer", "asks_store"], AwaitedEvent.ANSWER, LATE_AT),
        (["answer_comes", "awaits_tier"], AwaitedEvent.TIER, LATE_AT),
        (["answer_comes", "awaits_tier", "needs_answer"], AwaitedEvent.TIER, LATE_AT),
        (["answer_comes", "awaits_tier", "asks_store"], AwaitedEvent.STORE, LATE_AT),
        (["scan_deferred", "awaits_tier"], AwaitedEvent.TIER, ASK_AT),
        (["scan_deferred", "awaits_tier", "was_preempted"], AwaitedEvent.TIER, ASK_AT),
        (["scan_deferred", "awaits_tier", "asks_store"], AwaitedEvent.STORE, JUDGE_AT),
        (["scan_deferred"], AwaitedEvent.LOAD, NOW + LOAD_PAUSE_S),
        (["scan_deferred", "asks_store"], AwaitedEvent.LOAD, NOW + LOAD_PAUSE_S),
    ],
)
def test_what_a_prompt_waits_for_and_until_when(facts: list[str], event: AwaitedEvent, until: float) -> None:
    known = WaitFacts(NOW, late_at=LATE_AT, ask_at=ASK_AT, judge_at=JUDGE_AT)
    assert next_wait(known._replace(**dict.fromkeys(facts, True))) == NextWait(event, until)


@pytest.mark.parametrize(
    "facts",
    [
        [],
        ["answer_comes"],  # it would only replace an answer that is good enough
        ["needs_answer"],  # nothing is asked, or no longer waited for
        ["awaits_tier", "asks_store"],  # first it is scanned
        ["scan_deferred", "was_preempted"],
    ],
)
def test_a_prompt_waits_for_nothing(facts: list[str]) -> None:
    assert next_wait(WaitFacts(NOW)._replace(**dict.fromkeys(facts, True))) is NO_WAIT


def test_a_prompt_that_waits_for_a_tier_is_judged_before_it_asks_again_if_that_is_sooner() -> None:
    facts = WaitFacts(NOW, awaits_tier=True, scan_deferred=True, ask_at=JUDGE_AT, judge_at=ASK_AT)
    assert next_wait(facts) == NextWait(AwaitedEvent.TIER, ASK_AT)


def test_a_prompt_that_asks_a_store_waits_until_it_is_judged_although_an_answer_is_late_before() -> None:
    facts = WaitFacts(NOW, answer_comes=True, awaits_tier=True, asks_store=True, late_at=ASK_AT, judge_at=JUDGE_AT)
    assert next_wait(facts) == NextWait(AwaitedEvent.STORE, JUDGE_AT)


@pytest.mark.parametrize(
    ("is_worth_it", "asks_store", "ends_after"),
    [(True, False, 1.0), (True, True, 1.0), (False, False, DOUBT_SHARE), (False, True, ASK_SHARE)],
)
def test_how_long_a_wait_for_a_tier_lasts(is_worth_it: bool, asks_store: bool, ends_after: float) -> None:
    longest_s = 2.0
    wait = judged(TierWait(), NOW, longest_s=longest_s, is_worth_it=is_worth_it, asks_store=asks_store)
    assert wait.is_awaited
    assert wait.judge_at == pytest.approx(NOW + ends_after * longest_s)
    judged(wait, wait.judge_at, longest_s=inf, is_worth_it=is_worth_it, asks_store=asks_store)
    assert wait.has_ended
    assert not wait.is_awaited


def test_a_wait_for_a_tier_does_not_end_before_the_answer_that_comes() -> None:
    wait = judged(TierWait(), NOW)
    assert judged(wait, NOW + 1.0, is_worth_it=False, next_answer_comes=True).is_awaited
    assert judged(wait, NOW + 1.0, is_worth_it=False).has_ended


def test_only_an_estimate_ends_a_doubt() -> None:
    wait = judged(TierWait(), NOW, longest_s=1.0, is_worth_it=False)
    judged(wait, NOW, is_estimated=False)
    assert judged(wait, NOW, is_worth_it=False).judge_at == pytest.approx(NOW + max(MIN_COMPUTED_S, DOUBT_SHARE))
    judged(wait, NOW + 0.01)
    again = judged(wait, NOW + 0.02, is_worth_it=False)
    assert again.judge_at == pytest.approx(NOW + 0.02 + max(MIN_COMPUTED_S, DOUBT_SHARE))


def judged(
    wait: TierWait,
    now: float,
    *,
    longest_s: float = 1.0,
    is_worth_it: bool = True,
    is_estimated: bool = True,
    asks_store: bool = False,
    next_answer_comes: bool = False,
) -> TierWait:
    """The wait, judged at a time."""
    wait.judge(
        now,
        longest_s=longest_s,
        is_worth_it=is_worth_it,
        is_estimated=is_estimated,
        asks_store=asks_store,
        next_answer_comes=next_answer_comes,
    )
    return wait
