"""Questions about blocks of a store, and a table that keeps the answers for a second or two."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import CHAR_P, NUMBER, VOID_P, declare, native
from kvoffd.tiers.asking_thread import ASK_PATIENCE_S, Answered, AskingThread, Question
from kvoffd.tiers.generations import checked
from kvoffd.tiers.header import BlockGroup, stored_group
from kvoffd.tiers.store import Store, StoreError, StoreFault
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Found, TierListener

if TYPE_CHECKING:
    from kvoffd.tiers.shared import SharedTier

_OF_ANSWERS = VOID_P, NUMBER, CHAR_P, NUMBER, CHAR_P, NUMBER, NUMBER, VOID_P, VOID_P
declare(answers_find=(None, *_OF_ANSWERS), answers_note=(None, *_OF_ANSWERS))

YES_S, NO_S, HIDDEN_S = 2.0, 1.0, 30.0
"""Time for which an answer is cached, and for which a block that was removed, or is corrupt, is hidden."""
UNKNOWN = 3
"""State of a key in addition to those of ``find``: nobody asked for it recently."""
_IS_UNKNOWN = bytes(state == UNKNOWN for state in range(256))
"""Table of ``bytes.translate``: 1 for UNKNOWN, 0 for each other state."""
MAX_ASKED = 87_384
"""Keys whose answers may be outstanding. No namespace gets over three quarters of that, 65,538."""
MAX_ANSWERS = 262_144
"""Cached answers, of 16 bytes each."""
WINDOW = 16
"""See answers.c."""


class Answers:
    """Asks a store for keys, and has its answers by tag and key, each with a time. A new one replaces the oldest of
    ``WINDOW`` neighbours.

    | state   | its time      | it is UNKNOWN again                                       |
    |---------|---------------|-----------------------------------------------------------|
    | PRESENT | when answered | YES_S later; believed, and read, ``believed_s``           |
    | ASKED   | when asked    | NO_S after ``ask_deadline_s``, from which on it is ABSENT |
    | ABSENT  | until when    | at that time                                              |

    An ABSENT for longer than NO_S is a hidden block: it stands whatever the store answers.

    Args:
        tier: the tier over the store.
        listener: gets the answers.
        store: of which the constants are used.
        put: puts a question to the store.

    Attributes:
        asked_keys: number of keys whose answers are outstanding.
        asked_of: these by namespace.
        is_unanswered: whether the last question was not answered.
    """

    def __init__(
        self,
        tier: SharedTier,
        listener: TierListener,
        store: Store,
        clock: Callable[[], float],
        put: Callable[[Question], None],
    ) -> None:
        self.tier, self.listener, self.clock = tier, listener, clock
        self._store, self._put = store, put
        self.asked_keys, self.is_unanswered = 0, False
        self.asked_of = Counter[bytes]()
        self._find, self._note = native().answers_find, native().answers_note
        self._places = MAX_ANSWERS
        self._table = np.empty((self._places + WINDOW, 2), np.uint64)
        self._table.fill(0)  # touches the pages now, not in the first lookups
        self.clear()

    def clear(self) -> None:
        """Forget all answers."""
        self._seed = os.urandom(16)  # of the hash by which answers are found

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        """See ``Tier.find``."""
        question: Ask | None = None
        states = self.states(group.tag, keys)
        first, end = 0, len(keys)  # the keys that may be asked for
        if not prefix:  # the last ones, known or not: else each lookup that waits would ask further from the end
            first = max(0, end - self._store.most_window_keys)
        elif (gap := states.find(ABSENT)) >= 0:  # keys behind a gap are useless
            end = gap
        unknown = list(compress(range(first, end), states[first:end].translate(_IS_UNKNOWN)))
        # A namespace gets three quarters of the places that are free or its own: others always find a quarter of them.
        own, free = self.asked_of[group.fingerprint], MAX_ASKED - self.asked_keys
        most = max(0, 3 * (free + own) // 4 - own)
        if places := unknown[:most]:
            span = slice(places[0], places[-1] + 1)  # all that are unknown in it are asked for
            states[span] = states[span].replace(bytes([UNKNOWN]), bytes([ASKED]))
            asks_all = len(places) == len(keys)
            asked = keys if asks_all else list(map(keys.__getitem__, places))
            now = self.clock()
            self._in_table(self._note, group.tag, asked, ASKED, now)
            self.asked_keys += len(asked)
            self.asked_of[group.fingerprint] += len(asked)
            self.tier.counters.asked_keys += len(asked)
            ask = Ask(self, group, asked, prefix, now + self.tier.ask_deadline_s)
            self._put(ask)
            question = ask if asks_all else None
        return Found(bytes(states).replace(bytes([UNKNOWN]), bytes([ABSENT])), question)

    def states(self, tag: int, keys: Sequence[bytes]) -> bytearray:
        """Return the state of each key now, by the table above."""
        (states, at), now = self._in_table(self._find, tag, keys), self.clock()
        is_asked, ask_ends = states == ASKED, at + self.tier.ask_deadline_s
        until = np.where(is_asked, ask_ends + NO_S, np.where(states == PRESENT, at + YES_S, at))
        # An ask without an answer in time was a miss; the next lookup may ask again a little later.
        states[is_asked & (ask_ends <= now)] = ABSENT
        states[until <= now] = UNKNOWN
        return bytearray(states)

    def are_believed(self, tag: int, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each block existed so recently that it is not offered again, and that a read is tried."""
        states, at = self._in_table(self._find, tag, keys)
        believed: list[bool] = ((states == PRESENT) & (self.clock() < at + self._store.believed_s)).tolist()
        return believed

    def record(self, tag: int, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Record a store's answers, but for blocks that are hidden."""
        now, there = self.clock(), np.frombuffer(bytes(found), np.bool_)
        before, until = self._in_table(self._find, tag, keys)
        is_hidden = (before == ABSENT) & (until > now + NO_S)
        states = np.where(there & ~is_hidden, PRESENT, ABSENT)
        at = np.where(is_hidden, until, np.where(there, now, now + NO_S))
        self._in_table(self._note, tag, keys, states, at)

    def hide(self, tag: int, keys: Sequence[bytes], seconds: float) -> None:
        """Have blocks count as absent for this time; if it is longer than NO_S, whatever the store answers."""
        self._in_table(self._note, tag, keys, ABSENT, self.clock() + seconds)

    def _in_table(
        self,
        call: Callable[..., None],
        tag: int,
        keys: Sequence[bytes],
        states: npt.ArrayLike = UNKNOWN,
        at: npt.ArrayLike = 0.0,
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Have ``_note`` note a state and a time for each key, or ``_find`` find them, UNKNOWN if none was noted;
        return them."""
        columns = np.full(len(keys), states, np.uint8), np.full(len(keys), at, np.float64)
        if keys:
            joined, size = b"".join(keys), len(keys[0])
            assert len(joined) == len(keys) * size
            whose = self._table.ctypes.data, self._places, self._seed, tag
            call(*whose, joined, len(keys), size, *(column.ctypes.data for column in columns))
        return columns


@dataclass(slots=True)
class Answer(Answered):
    """A namespace's generation, and whether each requested key exists."""

    generation: int
    found: list[bool]


@dataclass(slots=True, eq=False)
class Ask(Question):
    """Asks which keys have a block, if it begins by the deadline."""

    answers: Answers
    group: BlockGroup
    keys: Sequence[bytes]
    prefix: bool
    deadline: float

    def run(self, asker: AskingThread) -> Answer | None:
        """Return the answer; None if there is none."""
        started, deadline_s = asker.clock(), asker.tier.ask_deadline_s
        if asker.breaker.open or asker.tier.closed or started >= self.deadline:
            return None
        generation, found, is_slow = 0, list[bool](), False
        try:
            asker.store.connect()
            most = asker.store.keys_at_once
            for at in range(0, len(self.keys), most):
                began = asker.clock()
                until = began + deadline_s + ASK_PATIENCE_S
                if found and (began >= self.deadline or (self.prefix and False in found)):
                    break
                seen, there = self._ask_part(asker, self.keys[at : at + most], until)
                # Detecting that one of several servers is down takes time, but does not slow the others.
                is_slow |= asker.clock() - began > deadline_s
                if found and seen != generation:  # a clear between two parts voids the blocks of one of them
                    generation, found = max(seen, generation), []
                    break
                generation, found = seen, found + there
        except Exception as error:
            asker.report(error, "ask")
            return None
        if is_slow:
            asker.answered_late()
        else:
            asker.breaker.succeeded("ask")
        found += [False] * (len(self.keys) - len(found))
        return Answer(asker.clock() - started, generation, found)

    def _ask_part(self, asker: AskingThread, keys: Sequence[bytes], deadline: float) -> tuple[int, list[bool]]:
        """Ask about some keys by this node's generation of the namespace, and again if the store's is higher. Return
        the higher one, and whether each key has a block of it."""
        # ours: this node's generation; theirs: the store's; asked: the one whose blocks were asked for.
        group, store, fingerprint = self.group, asker.store, self.group.fingerprint
        ours = asked = asker.tier.generations.fleet(fingerprint)
        theirs, found = store.ask(stored_group(group, ours), keys, deadline, prefix=self.prefix)
        if theirs > ours:
            asked = checked(theirs, fingerprint)
            theirs, found = store.ask(stored_group(group, asked), keys, deadline, prefix=self.prefix)
        elif theirs < ours:
            asker.give_back(fingerprint, theirs, ours, deadline)
        if len(found) != len(keys):
            raise StoreError(StoreFault.PROTOCOL, f"{len(keys)} keys were requested, but {len(found)} answered.")
        if theirs > asked:  # a clear between the two questions
            return checked(theirs, fingerprint), [False] * len(keys)
        return asked, found

    def end(self, answer: Answer | Exception | None) -> None:
        """Record the answer, and pass it on: without one, or with a void one, no key is there."""
        answers, tier, fingerprint = self.answers, self.answers.tier, self.group.fingerprint
        found = [False] * len(self.keys)
        answers.asked_keys -= len(self.keys)
        answers.asked_of[fingerprint] -= len(self.keys)
        if not answers.asked_of[fingerprint]:
            del answers.asked_of[fingerprint]
        if isinstance(answer, Answer):
            tier.clears.answered(fingerprint, answer.generation)
            if answer.generation == tier.generations.fleet(fingerprint):  # else the blocks are void by now
                found = answer.found
                if count := sum(found):
                    tier.counters.found_keys += count
                    tier.found_at = answers.clock()
        else:
            tier.counters.unanswered_keys += len(self.keys)
        answers.is_unanswered = not isinstance(answer, Answer)
        answers.record(self.group.tag, self.keys, found)
        if self.prefix and False in found:  # keys behind a gap are useless
            gap = found.index(False)
            found = [True] * gap + [False] * (len(found) - gap)
        answers.listener.answered(tier, self.group, self.keys, found, self)
