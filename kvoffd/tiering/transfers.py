"""What blocks on their way to or from a tier hold of the cache, from the begin of the transfer to its one end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvoffd.cache.namespace import Block, BlockState, MissReason, Namespace
from kvoffd.cache.pins import StoreTicket
from kvoffd.system.files import OnError
from kvoffd.tiers.tier import TierBlock, TierKey, TierShard


@dataclass(slots=True, eq=False)
class Promotion:
    """A block that is brought up: in effect a store of the shards of all ranks."""

    source: TierBlock
    block: Block
    tickets: list[StoreTicket]
    """By rank."""

    @property
    def offsets(self) -> list[int]:
        """By rank, the pool offset in bytes of the slot to be filled."""
        return [ticket.offsets[0] for ticket in self.tickets]


@dataclass(slots=True, eq=False)
class Demotion:
    """A block that is written to a tier: in effect a load of the shards of all ranks, under no lease."""

    copy: TierBlock
    block: Block
    offsets: list[int]
    """By rank, the pool offset in bytes of the slot to be read."""


class TierTransfers:
    """Begins and ends promotions and demotions. Each must be ended exactly once, after its last byte has moved."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self.demotions: set[Demotion] = set()

    def begin_promotions(self, namespace: Namespace, group: int, sources: Sequence[TierBlock]) -> list[Promotion]:
        """Take slots for blocks of a tier, all of one group, that fit; evicting if needed.

        Keys that the pool has by now, or that a store is writing, are left out; so are the last ones where there is
        no room for all, and all of a namespace that is being cleared.
        """
        if namespace.clearing:
            return []
        blocks = self._cache.blocks
        index = namespace.index[group]
        absent = [source for source in sources if source.id.key not in index]
        allowance, kept = blocks.allowance(namespace), frozenset[Block]()
        slots: list[list[int]] = []
        with OnError(lambda: self._cache.slots.free([offset for offsets in slots for offset in offsets])):
            for rank in range(namespace.world_size):
                nbytes, node = namespace.slot_bytes(rank, group), namespace.nodes.get(rank)
                slots.append(blocks.take_slots(namespace, nbytes, len(absent), kept, node, inf, allowance, nbytes))
        count = min(map(len, slots))
        for offsets in slots:
            self._cache.slots.free(offsets[count:])
        return [
            self._begin(namespace, group, source, [offsets[number] for offsets in slots])
            for number, source in enumerate(absent[:count])
        ]

    def _begin(self, namespace: Namespace, group: int, source: TierBlock, offsets: Sequence[int]) -> Promotion:
        tickets: list[StoreTicket] = []
        block: Block | None = None
        for rank, (offset, shard) in enumerate(zip(offsets, source.shards, strict=True)):
            slot_bytes = namespace.slot_bytes(rank, group)
            (block,) = self._cache.blocks.start_shards(
                namespace, group, [source.id.key], [block], rank, [offset], slot_bytes, [shard.first_block]
            )
            tickets.append(StoreTicket(namespace, rank, group, [0], [offset], [], [block]))
        self._cache.stores.update(tickets)
        assert block is not None, "a block has shards"
        return Promotion(source, block, tickets)

    def end_promotion(self, promotion: Promotion, ok: bool) -> bool:
        """End it; ``ok`` says that all bytes are in place and have their checksums. True where the block is ready."""
        for ticket, shard in zip(promotion.tickets, promotion.source.shards, strict=True):
            if ok and shard.checksum:
                ticket.checksums = [shard.checksum]
                self._cache.blocks.set_first_block(promotion.block, ticket.rank, shard.first_block)
                self._cache.commit_store(ticket)
            else:
                self._cache.abort_store(ticket)
        return promotion.block.state is BlockState.READY

    def give_up_promotion(self, promotion: Promotion) -> None:
        """Free the key of a promotion that takes too long for others. Its slots stay taken until it is ended."""
        self._cache.drop_incomplete([promotion.block], MissReason.TIER_LATE)

    def begin_demotion(self, block: Block) -> Demotion | None:
        """Pin a block for a tier to copy; None where it is not ready, or lacks a checksum to keep with it."""
        shards = block.shards.values()
        if block.state is not BlockState.READY or any(shard.corrupt or not shard.checksum for shard in shards):
            return None
        self._cache.blocks.pin([block])
        demotion = Demotion(tier_block(block), block, [shard.offset for shard in shards])
        self.demotions.add(demotion)
        return demotion

    def end_demotion(self, demotion: Demotion) -> bool:
        """End it. False where the block was dropped meanwhile: what was written of it must not come back."""
        self.demotions.remove(demotion)
        ready = demotion.block.state is BlockState.READY
        self._cache.blocks.unpin([demotion.block])
        return ready


def tier_key(block: Block) -> TierKey:
    return TierKey(block.namespace.fingerprint, block.group, block.key)


def tier_block(block: Block) -> TierBlock:
    shards = (
        TierShard(block.namespace.shard_length(rank, block.group), shard.first_block, shard.checksum)
        for rank, shard in block.shards.items()
    )
    return TierBlock(tier_key(block), tuple(shards))
