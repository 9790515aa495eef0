"""Estimate of how full a store is that many nodes write to."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kvoffd.tiers.store import StoreUsage
from kvoffd.tiers.tier import FULL_PART, TierStats

OLD_WEIGHT = 0.9
"""Weight of earlier samples in this node's part of the writes."""


class Fullness:
    """Estimates how long blocks survive in a store, from its answers about its memory.

    Args:
        counters: this node's writes, which the tier counts.
        pool_bytes: the least size that a store without a limit is taken for.
    """

    def __init__(self, counters: TierStats, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._counters, self._pool_bytes, self._clock = counters, pool_bytes, clock
        self._usage: StoreUsage | None = None
        """The store's last answer."""
        self._full_until = -inf
        self._evicts = False
        """Whether the store evicted objects between the last two looks."""
        self._written_before = 0, 0
        """Blocks and bytes written up to the last look."""
        self._written = self._evicted = 1.0
        """Recent numbers of blocks that this node wrote, and that the store evicted, for writes of all nodes. At first
        equal: as if this node wrote all."""

    @property
    def usage(self) -> StoreUsage:
        """Answer of the last look; zeros without one."""
        return self._usage or StoreUsage(0, 0, 0)

    @property
    def lifetime_bytes(self) -> int:
        """Bytes of this node's writes that a block survives; 0 while there is free space, as far as the store reports.

        Other nodes write too: this node causes only a part of the evictions.
        """
        size, used, _ = self.usage
        if not (used >= FULL_PART * size > 0 or self._evicts or self._clock() < self._full_until):
            return 0
        size = size or max(self._pool_bytes, self._counters.written_bytes)
        return max(1, int(size * min(1.0, self._written / self._evicted)))

    def wrote_much(self) -> bool:
        """Return whether the writes since the last look may have filled the store."""
        size = self.usage.size_bytes
        return 0 < (1 - FULL_PART) * size <= self._counters.written_bytes - self._written_before[1]

    def assume_full(self, seconds: float) -> None:
        """Take the store for full, for this time: it had no space for a write."""
        self._full_until = self._clock() + seconds

    def looked(self, found: StoreUsage | None) -> None:
        """Record the store's answer; None if it does not report its memory."""
        before, self._usage = self._usage, found
        if found is None:
            return
        written = self._counters.written_blocks - self._written_before[0]
        self._written_before = self._counters.written_blocks, self._counters.written_bytes
        evicted = max(0, found.evicted - before.evicted) if before is not None else 0
        self._evicts = evicted > 0
        if evicted:
            self._written = OLD_WEIGHT * self._written + written
            # More may be written than evicted, since the store still had space: this node's part is at most all.
            self._evicted = OLD_WEIGHT * self._evicted + max(evicted, written)
