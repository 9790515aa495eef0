"""Clears of all nodes over one store: it tells the generations of namespaces, and a clear raises them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvoffd.system.newest import put_newest
from kvoffd.tiers.asking_thread import ASK_PATIENCE_S, Answered, AskingThread, Question
from kvoffd.tiers.generations import checked
from kvoffd.tiers.store import Store, StoreError, StoreFault

if TYPE_CHECKING:
    from kvoffd.tiers.shared import SharedTier

logger = logging.getLogger(__name__)

RAISE_S = 5.0
"""Limit for raising a generation, or for checking whether another node did."""
MAX_NAMESPACES = 65_536
"""Limit of the namespaces whose last poll for a reset is remembered."""
POLLED_AT_ONCE = 1024
"""Namespaces of one poll."""
NOT_YET = StoreFault.BUSY, StoreFault.UNKEPT
"""Answers of a peer that has not followed a generation yet, and will: no failures."""


class FleetClears:
    """Asks one store about clears of all nodes, and raises generations there. For the daemon's thread.

    Args:
        store: of which the constants are used.
        put: puts a question to the store.
        on_voided: called once blocks in the store have become void.

    Attributes:
        unfollowed: raises that a peer has not followed yet: ``tick`` asks again.
    """

    def __init__(
        self,
        tier: SharedTier,
        store: Store,
        clock: Callable[[], float],
        put: Callable[[Question], None],
        on_voided: Callable[[], None],
    ) -> None:
        self._tier, self._store, self.clock, self._put, self._on_voided = tier, store, clock, put, on_voided
        self.raises = 0
        """Raises that were put and have not ended."""
        self.unfollowed: list[Raise] = []
        self.polled_at: dict[bytes, float] = {}
        """Time when the last poll about each namespace ended, answered or not; inf while one is polled."""
        self._answered_about: dict[bytes, float] = {}
        """Time of the last answer about each namespace, by a poll, an ask or a raise."""

    def tick(self) -> None:
        """Ask peers again that have not followed."""
        for request in self.unfollowed:
            self._put_raise(request)
        self.unfollowed.clear()

    def raise_generation(self, fingerprint: bytes, generation: int, cleared_at: int) -> Raise:
        """Begin to void a namespace's blocks for all nodes; the result shows when that has ended, and how. It has ended
        at once if the store is not reachable. ``cleared_at``: see ``Store.clear``."""
        request = Raise(self, fingerprint, generation, cleared_at, self.clock() + RAISE_S)
        if self._tier.breaker.silent or self._tier.closed:
            request.ended = True
            request.problem = self._tier.health.problem or f"{self._tier.name} has not been reached yet."
        else:
            self._put_raise(request)
        return request

    def _put_raise(self, request: Raise) -> None:
        self.raises += 1
        self._put(request)

    def poll(self, fingerprints: Iterable[bytes]) -> None:
        """Check whether namespaces' blocks were voided for all nodes, unless that was done recently. Once that is due
        for one of them, one question is about all."""
        if not self._tier.name or self._tier.breaker.silent or self._tier.closed:
            return
        now = self.clock()
        idle = {one: at for one in fingerprints if (at := self.polled_at.get(one, -inf)) < inf}  # not being polled
        if any(now >= at + self._store.poll_s for at in idle.values()):
            self._put_polls(list(idle))

    def _put_polls(self, fingerprints: Sequence[bytes]) -> None:
        for first in range(0, len(fingerprints), POLLED_AT_ONCE):
            asked = fingerprints[first : first + POLLED_AT_ONCE]
            for one in asked:
                put_newest(self.polled_at, one, inf, MAX_NAMESPACES)
            self._put(Poll(self, asked, self.clock() + RAISE_S))

    def tell(self, fingerprints: Iterable[bytes]) -> None:
        """Have a peer hear of the generations that namespaces have here now: a poll gives a peer that lacks one the
        higher number. A store hears of them from the node that cleared: all nodes at once would raise them several
        times."""
        if self._store.is_peer and self._tier.name and not (self._tier.breaker.silent or self._tier.closed):
            self._put_polls(list(fingerprints))

    def answered_about(self, fingerprint: bytes) -> float:
        """Return the time of the store's last answer about a namespace; -inf without one."""
        return self._answered_about.get(fingerprint, -inf)

    def answered(self, fingerprint: bytes, generation: int) -> None:
        """Record that the store has answered about a namespace, whose generation is this one there."""
        if self._tier.generations.hear(fingerprint, generation):
            name = self._tier.name
            logger.info("The blocks of a namespace in %s are void: its generation is %d now.", name, generation)
            self._on_voided()
        put_newest(self._answered_about, fingerprint, self.clock(), MAX_NAMESPACES)


class Unfollowed(Exception):
    """A peer has not followed a raised generation yet."""


@dataclass(slots=True, eq=False)
class Raise(Question):
    """Raises a generation, which voids the blocks of a namespace for all nodes.

    Attributes:
        generation: at least this one; the thread sets it to the one that the store got.
        cleared_at: see ``Store.clear``.
    """

    clears: FleetClears
    fingerprint: bytes
    generation: int
    cleared_at: int
    until: float
    """Time until which a peer is asked again."""
    ended: bool = False
    problem: str = ""
    """Reason why it has not succeeded, a sentence; empty if it has."""

    def run(self, asker: AskingThread) -> int | Exception:
        """Return the raised generation, or the failure; ``Unfollowed`` if the peer is to be asked again."""
        store, until = asker.store, self.until
        if store.is_peer:  # one that is silent delays the questions of lookups no longer than these do
            until = asker.clock() + asker.tier.ask_deadline_s + ASK_PATIENCE_S
        try:
            store.connect()
            seen = checked(store.generation(self.fingerprint, until), self.fingerprint)
            # An equal number of a peer may be this clear's, of which it heard elsewhere. A higher one may be an earlier
            # clear's, by a clock that is ahead: the peer would keep what it has stored since.
            if seen > self.generation or not store.is_peer:
                self.generation = max(self.generation, seen + 1)
            raised = store.clear(self.fingerprint, seen, self.generation, self.cleared_at, until)
            return checked(raised, self.fingerprint)
        except Exception as error:
            peer_fault = error.kind if store.is_peer and isinstance(error, StoreError) else None
            if peer_fault in NOT_YET:
                return Unfollowed(str(error))
            asker.report(error, asker.raise_work)
            # Each question to a peer is short: one that was late may answer the next. A store had all of RAISE_S.
            return Unfollowed(str(error)) if peer_fault is StoreFault.TIMEOUT else error

    def end(self, answer: int | Exception) -> None:
        clears = self.clears
        clears.raises -= 1
        if isinstance(answer, int):
            clears.answered(self.fingerprint, answer)
            self.ended, self.problem = True, ""
            return
        self.problem = str(answer) or repr(answer)
        self.ended = not isinstance(answer, Unfollowed) or clears.clock() >= self.until
        if not self.ended:
            clears.unfollowed.append(self)


@dataclass(slots=True)
class PollAnswer(Answered):
    """The generation of each namespace, None where the store has no valid one."""

    generations: list[int | None]


@dataclass(slots=True, eq=False)
class Poll(Question):
    """Asks for the generations of namespaces. Also asked while the store fails to read or write."""

    clears: FleetClears
    fingerprints: Sequence[bytes]
    deadline: float

    def run(self, asker: AskingThread) -> PollAnswer | None:
        """Return the answer; None if there is none."""
        started = asker.clock()
        if asker.breaker.silent or asker.tier.closed:
            return None
        try:
            asker.store.connect()
            began = asker.clock()
            until = began + asker.tier.ask_deadline_s + ASK_PATIENCE_S
            ours = list(map(asker.tier.generations.fleet, self.fingerprints))
            theirs = asker.store.generations(self.fingerprints, until)
            if len(theirs) != (wanted := len(self.fingerprints)):
                why = f"{wanted} generations were requested, but {len(theirs)} answered."
                raise StoreError(StoreFault.PROTOCOL, why)
            seconds = asker.clock() - started
        except Exception as error:
            asker.report(error, "ask")
            return None
        if asker.clock() - began > asker.tier.ask_deadline_s:
            asker.answered_late()
        else:
            asker.breaker.succeeded("ask")
        each = zip(self.fingerprints, ours, theirs, strict=True)
        return PollAnswer(seconds, [self._agree(asker, *one, until) for one in each])

    @staticmethod
    def _agree(
        asker: AskingThread, fingerprint: bytes, ours: int, theirs: int | StoreError, deadline: float
    ) -> int | None:
        """Return the higher of this node's and the store's generation of a namespace, after giving it back to a store
        that lost it. If the store has no valid one, count a failure, and return None."""
        try:
            if isinstance(theirs, StoreError):
                raise theirs
            checked(theirs, fingerprint)
        except StoreError as error:
            asker.report(error, "ask")
            return None
        if theirs < ours and asker.clock() < deadline:
            try:
                asker.store.connect()  # an earlier one may have been refused, which closes the connection
                asker.give_back(fingerprint, theirs, ours, deadline)
            except Exception as error:  # the store has answered all the same: else this node would hear of no clear
                asker.report(error, asker.raise_work)
        return max(theirs, ours)

    def end(self, answer: PollAnswer | Exception | None) -> None:
        clears, now = self.clears, self.clears.clock()
        clears.polled_at.update((one, now) for one in self.fingerprints if one in clears.polled_at)  # else displaced
        if isinstance(answer, PollAnswer):
            for fingerprint, generation in zip(self.fingerprints, answer.generations, strict=True):
                if generation is not None:
                    clears.answered(fingerprint, generation)
