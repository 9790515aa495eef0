"""The next wait of a prompt that vLLM has not scheduled, for what and until when: decided by facts, no side effects.

The first row that applies counts. "An answer comes": a lookup is in flight, and was not given up.

| facts | it waits for | at the latest until |
|---|---|---|
| an answer comes, and it waits for a tier | TIER, or STORE | ``late_at``; for STORE not before ``judge_at`` |
| an answer comes, and it needs one | ANSWER | ``late_at`` |
| its scan was deferred, and it waits for a tier | TIER | ``ask_at`` or ``judge_at``, whichever is first |
| the same, and a store is being asked | STORE | ``judge_at``: when to ask again the first of all askers decides |
| its scan was deferred, and it was preempted | NOTHING: it waits for its own stores, whose end wakes nobody | |
| its scan was deferred | LOAD | ``LOAD_PAUSE_S`` |
| else | NOTHING | |

``PromptWaits`` gathers the facts and obeys. That a prompt must wait for its turn to be looked up is known before there
are any: ``PromptQueue.take_lookup``. Whether a wait for a tier is worth it: ``TierWait.judge``.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf
from typing import NamedTuple

LOAD_PAUSE_S = 0.05
"""Longest time for which a request that waits for another one's load is not scanned."""


class AwaitedEvent(Enum):
    """The event that ends a prompt's wait before its time."""

    NOTHING = auto()
    """It does not wait."""
    ANSWER = auto()
    """The answer to its lookup."""
    TIER = auto()
    """The same, or that it is to be looked up again; after that its turn among all that wait for tiers."""
    STORE = auto()
    """As TIER; it is looked up again with all others for which a shared store is being asked."""
    LOAD = auto()
    """The end of another prompt's load, perhaps of the same blocks."""


class WaitFacts(NamedTuple):
    """Facts about a prompt. Times are by ``EngineClock``.

    Attributes:
        now: the time.
        answer_comes: a lookup is in flight, and was not given up.
        needs_answer: it has no answer, one that is known to be old, or none about its tails.
        awaits_tier: it waits for blocks of its answer that come up from tiers (``TierWait.is_awaited``).
        asks_store: the answer says that a shared store is being asked for some of its keys.
        scan_deferred: vLLM's scan of its answer said that it must wait.
        was_preempted: it ran before.
        late_at: when the answer that comes is late.
        ask_at: when it is to be looked up again for what comes up.
        judge_at: when its wait for a tier ends if nothing changes.
    """

    now: float
    answer_comes: bool = False
    needs_answer: bool = False
    awaits_tier: bool = False
    asks_store: bool = False
    scan_deferred: bool = False
    was_preempted: bool = False
    late_at: float = inf
    ask_at: float = -inf
    judge_at: float = inf


class NextWait(NamedTuple):
    """The event that a prompt waits for, and the time at which vLLM comes to it again in any case."""

    event: AwaitedEvent
    until: float


NO_WAIT = NextWait(AwaitedEvent.NOTHING, -inf)


def next_wait(facts: WaitFacts) -> NextWait:
    """Return what a prompt waits for now, and until when, by the table above."""
    if facts.answer_comes and (facts.needs_answer or facts.awaits_tier):
        until = facts.late_at
    elif facts.scan_deferred and facts.awaits_tier:
        until = min(facts.ask_at, facts.judge_at)
    elif facts.scan_deferred and not facts.was_preempted:
        return NextWait(AwaitedEvent.LOAD, facts.now + LOAD_PAUSE_S)
    else:
        return NO_WAIT
    if not facts.awaits_tier:
        return NextWait(AwaitedEvent.ANSWER, until)
    if facts.asks_store:
        return NextWait(AwaitedEvent.STORE, max(until, facts.judge_at))
    return NextWait(AwaitedEvent.TIER, until)
