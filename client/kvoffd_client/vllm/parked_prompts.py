"""Prompts that a step passes over, and what wakes each of them.

vLLM asks for each prompt that waits again in each step, and passes over a parked one until an answer comes, it may be
looked up, a load ends, its time comes, or vLLM's own cache has another part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from kvoffd_client.scheduler_client import LookupFuture

JUDGED_AT_ONCE = 4
"""Prompts waiting for a tier that one step looks at again: each takes 50 to 100 µs. The others follow in turns."""
MAX_STALE = 1024
"""Entries of a heap, over two for each prompt in it, before it is rebuilt without those that have left."""


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


class Entry(NamedTuple):
    """Entry of a heap. That of a prompt that was woken stays until it is first, or the heap is rebuilt."""

    key: float
    number: int
    request_id: str
    parked: Parked


class ParkedPrompts:
    """The parked prompts, by the id of their request.

    | it waits | kept in, besides ``_parked`` | woken by |
    |---|---|---|
    | for any of these, no longer than ``until`` | ``_by_time`` | ``wake`` |
    | for an answer | ``_for_answers`` | ``wake``, if the answer has come |
    | until it may be looked up | ``for_lookups`` | ``PromptQueue.wake_for_lookups`` |
    | for the end of another one's load | ``_for_loads`` | ``load_ended`` |
    | for a tier, in turns with others | ``_not_due``, not ``_by_time``; then ``_due`` | ``wake``, a few in a step |
    | for a shared store that is being asked | as for a tier, and ``_asking`` | as for a tier |

    Args:
        by_priority: whether vLLM schedules by priority, the lowest number first, and not in the order of arrival.

    Attributes:
        for_lookups: ``lookup_keys`` of those that wait until they may be looked up, the first one first.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._numbers = count()
        self._parked: dict[str, Parked] = {}
        self._by_time: list[Entry] = []
        """Heap of those that are not in turns, by ``until``."""
        self._not_due: list[Entry] = []
        """Heap of those in turns that are not due, by ``until``."""
        self._due: list[Entry] = []
        """Heap of those that are due, by priority and the order in which they became due."""
        self._due_since: dict[str, None] = {}
        """Those that are due, in the order in which they became due."""
        self._for_answers: dict[str, Parked] = {}
        """Those that an answer wakes."""
        self._for_loads: dict[str, None] = {}
        """Those that the end of a load wakes."""
        self._asking: dict[str, int] = {}
        """``ask_order`` of those that have one."""
        self.for_lookups: dict[str, int] = {}
        self._turns_left = JUDGED_AT_ONCE
        """Prompts that are due that may still be woken in this step."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parked

    def __len__(self) -> int:
        return len(self._parked)

    def is_parked(self, request_id: str, own_tokens: int) -> bool:
        """Return whether a prompt is passed over, of which vLLM's own cache has ``own_tokens``."""
        parked = self._parked.get(request_id)
        return parked is not None and parked.own_tokens == own_tokens

    @property
    def first_awaited(self) -> LookupFuture | None:
        """The answer that the first of the prompts waits for; None if none does."""
        return next((parked.future for parked in self._for_answers.values()), None)

    @property
    def has_due(self) -> bool:
        """Whether some wait only for their turn in one of the next steps."""
        return bool(self._due_since)

    # --- parking -----------------------------------------------------------------------------------

    def park(self, request_id: str, parked: Parked) -> None:
        """Pass over a prompt from now on."""
        self.wake_one(request_id)
        self._parked[request_id] = parked
        if parked.ask_order is not None:
            self._asking[request_id] = parked.ask_order
        if parked.future is not None:
            self._for_answers[request_id] = parked
        if parked.for_load:
            self._for_loads[request_id] = None
        if parked.lookup_keys:
            self.for_lookups[request_id] = parked.lookup_keys
        self._push(self._not_due if parked.in_turns else self._by_time, parked.until, request_id, parked)

    def await_answer(self, request_id: str, future: LookupFuture) -> None:
        """Have this answer wake a prompt, if it is parked: it was looked up."""
        self.for_lookups.pop(request_id, None)
        if (parked := self._parked.get(request_id)) is not None:
            parked.future = future
            self._for_answers[request_id] = parked

    def _push(self, heap: list[Entry], key: float, request_id: str, parked: Parked) -> None:
        """Add a prompt to a heap, behind those of the same key."""
        heappush(heap, Entry(key, next(self._numbers), request_id, parked))
        if len(heap) > 2 * len(self._parked) + MAX_STALE:
            heap[:] = sorted([entry for entry in heap if self._parked.get(entry.request_id) is entry.parked])

    # --- waking ------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Let JUDGED_AT_ONCE prompts that are due be woken until the next step begins."""
        self._turns_left = JUDGED_AT_ONCE

    def wake(self, now: float) -> None:
        """Wake the prompts whose time or answer has come; of those in turns JUDGED_AT_ONCE in a step at most."""
        waiting = self._for_answers.items()
        answered = [(request_id, one) for request_id, one in waiting if one.future is not None and one.future.done]
        for request_id, parked in answered:
            if parked.in_turns:
                self._make_due(request_id, parked)
            else:
                self.wake_one(request_id)
        while self._by_time and self._by_time[0].key <= now:
            self._wake_entry(heappop(self._by_time))
        self._make_askers_due(now)
        while self._not_due and self._not_due[0].key <= now:
            entry = heappop(self._not_due)
            if self._parked.get(entry.request_id) is entry.parked:
                self._make_due(entry.request_id, entry.parked)
        # The step's first turn is not by priority, so that urgent prompts cannot take all turns for ever.
        if self._due_since and self._turns_left == JUDGED_AT_ONCE:
            self.wake_one(next(iter(self._due_since)))
            self._turns_left -= 1
        while self._turns_left and self._due_since:
            if self._wake_entry(heappop(self._due)):
                self._turns_left -= 1

    def wake_one(self, request_id: str) -> bool:
        """Wake a prompt. Return whether it was parked."""
        self._for_answers.pop(request_id, None)
        self._for_loads.pop(request_id, None)
        self.for_lookups.pop(request_id, None)
        self._asking.pop(request_id, None)
        self._due_since.pop(request_id, None)
        return self._parked.pop(request_id, None) is not None

    def wake_all(self) -> None:
        """Wake all prompts."""
        for request_id in [*self._parked]:
            self.wake_one(request_id)

    def load_ended(self) -> None:
        """Wake the prompts that wait for the end of a load."""
        for request_id in [*self._for_loads]:
            self.wake_one(request_id)

    def _make_due(self, request_id: str, parked: Parked) -> None:
        """Have a prompt wait for its turn, unless it does."""
        if not parked.is_due:
            parked.is_due = True
            self._due_since[request_id] = None
            self._for_answers.pop(request_id, None)
            self._push(self._due, parked.priority if self._by_priority else 0, request_id, parked)

    def _make_askers_due(self, now: float) -> None:
        """Once the first of the prompts that ask a store is to ask again, make all of them due that await no answer, so
        that they ask in their order. While the first one awaits an answer, the others do not overtake it."""
        askers = [request_id for request_id in self._asking if not self._parked[request_id].is_due]
        if not askers:
            return
        askers.sort(key=self._asking.__getitem__)
        first = self._parked[askers[0]]
        if first.future is not None or first.ask_at > now:
            return
        for request_id in askers:
            if (parked := self._parked[request_id]).future is None:
                self._make_due(request_id, parked)

    def _wake_entry(self, entry: Entry) -> bool:
        """Wake the prompt of a heap's entry, unless it was woken since. Return whether it was parked."""
        return self._parked.get(entry.request_id) is entry.parked and self.wake_one(entry.request_id)
