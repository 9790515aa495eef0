"""The blocks of the pool, by number: arrays with what is known of each, and the index that finds them by key.

A block's number is that of its first slot, the one of rank 0; the slots of the other ranks hang from it in a ring. What
must outlive the daemon is in the slot table's records, what need not in the arrays here. ``blocks.c`` does the work.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.pool.allocator import SlotAllocator, SlotIds
from kvoffd.pool.slot_table import BAD_RECORD
from kvoffd.system.native import SlotIndex, Structure, native
from kvoffd_proto import messages

if TYPE_CHECKING:
    from kvoffd.cache.policy import Group

BlockIds: TypeAlias = npt.NDArray[np.uint32]
"""Numbers of blocks: of their first slots."""
Offsets: TypeAlias = npt.NDArray[np.uint64]
"""Of slots, in bytes of the pool."""
NO_BLOCK = 2**32 - 1
FREE, WRITING, READY = int(messages.ABSENT), int(messages.WRITING), int(messages.READY)
"""States of a block, as lookups answer with them: FREE has no block; of a WRITING one a shard is missing."""
DROPPED = 16
"""Out of the index, its slots still held by a pin or a running write."""
WITH_SLOTS = WRITING, READY, DROPPED
NOT_FIRST = 17
"""State of a slot that is not a block's first."""
RESERVED, WRITING_SHARD, WRITTEN = 0, 1, 2
"""State of a shard: its slot is taken; a store writes it; all of it is there."""
SHARD_STATE, UNVERIFIED, CORRUPT = 3, 4, 8
"""Bits of ``shard``: its state; its bytes are not compared yet, or have no checksum yet; they are wrong."""
MAX_SEEN = 8192
"""Blocks that one search for those of a group that may go looks at: about a millisecond."""
FOUND = 255
"""In place of a ``MissReason``: the key was found."""
KNOWN_MISSES = 2**19
"""Keys of which it is known why they left, 8 bytes each. A key replaces one at random."""


class Verdict(IntEnum):
    """What a store has to do about a key."""

    PRESENT = 0
    """Nothing: the rank's shard is written, or being written."""
    LACKING = 1
    """It has no block."""
    MINE = 2
    """It has a block, which lacks the rank's shard."""
    AGAIN = 3
    """It is to be written under an earlier number."""
    NARROW = 4
    """Its block begins later than what is offered, and nothing holds it."""


class Found(NamedTuple):
    """What a lookup of keys of one group found."""

    states: bytes
    """By key."""
    ready: BlockIds
    """The blocks of those that are READY."""
    loose_bytes: int
    """Of the READY blocks that nothing pinned before, if they were pinned."""
    run: int
    """Keys before the first that is not READY."""
    reasons: bytes
    """By key: the ``MissReason``, or FOUND."""


class BlockTable(Structure):
    """Arrays by slot number, and the index. For one thread. It is the ``struct blocks`` of blocks.h.

    An array that C reads is copied into a ``bytes`` object first (``packed``), and what C finds out of the buffers: for
    a few blocks that takes less than to ask an array for its address.

    Args:
        records: of the slot table, by slot.
    """

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("generation", "pinned_blocks", "pinned_bytes")),
        *((f"at_{name}", ctypes.c_void_p) for name in ("records", "state", "shard", "pins", "missing", "group")),
        *((f"at_{name}", ctypes.c_void_p) for name in ("next", "pages", "older", "newer", "misses")),
        *((f"at_{name}", ctypes.c_void_p) for name in ("bytes", "numbers", "offsets", "counts")),
        ("index", SlotIndex),
        ("crc", ctypes.c_uint32 * 256 * 8),
    )
    generation: int
    """The highest that a record has."""
    pinned_blocks: int
    pinned_bytes: int
    index: SlotIndex

    def __init__(self, records: npt.NDArray[np.void]) -> None:
        slots = len(records)
        self.records = records
        self.state = np.zeros(slots, np.uint8)
        self.shard = np.zeros(slots, np.uint8)
        self.pins = np.zeros(slots, np.uint32)
        """Of a block: leases, running loads and writes to a tier that need its bytes."""
        self.missing = np.zeros(slots, np.uint8)
        """Of a block: shards that are not written."""
        self.group = np.zeros(slots, np.uint32)
        """Number of the slot's group (see ``policy.Group``)."""
        self.next = np.zeros(slots, np.uint32)
        """The slot of the next rank; behind the last comes the first."""
        self.pages = np.zeros(slots, np.uint32)
        """Of a block: pages of its slots."""
        self._older, self._newer = np.zeros(slots, np.uint32), np.zeros(slots, np.uint32)
        self._misses = np.zeros(KNOWN_MISSES, np.uint64)
        lists = self.next, self.pages, self._older, self._newer, self._misses
        arrays = self.state, self.shard, self.pins, self.missing, self.group, *lists
        self._native = native()
        self._counts = array("Q", bytes(8 * 3))
        """The most that C writes there: ``struct released`` of blocks.c."""
        self.at_records = records.ctypes.data
        self.at_state, self.at_shard, self.at_pins, self.at_missing = (one.ctypes.data for one in arrays[:4])
        self.at_group, self.at_next, self.at_pages, self.at_older, self.at_newer, self.at_misses = (
            one.ctypes.data for one in arrays[4:]
        )
        self._arrays_bytes = sum(one.nbytes for one in arrays)
        self.address = ctypes.addressof(self)  # type: ignore[arg-type]
        if not self._native.blocks_open(self.address, os.urandom(16)):
            raise MemoryError
        self._close = weakref.finalize(self, self._native.blocks_close, self.address)
        self.at_counts, _ = self._counts.buffer_info()
        self._room = 0
        self._fit(512)

    def _fit(self, count: int) -> None:
        """Have the buffers hold so many numbers, and as many keys."""
        if count <= self._room:
            return
        # Twice as many: the next are likely to be as many.
        buffers = np.empty(4 * count, np.uint32), np.empty(128 * count, np.uint8), np.empty(2 * count, np.uint64)
        self._numbers, self._bytes, self._offsets = buffers  # all or none
        self.at_numbers, self.at_bytes, self.at_offsets = (one.ctypes.data for one in buffers)
        self._room = 2 * count

    @property
    def nbytes(self) -> int:
        """Memory of the index and the arrays, untouched pages among it."""
        return int(self.index.nbytes) + self._arrays_bytes

    def find(self, group: int, keys: bytes, key_bytes: int) -> tuple[bytes, BlockIds]:
        """By key: the state of its block and the number; FREE and NO_BLOCK where there is none."""
        count = len(keys) // key_bytes
        self._fit(count)
        self._native.blocks_find(self.address, group, keys, count, key_bytes)
        return self._bytes[:count].tobytes(), self._numbers[:count].copy()

    def lookup(self, group: int, keys: bytes, key_bytes: int, *, pin: bool) -> Found:
        """Find keys, and pin the blocks of those that are READY."""
        count, pinned_bytes = len(keys) // key_bytes, self.pinned_bytes
        self._fit(count)
        self._native.blocks_lookup(self.address, group, keys, count, key_bytes, pin)
        ready, run = self._counts[:2]
        states, reasons = self._bytes[:count].tobytes(), self._bytes[count : 2 * count].tobytes()
        return Found(states, self._numbers[:ready].copy(), self.pinned_bytes - pinned_bytes, run, reasons)

    def plan(
        self, group: int, keys: bytes, key_bytes: int, rank: int, first_blocks: Mapping[int, int]
    ) -> tuple[bytes, BlockIds]:
        """By key: the ``Verdict`` on its store by a rank, and its block, NO_BLOCK where there is none.

        ``first_blocks``: by the number of a key, from where on it is offered, if not from 0.
        """
        count, offered = len(keys) // key_bytes, None
        if first_blocks:
            firsts = array("H", bytes(2 * count))
            for number, first in first_blocks.items():
                if number < count:
                    firsts[number] = first
            offered = firsts.tobytes()
        self._fit(count)
        if not self._native.blocks_plan(self.address, group, keys, count, key_bytes, rank, offered):
            raise MemoryError
        return self._bytes[:count].tobytes(), self._numbers[:count].copy()

    def take(self, slots: SlotAllocator, group: Group, keys: bytes, count: int) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks of a group for the first ``count`` keys, none of which is there, or as many as there are
        free slots for. Returns their slots, [blocks, ranks]. All shards are still to be written."""
        assert 0 <= count * group.key_bytes <= len(keys)
        ranks = len(group.sizes)
        self._fit(count * ranks)
        taken = self._native.blocks_take(self.address, slots.address, group.packed, keys, count)
        assert taken != NO_BLOCK, "a key is there"
        return self._numbers[: taken * ranks].reshape(taken, ranks).copy()

    def replace(
        self, group: Group, blocks: BlockIds, keys: bytes, reason: int
    ) -> tuple[npt.NDArray[np.uint32], bytes, int]:
        """``drop`` blocks of a group that nothing holds, and make others of it in their slots, for the first keys.

        Returns the slots, [blocks, ranks], the keys of those that are gone, and how many slots were UNVERIFIED.
        """
        count, ranks, size = len(blocks), len(group.sizes), group.key_bytes
        self._fit(count * ranks)
        replaced = self._native.blocks_replace(self.address, group.packed, packed(blocks), count, keys, reason)
        assert replaced == count, "a block is held, or a key is there"
        slots = self._numbers[: count * ranks].reshape(count, ranks).copy()
        return slots, self._bytes[: count * size].tobytes(), self._counts[1]

    def begin_writes(self, slots: SlotAllocator, blocks: BlockIds, rank: int) -> tuple[SlotIds, Offsets]:
        """A rank's shards of WRITING blocks are written from now on. Returns their slots, and where these are."""
        count = len(blocks)
        self._fit(count)
        self._native.blocks_begin_writes(self.address, slots.address, packed(blocks), count, rank)
        return self._numbers[:count].copy(), self._offsets[:count].copy()

    def begin_load(
        self, slots: SlotAllocator, group: int, keys: bytes, key_bytes: int, rank: int, first_block: int
    ) -> tuple[BlockIds, SlotIds, Offsets] | list[int]:
        """Pin blocks of which a rank can read its shards whole, the first from ``first_block`` on. Returns them, the
        rank's slots and where these are; or nothing is pinned, and returns the numbers of the keys that it cannot."""
        count = len(keys) // key_bytes
        self._fit(count)
        offered = group, keys, count, key_bytes, rank, first_block
        if not self._native.blocks_begin_load(self.address, slots.address, *offered):
            lacking: list[int] = np.flatnonzero(self._bytes[:count] == 0).tolist()
            return lacking
        blocks, its_slots = self._numbers[: 2 * count].reshape(2, count).copy()
        return blocks, its_slots, self._offsets[:count].copy()

    def publish(
        self,
        blocks: BlockIds,
        slots: SlotIds,
        first_blocks: Iterable[int] | None,
        length: int,
        checksums: array[int],
        key_bytes: int,
    ) -> tuple[BlockIds, bytes]:
        """Note that one rank's shards of WRITING blocks are whole. Returns those that are READY by it, and their keys.

        They come from the last to the first, with rising generations: it is the order of use for a successor, and a
        chain's tail is older than its root. A successor does not trust bytes without a checksum, which is 0.
        ``first_blocks``: None for 0 of all.
        """
        count = len(blocks)
        firsts, sums = None if first_blocks is None else array("H", first_blocks).tobytes(), checksums.tobytes()
        assert 8 * count == 8 * len(slots) == len(sums)
        assert firsts is None or 2 * count == len(firsts)
        self._fit(count)
        written = packed(blocks), packed(slots), count
        found = self._native.blocks_publish(self.address, *written, firsts, length, sums)
        assert found != NO_BLOCK, "a block is not WRITING"
        return self._numbers[:found].copy(), self._bytes[: found * key_bytes].tobytes()

    def set_checksum(self, slot: int, checksum: int) -> None:
        """Enter the checksum of a shard that was published without one."""
        self._native.blocks_set_checksum(self.address, slot, checksum)

    def set_corrupt(self, slot: int) -> None:
        """Note that a slot holds wrong bytes. A successor does not use it either, whatever holds it now."""
        self.shard[slot] = (self.shard[slot] & ~np.uint8(UNVERIFIED)) | CORRUPT
        self.records["state"][slot] = BAD_RECORD

    def append(self, group: Group, blocks: BlockIds) -> None:
        """Enter blocks that are in the index into their group's list, as its newest."""
        self._native.blocks_append(self.address, group.packed, packed(blocks), len(blocks))

    def oldest(self, group: Group, count: int, *, loose: bool = False) -> BlockIds:
        """Up to ``count`` of the blocks of a group that were entered first. ``loose``: READY ones that nothing pins,
        of the first ``MAX_SEEN``; the others of these become the newest."""
        self._fit(count)
        return self._numbers[
            : self._native.blocks_oldest(self.address, group.packed, count, MAX_SEEN if loose else count, loose)
        ].copy()

    def make_space(
        self, slots: SlotAllocator, group: Group, count: int, order: BlockIds, *, last: bool
    ) -> tuple[BlockIds, bool]:
        """Blocks to evict so that slots for ``count`` blocks of a group come free, and whether they are enough: see
        ``Victims.for_space``.

        ``order``: READY blocks that nothing pins, the next to go first; ``last``: there are no others.
        """
        room = len(order) + 2 * slots.slots_per_region
        self._fit(room)
        wanted = slots.address, group.packed, count
        found = self._native.blocks_make_space(self.address, *wanted, packed(order), len(order), room, last)
        if found == NO_BLOCK:
            raise MemoryError
        return self._numbers[:found].copy(), bool(self._counts[0])

    def drop(self, group: Group, blocks: BlockIds, reason: int = 0) -> tuple[bytes, SlotIds, int, int]:
        """Take blocks of a group out of the index, for a reason that is noted if it is not 0. They are DROPPED then,
        no successor brings them back, and those that nothing holds are ended.

        Returns their keys, and what ``release`` does.
        """
        self._fit(len(blocks) * len(group.sizes))
        dropped = self._native.blocks_drop(self.address, group.packed, packed(blocks), len(blocks), reason)
        assert dropped == len(blocks), "a block is not in the index"
        return self._bytes[: len(blocks) * group.key_bytes].tobytes(), *self._released()

    def release(self, blocks: BlockIds, ranks: int) -> tuple[SlotIds, int, int]:
        """End the DROPPED ones of blocks that nothing holds. Returns their slots, and how many were UNVERIFIED, and
        CORRUPT.

        Slots whose shard is CORRUPT keep that mark, in their records too, and must not be used again.
        """
        self._fit(len(blocks) * ranks)
        self._native.blocks_release(self.address, packed(blocks), len(blocks))
        return self._released()

    def _released(self) -> tuple[SlotIds, int, int]:
        slots, unverified, corrupt = self._counts[:3]
        return self._numbers[:slots].copy(), unverified, corrupt

    def group_of(self, blocks: BlockIds, *, loose: bool = False) -> int:
        """The number of the group that all the blocks are of; 0 where there is none, or one has pins and they should be
        ``loose``."""
        return int(self._native.blocks_alike(self.address, packed(blocks), len(blocks), loose))

    def pin(self, blocks: BlockIds) -> int:
        """Keep the bytes of blocks, once more for each time one is named, until ``Cache.unpin``.

        Returns the bytes of those that nothing pinned before.
        """
        pinned_bytes = self.pinned_bytes
        self._native.blocks_pin(self.address, packed(blocks), len(blocks))
        return self.pinned_bytes - pinned_bytes

    def unpin(self, blocks: BlockIds) -> BlockIds:
        """Undo one pin for each time a block is named. Returns those that nothing pins any more."""
        self._fit(len(blocks))
        return self._numbers[: self._native.blocks_unpin(self.address, packed(blocks), len(blocks))].copy()

    def slots(self, blocks: BlockIds, ranks: int) -> npt.NDArray[np.uint32]:
        """[blocks, ranks] the slots of blocks that have so many, or more."""
        found = np.empty((len(blocks), ranks), np.uint32)
        found[:, 0] = blocks
        for rank in range(1, ranks):
            found[:, rank] = self.next[found[:, rank - 1]]
        return found

    def first_slots(self, slots: SlotIds) -> BlockIds:
        """The blocks that slots belong to. One that is free, or in quarantine, stands for itself."""
        slots = slots.copy()
        while (inside := (self.state[slots] == NOT_FIRST) & (self.group[slots] != 0)).any():
            slots[inside] = self.next[slots[inside]]
        return slots

    def keys(self, blocks: BlockIds, key_bytes: int) -> bytes:
        """The keys of blocks of one group, end to end."""
        count = len(blocks)
        self._fit(count)
        self._native.blocks_keys(self.address, packed(blocks), count, key_bytes)
        return self._bytes[: count * key_bytes].tobytes()

    def split_keys(self, blocks: BlockIds, key_bytes: int) -> list[bytes]:
        """The same, each by itself."""
        keys: list[bytes] = np.frombuffer(self.keys(blocks, key_bytes), f"V{key_bytes}").tolist()
        return keys

    def note_misses(self, group: int, keys: bytes, key_bytes: int, reason: int) -> None:
        """These keys are not there from now on, for this reason, 1 to 15."""
        self._native.blocks_note(self.address, group, keys, len(keys) // key_bytes, key_bytes, reason)

    def miss_reasons(self, group: int, keys: bytes, key_bytes: int) -> bytes:
        """Return the ``MissReason`` of each key, as far as it is known."""
        count = len(keys) // key_bytes
        self._fit(count)
        self._native.blocks_reasons(self.address, group, keys, count, key_bytes)
        return self._bytes[:count].tobytes()


def packed(numbers: npt.NDArray[np.uint32]) -> bytes:
    """As C reads them: numbers of another width would be taken for others."""
    assert numbers.dtype == np.uint32
    return numbers.tobytes()
