"""What blocks on their way up or down hold of the cache: the steps that keep its books right meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffd.cache.block import Block, BlockState, Shard
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.ticket import StoreTicket
from kvoffd.tiers.tier import TierBlock, TierKey, TierShard

if TYPE_CHECKING:
    from kvoffd.cache.cache import BlockCache


@dataclass(slots=True, eq=False)
class Promotion:
    """A block on its way up: in effect a store of the shards of all ranks."""

    source: TierBlock
    block: Block
    tickets: list[StoreTicket] = field(default_factory=list)
    """By rank."""

    @property
    def offsets(self) -> list[int]:
        """By rank, the pool offset in bytes of the slot to be filled."""
        return [ticket.offsets[0] for ticket in self.tickets]


@dataclass(slots=True, eq=False)
class WriteTicket:
    """A block on its way down: in effect a load of the shards of all ranks, under no lease."""

    copy: TierBlock
    block: Block
    offsets: list[int]
    """By rank, the pool offset in bytes of the slot to be read."""


class TierTransfers:
    """Begins and ends promotions and writes. Every one must be ended exactly once, after its last byte has moved."""

    def __init__(self, cache: BlockCache, blocks: Blocks, stores: set[StoreTicket], settle: Callable[[], None]) -> None:
        self._cache = cache
        self._blocks = blocks
        self._stores = stores
        self._settle = settle
        self.writes: set[WriteTicket] = set()

    # --- up --------------------------------------------------------------------------------------

    def fits(self, namespace: Namespace, source: TierBlock) -> bool:
        """Whether a block of a tier has the geometry of its namespace, as far as that is known by now."""
        if source.id.group >= len(namespace.groups) or len(source.shards) != namespace.world_size:
            return False
        if len(source.id.key) != namespace.key_bytes:
            return False
        for rank, shard in enumerate(source.shards):
            sizes = namespace.shard_bytes(rank)
            if sizes is None or sizes[source.id.group] != shard.length or not shard.checksum:
                return False
        return True

    def begin_promotion(self, namespace: Namespace, group: int, sources: Sequence[TierBlock]) -> list[Promotion]:
        """Take slots for blocks of a tier, all of one group, that fit; evicting if needed.

        Those that the pool has, or is given, by now are left out; so are the last ones where there is no room for all.
        """
        self._settle()
        index = namespace.index[group]
        wanted = [source for source in sources if source.id.key not in index]
        slots = [
            self._blocks.take_slots(
                namespace.slot_bytes(rank, group), len(wanted), frozenset(), namespace.nodes.get(rank)
            )
            for rank in range(namespace.world_size)
        ]
        count = min(map(len, slots))
        for offsets in slots:
            for offset in offsets[count:]:
                self._blocks.give_back_slot(offset)
        return [
            self._begin(namespace, group, source, [offsets[number] for offsets in slots])
            for number, source in enumerate(wanted[:count])
        ]

    def _begin(self, namespace: Namespace, group: int, source: TierBlock, offsets: Sequence[int]) -> Promotion:
        tickets: list[StoreTicket] = []
        for rank, (offset, shard) in enumerate(zip(offsets, source.shards, strict=True)):
            slot_bytes = namespace.slot_bytes(rank, group)
            (block,) = self._blocks.start_shards(
                namespace, group, [source.id.key], rank, [offset], slot_bytes, [shard.first_block]
            )
            tickets.append(StoreTicket(namespace, rank, group, [0], [offset], [], [block]))
        self._stores.update(tickets)
        return Promotion(source, block, tickets)

    def end_promotion(self, promotion: Promotion, ok: bool) -> bool:
        """End it; ``ok`` says that all bytes are in place and have their checksums. True where the block is ready."""
        for ticket, shard in zip(promotion.tickets, promotion.source.shards, strict=True):
            if ok:
                ticket.checksums = [shard.checksum]
                self._cache.commit_store(ticket)
            else:
                self._cache.abort_store(ticket)
        return promotion.block.state is BlockState.READY

    def give_up(self, promotion: Promotion) -> None:
        """It takes too long: its key is free for others, its slots stay taken until it is ended."""
        if promotion.block.state is BlockState.WRITING:
            self._blocks.drop([promotion.block])

    # --- down ------------------------------------------------------------------------------------

    def begin_write(self, block: Block) -> WriteTicket | None:
        """Hold a block for a tier to copy; None where it is not ready, or lacks a checksum to keep with it."""
        self._settle()
        if block.state is not BlockState.READY or any(shard.corrupt or not shard.checksum for shard in _shards(block)):
            return None
        self._blocks.pin([block])
        ticket = WriteTicket(copy_of(block), block, [shard.offset for shard in _shards(block)])
        self.writes.add(ticket)
        return ticket

    def end_write(self, ticket: WriteTicket) -> bool:
        """End it. False where the block was dropped meanwhile: what was written of it must not come back."""
        self.writes.remove(ticket)
        wanted = ticket.block.state is BlockState.READY
        self._blocks.unpin([ticket.block])
        return wanted


def _shards(block: Block) -> list[Shard]:
    return [block.shards[rank] for rank in range(block.namespace.world_size)]


def id_of(block: Block) -> TierKey:
    """A block's name in the tiers."""
    return TierKey(block.namespace.fingerprint, block.group, block.key)


def copy_of(block: Block) -> TierBlock:
    """A ready block as a tier keeps it."""
    shards = []
    for rank, shard in enumerate(_shards(block)):
        sizes = block.namespace.shard_bytes(rank)
        assert sizes is not None, "a shard was written"
        shards.append(TierShard(sizes[block.group], shard.first_block, shard.checksum))
    return TierBlock(id_of(block), tuple(shards))
