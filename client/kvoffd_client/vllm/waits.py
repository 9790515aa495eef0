"""Waits of prompts, for answers to their lookups and for blocks that are being promoted: arithmetic, no waiting.

| class | one for each | says |
|---|---|---|
| ``LookupWait`` | prompt | since when it waits for an answer, and when that is late |
| ``TierWait`` | prompt | whether and until when it waits for blocks that come up, and when it asks again |
| ``AnswerWait`` | engine | how long a prompt may wait for an answer, and the scheduler in a step |
| ``EngineClock`` | engine | the time by which prompts wait |

A prompt's two are its ``PromptWait`` (request_state.py). ``PromptWaits`` uses them all; ``next_wait`` and
``next_lookup_s`` decide.

Times of ``LookupWait`` and ``TierWait`` are by ``EngineClock``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kvoffd_client.vllm.next_lookup import MIN_RETRY_PAUSE_S

LOOKUP_WAIT_S = 0.001
"""Time that the scheduler waits for answers in one step, for all its new requests together."""
IDLE_WAIT_S = 0.005
"""The same if no request ran in the previous step: without an answer an idle engine would run an empty step, after
which vLLM sleeps for a millisecond."""
MIN_COMPUTED_S = 0.02
"""Least time assumed for computing a prompt."""
LATE_REPLIES = 3
"""Consecutive answers that took longer than a prompt may wait, after which the next prompts do not wait."""
ANSWER_SHARE = 0.1
"""A prompt waits for an answer for this share of its compute time, if that is more than the deadline: on a busy machine
answers are late. A daemon that hangs costs this a few times, see LATE_REPLIES."""
DOUBT_SHARE = 0.03
"""A request waits for a tier for this share of its longest wait although that seems not worth it: the first estimates
of a tier's speed may be far off."""
ASK_SHARE, MAX_ASK_S = 0.1, 0.25
"""The same for a shared store that has not said what it has: the share, and the most seconds."""
WAIT_PAUSE_S = 0.1
"""Time without waits after a step's whole wait got no answer. So a daemon that hangs costs 1 % of an engine's time, 5 %
of an idle one's, until it counts as not connected."""
STANDSTILL_S, MAX_STOOD_STILL_S = 0.05, 5.0
"""Longest normal time between two readings of an idle engine's clock. If it is longer, probably neither engine nor
daemon had a CPU; the excess does not count as waited, up to MAX_STOOD_STILL_S until nobody waits any more."""
LONG_AGO = -inf


class EngineClock:
    """Time by which an engine's prompts wait. It stops while an idle engine stands still.

    Args:
        clock: clock such as time.monotonic().

    Attributes:
        is_idle: whether no request ran in the previous step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at = LONG_AGO
        self._behind_s = 0.0
        """Time that was left out so far."""
        self._left_s = MAX_STOOD_STILL_S
        """Time that may still be left out, until nobody waits any more."""
        self.is_idle = True

    def read(self) -> float:
        """Return the time, and leave out what the engine stood still since the last reading."""
        before, self._read_at = self._read_at, self._clock()
        still_s = min(self._read_at - before - STANDSTILL_S, self._left_s)
        if self.is_idle and still_s > 0:
            self._left_s -= still_s
            self._behind_s += still_s
        return self._read_at - self._behind_s

    def begin_step(self, *, is_idle: bool) -> None:
        """Begin a step, in which no request runs if it ``is_idle``. The time until now is the last step's."""
        self.read()
        self.is_idle = is_idle

    def begin_wait(self, *, is_first: bool) -> None:
        """Begin a prompt's wait, of which the time until now is no part. If it ``is_first``, because nobody waits, up
        to MAX_STOOD_STILL_S are left out again."""
        self.read()
        if is_first:
            self._left_s = MAX_STOOD_STILL_S


class AnswerWait:
    """Waits for answers, over all of an engine's prompts.

    Args:
        deadline_s: a lookup without an answer by then is a miss.
        do_no_harm: a prompt waits no longer than computing takes, and not if the last answers were late.

    Attributes:
        left_s: time that the scheduler may still wait in this step.
    """

    def __init__(self, deadline_s: float, *, do_no_harm: bool) -> None:
        self._deadline_s, self._do_no_harm = deadline_s, do_no_harm
        self._replies_s: deque[float] = deque(maxlen=LATE_REPLIES)
        """Durations of the last answers, or of the wait for those given up."""
        self._suspended_until = LONG_AGO
        self.left_s = IDLE_WAIT_S

    def begin_step(self, *, is_idle: bool) -> None:
        self.left_s = IDLE_WAIT_S if is_idle else LOOKUP_WAIT_S

    def take_pause(self) -> float:
        """Return how long an idle engine may pause when no answer is awaited, and take that from the step's time."""
        pause_s = max(0.0, min(self.left_s, MIN_RETRY_PAUSE_S))
        self.left_s -= pause_s
        return pause_s

    def may_wait(self, now: float) -> bool:
        """Return whether the scheduler may wait for an answer now."""
        return self.left_s > 0 and now >= self._suspended_until

    def record_wait(self, began: float, now: float, *, answered: bool) -> bool:
        """Record that the scheduler waited. Return whether that timed out; then it does not wait for WAIT_PAUSE_S.

        A wait that is shorter than LOOKUP_WAIT_S, because others took the step's time, says nothing of the daemon.
        """
        timed_out = not answered and self.left_s >= LOOKUP_WAIT_S
        self.left_s -= now - began
        if timed_out:
            self._suspended_until = now + WAIT_PAUSE_S
        return timed_out

    def record_reply(self, seconds: float) -> None:
        self._replies_s.append(seconds)

    def allowed_s(self, computed_s: float) -> float:
        """Return the longest wait for an answer, from the sending of its lookup: the deadline, or ANSWER_SHARE of
        computing a long prompt, but no longer than computing takes; 0 if all of the daemon's last answers took longer.
        """
        if not self._do_no_harm:
            return self._deadline_s
        allowed_s = min(max(self._deadline_s, ANSWER_SHARE * computed_s), computed_s)
        late = len(self._replies_s) == LATE_REPLIES and min(self._replies_s) > allowed_s
        return 0.0 if late else allowed_s


@dataclass(slots=True, eq=False)
class LookupWait:
    """One request's wait for the answers to its lookups. All that follow one another while vLLM cannot scan it have one
    deadline: each answer may be outdated when it comes, while others store what it lacks.

    Attributes:
        since: time since which vLLM could not scan it for want of an answer; None while it can.
        late_at: time at which the answer that it waits for is late.
        waits_no_more: it waited too long to be looked up, because too many others were, and waits for no answer any
            more.
    """

    since: float | None = None
    late_at: float = inf
    waits_no_more: bool = False

    def begin(self, now: float) -> float:
        """Begin to wait, unless it does. Return the time since which it waits."""
        if self.since is None:
            self.since = now
        return self.since

    def set_late_at(self, sent_at: float, allowed_s: float, *, earliest: float) -> None:
        """Set when the answer to a lookup is late: once the request has waited for ``allowed_s``, but not before
        ``earliest``.

        The time begins with the first lookup that the request waits for. But each has a moment of its own: vLLM may not
        have come to the request for a while.
        """
        since = sent_at if self.since is None else min(self.since, sent_at)
        self.late_at = max(since + allowed_s, sent_at + min(allowed_s, MIN_COMPUTED_S), earliest)


@dataclass(slots=True, eq=False)
class TierWait:
    """One request's wait for blocks that are being promoted.

    Attributes:
        began: time when it began; None before.
        until: its latest end.
        doubted_since: time since which it is not known to be worth it; None while it is.
        is_awaited: the request waits for blocks of its present answer. Not while that has none, or the daemon cannot be
            asked again: then it is scanned without, and may wait again later.
        has_ended: it waits no more, also for those of later answers.
        ask_at: time of the next lookup, ``retry_pause_s`` after the answer.
        judge_at: time when the wait ends if nothing changes.
    """

    began: float | None = None
    until: float = inf
    doubted_since: float | None = None
    is_awaited: bool = False
    has_ended: bool = False
    ask_at: float = LONG_AGO
    judge_at: float = inf

    def judge(
        self,
        now: float,
        *,
        longest_s: float,
        is_worth_it: bool,
        is_estimated: bool,
        asks_store: bool,
        next_answer_comes: bool,
    ) -> None:
        """Begin, continue or end the wait. It begins in doubt.

        | if | it ends |
        |---|---|
        | ``next_answer_comes`` | not now |
        | else it is not worth it, and ``asks_store`` | ASK_SHARE of its longest time after the doubt began |
        | else it is not worth it | DOUBT_SHARE of its longest time after the doubt began |
        | else | at ``until`` |

        Args:
            longest_s: its longest time, by which it begins; later ones do not count.
            is_estimated: the daemon said when the blocks come. Only then a wait that is worth it ends a doubt.
            asks_store: all that comes depends on what a shared store will say.
            next_answer_comes: an answer is awaited that shows what was promoted during a step.
        """
        if self.began is None:
            self.began = self.doubted_since = now
            self.until = now + longest_s
        if not is_worth_it:
            self.doubted_since = now if self.doubted_since is None else self.doubted_since
        elif is_estimated:
            self.doubted_since = None
        if next_answer_comes:
            self.is_awaited = True
            return
        longest_s = self.until - self.began
        doubt_s = max(MIN_COMPUTED_S, DOUBT_SHARE * longest_s)
        if asks_store:
            doubt_s = max(doubt_s, min(MAX_ASK_S, ASK_SHARE * longest_s))
        self.judge_at = self.until
        if not is_worth_it and self.doubted_since is not None:
            self.judge_at = min(self.until, self.doubted_since + doubt_s)
        self.has_ended = now >= self.judge_at
        self.is_awaited = not self.has_ended
