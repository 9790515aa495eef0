"""Checksums of the pool's bytes: which shards are to be compared, and the end of those whose bytes are wrong."""

from __future__ import annotations

import numpy as np

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import NO_BLOCKS
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.states import CORRUPT, DROPPED, SHARD_STATE, UNVERIFIED, WRITTEN
from kvoffd.cache.tickets import Check, LoadTicket
from kvoffd.pool.allocator import SlotIds
from kvoffd.pool.slot_table import SlotTable

LOOKED_AT_ONCE, LOOKS = 1 << 14, 64
"""Slots that ``next_unverified`` examines together, and how often at most in one call, which then takes a millisecond:
a pool of 512 GB has 64 million slot numbers."""


class Integrity:
    """Checks of shards. A shard is UNVERIFIED until its bytes are compared, and CORRUPT once they were found wrong.

    Attributes:
        checked_slots, checked_bytes, mismatches: slots compared with their checksums, their bytes, and the slots whose
            checksum was wrong.
    """

    def __init__(self, life: BlockLife, table: SlotTable) -> None:
        self._life, self._blocks, self._table = life, life.blocks, table
        self.checked_slots = self.checked_bytes = self.mismatches = 0
        self._scanned_to = 0
        """Slot at which ``next_unverified`` continues."""

    def check(self, slot: int, sequence: int, checksum: int) -> bool:
        """Set the checksum of a slot's record if it has none yet. Otherwise compare; if they differ, drop the block and
        return False.

        Does nothing if the slot was freed or rewritten since ``sequence``. A slot that another check found wrong
        stays wrong: memory that changes is not trusted.
        """
        record, shard = self._table.records[slot], int(self._blocks.shard[slot])
        is_same = int(record["sequence"]) == sequence and self._life.slots.in_use[slot]
        if not is_same or shard & SHARD_STATE != WRITTEN:
            return True
        if not record["checksum"]:
            self._life.set_checksum(slot, checksum)
            return True
        self.checked_slots += 1
        self.checked_bytes += int(record["length"])
        if shard & CORRUPT:
            return False
        if record["checksum"] == checksum:
            self._life.mark_verified(slot)
            return True
        self.mismatches += 1
        self._life.mark_corrupt(slot)
        self._drop(slot)
        return False

    def _drop(self, slot: int) -> None:
        """Drop the block that a corrupt slot belongs to, if it is not dropped yet, and its copies in the tiers."""
        block, group = self._blocks.blocks_of(np.array([slot], np.uint32)), self._life.group_of(slot)
        packed_key = self._blocks.keys(block, group.key_bytes)
        if self._blocks.state[block[0]] != DROPPED:
            self._life.drop(block, MissReason.CORRUPT)
        if self._life.tiers is not None and not group.retired:
            self._life.tiers.remove(group.namespace, group.index, packed_key, MissReason.CORRUPT)

    def checks(self, slots: SlotIds) -> list[Check]:
        """Return the checks that these slots need now; free, unfinished and known corrupt slots need none."""
        shards = self._blocks.shard[slots]
        slots = slots[(shards & SHARD_STATE == WRITTEN) & (shards & CORRUPT == 0)]
        records = self._table.records[slots]
        offsets = self._life.slots.offsets(slots)
        columns = records["sequence"], offsets, records["length"], records["checksum"]
        return list(map(Check, slots.tolist(), *(column.tolist() for column in columns)))

    def checks_of_load(self, ticket: LoadTicket, every: bool, first_block: int = 0) -> list[Check]:
        """Return the checks before a load: of shards that are not verified yet, or of ``every`` shard.

        A shard that is read from its middle is checked too, because its reader lacks bytes that the checksum covers.
        Shards whose checksum is still to be computed are loaded unchecked.
        """
        wanted = (self._blocks.shard[ticket.slots] & UNVERIFIED != 0) | every
        wanted[:1] |= first_block > 0
        return [check for check in self.checks(ticket.slots[wanted]) if check.checksum]

    def corrupt_keys(self, ticket: LoadTicket) -> bytes:
        """Return the keys of a load's blocks whose slots hold wrong bytes."""
        bad = self._blocks.shard[ticket.slots] & CORRUPT != 0
        return self._blocks.keys(ticket.blocks[bad], ticket.group.key_bytes)

    def next_unverified(self, limit: int) -> SlotIds:
        """Return up to ``limit`` slots that an earlier daemon wrote and nobody has compared, or whose checksum is still
        to be computed. They come again unless they are checked.

        The result is empty if none is among the slots that one call looks at; the next call continues behind these.
        """
        for _ in range(LOOKS):
            if not self._blocks.unverified_slots:
                break
            begin = self._scanned_to
            shards = self._blocks.shard[begin : begin + LOOKED_AT_ONCE]
            found = np.flatnonzero((shards & UNVERIFIED != 0) & (shards & SHARD_STATE == WRITTEN))[:limit] + begin
            if found.size:
                self._scanned_to = int(found[-1]) + 1
                return found.astype(np.uint32)
            end = begin + len(shards)
            self._scanned_to = end if end < len(self._blocks.shard) else 0
        return NO_BLOCKS
