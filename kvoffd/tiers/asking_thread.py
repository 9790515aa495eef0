"""The thread of a shared tier that asks the store, and the questions that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffd.tiers.block_threads import NO_ANSWER, StoreThread
from kvoffd.tiers.generations import checked
from kvoffd.tiers.header import BlockGroup, stored_group
from kvoffd.tiers.store import UNKEPT, StoreError, StoreUsage

PROBE_S, LOOK_DEADLINE_S = 1.0, 0.5
"""Limits for the answer to a probe, and about how full the store is."""
ASK_PATIENCE_S = 0.08
"""Time after an ask's deadline, at which an answer is late enough to count as a failure, until its connection is
closed."""


class Probe:
    """Checks whether the store serves at all."""


class Look:
    """Asks how full the store is."""


@dataclass(slots=True, eq=False)
class Raise:
    """Raises a generation, which voids the blocks of a namespace for all nodes.

    Attributes:
        generation: at least this one; the thread sets it to the one that the store got.
        cleared_at: see ``Store.clear``.
    """

    fingerprint: bytes
    generation: int
    cleared_at: int
    deadline: float
    ended: bool = False
    problem: str = ""


@dataclass(slots=True, eq=False)
class Ask:
    """Asks which keys have a block, if it begins by the deadline."""

    group: BlockGroup
    keys: Sequence[bytes]
    prefix: bool
    deadline: float


@dataclass(slots=True, eq=False)
class Poll:
    """Asks for the generations of namespaces. Also asked while the store fails to read or write."""

    fingerprints: Sequence[bytes]
    deadline: float


Question: TypeAlias = Probe | Look | Raise | Ask | Poll


class Unfollowed(Exception):
    """A peer has not followed a raised generation yet."""


@dataclass(slots=True)
class Answer:
    """A namespace's generation, whether each requested key exists, and how long the answer took."""

    generation: int
    found: list[bool]
    seconds: float


@dataclass(slots=True)
class PollAnswer:
    """The generation of each namespace, None where the store has no valid one, and how long the answer took."""

    generations: list[int | None]
    seconds: float


class AskingThread(StoreThread):
    """Asks the store, and raises generations."""

    @property
    def _raising(self) -> str:
        """Kind of work that raising a generation is: for a peer, which is only read, none that it could refuse."""
        return "" if self._store.follows else "write"

    def asks(self, questions: list[Question]) -> Iterator[object]:
        """Answer questions, each as the method for its kind says."""
        for question in questions:
            if isinstance(question, Ask):
                yield self._ask(question)
            elif isinstance(question, Poll):
                yield self._poll(question)
            elif isinstance(question, Look):
                yield self._look()
            elif isinstance(question, Raise):
                yield self._raise(question)
            else:
                self._probe()
                yield None

    def _probe(self) -> None:
        """Check whether the store serves, and tell the breaker."""
        answers = False
        try:
            self._store.connect()
            self._store.ping(self._clock() + PROBE_S)
            answers = True
        except Exception as error:
            self._report(error)
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
            if error.kind not in NO_ANSWER:
                return None
            self._report(error)
            return error

    def _ask(self, ask: Ask) -> Answer | None:
        """Return the answer; None if there is none."""
        started = self._clock()
        if self._breaker.open or self._tier.closed or started >= ask.deadline:
            return None
        generation, found, is_slow = 0, list[bool](), False
        try:
            self._store.connect()
            most = self._store.keys_at_once
            for at in range(0, len(ask.keys), most):
                began = self._clock()
                if found and (began >= ask.deadline or (ask.prefix and False in found)):
                    break
                until = began + self._tier.ask_deadline_s + ASK_PATIENCE_S
                seen, there = self._ask_part(ask, ask.keys[at : at + most], until)
                is_slow |= self._clock() - began > self._tier.ask_deadline_s
                if found and seen != generation:  # a clear between two parts voids the blocks of one of them
                    generation, found = max(seen, generation), []
                    break
                generation, found = seen, found + there
        except Exception as error:
            self._report(error, "ask")
            return None
        self._record_success(is_slow)
        found += [False] * (len(ask.keys) - len(found))
        return Answer(generation, found, self._clock() - started)

    def _poll(self, poll: Poll) -> PollAnswer | None:
        """Return the answer; None if there is none."""
        started = self._clock()
        if self._breaker.silent or self._tier.closed:
            return None
        try:
            self._store.connect()
            began = self._clock()
            until = began + self._tier.ask_deadline_s + ASK_PATIENCE_S
            ours = list(map(self._tier.generations.fleet, poll.fingerprints))
            theirs = self._store.generations(poll.fingerprints, until)
            if len(theirs) != (wanted := len(poll.fingerprints)):
                raise StoreError("protocol", f"{wanted} generations were requested, but {len(theirs)} answered.")
            seconds = self._clock() - started
        except Exception as error:
            self._report(error, "ask")
            return None
        self._record_success(self._clock() - began > self._tier.ask_deadline_s)
        each = zip(poll.fingerprints, ours, theirs, strict=True)
        return PollAnswer([self._agree(*one, until) for one in each], seconds)

    def _agree(self, fingerprint: bytes, ours: int, theirs: int | StoreError, deadline: float) -> int | None:
        """Return the higher of this node's and the store's generation of a namespace, after giving it back to a store
        that lost it. If the store has no valid one, count a failure, and return None."""
        try:
            if isinstance(theirs, StoreError):
                raise theirs
            checked(theirs, fingerprint)
        except StoreError as error:
            self._report(error, "ask")
            return None
        if theirs < ours and self._clock() < deadline:
            try:
                self._store.connect()  # an earlier one may have been refused, which closes the connection
                self._give_back(fingerprint, theirs, ours, deadline)
            except Exception as error:  # the store has answered all the same: else this node would hear of no clear
                self._report(error, self._raising)
        return max(theirs, ours)

    def _record_success(self, is_slow: bool) -> None:
        """Record an answer. Detecting that one of several servers is down takes time, but does not slow the others."""
        if is_slow:
            self._breaker.failed("ask")
        else:
            self._breaker.succeeded("ask")

    def _ask_part(self, ask: Ask, keys: Sequence[bytes], deadline: float) -> tuple[int, list[bool]]:
        """Ask about some keys by this node's generation of the namespace, and again if the store's is higher. Return
        the higher one, and whether each key has a block of it."""
        group, fingerprint = ask.group, ask.group.fingerprint
        ours = asked = self._tier.generations.fleet(fingerprint)
        theirs, found = self._store.ask(stored_group(group, ours), keys, deadline, prefix=ask.prefix)
        if checked(theirs, fingerprint) > ours:
            asked = theirs
            theirs, found = self._store.ask(stored_group(group, asked), keys, deadline, prefix=ask.prefix)
            checked(theirs, fingerprint)
        elif theirs < ours:
            self._give_back(fingerprint, theirs, ours, deadline)
        if len(found) != len(keys):
            raise StoreError("protocol", f"{len(keys)} keys were requested, but {len(found)} answered.")
        if theirs > asked:  # a clear between the two questions
            return theirs, [False] * len(keys)
        return asked, found

    def _give_back(self, fingerprint: bytes, theirs: int, ours: int, deadline: float) -> None:
        """Raise the generation of a store that lost it, so that no node reads blocks of the older one again."""
        try:
            self._store.raise_generation(fingerprint, theirs, ours, deadline)
        except StoreError as error:
            if error.kind in NO_ANSWER:
                raise
            if error.kind != UNKEPT:  # else the peer has followed, and lends what is safe
                self._report(error, self._raising)  # a node with write permission does it

    def _raise(self, request: Raise) -> int | Exception:
        """Return the raised generation, or the failure."""
        until = request.deadline
        if self._store.follows:  # one that is silent delays the questions of lookups no longer than these do
            until = self._clock() + self._tier.ask_deadline_s + ASK_PATIENCE_S
        try:
            self._store.connect()
            seen = checked(self._store.generation(request.fingerprint, until), request.fingerprint)
            # An equal number of a peer may be this clear's, of which it heard elsewhere. A higher one may be an earlier
            # clear's, by a clock that is ahead: the peer would keep what it has stored since.
            if seen > request.generation or not self._store.follows:
                request.generation = max(request.generation, seen + 1)
            numbers = seen, request.generation, request.cleared_at
            raised = self._store.clear(request.fingerprint, *numbers, until)
            return checked(raised, request.fingerprint)
        except Exception as error:
            kind = error.kind if self._store.follows and isinstance(error, StoreError) else ""
            if kind not in ("busy", UNKEPT):
                self._report(error, self._raising)
            return Unfollowed(str(error)) if kind in ("busy", UNKEPT, "timeout") else error  # a peer is asked again
