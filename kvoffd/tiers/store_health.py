"""Whether a store answers, accepts writes and has space, as the tier over it knows, and the questions about that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvoffd.tiers.asking_thread import AskingThread, Question
from kvoffd.tiers.breaker import Breaker
from kvoffd.tiers.fullness import Fullness
from kvoffd.tiers.store import StoreError, StoreFault, StoreUsage
from kvoffd.tiers.tier import TierStats

logger = logging.getLogger(__name__)

PROBE_S, LOOK_DEADLINE_S = 1.0, 0.5
"""Limits for the answer to a probe, and about how full the store is."""
QUIET_S = 10.0
"""Time without a question after which the store is probed, so that operators learn if it is gone."""
LOOK_S, SILENT_LOOK_S = 10.0, 600.0
"""Intervals at which the store is asked how full it is; the latter if it does not report that."""
FULL_PAUSE_S = 5.0
"""Pause of writes after the store refused one: it is full, a replica, or does not permit it."""
SHOWN_S = 60.0
"""Time for which a refused write is in health, unless one succeeds, and a full store counts as full."""
STEADY_S = 5.0
"""Time for which a store must be reachable again before the log says so."""
LOGGED_S = 60.0
"""Interval after which an unexpected failure is logged with its traceback again."""


class StoreHealth:
    """State of a store as a whole. For the daemon's thread.

    Args:
        counters: this node's writes.
        pool_bytes: see ``Fullness``.

    Attributes:
        problem: last failure of the whole store, a sentence.
        fullness: how full it is.
        asked_at: time when a question last ended, in whatever way.
    """

    def __init__(self, breaker: Breaker, counters: TierStats, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._breaker, self._clock = breaker, clock
        self.problem = self._refusal = ""
        self.fullness = Fullness(counters, pool_bytes, clock)
        self._write_at = 0.0
        """Time from which on writes are tried."""
        self._shown_until = 0.0
        """Time until which the last refusal of a write is reported."""
        self._looking = self._probing = False
        """Whether a ``Look`` and a ``Probe`` are under way."""
        self._look_at = self.asked_at = clock()
        """``_look_at``: time of the next ``Look``."""
        self._steady_at = 0.0
        """Time from which on a store that is reachable then is steadily reachable."""
        self._is_steady = False
        self._logged_at = clock() - LOGGED_S

    @property
    def tries_writes(self) -> bool:
        """Whether writes are tried: a refused one pauses them for some seconds."""
        return self._clock() >= self._write_at

    @property
    def refusal(self) -> str:
        """Reason why it refused the last write, a sentence; empty if it accepted that, or some time later."""
        return self._refusal if self._clock() < self._shown_until else ""

    def assume_steady(self) -> None:
        """Take the store for steadily reachable, so that nothing is logged of it: it is one of many peers."""
        self._is_steady = True

    def follow_breaker(self) -> bool:
        """Take over whether the store is reachable now, at each tick. Return whether it has become steadily reachable
        since the last call."""
        now = self._clock()
        if self._breaker.open:
            self._is_steady = False
            self._steady_at = now + (STEADY_S if self._breaker.opened else 0.0)  # at the start: once it is reached
            self._look_at = now  # as soon as it is reachable
        elif not self._is_steady and now >= self._steady_at:
            self._is_steady = True
            return True
        return False

    def take_questions(self) -> Iterator[Look | Probe]:
        """Yield the questions that are due, which the caller puts: they count as under way."""
        now = self._clock()
        if not (self._looking or self._breaker.open) and (now >= self._look_at or self.fullness.wrote_much()):
            self._looking = True
            yield Look(self)
        if not self._probing and now >= (self._breaker.probe_at if self._breaker.open else self.asked_at + QUIET_S):
            self._probing = True
            yield Probe(self)

    def probed(self) -> None:
        self._probing = False

    def looked(self, found: StoreUsage | Exception | None) -> None:
        """Record the end of a ``Look``."""
        self._looking, self._look_at = False, self._clock() + (SILENT_LOOK_S if found is None else LOOK_S)
        if not isinstance(found, Exception):
            self.fullness.looked(found)

    def wrote(self) -> None:
        """Record that the store accepted a write."""
        self._shown_until = 0.0

    def failed(self, error: StoreError, *, refuses_writes: bool) -> None:
        """Record a failure. ``refuses_writes``: the server answers, but refuses a write."""
        now, self.problem = self._clock(), error.sentence
        if refuses_writes:
            self._write_at, self._shown_until = now + FULL_PAUSE_S, now + SHOWN_S
            self._refusal = error.sentence
        if error.kind is StoreFault.FULL:
            self.fullness.assume_full(SHOWN_S)
        if now >= self._logged_at + LOGGED_S and error.kind is StoreFault.INTERNAL:
            self._logged_at = now
            logger.error("A shared store failed unexpectedly.", exc_info=error.__cause__)


@dataclass(slots=True, eq=False)
class Probe(Question):
    """Checks whether the store serves at all, and tells the breaker."""

    health: StoreHealth

    def run(self, asker: AskingThread) -> None:
        answers = False
        try:
            asker.store.connect()
            asker.store.ping(asker.clock() + PROBE_S)
            answers = True
        except Exception as error:
            asker.report(error)
        if asker.breaker.open:
            asker.breaker.probed(answers)
        elif not answers:
            asker.breaker.failed("ask", at_once=True)

    def end(self, answer: object) -> None:
        self.health.probed()


@dataclass(slots=True, eq=False)
class Look(Question):
    """Asks how full the store is."""

    health: StoreHealth

    def run(self, asker: AskingThread) -> StoreUsage | Exception | None:
        """Return the store's answer; None if it gives none, as to a user without permission; or the failure."""
        try:
            asker.store.connect()
            return asker.store.usage(asker.clock() + LOOK_DEADLINE_S)
        except StoreError as error:
            if not error.kind.is_answer:
                asker.report(error)
            elif error.kind is not StoreFault.BUSY:  # as while it runs a script: it is as full as it was
                return None
            return error

    def end(self, answer: StoreUsage | Exception | None) -> None:
        self.health.looked(answer)
