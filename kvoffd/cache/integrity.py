"""Which slots to compare with their checksums, and what follows from it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvoffd.cache.lookup import LeasedBlocks
from kvoffd.cache.namespace import OFFSET_AT, PAGES, UNVERIFIED, Block, MissReason, Shard
from kvoffd.cache.pins import LoadTicket

LOOKED_AT_ONCE = 4096
"""Slots of an earlier daemon that are looked at in one step: a few milliseconds where none needs a check any more."""


class ChecksumCheck(NamedTuple):
    """A shard whose bytes are to be compared: ``length`` bytes at ``offset`` with ``checksum``.

    Where that is 0 it is to be taken; ``since`` then tells whether the shard was written anew meanwhile.
    """

    block: Block
    rank: int
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
        return self._cache.blocks.unverified_slots

    @property
    def has_unverified(self) -> bool:
        """Whether ``unverified`` has something to look at, if only to find that it needs no check any more."""
        return bool(self._cache.blocks.unverified_slots or self._cache.blocks.adopted)

    @property
    def quarantined_slots(self) -> int:
        """Slots that are never used again."""
        return len(self._cache.blocks.quarantined)

    def slots(self) -> array[int]:
        """Offsets of all slots in use, for ``checks_at``."""
        return self._cache.blocks.holders.offsets()

    def checks_of_load(self, ticket: LoadTicket, every: bool) -> list[ChecksumCheck]:
        """What a load must check before it copies: shards that are not verified yet, or ``every`` shard.

        A shard that is read from its middle on is checked too: its reader has not all that its checksum covers. Shards
        whose checksum is still to be taken are loaded as they are, and counted.
        """
        if not (every or self._cache.blocks.unverified_slots or ticket.first_block):
            return []
        shards = [block.shard(ticket.rank) for block in ticket.blocks]
        self.loaded_unverified_slots += sum(not shard.verified and not shard.checksum for shard in shards)
        return [
            _check(block, ticket.rank, shard)
            for number, (block, shard) in enumerate(zip(ticket.blocks, shards, strict=True))
            if shard.checksum and (every or not shard.verified or (ticket.first_block and not number))
        ]

    def unverified(self, limit_bytes: int) -> list[ChecksumCheck]:
        """Shards that are not verified yet, oldest first, about ``limit_bytes``; maybe none though there are some."""
        blocks, checks = self._cache.blocks, []
        for since in blocks.without_checksum.values():
            block, rank = since
            checks.append(_check(block, rank, block.shard(rank))._replace(since=since))
            if (limit_bytes := limit_bytes - checks[-1].length) <= 0:
                return checks
        adopted, again, least = blocks.adopted, [], max(0, len(blocks.adopted) - LOOKED_AT_ONCE)
        while len(adopted) > least and limit_bytes > 0:
            offset = adopted.pop()
            if (check := self._check_at(offset)) is not None and check.block.words[2 * check.rank] & UNVERIFIED:
                again.append(offset)
                checks.append(check)
                limit_bytes -= check.length
        adopted.extend(reversed(again))
        return checks

    def checks_at(self, offsets: Iterable[int]) -> list[ChecksumCheck]:
        """What there is to check in these slots by now: none that was freed meanwhile, or is being written."""
        return [check for offset in offsets if (check := self._check_at(offset)) is not None]

    def _check_at(self, offset: int) -> ChecksumCheck | None:
        if (block := self._cache.blocks.holders.get(offset)) is None:
            return None
        rank = next(rank for rank, word in enumerate(block.words[::2]) if word and word >> OFFSET_AT & PAGES == offset)
        shard = block.shard(rank)
        return _check(block, rank, shard) if shard.written and shard.checksum and not shard.corrupt else None

    def apply(self, check: ChecksumCheck, checksum: int) -> bool:
        """Act on the ``checksum`` that a slot's bytes have; False where it is wrong. The block is dropped then.

        Nothing need have held the slot meanwhile: where it was freed or is written anew, nothing follows.
        """
        blocks, rank = self._cache.blocks, check.rank
        shard = check.block.shard(rank) if check.block.words[2 * rank] else None
        if shard is None or (shard.offset, shard.checksum) != (check.offset, check.checksum) or not shard.written:
            return True
        if not check.checksum:
            if check.since is not None and blocks.without_checksum.get(check.offset) is check.since:
                blocks.take_checksum(check.block, rank, checksum)
            return True
        self.checked_slots += 1
        self.checked_bytes += check.length
        # Where another check found the bytes wrong they stay so: memory that changes is not trusted.
        if checksum == check.checksum and not shard.corrupt:
            blocks.mark_verified(check.block, rank)
            return True
        if not shard.corrupt:
            self.mismatches += 1
            blocks.quarantine(check.block, rank)
        if blocks.tiering is not None:
            block = check.block
            blocks.tiering.forget(block.namespace, block.group, [block.key], MissReason.CORRUPT)
        return False


def _check(block: Block, rank: int, shard: Shard) -> ChecksumCheck:
    length = block.namespace.shard_length(rank, block.group)
    return ChecksumCheck(block, rank, shard.offset, length, shard.checksum)
