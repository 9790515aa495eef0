"""How long a lookup's answer is waited for: never longer than computing the prompt takes, and less after late ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvoffd_client.scheduler_client import Lookup
from kvoffd_client.vllm.do_no_harm import PrefillRate

ASSUMED_RATE = 10_000.0
"""Tokens a second that an engine is taken to compute while its prefill rate is not known, as for its first prompts. A
guess, for a large GPU; a slower engine waits less than it might."""
LEAST_UNKNOWN_S = 0.02
"""The least allowance while the rate is not known."""
LEAST_SHARE = 1 / 16
"""Late answers reduce the allowance to this share at least: a daemon that hangs costs so much of the computing."""
STEP = 1 / 8
"""What each answer in time adds to the share."""
LENGTHS = 32
"""Prompts differ by their length, in powers of two of tokens."""
MAX_GIVEN_UP = 64


@dataclass(frozen=True, slots=True)
class _GivenUp:
    ticket: Lookup
    tokens: int
    sent_at: float
    late_at: float


class LookupAllowance:
    """The time for which an answer is waited for, from the sending of its lookup.

    It is a share of the time that the engine needs to compute the prompt's tokens, and ``deadline_s`` at most. A step
    with few tokens takes the least.

    The share begins at 1. An answer is late where computing was faster; it halves the share, for prompts of its length
    and shorter ones, once for all that were on their way together. An answer in time adds an eighth, for prompts of its
    length and longer ones.

    An answer that is given up and then comes in time counts as one in time, so the share recovers by itself.

    Where it is not ``active`` the allowance is always ``deadline_s``. For the scheduler's thread.
    """

    def __init__(
        self, prefill: PrefillRate, deadline_s: float, clock: Callable[[], float], *, active: bool = True
    ) -> None:
        self.prefill = prefill
        self._deadline_s = deadline_s
        self._clock = clock
        self.active = active
        self._shares = [1.0] * LENGTHS
        self._halved_at = [float("-inf")] * LENGTHS
        self._given_up: deque[_GivenUp] = deque(maxlen=MAX_GIVEN_UP)

    def full_s(self, tokens: int) -> float:
        """The allowance for so many tokens that must be computed otherwise, without late answers."""
        if not self.active:
            return self._deadline_s
        if (rate := self.prefill.tokens_per_second) and tokens:
            computed_s = max(self.prefill.step_s, tokens / rate)
        else:
            computed_s = max(LEAST_UNKNOWN_S, tokens / ASSUMED_RATE)
        return min(self._deadline_s, computed_s)

    def seconds_for(self, tokens: int) -> float:
        """The allowance for so many tokens now."""
        share = self._shares[_length(tokens)] if self.active else 1.0
        return share * self.full_s(tokens)

    def answered(self, tokens: int) -> None:
        """Note an answer in time."""
        for length in range(_length(tokens), LENGTHS):
            self._shares[length] = min(1.0, self._shares[length] + STEP)

    def give_up(self, ticket: Lookup, sent_at: float, tokens: int) -> None:
        """Note that an answer is waited for no longer. It may still come in time."""
        self._given_up.append(_GivenUp(ticket, tokens, sent_at, sent_at + self.full_s(tokens)))
        self.settle()

    def settle(self) -> None:
        """Find out which answers that were given up came in time, and which are late."""
        now = self._clock()
        for _ in range(len(self._given_up)):
            one = self._given_up.popleft()
            if not one.ticket.done and now < one.late_at:
                self._given_up.append(one)
            elif one.ticket.done and not one.ticket.failed and one.ticket.answered_at < one.late_at:
                self.answered(one.tokens)
            else:
                self._late(one, now)

    def _late(self, one: _GivenUp, now: float) -> None:
        for length in range(_length(one.tokens) + 1):
            if one.sent_at >= self._halved_at[length]:
                self._shares[length] = max(LEAST_SHARE, self._shares[length] / 2)
                self._halved_at[length] = now


def _length(tokens: int) -> int:
    return min(tokens.bit_length(), LENGTHS - 1)
