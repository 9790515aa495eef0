"""Which slots to compare with their checksums, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvoffd.cache.block import Block, Shard
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.ticket import LoadTicket


class ChecksumCheck(NamedTuple):
    """A shard whose bytes are to be compared: ``length`` bytes at ``offset`` with ``checksum``."""

    block: Block
    rank: int
    shard: Shard
    offset: int
    length: int
    checksum: int


class Integrity:
    """Counts what is compared and acts on it. The bytes themselves are read by others, in threads of their own."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.checked_slots = 0
        self.checked_bytes = 0
        self.mismatches = 0

    @property
    def unverified_slots(self) -> int:
        """Slots of an earlier daemon that nobody has looked at yet."""
        return len(self._blocks.unverified)

    @property
    def quarantined_slots(self) -> int:
        """Slots that are never used again."""
        return len(self._blocks.quarantined)

    def looks_of_load(self, ticket: LoadTicket, every: bool) -> list[ChecksumCheck]:
        """What a load must compare before it copies: what nobody has verified yet, or ``every`` shard."""
        if not every and not self._blocks.unverified:
            return []
        return [
            _look(block, ticket.rank, shard)
            for block, shard in zip(ticket.blocks, ticket.shards, strict=True)
            if shard.checksum and (every or not shard.verified)
        ]

    def unverified(self, limit_bytes: int) -> list[ChecksumCheck]:
        """Shards that nobody has verified yet, oldest first, together about ``limit_bytes``."""
        looks: list[ChecksumCheck] = []
        for shard, (block, rank) in self._blocks.unverified.items():
            looks.append(_look(block, rank, shard))
            limit_bytes -= shard.slot_bytes
            if limit_bytes <= 0:
                break
        return looks

    def slots(self) -> list[int]:
        """Offsets of all slots in use, for ``looks_at``."""
        return list(self._blocks.block_at)

    def looks_at(self, offsets: Iterable[int]) -> list[ChecksumCheck]:
        """What there is to compare in those slots by now: none of what was freed, or is being written."""
        looks: list[ChecksumCheck] = []
        for offset in offsets:
            if (block := self._blocks.block_at.get(offset)) is not None:
                for rank, shard in block.shards.items():
                    if shard.offset == offset and shard.written and shard.checksum and not shard.corrupt:
                        looks.append(_look(block, rank, shard))
        return looks

    def judge(self, look: ChecksumCheck, found: int) -> bool:
        """Note what a slot's bytes hash to; False where they are not those that were stored. Its block goes then.

        Nothing need have held the slot meanwhile: where it was freed or is written anew, nothing follows.
        """
        shard = look.shard
        if look.block.shards.get(look.rank) is not shard or not shard.written or shard.checksum != look.checksum:
            return True
        self.checked_slots += 1
        self.checked_bytes += look.length
        if found == look.checksum:
            if not shard.corrupt:  # else another look found it wrong, and what is not stable is not believed
                self._blocks.mark_verified(shard)
            return not shard.corrupt
        if not shard.corrupt:
            self.mismatches += 1
            self._blocks.quarantine(look.block, look.rank)
        return False


def _look(block: Block, rank: int, shard: Shard) -> ChecksumCheck:
    sizes = block.namespace.shard_bytes(rank)
    assert sizes is not None
    return ChecksumCheck(block, rank, shard, shard.offset, sizes[block.group], shard.checksum)
