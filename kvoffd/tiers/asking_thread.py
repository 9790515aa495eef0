"""The thread of a shared tier that asks the store, and the questions that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffd.tiers.block_threads import LOST, StoreThread
from kvoffd.tiers.generations import is_sound
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.store import UNKEPT, StoreError, StoreUsage, bad_generation, generation_key, object_prefix

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
        if self._breaker.open or (started >= ask.deadline and ask.keys) or self._tier.closed:
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
        fingerprint, store = ask.group.fingerprint, self._store
        own_key, known = generation_key(fingerprint), self._tier.generations.fleet(fingerprint)

        def names(generation: int) -> list[bytes]:
            prefix = object_prefix(ask.group._replace(generation=generation))
            return [prefix + key.hex().encode() for key in keys]

        generation, found = self._question(own_key, names(known), deadline, prefix=ask.prefix)
        if generation > known:
            known, found = self._question(own_key, names(generation), deadline, prefix=ask.prefix)
        elif generation < known:
            # A store that lost the number, but not blocks of an older one, must not return those.
            try:
                store.raise_generation(own_key, generation, known, deadline)
            except StoreError as error:
                if error.kind in LOST:
                    raise
                if error.kind != UNKEPT:  # else the peer has followed, and lends what is safe
                    self._fail(error, "" if store.follows else "write")  # a node with write permission does it
        return known, found

    def _question(
        self, own_key: bytes, names: Sequence[bytes], deadline: float, *, prefix: bool
    ) -> tuple[int, list[bool]]:
        """Ask the store once, and check its answer. Raises StoreError."""
        generation, found = self._store.ask(own_key, names, deadline, prefix=prefix)
        _check_generation(own_key, generation)
        if len(found) != len(names):
            raise StoreError("protocol", f"{len(names)} keys were requested, but {len(found)} answered.")
        return generation, found

    def _raise(self, one: Raise) -> int | Exception:
        """Return the raised generation, or the failure."""
        own_key, until = generation_key(one.fingerprint), one.deadline
        if self._store.follows:  # one that is silent delays the questions of lookups no longer than these do
            until = self._clock() + self._tier.ask_deadline_s + ASK_PATIENCE_S
        try:
            self._store.connect()
            seen, _ = self._question(own_key, [], until, prefix=True)
            least = seen if self._store.follows else seen + 1
            raised = self._store.raise_generation(own_key, seen, max(least, one.generation), until)
            _check_generation(own_key, raised)
            return raised
        except Exception as error:
            kind = error.kind if self._store.follows and isinstance(error, StoreError) else ""
            if kind not in ("busy", UNKEPT):
                self._fail(error, "write")
            return Unfollowed(str(error)) if kind in ("busy", UNKEPT, "timeout") else error


def _check_generation(own_key: bytes, generation: int) -> None:
    """Raise StoreError for a generation that is not sound."""
    if not is_sound(generation):
        raise bad_generation(f"{own_key.decode()}, {generation},")
