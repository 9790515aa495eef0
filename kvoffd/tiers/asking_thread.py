"""The thread of a shared tier that asks the store, and what a question is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any

from kvoffd.tiers.block_threads import StoreThread
from kvoffd.tiers.store import StoreError, StoreFault
from kvoffd_proto.units import format_duration

ASK_PATIENCE_S = 0.08
"""Time after an ask's deadline, at which an answer is late enough to count as a failure, until its connection is
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
    """An answer that shows how fast the store is."""

    seconds: float


class AskingThread(StoreThread):
    """The thread of a tier that runs its questions."""

    @property
    def raising(self) -> str:
        """Kind of work that raising a generation is: for a peer, which is only read, none that it could refuse."""
        return "" if self.store.follows else "write"

    def answered_late(self) -> None:
        """Count an answer as a failure, of which operators hear if it opens the breaker."""
        if self.breaker.failed("ask"):
            limit = format_duration(self.tier.ask_deadline_s)
            why = f"{self.tier.name} answers later than {limit}, the setting shared_ask_deadline, time after time."
            self.report(StoreError(StoreFault.TIMEOUT, why))

    def give_back(self, fingerprint: bytes, theirs: int, ours: int, deadline: float) -> None:
        """Raise the generation of a store that lost it, so that no node reads blocks of the older one again."""
        try:
            self.store.raise_generation(fingerprint, theirs, ours, deadline)
        except StoreError as error:
            if not error.kind.is_answer:
                raise
            if error.kind is not StoreFault.UNKEPT:  # else the peer has followed, and lends what is safe
                self.report(error, self.raising)  # a node with write permission does it
