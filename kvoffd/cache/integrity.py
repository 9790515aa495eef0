"""Which slots to compare with their checksums, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvoffd.cache.lookup import LeasedBlocks
from kvoffd.cache.namespace import Block, Shard
from kvoffd.cache.pins import LoadTicket


class ChecksumCheck(NamedTuple):
    """A shard whose bytes are to be compared: ``length`` bytes at ``offset`` with ``checksum``.

    Where that is 0 it is to be taken; ``since`` then tells whether the shard was written anew meanwhile.
    """

    block: Block
    rank: int
    shard: Shard
    offset: int
    length: int
    checksum: int
    since: object = None


class Integrity:
    """Chooses the slots to check, counts the checks and acts on their results. Others read and hash the bytes."""

    def __init__(self, cache: LeasedBlocks) -> None:
        self._cache = cache
        self.checked_slots = 0
        self.checked_bytes = 0
        self.mismatches = 0
        self.loaded_unverified_slots = 0

    @property
    def unverified_slots(self) -> int:
        """Slots that an earlier daemon wrote and that have not been checked yet, or whose checksum is to be taken."""
        return len(self._cache.blocks.unverified)

    @property
    def quarantined_slots(self) -> int:
        """Slots that are never used again."""
        return len(self._cache.blocks.quarantined)

    def slots(self) -> list[int]:
        """Offsets of all slots in use, for ``checks_at``."""
        return list(self._cache.blocks.block_at)

    def checks_of_load(self, ticket: LoadTicket, every: bool) -> list[ChecksumCheck]:
        """What a load must check before it copies: shards that are not verified yet, or ``every`` shard.

        Shards whose checksum is still to be taken are loaded as they are, and counted.
        """
        if self._cache.blocks.unverified:
            self.loaded_unverified_slots += sum(not shard.verified and not shard.checksum for shard in ticket.shards)
        elif not every:
            return []
        return [
            _check(block, ticket.rank, shard)
            for block, shard in zip(ticket.blocks, ticket.shards, strict=True)
            if shard.checksum and (every or not shard.verified)
        ]

    def unverified(self, limit_bytes: int) -> list[ChecksumCheck]:
        """Shards that are not verified yet, oldest first, together about ``limit_bytes``."""
        checks: list[ChecksumCheck] = []
        for shard, since in self._cache.blocks.unverified.items():
            block, rank = since
            checks.append(_check(block, rank, shard)._replace(since=since))
            limit_bytes -= shard.slot_bytes
            if limit_bytes <= 0:
                break
        return checks

    def checks_at(self, offsets: Iterable[int]) -> list[ChecksumCheck]:
        """What there is to check in these slots by now: none that was freed meanwhile, or is being written."""
        block_at = self._cache.blocks.block_at
        return [
            _check(block, rank, shard)
            for offset in offsets
            if (block := block_at.get(offset)) is not None
            for rank, shard in block.shards.items()
            if shard.offset == offset and shard.written and shard.checksum and not shard.corrupt
        ]

    def apply(self, check: ChecksumCheck, checksum: int) -> bool:
        """Act on the ``checksum`` that a slot's bytes have; False where it is wrong. The block is dropped then.

        Nothing need have held the slot meanwhile: where it was freed or is written anew, nothing follows.
        """
        shard, blocks = check.shard, self._cache.blocks
        if check.block.shards.get(check.rank) is not shard or not shard.written or shard.checksum != check.checksum:
            return True
        if not check.checksum:
            if blocks.unverified.get(shard) is check.since:
                blocks.take_checksum(shard, checksum)
            return True
        self.checked_slots += 1
        self.checked_bytes += check.length
        # Where another check found the bytes wrong they stay so: memory that changes is not trusted.
        if checksum == check.checksum and not shard.corrupt:
            blocks.mark_verified(shard)
            return True
        if not shard.corrupt:
            self.mismatches += 1
            blocks.quarantine(check.block, check.rank)
        if blocks.tiering is not None:
            blocks.tiering.forget(check.block.namespace, check.block.group, [check.block.key])
        return False


def _check(block: Block, rank: int, shard: Shard) -> ChecksumCheck:
    sizes = block.namespace.shard_bytes(rank)
    assert sizes is not None
    return ChecksumCheck(block, rank, shard, shard.offset, sizes[block.group], shard.checksum)
