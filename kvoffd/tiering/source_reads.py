"""Reads that a source's tier has begun: how many bytes at once, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, takewhile

from kvoffd.cache.leases import Leases
from kvoffd.cache.tickets import FillTicket
from kvoffd.tiering.fills import Fill
from kvoffd.tiering.read_speed import ReadSpeed
from kvoffd.tiers.tier import ReadEnd, Tier

UNMEASURED_BYTES = 64 * 2**20
"""Limit of the pool bytes that reads use at once while the speed is unknown."""
AHEAD_S = 0.25
"""Once the speed is known, reads under way are limited to what comes in this time: those that nobody waits for any
more end soon."""
AHEAD_BLOCKS = 16
"""Lower limit of the blocks under way."""


class SourceReads:
    """The reads of one source, until its tier ends them.

    A tier may end reads in any order. The turn of a read begins when all earlier ones have ended or were given up; then
    it has its patience. A read that takes longer is given up: no lookup waits for it, and the tier may still write into
    its slots.

    Args:
        patience_s: time for a tier to read a block from the beginning of its turn.

    Attributes:
        most_bytes: pool bytes that reads may use at once. A larger block is read alone. Reads that were given up may
            use as much again, so that others are still read.
        under_way: in the order in which they were begun, without those that were given up.
        given_up: those that were given up, and have not ended.
        under_way_bytes: pool bytes of the former.
        given_up_bytes: pool bytes of the latter, a part of ``Leases.withheld_bytes``.
    """

    def __init__(
        self, tier: Tier, leases: Leases, clock: Callable[[], float], patience_s: float, most_bytes: int
    ) -> None:
        self._tier, self._leases, self._clock, self._patience_s = tier, leases, clock, patience_s
        self.most_bytes = most_bytes
        self.under_way: dict[Fill, None] = {}
        self.given_up: dict[Fill, None] = {}
        self.under_way_bytes = self.given_up_bytes = 0
        self.speed = ReadSpeed(clock)
        self._turn_at = 0.0
        """Time when the turn of the first read under way began."""
        self._ended_at = 0.0
        """Time when a read last ended."""

    def free_blocks(self, block_bytes: int) -> int:
        """Return how many further blocks of this size may be read now: at least one if no other read has slots."""
        given_up_beyond = max(0, self.given_up_bytes - self.most_bytes)  # what they use of the others' bytes
        free_bytes = self._most_under_way(block_bytes) - self.under_way_bytes - given_up_beyond
        return max(free_bytes // block_bytes, 0 if self.under_way or self.given_up else 1)

    def are_few(self, block_bytes: int) -> bool:
        """Return whether at most half of the bytes that may be under way are."""
        return 2 * self.under_way_bytes <= self._most_under_way(block_bytes)

    def _most_under_way(self, block_bytes: int) -> int:
        """Return the pool bytes that reads under way may use at once, at the measured speed."""
        speed = self.speed.measured
        ahead_bytes = int(AHEAD_S * speed) if speed else UNMEASURED_BYTES
        return min(self.most_bytes, max(ahead_bytes, AHEAD_BLOCKS * block_bytes))

    def begin(self, fill: Fill, ticket: FillTicket, on_end: ReadEnd) -> bool:
        """Begin a read into the slots of a ticket; return False if the tier does not accept it now."""
        group = fill.queue.block_group
        if not self._tier.read(group, fill.key, ticket.offsets, self._patience_s, on_end, fill.is_awaited):
            return False
        fill.begun_at = self._clock()
        if not self.under_way:
            self._turn_at = fill.begun_at
        self.speed.begin(group.nbytes)
        fill.ticket = ticket
        self.under_way[fill] = None
        self.under_way_bytes += fill.queue.group.block_bytes
        return True

    def end(self, fill: Fill, came_bytes: int) -> bool:
        """Remove a read that its tier has ended, with 0 ``came_bytes`` if it failed. Return whether it had been given
        up."""
        self._ended_at = self._clock()
        if next(iter(self.under_way), None) is fill:
            self._turn_at = self._ended_at
        if was_given_up := fill in self.given_up:
            del self.given_up[fill]
            self._count_given_up(-fill.queue.group.block_bytes)
        else:
            del self.under_way[fill]
            self.under_way_bytes -= fill.queue.group.block_bytes
        self.speed.end(came_bytes, len(self.under_way))
        return was_given_up

    def give_up_overdue(self, most: int) -> list[Fill]:
        """Give up reads once the turn of the first has taken too long, and return them, up to ``most``."""
        overdue = self._overdue(most)
        for fill in overdue:
            del self.under_way[fill]
            self.under_way_bytes -= fill.queue.group.block_bytes
            self.given_up[fill] = None
            self._count_given_up(fill.queue.group.block_bytes)
        if 0 < len(overdue) < most:  # these were all: the turn of the one behind them begins
            self._turn_at = self._clock()
        return overdue

    def _overdue(self, most: int) -> list[Fill]:
        """Return the reads that are overdue: the first alone, if another one has ended in its turn; else the tier
        hangs, and they are all that began as long ago, up to ``most``."""
        now = self._clock()
        if not self.under_way or now - self._turn_at < self._patience_s:
            return []
        if self._ended_at > self._turn_at:
            return list(islice(self.under_way, 1))
        old = takewhile(lambda fill: now - fill.begun_at >= self._patience_s, self.under_way)
        return list(islice(old, most))

    def _count_given_up(self, nbytes: int) -> None:
        self.given_up_bytes += nbytes
        self._leases.withheld_bytes += nbytes
