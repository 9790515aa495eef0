"""A cache on fake slots that hold bytes, over the disk tier."""

from __future__ import annotations

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.pins import StoreTicket
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.manager import TieringManager
from kvoffd.tiers.tier import CompositeTier, TierKey
from kvoffd_proto.events import MEDIUM_STORAGE
from tests.kit.cache_harness import CacheHarness, begin_store
from tests.kit.held_disk import HeldDisk, PoolBytes
from tests.kit.invariants import check_invariants
from tests.kit.memory_disk import MemoryDisk


class FoldedTierEvents:
    """Folds the events of a tier into the index they describe, and refuses impossible ones."""

    def __init__(self) -> None:
        self.index: set[tuple[bytes, int, bytes]] = set()

    def stored(self, namespace: Namespace, group: int, keys: list[bytes], medium: str) -> None:
        assert medium == MEDIUM_STORAGE
        names = {(namespace.fingerprint, group, key) for key in keys}
        assert not names & self.index
        self.index |= names

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str) -> None:
        assert medium == MEDIUM_STORAGE
        names = {(namespace.fingerprint, group, key) for key in keys}
        assert names <= self.index
        self.index -= names


class TieringHarness(CacheHarness):
    """A cache with a tier. A shard's bytes are a function of its name and are checked after promotions."""

    def __init__(
        self,
        settings: TieringSettings | None = None,
        regions: int = 4,
        tier_blocks: int = 0,
        most_jobs: int = 2**30,
        file: MemoryDisk | None = None,
    ) -> None:
        super().__init__(regions=regions)
        self.memory = PoolBytes(self.slots.pool_bytes)
        self.tiers = CompositeTier()
        self.tier_events = FoldedTierEvents()
        self.engines_busy = False
        self.tiering = TieringManager(
            self.cache,
            self.tiers,
            self.tier_events,
            self.clock,
            settings or TieringSettings(),
            lambda: self.engines_busy,
        )
        self.cache.attach(self.tiering)
        self.disk = HeldDisk(
            file or MemoryDisk(), self.memory, self.clock, self.tiering, tier_blocks, most_jobs=most_jobs
        )
        self.tier = self.disk.tier
        self.tiers.attach(self.tier)

    def heir(self, settings: TieringSettings) -> TieringHarness:
        """The next life, with the same file."""
        self.tier.close(1.0)
        return TieringHarness(settings, file=self.disk.file)

    def content(self, namespace: Namespace, group: int, key: bytes, rank: int) -> bytes:
        """The bytes that a shard must hold."""
        sizes = namespace.shard_bytes(rank)
        assert sizes is not None
        return (namespace.fingerprint + bytes([group, rank]) + key).ljust(sizes[group], b".")[: sizes[group]]

    def fill(self, ticket: StoreTicket) -> None:
        """Write the bytes and checksums of a store."""
        for block, offset in zip(ticket.blocks, ticket.offsets, strict=True):
            data = self.content(ticket.namespace, ticket.group, block.key, ticket.rank)
            self.memory.poke(offset, data)
            ticket.checksums.append(self.memory.sum_of(offset, len(data)))

    def put(self, namespace: Namespace, keys: bytes, group: int = 0, first_block: int = 0) -> int:
        dropped = 0
        for rank in range(namespace.world_size):
            ticket = begin_store(self.cache, namespace, rank, group, keys, first_block)
            self.fill(ticket)
            self.cache.commit_store(ticket)
            dropped = len(ticket.dropped)
        return dropped

    def put_in_tier(self, namespace: Namespace, keys: bytes) -> None:
        """Have the tier hold the blocks, and the pool not."""
        self.put(namespace, keys)
        blocks = [namespace.index[0][key] for key in namespace.split(0, keys)]
        for block in blocks:
            ticket = self.tiering.transfers.begin_demotion(block)
            assert ticket is not None
            assert self.tier.write(ticket.copy, ticket.offsets, lambda _, ticket=ticket: self.end_write(ticket))  # type: ignore[misc]
        self.disk.end_all()
        self.cache.blocks.evict(blocks)
        assert self.in_tier(namespace, keys) == len(blocks)

    def end_write(self, ticket: object) -> None:
        assert self.tiering.transfers.end_demotion(ticket)  # type: ignore[arg-type]

    def in_tier(self, namespace: Namespace, keys: bytes, group: int = 0) -> int:
        index = self.tier.index(namespace.fingerprint, group)
        return sum(key in index for key in namespace.split(group, keys))

    def finish_promotions(self) -> None:
        """Finish every promotion that was asked for."""
        self.tiering.pump()
        self.disk.end_all(self.clock())

    def check(self) -> None:
        """Check the cache's invariants, the events folded so far, and the bytes of all ready blocks."""
        check_invariants(self.cache)
        for namespace in self.cache.namespaces:
            for group, index in enumerate(namespace.index):
                for key, block in index.items():
                    for rank, shard in block.shards.items():
                        if shard.written:
                            expected = self.content(namespace, group, key, rank)
                            assert self.memory.peek(shard.offset, len(expected)) == expected
        self.disk.settle()
        assert self.tier_events.index == {tuple(name) for name in self.disk.blocks}


def name_of(namespace: Namespace, key: bytes, group: int = 0) -> TierKey:
    """The name by which a tier knows a block."""
    return TierKey(namespace.fingerprint, group, key)


__all__ = ["FoldedTierEvents", "TieringHarness", "name_of"]
