"""The interface of everything that executes plans: HostEngine for host memory, CudaEngine for GPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.plan import Direction, Outcome, Plan


@dataclass(slots=True, eq=False)
class Transfer:
    """One job's copy. Compared by identity; belongs to the engine from ``submit`` until ``on_done``.

    Attributes:
        deadline: on the engine's clock, in seconds; looked at before the transfer starts, every few milliseconds while
            it is copied, and by ``expire``.
        on_done: called exactly once, from any thread, with the transfer, its outcome and the seconds it spent copying,
            when nothing touches its memory any more, its slots included. It must be quick and must not raise.
        on_overdue: called at most once, by ``expire`` in its caller's thread: the copy has not come back a while after
            the deadline, as on a GPU that hangs, and may touch the memory until ``on_done``, if that ever comes.
        checksums: of its slots. A load's are compared before its first byte moves; a store's are taken of each slot
            that is whole while others are still copied.
        abandoned: the transfer ends as FAILED at its next step.
        owner: whose it is: owners take turns, a slice of a transfer at a time, however much each of them has queued.
    """

    direction: Direction
    plan: Plan
    deadline: float
    on_done: OnDone
    on_overdue: Callable[[Transfer], None] | None = None
    checksums: SlotChecksums | None = None
    abandoned: bool = False
    owner: Hashable = None


OnDone = Callable[[Transfer, Outcome, float], None]


class DirectionLoad(NamedTuple):
    """What one direction of an engine has to do and has done."""

    queued: int
    """Transfers whose copy has not begun."""
    running: int
    """Transfers whose copy has begun, those that wait for their checksums included."""
    busy_seconds: float
    bytes: int
    """Bytes copied, those of transfers that ended half-way included."""
    checksum_seconds: float = 0.0
    """CPU seconds that went into checksums, whichever threads took them."""
    checksum_bytes: int = 0
    refused_batches: int = 0
    """Batches of copies that a CUDA driver refused, so that their pieces were copied one by one."""

    def plus(self, other: DirectionLoad) -> DirectionLoad:
        return DirectionLoad(*map(add, self, other))


class TransferEngine(ABC):
    """Executes transfers. Its methods may be called from any thread and never wait for a copy, but for ``close``."""

    def hangs_s(self, direction: Direction) -> float:
        """For how long a copy has been known to be overdue whose thread waits for more than a CPU; 0 when none is."""
        return 0.0

    @abstractmethod
    def submit(self, transfer: Transfer) -> None:
        """Queue the transfer, first in first out per direction and owner. After ``close`` it is CANCELLED at once.

        The queue itself has no bound: the server bounds the jobs in flight.
        """

    @abstractmethod
    def cancel(self, transfer: Transfer) -> bool:
        """End a transfer that has not started as CANCELLED; False, and nothing changes, when it runs or has ended."""

    def abandon(self, transfer: Transfer) -> None:
        """End the transfer as FAILED at its next step, or before it starts. Its memory is in use until ``on_done``."""
        transfer.abandoned = True

    def expire(self) -> None:  # noqa: B027 - engines whose copies always come back need not do anything
        """End waiting transfers beyond their deadline; call ``on_overdue`` of running ones that do not come back.

        The owner calls this now and then, since threads that hang cannot look at the clock.
        """

    @abstractmethod
    def load_of(self, direction: Direction) -> DirectionLoad:
        """Return the counters of one direction."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Cancel what waits, abandon what runs, end the threads.

        Returns False when a thread still copies after ``timeout_s``: the memory it uses must then stay mapped.
        """
