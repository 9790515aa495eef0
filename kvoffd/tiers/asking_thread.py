"""The thread of a shared tier that asks the store, and what a question is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any

from kvoffd.tiers.block_threads import StoreThread
from kvoffd.tiers.breaker import Work
from kvoffd.tiers.store import StoreError, StoreFault
from kvoffd_proto.units import format_duration

ASK_PATIENCE_S = 0.08
"""Time after an ask's deadline in which its answer is still used, but counts as a failure. After that its connection is
closed."""


class Question(ABC):
    """A question to a store, from the time when it is put to its answer.

    Attributes:
        deadline: time by which its turn must have come.
    """

    __slots__ = ()
    deadline = inf

    @abstractmethod
    def run(self, asker: AskingThread) -> Any:
        """Ask the store, in the asking thread."""

    @abstractmethod
    def end(self, answer: Any) -> None:
        """Take what ``run`` returned, in the daemon's thread; else the exception that it raised, None if the thread
        hangs, or a StoreError if the tier is closed."""


@dataclass(slots=True)
class Answered:
    """An answer whose duration shows how fast the store is."""

    seconds: float


class AskingThread(StoreThread):
    """The thread of a tier that runs its questions."""

    @property
    def raise_work(self) -> Work | None:
        """Kind of work that raising a generation is, for ``report``. A store may refuse it, as any write; a peer is
        only read, and does not fail at its work if it has not followed yet."""
        return None if self.store.is_peer else "write"

    def answered_late(self) -> None:
        """Count a late answer as a failure. It is reported only if it opens the breaker: a single one is nothing."""
        if self.breaker.failed("ask"):
            limit = format_duration(self.tier.ask_deadline_s)
            why = f"{self.tier.name} answers later than {limit}, the setting shared_ask_deadline, time after time."
            self.report(StoreError(StoreFault.TIMEOUT, why))

    def give_back(self, fingerprint: bytes, theirs: int, ours: int, deadline: float) -> None:
        """Raise the generation of a store that lost it, from ``theirs`` to ``ours``, so that no node reads blocks of
        the older one again. Raises StoreError if the store does not answer."""
        try:
            self.store.raise_generation(fingerprint, theirs, ours, deadline)
        except StoreError as error:
            if not error.kind.is_answer:
                raise
            if error.kind is not StoreFault.UNKEPT:  # else the peer has followed, and lends what is safe
                self.report(error, self.raise_work)  # a node with write permission does it
