"""The next lookup of a prompt that vLLM has not scheduled, and when that is: decided by facts, no side effects.

The first row that applies counts.

| facts | it is looked up |
|---|---|
| a lookup is in flight | not before that is answered, or failed |
| its last lookup failed | FAILED_PAUSE_S after that |
| it has no answer | now |
| its time to wait for answers is over | no more: the last one counts |
| the answer lacks what was stored since, or is about fewer chunks than the prompt has by now | now |
| all chunks are ready, under a lease | RENEW_BEFORE_S before the lease has lived half of its life (``stale_at``) |
| it waits for blocks that come up from tiers | at ``TierWait.ask_at``: ``retry_pause_s`` after the answer |
| else | REFRESH_S after the answer; in proportion later if that is about more than REFRESH_KEYS chunks |

``RequestLookups.is_due`` gathers the facts. A prompt that is due may have to wait for its turn:
``PromptQueue.take_lookup``.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

FAILED_PAUSE_S = 1.0
"""Time for which no lookup of a request is sent after one that failed."""
RENEW_BEFORE_S = 1.0
"""An answer without misses is renewed this long before ``stale_at``."""
REFRESH_S, REFRESH_KEYS = 1.0, 1000
"""Age at which an answer with misses is refreshed; one about more than REFRESH_KEYS chunks at an age that is larger in
proportion."""
MIN_RETRY_PAUSE_S, MAX_RETRY_PAUSE_S, RETRY_SHARE = 0.002, 0.05, 0.02
"""Shortest and longest pause between lookups of blocks being promoted. A request that has waited for long pauses for up
to RETRY_SHARE of that time: reading 8,192 states takes the scheduler milliseconds."""


class LookupFacts(NamedTuple):
    """Facts about a prompt, durations in seconds.

    Attributes:
        is_in_flight: a lookup has no answer yet.
        failed_s: time since its last lookup failed.
        has_answer: it has an answer, whose lease is not about to end.
        may_wait: it may still wait for an answer if it is looked up.
        is_outdated: what the answer lacks was stored since, or the prompt has more chunks by now.
        has_all: all chunks are ready, under a lease.
        awaits_tier: it waits for blocks that come up from tiers, or may begin to.
        until_stale_s: time until ``stale_at`` of the answer.
        until_ask_s: time until ``TierWait.ask_at``.
        answered_s: time since the answer came.
        chunks: number of chunks that the answer is about.
    """

    is_in_flight: bool = False
    failed_s: float = inf
    has_answer: bool = True
    may_wait: bool = True
    is_outdated: bool = False
    has_all: bool = False
    awaits_tier: bool = False
    until_stale_s: float = 0.0
    until_ask_s: float = 0.0
    answered_s: float = 0.0
    chunks: int = 0


def next_lookup_s(facts: LookupFacts) -> float:
    """Return the time until a prompt is looked up, by the table above: 0 or less if it is due, inf if it will not be
    before something changes."""
    if facts.is_in_flight:
        return inf
    if facts.failed_s < FAILED_PAUSE_S:
        return FAILED_PAUSE_S - facts.failed_s
    if not facts.has_answer:
        return 0.0
    if not facts.may_wait:
        return inf
    if facts.is_outdated:
        return 0.0
    if facts.has_all:
        return facts.until_stale_s - RENEW_BEFORE_S
    if facts.awaits_tier:
        return facts.until_ask_s
    return REFRESH_S * max(1.0, facts.chunks / REFRESH_KEYS) - facts.answered_s


def retry_pause_s(waited_s: float, expected_s: float) -> float:
    """Return the time from an answer to the next lookup while blocks come up.

    That is half of the time in which the answer expects them; without an estimate (``expected_s`` is 0) a quarter of
    the time waited so far.
    """
    pause_s = expected_s / 2 if expected_s else waited_s / 4
    longest_s = max(MAX_RETRY_PAUSE_S, RETRY_SHARE * waited_s)
    return min(longest_s, max(MIN_RETRY_PAUSE_S, pause_s))
