"""The prompts that vLLM has not scheduled yet: which of them are looked up ahead, and which a step can pass over.

A prompt waits in one of three ways until it is scheduled:

* behind: it is not looked up. An answer would pin its blocks for as long as it waits, and would be old by the time it
  runs;
* ahead, in the window: it is looked up, so that a step need not wait for the answer, and waits for no tier. The next
  prompts are there, as many as a few steps compute;
* for a tier, whose blocks come up.

One that cannot be looked up, or was preempted and is not looked up again yet, is in none of them.

Any of them may be parked in addition. vLLM asks for each prompt that waits again in each step, and passes over a parked
one until an answer comes, it may be looked up, a load ends, its time comes, or vLLM's own cache has another part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import NamedTuple

from kvoffd_client.scheduler_client import LookupFuture

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
JUDGED_AT_ONCE = 4
"""Prompts waiting for a tier that one step looks at again: each takes 50 to 100 µs. The others follow in turns."""
MAX_STALE = 1024
"""Entries of a heap, over two for each parked prompt, before it is rebuilt without those that were woken."""


class InWindow(NamedTuple):
    """A prompt that is ahead."""

    tokens: int
    priority: int


NOT_AHEAD = InWindow(0, 0)


@dataclass(slots=True, eq=False)
class Parked:
    """A prompt that a step passes over.

    Attributes:
        own_tokens: tokens that vLLM's own cache had when it was parked. With another number it is not passed over.
        until: time, by the engine's clock, at which it is looked at again.
        future: an answer that wakes it; None for none.
        in_turns: its time or answer does not wake it, but makes it due. A step wakes JUDGED_AT_ONCE of those that are
            due: first the one that is due for longest, then the most urgent.
        priority: vLLM's priority of one that is in turns.
        is_due: its time or answer has come, and it waits for its turn.
        ask_order: number of the prompt, if a shared store is being asked for its keys; else None. When the first of
            these is to be looked up again, all become due, in the order of their numbers: a store's blocks are
            promoted in that order.
        ask_at: time at which such a prompt is to be looked up again.
        for_load: the end of a load wakes it.
        lookup_keys: number of its keys, if it waits until it may be looked up; else 0.
    """

    own_tokens: int
    until: float
    future: LookupFuture | None = None
    in_turns: bool = False
    priority: int = 0
    is_due: bool = False
    ask_order: int | None = None
    ask_at: float = 0.0
    for_load: bool = False
    lookup_keys: int = 0


class PromptQueue:
    """Prompts that are not scheduled, by the id of their request.

    Args:
        step_tokens: most tokens that a step computes.
        by_priority: whether vLLM schedules by priority, the lowest number first, and not in the order of arrival.
    """

    def __init__(self, step_tokens: int, *, by_priority: bool) -> None:
        self._most_window_tokens, self._by_priority = AHEAD_STEPS * step_tokens, by_priority
        self._arrivals = count()
        self._behind: set[str] = set()
        """Prompts that are not looked up yet."""
        self._order: list[tuple[int, int, str]] = []
        """Heap of these, and of some that have left ``_behind``, by priority and arrival."""
        self._window: dict[str, InWindow] = {}
        """Prompts that are ahead, in the order in which they entered."""
        self._window_tokens = 0
        self._awaiting_tier: set[str] = set()
        """Prompts that were looked up and wait for a tier."""
        self._for_lookups: dict[str, int] = {}
        """``lookup_keys`` of the parked prompts that wait until they may be looked up, the first one first."""
        self._parked: dict[str, Parked] = {}
        self._by_time: list[tuple[float, int, str, Parked]] = []
        """Heap of the parked that are not in turns, and of some that were woken, by ``until``."""
        self._not_due: list[tuple[float, int, str, Parked]] = []
        """The same of those in turns that are not due."""
        self._due: list[tuple[float, int, str, Parked]] = []
        """Heap of those in turns that are due, and of some that were woken, by priority and the order in which they
        became due."""
        self._due_since: dict[str, None] = {}
        """Those that are due, in the order in which they became due."""
        self._for_answers: dict[str, Parked] = {}
        """Parked prompts that an answer wakes."""
        self._for_loads: dict[str, None] = {}
        """Parked prompts that the end of a load wakes."""
        self._asking: dict[str, int] = {}
        """``ask_order`` of the parked prompts that ask what a shared store has."""
        self._lookups_left, self._keys_left = ASKED_AT_ONCE, ASKED_KEYS
        """Prompts behind the window, and keys, that may still be looked up in this step."""
        self._turns_left = JUDGED_AT_ONCE
        """Prompts in turns that may still be woken in this step."""

    # --- the window ------------------------------------------------------------------------------

    def add(self, request_id: str, priority: int) -> None:
        """Add a prompt that has arrived."""
        self._behind.add(request_id)
        heappush(self._order, (priority if self._by_priority else 0, next(self._arrivals), request_id))
        if len(self._order) > 2 * len(self._behind) + MAX_STALE:
            self._order = sorted([entry for entry in self._order if entry[2] in self._behind])

    @property
    def has_space(self) -> bool:
        """Whether one more prompt may be looked up ahead."""
        if self.is_full:
            return False
        few = len(self._window) < MIN_AHEAD
        return few or (len(self._window) < MAX_AHEAD and self._window_tokens < self._most_window_tokens)

    @property
    def is_full(self) -> bool:
        """Whether no more prompts may be looked up."""
        return len(self._window) + len(self._awaiting_tier) >= MAX_LOOKED_UP

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

    def outranks(self, priority: int) -> bool:
        """Return whether vLLM schedules a prompt of this priority before one of the window."""
        return self._by_priority and any(priority < other.priority for other in self._window.values())

    def take_next(self) -> str | None:
        """Take the first prompt that is not looked up; None if there is none."""
        while self._order:
            request_id = heappop(self._order)[2]
            if request_id in self._behind:
                self._behind.remove(request_id)
                return request_id
        return None

    def enter_window(self, request_id: str, tokens: int, priority: int, future: LookupFuture) -> None:
        """Record that a prompt was looked up. If it is parked, this answer wakes it."""
        self._behind.discard(request_id)
        self._window_tokens += tokens - self._window.get(request_id, NOT_AHEAD).tokens
        self._window[request_id] = InWindow(tokens, priority)
        self._awaiting_tier.discard(request_id)
        self._for_lookups.pop(request_id, None)
        if (parked := self._parked.get(request_id)) is not None:
            parked.future = future
            self._for_answers[request_id] = parked

    def wait_for_tier(self, request_id: str) -> None:
        """Record that a prompt waits for a tier: it takes no place in the window."""
        self._window_tokens -= self._window.pop(request_id, NOT_AHEAD).tokens
        self._awaiting_tier.add(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a prompt that is scheduled, or has ended."""
        self._behind.discard(request_id)
        self._window_tokens -= self._window.pop(request_id, NOT_AHEAD).tokens
        self._awaiting_tier.discard(request_id)
        self._unpark(request_id)

    # --- parked prompts --------------------------------------------------------------------------

    def park(self, request_id: str, parked: Parked) -> None:
        """Pass over a prompt from now on."""
        self._unpark(request_id)
        self._parked[request_id] = parked
        if parked.ask_order is not None:
            self._asking[request_id] = parked.ask_order
        if parked.future is not None:
            self._for_answers[request_id] = parked
        if parked.for_load:
            self._for_loads[request_id] = None
        if parked.lookup_keys:
            self._for_lookups[request_id] = parked.lookup_keys
        self._push(self._not_due if parked.in_turns else self._by_time, parked.until, request_id, parked)

    def _push(self, heap: list[tuple[float, int, str, Parked]], key: float, request_id: str, parked: Parked) -> None:
        """Add a parked prompt to a heap, behind those of the same key."""
        heappush(heap, (key, next(self._arrivals), request_id, parked))
        if len(heap) > 2 * len(self._parked) + MAX_STALE:
            heap[:] = sorted([entry for entry in heap if self._parked.get(entry[2]) is entry[3]])

    def is_parked(self, request_id: str, own_tokens: int) -> bool:
        """Return whether a prompt is passed over, of which vLLM's own cache has ``own_tokens``."""
        parked = self._parked.get(request_id)
        return parked is not None and parked.own_tokens == own_tokens

    @property
    def has_waiting(self) -> bool:
        """Whether some prompt is not scheduled."""
        return bool(self._behind or self._window or self._awaiting_tier or self._parked)

    @property
    def has_parked(self) -> bool:
        return bool(self._parked)

    @property
    def first_awaited(self) -> LookupFuture | None:
        """The answer that the first of the parked prompts waits for."""
        return next((parked.future for parked in self._for_answers.values()), None)

    @property
    def has_work(self) -> bool:
        """Whether the next step will wake some of the parked prompts: they are due, or may be looked up."""
        return bool(self._due_since) or (bool(self._for_lookups) and not self.is_full)

    def begin_step(self) -> None:
        """Let JUDGED_AT_ONCE prompts in turns be woken, and ASKED_AT_ONCE be looked up, until the next step begins."""
        self._turns_left, self._lookups_left, self._keys_left = JUDGED_AT_ONCE, ASKED_AT_ONCE, ASKED_KEYS

    def wake_for_lookups(self) -> None:
        """Wake as many of the prompts that wait until they may be looked up as still may be in this step."""
        keys_left = self._keys_left  # take_lookup() takes them when vLLM comes to the prompts
        for request_id, keys in [*islice(self._for_lookups.items(), self._lookups_left)]:
            if keys_left <= 0:
                break
            keys_left -= keys
            self._unpark(request_id)

    def wake(self, now: float) -> None:
        """Wake the prompts whose time or answer has come; of those in turns JUDGED_AT_ONCE in a step at most."""
        waiting = self._for_answers.items()
        answered = [(request_id, one) for request_id, one in waiting if one.future is not None and one.future.done]
        for request_id, parked in answered:
            if parked.in_turns:
                self._make_due(request_id, parked)
            else:
                self._unpark(request_id)
        while self._by_time and self._by_time[0][0] <= now:
            self._wake_entry(heappop(self._by_time))
        self._make_askers_due(now)
        while self._not_due and self._not_due[0][0] <= now:
            _, _, request_id, parked = heappop(self._not_due)
            if self._parked.get(request_id) is parked:
                self._make_due(request_id, parked)
        # The step's first turn is not by priority, so that urgent prompts cannot take all turns for ever.
        if self._due_since and self._turns_left == JUDGED_AT_ONCE:
            self._turns_left -= self._unpark(next(iter(self._due_since)))
        while self._turns_left and self._due_since:
            self._turns_left -= self._wake_entry(heappop(self._due))

    def _make_due(self, request_id: str, parked: Parked) -> None:
        """Have a parked prompt wait for its turn, unless it does."""
        if not parked.is_due:
            parked.is_due = True
            self._due_since[request_id] = None
            self._for_answers.pop(request_id, None)
            self._push(self._due, parked.priority if self._by_priority else 0, request_id, parked)

    def _make_askers_due(self, now: float) -> None:
        """Make the prompts due that ask a store and await no answer, all of them once the first one is to ask again."""
        askers = [request_id for request_id in self._asking if not self._parked[request_id].is_due]
        askers.sort(key=self._asking.__getitem__)
        if askers and (first := self._parked[askers[0]]).future is None and first.ask_at <= now:
            for request_id in askers:
                if (parked := self._parked[request_id]).future is None:
                    self._make_due(request_id, parked)

    def _wake_entry(self, entry: tuple[float, int, str, Parked]) -> bool:
        """Wake the prompt of a heap's entry, unless it was woken since. Return whether it was parked."""
        _, _, request_id, parked = entry
        return self._parked.get(request_id) is parked and self._unpark(request_id)

    def wake_all(self) -> None:
        for request_id in [*self._parked]:
            self._unpark(request_id)

    def load_ended(self) -> None:
        """Wake the prompts that wait for the end of a load."""
        for request_id in [*self._for_loads]:
            self._unpark(request_id)

    def _unpark(self, request_id: str) -> bool:
        """Wake a prompt. Return whether it was parked."""
        self._for_answers.pop(request_id, None)
        self._for_loads.pop(request_id, None)
        self._for_lookups.pop(request_id, None)
        self._asking.pop(request_id, None)
        self._due_since.pop(request_id, None)
        return self._parked.pop(request_id, None) is not None

    def first_ahead(self, most: int) -> Iterator[str]:
        """Yield those of the first ``most`` prompts of the window that are not parked."""
        return (request_id for request_id in [*islice(self._window, most)] if request_id not in self._parked)
