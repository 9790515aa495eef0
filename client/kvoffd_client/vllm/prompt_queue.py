"""The prompts that vLLM has not scheduled yet: which of them are looked up ahead.

A prompt waits in one of three ways until it is scheduled:

* behind: it is not looked up, or could not be when its turn came. An answer would pin its blocks for as long as it
  waits, and would be old by the time it runs;
* ahead, in the window: it is looked up, so that a step need not wait for the answer, and waits for no tier. The next
  prompts are there, as many as a few steps compute;
* for a tier, whose blocks come up.

One that was preempted and is not looked up again yet is in none of them. Any of them may be parked in addition
(``ParkedPrompts``).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from kvoffd_client.scheduler_client import LookupFuture
from kvoffd_client.vllm.parked_prompts import MAX_STALE, ParkedPrompts

AHEAD_STEPS = 4
"""Steps whose prompts are looked up ahead."""
MIN_AHEAD, MAX_AHEAD = 2, 256
"""Fewest and most prompts that are looked up ahead."""
MAX_LOOKED_UP = 4096
"""Most prompts that are looked up, those that wait for a tier included: each may hold a lease, and pin blocks."""
ASKED_AT_ONCE = 32
"""Most prompts behind the window that are looked up in one step, because vLLM came to them."""
ASKED_KEYS = 8192
"""Once these have this many keys, no further one is looked up in this step."""


class InWindow(NamedTuple):
    """A prompt that is ahead."""

    tokens: int
    priority: int


NOT_AHEAD = InWindow(0, 0)


class PromptQueue:
    """Prompts that are not scheduled, by the id of their request.

    Args:
        step_tokens: most tokens that a step computes.
        by_priority: whether vLLM schedules by priority, the lowest number first, and not in the order of arrival.

    Attributes:
        parked: those that a step passes over.
    """

    def __init__(self, step_tokens: int, *, by_priority: bool) -> None:
        self.parked = ParkedPrompts(by_priority=by_priority)
        self._most_window_tokens, self._by_priority = AHEAD_STEPS * step_tokens, by_priority
        self._arrivals = count()
        self._behind: set[str] = set()
        """Prompts that are not looked up yet."""
        self._order: list[tuple[int, int, str]] = []
        """Heap of those of them that were not taken, and of some that have left, by priority and arrival."""
        self._window: dict[str, InWindow] = {}
        """Prompts that are ahead, in the order in which they entered."""
        self._window_tokens = 0
        self._awaiting_tier: set[str] = set()
        """Prompts that were looked up and wait for a tier."""
        self._lookups_left, self._keys_left = ASKED_AT_ONCE, ASKED_KEYS
        """Prompts behind the window, and keys, that may still be looked up in this step."""

    def begin_step(self) -> None:
        """Let ASKED_AT_ONCE prompts behind the window be looked up, and some that are parked be woken, until the next
        step begins."""
        self._lookups_left, self._keys_left = ASKED_AT_ONCE, ASKED_KEYS
        self.parked.begin_step()

    def add(self, request_id: str, priority: int) -> None:
        """Add a prompt that has arrived."""
        self._behind.add(request_id)
        heappush(self._order, (priority if self._by_priority else 0, next(self._arrivals), request_id))
        if len(self._order) > 2 * len(self._behind) + MAX_STALE:
            self._order = sorted([entry for entry in self._order if entry[2] in self._behind])

    def remove(self, request_id: str) -> None:
        """Remove a prompt that is scheduled, or has ended."""
        self._behind.discard(request_id)
        self._window_tokens -= self._window.pop(request_id, NOT_AHEAD).tokens
        self._awaiting_tier.discard(request_id)
        self.parked.wake_one(request_id)

    @property
    def has_waiting(self) -> bool:
        """Whether some prompt is not scheduled."""
        return bool(self._behind or self._window or self._awaiting_tier or self.parked)

    @property
    def is_full(self) -> bool:
        """Whether no more prompts may be looked up."""
        return len(self._window) + len(self._awaiting_tier) >= MAX_LOOKED_UP

    # --- the window --------------------------------------------------------------------------------

    @property
    def has_space(self) -> bool:
        """Whether one more prompt may be looked up ahead."""
        if self.is_full:
            return False
        few = len(self._window) < MIN_AHEAD
        return few or (len(self._window) < MAX_AHEAD and self._window_tokens < self._most_window_tokens)

    def outranks(self, priority: int) -> bool:
        """Return whether vLLM schedules a prompt of this priority before one of the window."""
        return self._by_priority and any(priority < other.priority for other in self._window.values())

    def take_next(self) -> str | None:
        """Return the first prompt behind the window that was not taken before; None if there is none.

        One that cannot be looked up then stays behind, and is looked up when vLLM comes to it (``take_lookup``).
        """
        while self._order:
            _, _, request_id = heappop(self._order)
            if request_id in self._behind:
                return request_id
        return None

    def enter_window(self, request_id: str, tokens: int, priority: int, future: LookupFuture) -> None:
        """Record that a prompt was looked up. If it is parked, this answer wakes it."""
        self._behind.discard(request_id)
        self._window_tokens += tokens - self._window.get(request_id, NOT_AHEAD).tokens
        self._window[request_id] = InWindow(tokens, priority)
        self._awaiting_tier.discard(request_id)
        self.parked.await_answer(request_id, future)

    def wait_for_tier(self, request_id: str) -> None:
        """Record that a prompt waits for a tier: it takes no place in the window."""
        self._window_tokens -= self._window.pop(request_id, NOT_AHEAD).tokens
        self._awaiting_tier.add(request_id)

    def first_ahead(self, most: int) -> Iterator[str]:
        """Yield those of the first ``most`` prompts of the window that are not parked."""
        return (request_id for request_id in [*islice(self._window, most)] if request_id not in self.parked)

    # --- lookups behind the window -----------------------------------------------------------------

    def take_lookup(self, request_id: str, keys: int) -> bool:
        """Take one of the step's lookups for a prompt of this many keys. Return whether it may be looked up now.

        A prompt behind the window may be if few others were in this step: vLLM came to it, so what is before it in the
        queue may not run, or vLLM's order is another one. Others always may.
        """
        if request_id not in self._behind or self.has_space:
            return True
        if not self._lookups_left or self._keys_left <= 0 or self.is_full:
            return False
        self._lookups_left -= 1
        self._keys_left -= keys
        return True

    def wake_for_lookups(self) -> None:
        """Wake as many of the parked prompts that wait until they may be looked up as still may be in this step."""
        keys_left = self._keys_left  # take_lookup() takes them when vLLM comes to the prompts
        for request_id, keys in [*islice(self.parked.for_lookups.items(), self._lookups_left)]:
            if keys_left <= 0:
                break
            keys_left -= keys
            self.parked.wake_one(request_id)

    @property
    def next_step_wakes(self) -> bool:
        """Whether the next step will wake some of the parked prompts: they are due, or may be looked up."""
        return self.parked.has_due or (bool(self.parked.for_lookups) and not self.is_full)
