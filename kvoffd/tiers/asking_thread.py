"""The thread of a shared tier that asks the store, and the questions that it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffd.tiers.block_threads import LOST, StoreThread
from kvoffd.tiers.generations import is_sound
from kvoffd.tiers.header import BlockGroup, stored_group
from kvoffd.tiers.store import UNKEPT, StoreError, StoreUsage

PROBE_S = 1.0
LOOK_DEADLINE_S = 0.5
ASK_PATIENCE_S = 0.08
"""Time beyond an ask's deadline after which its connection is closed; beyond the deadline it counts as a failure."""


class Probe:
    """Checks whether the store serves at all."""


class Look:
    """Asks how full the store is."""


@dataclass(slots=True, eq=False)
class Raise:
    """Raises a generation, at least to this one, which voids the blocks of a namespace for all nodes."""

    fingerprint: bytes
    generation: int
    deadline: float
    ended: bool = False
    problem: str = ""


@dataclass(slots=True, eq=False)
class Ask:
    """Asks for keys, if it begins by the deadline; without keys, for the generation only."""

    group: BlockGroup
    keys: Sequence[bytes]
    prefix: bool
    deadline: float


Question: TypeAlias = Probe | Look | Raise | Ask


class Unfollowed(Exception):
    """A peer has not followed a raised generation yet."""


@dataclass(slots=True)
class Answer:
    """A namespace's generation, whether each requested key exists, and how long the answer took."""

    generation: int
    found: list[bool]
    seconds: float


class AskingThread(StoreThread):
    """Asks the store, and raises generations."""

    def asks(self, questions: list[Question]) -> list[object]:
        return list(map(self._answer, questions))

    def _answer(self, question: Question) -> object:
        if isinstance(question, Look):
            return self._look()
        if isinstance(question, Ask):
            return self._ask(question)
        if isinstance(question, Raise):
            return self._raise(question)
        self._probe()
        return None

    def _probe(self) -> None:
        answers = False
        try:
            self._store.connect()
            self._store.ping(self._clock() + PROBE_S)
            answers = True
        except Exception as error:
            self._fail(error, "")
        if self._breaker.open:
            self._breaker.probed(answers)
        elif not answers:
            self._breaker.failed("ask", at_once=True)

    def _look(self) -> StoreUsage | Exception | None:
        """Return the store's answer; None if it gives none, as to a user without permission; or the failure."""
        try:
            self._store.connect()
            return self._store.usage(self._clock() + LOOK_DEADLINE_S)
        except StoreError as error:
            if error.kind not in LOST:
                return None
            self._fail(error, "")
            return error

    def _ask(self, ask: Ask) -> Answer | None:
        """Return the answer; None if there is none."""
        started = self._clock()
        is_late = started >= ask.deadline and ask.keys
        if self._breaker.silent or (self._breaker.open and ask.keys) or is_late or self._tier.closed:
            return None
        found: list[bool] = []
        try:
            self._store.connect()
            most, slow = self._store.keys_at_once, False
            for at in range(0, len(ask.keys) or 1, most):
                began = self._clock()
                if found and (began >= ask.deadline or (ask.prefix and False in found)):
                    break
                until = began + self._tier.ask_deadline_s + ASK_PATIENCE_S
                generation, there = self._exchange(ask, ask.keys[at : at + most], until)
                found += there
                slow |= self._clock() - began > self._tier.ask_deadline_s
        except Exception as error:
            self._fail(error, "ask")
            return None
        # Detecting that one of several servers is down takes time, but does not slow the others.
        if slow:
            self._breaker.failed("ask")
        else:
            self._breaker.succeeded("ask")
        found += [False] * (len(ask.keys) - len(found))
        return Answer(generation, found, self._clock() - started)

    def _exchange(self, ask: Ask, keys: Sequence[bytes], deadline: float) -> tuple[int, list[bool]]:
        """Ask for some keys, and again if the namespace's generation is another than the known one."""
        fingerprint, store = ask.group.fingerprint, self._store
        known = self._tier.generations.fleet(fingerprint)

        def asked(of_generation: int) -> tuple[int, list[bool]]:
            if not keys:
                return checked(store.generation(fingerprint, deadline), fingerprint), []
            generation, found = store.ask(stored_group(ask.group, of_generation), keys, deadline, prefix=ask.prefix)
            if len(found) != len(keys):
                raise StoreError("protocol", f"{len(keys)} keys were requested, but {len(found)} answered.")
            return checked(generation, fingerprint), found

        generation, found = asked(known)
        if generation > known:
            known, found = asked(generation)
        elif generation < known:
            # A store that lost the number, but not blocks of an older one, must not return those.
            try:
                store.raise_generation(fingerprint, generation, known, deadline)
            except StoreError as error:
                if error.kind in LOST:
                    raise
                if error.kind != UNKEPT:  # else the peer has followed, and lends what is safe
                    self._fail(error, "" if store.follows else "write")  # a node with write permission does it
        return known, found

    def _raise(self, one: Raise) -> int | Exception:
        """Return the raised generation, or the failure."""
        until = one.deadline
        if self._store.follows:  # one that is silent delays the questions of lookups no longer than these do
            until = self._clock() + self._tier.ask_deadline_s + ASK_PATIENCE_S
        try:
            self._store.connect()
            seen = checked(self._store.generation(one.fingerprint, until), one.fingerprint)
            least = seen if self._store.follows else seen + 1
            raised = self._store.raise_generation(one.fingerprint, seen, max(least, one.generation), until)
            return checked(raised, one.fingerprint)
        except Exception as error:
            kind = error.kind if self._store.follows and isinstance(error, StoreError) else ""
            if kind not in ("busy", UNKEPT):
                self._fail(error, "write")
            return Unfollowed(str(error)) if kind in ("busy", UNKEPT, "timeout") else error


def checked(generation: int, fingerprint: bytes) -> int:
    """Return a generation from a store or peer. Raises StoreError for one that no node can have written."""
    if not is_sound(generation, time.time()):
        why = f"The generation {generation} of the namespace {fingerprint.hex()} was not written by a node"
        raise StoreError("generation", f"{why}; remove it there.")
    return generation
