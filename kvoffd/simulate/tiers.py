"""Tiers without bytes below the pool of a replay: the daemon's tiering decides, nothing is copied or late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.simulate.disk import open_disk
from kvoffd.simulate.shared import BlockPlaces, SimulatedPeers, SimulatedStore, StoreObjects
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.disk import DiskTier


class DiskPlan(NamedTuple):
    """A disk below the pool."""

    blocks: int
    mode: WriteMode = WriteMode.AUTO
    per_day_blocks: int = 0
    """Blocks that may be written per day once the disk was filled; 0 for no limit."""


class SimulatedTiers:
    """The tiers below one cache: a disk, a store and other nodes' pools, asked in this order as far as they are added.

    Args:
        disk: None for none.
        block_bytes: bytes of the cache's blocks.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        disk: DiskPlan | None,
        block_bytes: int,
    ) -> None:
        self._cache, self._clock, self._block_bytes = cache, clock, block_bytes
        self._posted: deque[Callable[[], None]] = deque()
        mode, per_day_blocks = (disk.mode, disk.per_day_blocks) if disk is not None else (WriteMode.NEVER, 0)
        self._tiering = Tiering(cache, events, clock, TieringSettings(mode, per_day_blocks * block_bytes))
        self._disk_tier: DiskTier | None = None
        self._disk_source: PromotionSource | None = None
        if disk is not None:
            self._disk_tier = open_disk(disk.blocks, block_bytes, clock, self._posted.append, self._tiering)
            self._tiering.disk_writer.budget.first_filling_bytes = disk.blocks * block_bytes
            self._disk_source = self._tiering.add_disk(self._disk_tier)
        self.loaded = self._tiering.loaded
        """Returns the sources of a load's blocks: ``TierHooks.loaded``."""
        cache.life.tiers = self._tiering

    def add_store(self, objects: StoreObjects, mode: WriteMode) -> SimulatedStore:
        """Add a store, which is written as ``mode`` says."""
        sizes = self._block_bytes, self._cache.slots.pool_bytes
        tier = SimulatedStore(objects, *sizes, self._clock, self._posted.append, self._tiering)
        self._tiering.add_store(tier, TieringSettings(mode))
        return tier

    def add_peers(self, places: BlockPlaces, peers: int) -> SimulatedPeers:
        """Add the pools of some nodes. See ``SimulatedPeers``."""
        tier = SimulatedPeers(places, peers, self._posted.append, self._tiering)
        self._tiering.add_store(tier, TieringSettings(WriteMode.NEVER))
        return tier

    def settle(self) -> None:
        """Run all pending reads and writes."""
        self._tiering.pump()
        while self._posted:
            self._posted.popleft()()
            self._tiering.pump()

    def tick(self) -> None:
        self._tiering.tick()
        self.settle()

    @property
    def promoted(self) -> int:
        """Blocks that came up from all tiers."""
        return sum(source.promoted_blocks for source in self._tiering.sources)

    @property
    def read_from_disk(self) -> int:
        return self._disk_source.promoted_blocks if self._disk_source is not None else 0

    @property
    def written_to_disk(self) -> int:
        return self._tiering.disk_writer.written_blocks

    def close(self) -> None:
        if self._disk_tier is not None:
            self._disk_tier.close(0.0)
