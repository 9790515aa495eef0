"""Blocks of the pool by number: arrays with the state of each, and the index that finds them by key.

A block's number is that of its first slot, which belongs to rank 0; a ring links the slots of the other ranks to it.
State that must outlive the daemon is in the slot table's records, the rest in the arrays here. Implemented in
``blocks.c``.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.namespace import Group
from kvoffd.cache.states import CORRUPT, FREE, NO_BLOCK, NOT_FIRST, READY, UNVERIFIED
from kvoffd.errors import NotReady
from kvoffd.pool.allocator import SlotAllocator, SlotIds
from kvoffd.pool.slot_table import BAD_RECORD, MAX_KEY_BYTES
from kvoffd.system.native import (
    CHAR_P,
    COUNT,
    INT,
    ITEMS,
    KEYS,
    NUMBER,
    UINT32,
    VOID_P,
    Structure,
    declare,
    native,
)
from kvoffd.system.structures import BLOCKS, SlotIndex, StateCounts
from kvoffd_proto import messages

declare(
    blocks_open=(INT, VOID_P, CHAR_P),
    blocks_close=(None, VOID_P),
    blocks_find=(None, VOID_P, *KEYS),
    blocks_lookup=(None, VOID_P, *KEYS, NUMBER),
    blocks_judge=(COUNT, VOID_P, *KEYS, NUMBER, VOID_P),
    blocks_make=(COUNT, VOID_P, VOID_P, CHAR_P, CHAR_P, NUMBER),
    blocks_replace=(COUNT, VOID_P, CHAR_P, *ITEMS, CHAR_P, NUMBER),
    blocks_begin_writes=(None, VOID_P, VOID_P, *ITEMS, NUMBER),
    blocks_begin_load=(INT, VOID_P, VOID_P, *KEYS, NUMBER, NUMBER),
    blocks_publish=(UINT32, VOID_P, CHAR_P, VOID_P, *ITEMS, VOID_P, VOID_P, CHAR_P, NUMBER),
    blocks_record_chain=(None, VOID_P, *ITEMS),
    blocks_set_checksum=(None, VOID_P, NUMBER, NUMBER),
    blocks_retire=(None, VOID_P, CHAR_P),
    blocks_add_recovered=(None, VOID_P, CHAR_P, *ITEMS),
    blocks_oldest=(COUNT, VOID_P, CHAR_P, NUMBER, NUMBER, NUMBER),
    blocks_choose_victims=(COUNT, VOID_P, VOID_P, CHAR_P, NUMBER, *ITEMS, NUMBER, NUMBER, NUMBER, VOID_P, *ITEMS),
    blocks_drop=(COUNT, VOID_P, CHAR_P, *ITEMS, NUMBER),
    blocks_end_dropped=(None, VOID_P, CHAR_P, *ITEMS),
    blocks_common_group=(UINT32, VOID_P, *ITEMS, NUMBER),
    blocks_pin=(None, VOID_P, *ITEMS),
    blocks_lease=(None, VOID_P, *ITEMS),
    blocks_end_lease=(COUNT, VOID_P, *ITEMS),
    blocks_unpin=(COUNT, VOID_P, *ITEMS),
    blocks_keys=(None, VOID_P, *ITEMS, NUMBER),
    blocks_record_misses=(None, VOID_P, *KEYS, NUMBER),
    blocks_reasons=(None, VOID_P, *KEYS),
)

BlockIds: TypeAlias = npt.NDArray[np.uint32]
"""Block numbers: the numbers of the blocks' first slots."""
Offsets: TypeAlias = npt.NDArray[np.uint64]
"""Pool offsets of slots, in bytes."""
NO_BLOCKS: BlockIds = np.empty(0, np.uint32)
MAX_SEEN = 4096
"""Blocks that one search for evictable blocks of a group examines: one to three milliseconds, depending on where they
lie."""
FOUND, CAME, IN_A_TIER, UNANSWERED_YET = 255, 254, 253, 252
"""Values instead of a ``MissReason``, above all of these. FOUND: the pool has the key's block. CAME: a tier had it, and
it is in the pool now. IN_A_TIER: a tier has it. UNANSWERED_YET, the lowest: a store was asked for it, and has not
answered."""
KNOWN_MISSES = 2**19
"""Keys whose reason for leaving is remembered, 8 bytes each. A new key replaces one at random."""
_ARRAYS = "state", "shard", "pins", "leases", "missing", "group", "next", "pages", "older", "newer", "misses", "prompt"
"""Arrays of ``BlockTable`` that C reads and writes, in the order of blocks.h."""


class StoreVerdict(IntEnum):
    """Action that a store takes for a key."""

    PRESENT = 0
    """Do nothing: the rank's shard is written, or being written."""
    ABSENT = 1
    """Make a block: the key has none."""
    JOIN = 2
    """Write the rank's shard, which the key's block lacks."""
    DUPLICATE = 3
    """Do nothing: an earlier index has the same key, which is to be written."""
    NARROW = 4
    """Replace the block, which begins later than the offered one and is not in use."""


class ChainStart(NamedTuple):
    """Beginning of a chain among blocks."""

    at: int
    """Index of its first block."""
    before: int
    """Block before that in its prompt; NO_BLOCK if it begins the prompt, or if that is unknown."""


class FoundKeys(NamedTuple):
    """Result of a lookup of keys of one group."""

    states: bytes
    """[keys] state of each."""
    ready: BlockIds
    """Blocks of the READY keys."""
    ready_prefix: int
    """Keys before the first that is not READY."""
    reasons: bytes
    """[keys] ``MissReason`` of each, or FOUND; IN_A_TIER if a tier brings it up."""

    def limited(self, fresh: npt.NDArray[np.bool_], most: int, reason: int) -> FoundKeys:
        """Return this with fewer READY keys: of the ``fresh`` ones only the first ``most``. The others become absent,
        for this reason. ``fresh``: [READY keys]."""
        states, reasons = (np.frombuffer(one, np.uint8).copy() for one in (self.states, self.reasons))
        kept = ~fresh
        kept[np.flatnonzero(fresh)[:most]] = True
        beyond = np.flatnonzero(states == READY)[~kept]
        states[beyond], reasons[beyond] = FREE, reason
        prefix = min(self.ready_prefix, leading(kept))
        ready, packed_states, packed_reasons = self.ready[kept], states.tobytes(), reasons.tobytes()
        return self._replace(states=packed_states, ready=ready, ready_prefix=prefix, reasons=packed_reasons)

    def with_coming(self, states: bytes) -> FoundKeys:
        """Return this with the states of keys that tiers bring up, which are IN_A_TIER."""
        if states == self.states:
            return self
        shown = np.frombuffer(states, np.uint8)
        reasons = np.frombuffer(self.reasons, np.uint8).copy()
        reasons[(shown == messages.PENDING) | (shown == messages.SHARED)] = IN_A_TIER
        return self._replace(states=states, reasons=reasons.tobytes())


class LoadedShards(NamedTuple):
    """Shards of one rank that a load has pinned, in the order of its keys."""

    blocks: BlockIds
    slots: SlotIds
    offsets: Offsets
    """Pool offsets of the slots."""


class EndedSlots(NamedTuple):
    """Slots of blocks that have ended."""

    slots: SlotIds
    corrupt: int
    """Number of CORRUPT ones among them."""


class BlockTable(Structure):
    """Arrays by slot number, and the index. Not thread-safe. It is the ``struct blocks`` of blocks.h.

    A method packs what C reads, calls it, and copies its results out of buffers, which the next call overwrites.
    Nothing is decided here: ``BlockLife`` says when a block may change, and has methods of the same names that call
    these and report the change.

    Arrays for C are copied into ``bytes`` first (``packed``): for a few blocks, that is faster than asking an array for
    its address.

    Args:
        records: the slot table's records, by slot.
    """

    _fields_ = BLOCKS
    sequence: int
    """Highest sequence number of any record."""
    pinned_blocks: int
    pinned_bytes: int
    leased_bytes: int
    """Bytes of the blocks that leases pin."""
    pinned_dropped_bytes: int
    """Bytes of the DROPPED blocks among the pinned ones. Those of a reset namespace are READY until they are swept."""
    unverified_slots: int
    """Slots that an earlier daemon wrote and nobody has compared, or whose checksum is still to be computed."""
    by_state: StateCounts
    index: SlotIndex

    def __init__(self, records: npt.NDArray[np.void]) -> None:
        slots = len(records)
        self.records = records
        self.state = np.zeros(slots, np.uint8)
        self.shard = np.zeros(slots, np.uint8)
        self.pins = np.zeros(slots, np.uint32)
        """[blocks] leases, running loads and writes to a tier that need the block's bytes."""
        self.leases = np.zeros(slots, np.uint32)
        """[blocks] leases among these."""
        self.missing = np.zeros(slots, np.uint8)
        """[blocks] shards that are not written."""
        self.group = np.zeros(slots, np.uint32)
        """[slots] number of the slot's group (see ``namespace.Group``)."""
        self.groups: dict[int, Group] = {}
        """Groups whose blocks have slots, and the current ones of all namespaces, by number."""
        self.next = np.zeros(slots, np.uint32)
        """[slots] slot of the next rank; that of the last rank is the block's first."""
        self.pages = np.zeros(slots, np.uint32)
        """[blocks] pages of the block's slots."""
        self.older, self.newer = np.zeros(slots, np.uint32), np.zeros(slots, np.uint32)
        """[blocks] neighbours in the list of their group, from the block that was first added to the last."""
        self.misses = np.zeros(KNOWN_MISSES, np.uint64)
        self.prompt = np.zeros(slots, np.uint64)
        """[blocks] number of the prompt that last looked the block up, or of the one whose store made it."""
        self.last_prompt = 0
        """The highest number of a prompt. Each lookup gets a new one, so that a prompt that asks again becomes the
        newest; so does each store, for those of its prompts that continue none that is known."""
        self._native = native()
        self._counts = array("Q", bytes(8 * 2))
        """The largest results that C writes there: ``struct found`` and ``struct ended`` of blocks.c."""
        self.at_records = records.ctypes.data
        for name in _ARRAYS:
            setattr(self, f"at_{name}", getattr(self, name).ctypes.data)
        self._arrays_bytes: int = sum(getattr(self, name).nbytes for name in _ARRAYS)
        self.address = ctypes.addressof(self)  # type: ignore[arg-type]
        if not self._native.blocks_open(self.address, os.urandom(16)):
            raise MemoryError
        self._close = weakref.finalize(self, self._native.blocks_close, self.address)
        self.at_counts, _ = self._counts.buffer_info()
        self._capacity = 0
        """Keys or slots whose results fit the buffers: a call of C for more must come after ``_grow``."""
        self._grow(512)

    def _grow(self, count: int) -> None:
        """Replace the buffers by ones for the largest result of twice as many keys or slots, as later calls are likely
        to have more. For each that is two numbers (``begin_load``), a key of MAX_KEY_BYTES, or a state and a reason,
        and an offset."""
        most = 2 * count
        buffers = np.empty(2 * most, np.uint32), np.empty(MAX_KEY_BYTES * most, np.uint8), np.empty(most, np.uint64)
        self._numbers, self._bytes, self._offsets = buffers  # all, or none if one allocation fails
        self.at_numbers, self.at_bytes, self.at_offsets = (one.ctypes.data for one in buffers)
        self._capacity = most

    @property
    def nbytes(self) -> int:
        """Memory of the index and the arrays, including untouched pages."""
        return int(self.index.nbytes) + self._arrays_bytes

    def find(self, group: Group, keys: bytes) -> tuple[bytes, BlockIds]:
        """Return the state and number of each key's block; FREE and NO_BLOCK if it has none."""
        count = len(keys) // group.key_bytes
        if count > self._capacity:
            self._grow(count)
        self._native.blocks_find(self.address, group.number, keys, count, group.key_bytes)
        return self._bytes[:count].tobytes(), self._numbers[:count].copy()

    def lookup(self, group: Group, keys: bytes, *, lease: bool) -> FoundKeys:
        """Find keys, and ``lease`` the blocks of the READY ones if so told."""
        count = len(keys) // group.key_bytes
        if count > self._capacity:
            self._grow(count)
        self._native.blocks_lookup(self.address, group.number, keys, count, group.key_bytes, lease)
        ready, ready_prefix = self._counts
        states, reasons = self._bytes[:count].tobytes(), self._bytes[count : 2 * count].tobytes()
        return FoundKeys(states, self._numbers[:ready].copy(), ready_prefix, reasons)

    def judge(self, group: Group, keys: bytes, rank: int, first_blocks: Mapping[int, int]) -> tuple[bytes, BlockIds]:
        """Return a ``StoreVerdict`` for each key that a rank stores, and the key's block, NO_BLOCK if it has none.

        ``first_blocks``: by the index of a key, the first engine block that is offered, if not 0.
        """
        count, offered = len(keys) // group.key_bytes, None
        if count > self._capacity:
            self._grow(count)
        if first_blocks:
            firsts = array("H", bytes(2 * count))
            for index, first in first_blocks.items():
                firsts[index] = first
            offered = firsts.tobytes()
        if not self._native.blocks_judge(self.address, group.number, keys, count, group.key_bytes, rank, offered):
            raise MemoryError
        return self._bytes[:count].tobytes(), self._numbers[:count].copy()

    def make(self, slots: SlotAllocator, group: Group, keys: bytes, count: int) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks of a group for the first ``count`` keys, which have none, or as many as free slots allow.

        Returns their slots, [blocks, ranks]. All shards are still to be written.
        """
        assert 0 <= count * group.key_bytes <= len(keys)
        ranks = len(group.sizes)
        if count * ranks > self._capacity:
            self._grow(count * ranks)
        made = self._native.blocks_make(self.address, slots.address, group.packed, keys, count)
        assert made != NO_BLOCK, "a key has a block"
        return self._numbers[: made * ranks].reshape(made, ranks).copy()

    def replace(self, group: Group, blocks: BlockIds, keys: bytes, reason: int) -> tuple[npt.NDArray[np.uint32], bytes]:
        """``drop`` blocks of a group that are not in use, and make new blocks for the first keys in their slots.

        Returns the slots, [blocks, ranks], and the keys of the dropped blocks.
        """
        count, ranks, size = len(blocks), len(group.sizes), group.key_bytes
        if count * ranks > self._capacity:
            self._grow(count * ranks)
        replaced = self._native.blocks_replace(self.address, group.packed, packed(blocks), count, keys, reason)
        assert replaced == count, "a block is in use, or a key has a block"
        slots = self._numbers[: count * ranks].reshape(count, ranks).copy()
        return slots, self._bytes[: count * size].tobytes()

    def begin_writes(self, slots: SlotAllocator, blocks: BlockIds, rank: int) -> tuple[SlotIds, Offsets]:
        """Mark a rank's shards of WRITING blocks as being written. Returns their slots and pool offsets."""
        count = len(blocks)
        if count > self._capacity:
            self._grow(count)
        self._native.blocks_begin_writes(self.address, slots.address, packed(blocks), count, rank)
        return self._numbers[:count].copy(), self._offsets[:count].copy()

    def begin_load(self, slots: SlotAllocator, group: Group, keys: bytes, rank: int, first_block: int) -> LoadedShards:
        """Pin blocks if a rank can read all its shards, the first from ``first_block``. Raises NotReady with the
        indices of the keys that it cannot read."""
        count = len(keys) // group.key_bytes
        if count > self._capacity:
            self._grow(count)
        offered = group.number, keys, count, group.key_bytes, rank, first_block
        if not self._native.blocks_begin_load(self.address, slots.address, *offered):
            raise NotReady(group.index, np.flatnonzero(self._bytes[:count] == 0).tolist())
        pinned, shards = self._numbers[: 2 * count].reshape(2, count).copy()
        return LoadedShards(pinned, shards, self._offsets[:count].copy())

    def publish(
        self,
        group: Group,
        blocks: BlockIds,
        slots: SlotIds,
        first_blocks: Iterable[int] | None,
        checksums: array[int],
        chains: Sequence[ChainStart] = (),
    ) -> tuple[BlockIds, bytes]:
        """Mark shards of a group's WRITING blocks as complete, each in its slot. Returns the blocks that became READY,
        and their keys.

        The order is from the last block to the first, with rising sequences. The next daemon takes it as the order of
        use, in which a chain's tail is older than its root. It does not trust bytes whose checksum is 0.
        ``first_blocks``: None for 0 of all. ``chains``: those that all of the blocks belong to, in order; empty if they
        belong to none.
        """
        count = len(blocks)
        firsts, sums = None if first_blocks is None else array("H", first_blocks).tobytes(), checksums.tobytes()
        assert count == len(slots) == len(checksums)
        assert firsts is None or 2 * count == len(firsts)
        if count > self._capacity:
            self._grow(count)
        written, begins = (packed(blocks), packed(slots), count), array("I", chain.from_iterable(chains)).tobytes()
        found = self._native.blocks_publish(self.address, group.packed, *written, firsts, sums, begins, len(chains))
        assert found != NO_BLOCK, "a block is not WRITING"
        return self._numbers[:found].copy(), self._bytes[: found * group.key_bytes].tobytes()

    def record_chain(self, blocks: BlockIds) -> None:
        """Record for the next daemon that each of these blocks is behind the one before it in a chain."""
        self._native.blocks_record_chain(self.address, packed(blocks), len(blocks))

    def set_checksum(self, slot: int, checksum: int) -> None:
        """Set the checksum of a shard that was published without one."""
        self._native.blocks_set_checksum(self.address, slot, checksum)

    def set_corrupt(self, slot: int) -> None:
        """Mark a slot as holding wrong bytes, whatever is using it now. The next daemon does not use it either."""
        self.unverified_slots -= int(self.shard[slot] & UNVERIFIED != 0)
        self.shard[slot] = (self.shard[slot] & ~np.uint8(UNVERIFIED)) | CORRUPT
        self.records["state"][slot] = BAD_RECORD

    def add_recovered(self, group: Group, blocks: BlockIds) -> None:
        """Add READY blocks that ``recover`` has put into the index to their group, as its newest."""
        self._native.blocks_add_recovered(self.address, group.packed, packed(blocks), len(blocks))

    def retire(self, group: Group) -> None:
        """Count all blocks of a group as DROPPED from now on."""
        self._native.blocks_retire(self.address, group.packed)

    def oldest(self, group: Group, count: int) -> BlockIds:
        """Return up to ``count`` of the blocks that were first added to the group."""
        return self._oldest(group, count, count, unpinned=False)

    def oldest_unpinned(self, group: Group, count: int) -> BlockIds:
        """Return up to ``count`` READY blocks without pins among the MAX_SEEN that were first added to the group. The
        others that it meets become the newest, so that the next search does not meet them again."""
        return self._oldest(group, min(count, MAX_SEEN), MAX_SEEN, unpinned=True)

    def _oldest(self, group: Group, count: int, seen: int, *, unpinned: bool) -> BlockIds:
        if count > self._capacity:
            self._grow(count)
        found = self._native.blocks_oldest(self.address, group.packed, count, seen, unpinned)
        return self._numbers[:found].copy()

    def choose_victims(
        self,
        slots: SlotAllocator,
        group: Group,
        count: int,
        order: BlockIds,
        older_than: int,
        hints: npt.NDArray[np.uint32],
        retentions: npt.NDArray[np.uint32],
        *,
        last: bool,
    ) -> tuple[BlockIds, bool]:
        """Choose blocks to evict so that slots for ``count`` blocks of a group become free; also returns whether they
        are enough: see ``Victims.for_space``.

        ``order``: READY, unpinned blocks, the first to evict first; ``last``: there are no others. ``hints``,
        ``retentions``: see ``Retentions``: ``hint_of`` and ``numbers``.
        """
        # A region goes as a whole, with blocks that are not in ``order``. C chooses none whose blocks might not fit the
        # buffer: two always do, and more can wait for the next call.
        most = len(order) + 2 * slots.slots_per_region
        if most > self._capacity:
            self._grow(most)
        wanted = slots.address, group.packed, count, packed(order), len(order)
        retained = hints.ctypes.data, packed(retentions), len(retentions)
        found = self._native.blocks_choose_victims(self.address, *wanted, most, last, older_than, *retained)
        if found == NO_BLOCK:
            raise MemoryError
        return self._numbers[:found].copy(), bool(self._counts[0])

    def drop(self, group: Group, blocks: BlockIds, reason: int = 0) -> tuple[bytes, EndedSlots]:
        """Take blocks of a group out of the index, and remember ``reason`` if it is not 0. They become DROPPED, are not
        recovered by the next daemon, and end at once if they are not in use.

        Returns their keys, and the result of ``end_dropped``.
        """
        slots = len(blocks) * len(group.sizes)
        if slots > self._capacity:
            self._grow(slots)
        dropped = self._native.blocks_drop(self.address, group.packed, packed(blocks), len(blocks), reason)
        assert dropped == len(blocks), "a block is not in the index"
        return self._bytes[: len(blocks) * group.key_bytes].tobytes(), self._ended()

    def end_dropped(self, group: Group, blocks: BlockIds) -> EndedSlots:
        """End the DROPPED blocks of a group that are not in use. Returns their slots.

        CORRUPT slots keep that mark, in their records too, and must not be used again.
        """
        slots = len(blocks) * len(group.sizes)
        if slots > self._capacity:
            self._grow(slots)
        self._native.blocks_end_dropped(self.address, group.packed, packed(blocks), len(blocks))
        return self._ended()

    def _ended(self) -> EndedSlots:
        slots, corrupt = self._counts
        return EndedSlots(self._numbers[:slots].copy(), corrupt)

    def common_group(self, blocks: BlockIds, *, unpinned: bool = False) -> int:
        """Return the group number that all blocks have; 0 if they differ. ``unpinned``: also 0 if one is pinned."""
        return int(self._native.blocks_common_group(self.address, packed(blocks), len(blocks), unpinned))

    def by_group(self, blocks: BlockIds) -> list[tuple[Group, BlockIds]]:
        """Group blocks, which have slots, by their group; each keeps its order."""
        if not blocks.size:
            return []
        if only := self.common_group(blocks):
            return [(self.groups[only], blocks)]
        numbers = self.group[blocks]
        return [(self.groups[number], blocks[numbers == number]) for number in sorted(set(numbers.tolist()))]

    def pin(self, blocks: BlockIds) -> None:
        """Keep the bytes of blocks until ``unpin``; a block that occurs several times is pinned as many times."""
        self._native.blocks_pin(self.address, packed(blocks), len(blocks))

    def unpin(self, blocks: BlockIds) -> BlockIds:
        """Remove one pin for each occurrence of a block. Returns the blocks that are not pinned any more, for
        ``BlockLife.return_unpinned``."""
        count = len(blocks)
        if count > self._capacity:
            self._grow(count)
        return self._numbers[: self._native.blocks_unpin(self.address, packed(blocks), count)].copy()

    def lease(self, blocks: BlockIds) -> None:
        """Pin blocks for a lease, until ``end_lease``."""
        self._native.blocks_lease(self.address, packed(blocks), len(blocks))

    def end_lease(self, blocks: BlockIds) -> BlockIds:
        """Undo ``lease``. Returns the blocks that are not pinned any more, for ``BlockLife.return_unpinned``."""
        count = len(blocks)
        if count > self._capacity:
            self._grow(count)
        return self._numbers[: self._native.blocks_end_lease(self.address, packed(blocks), count)].copy()

    def slots(self, blocks: BlockIds, ranks: int) -> npt.NDArray[np.uint32]:
        """Return the slots of blocks that have at least ``ranks`` of them, [blocks, ranks]."""
        found = np.empty((len(blocks), ranks), np.uint32)
        found[:, 0] = blocks
        for rank in range(1, ranks):
            found[:, rank] = self.next[found[:, rank - 1]]
        return found

    def blocks_of(self, slots: SlotIds) -> BlockIds:
        """Return the blocks that slots belong to. A free or quarantined slot stands for itself."""
        slots = slots.copy()
        while (inside := (self.state[slots] == NOT_FIRST) & (self.group[slots] != 0)).any():
            slots[inside] = self.next[slots[inside]]
        return slots

    def keys(self, blocks: BlockIds, key_bytes: int) -> bytes:
        """Return the keys of blocks of one group, concatenated."""
        count = len(blocks)
        if count > self._capacity:
            self._grow(count)
        self._native.blocks_keys(self.address, packed(blocks), count, key_bytes)
        return self._bytes[: count * key_bytes].tobytes()

    def split_keys(self, blocks: BlockIds, key_bytes: int) -> list[bytes]:
        """Return the keys of blocks of one group as a list."""
        keys: list[bytes] = np.frombuffer(self.keys(blocks, key_bytes), f"V{key_bytes}").tolist()
        return keys

    def record_misses(self, group: Group, keys: bytes, reason: int) -> None:
        """Remember the reason, 1 to 15, why these keys have no block any more."""
        count = len(keys) // group.key_bytes
        self._native.blocks_record_misses(self.address, group.number, keys, count, group.key_bytes, reason)

    def miss_reasons(self, group: Group, keys: bytes) -> bytes:
        """Return the ``MissReason`` of each key, as far as it is known."""
        count = len(keys) // group.key_bytes
        if count > self._capacity:
            self._grow(count)
        self._native.blocks_reasons(self.address, group.number, keys, count, group.key_bytes)
        return self._bytes[:count].tobytes()


def select_keys(keys: bytes, indices: Sequence[int] | npt.NDArray[np.intp], size: int) -> bytes:
    """Return the keys at these ascending indices, concatenated; consecutive ones, which are common, are one slice."""
    if len(indices) and indices[-1] - indices[0] == len(indices) - 1:
        return keys[indices[0] * size : (indices[-1] + 1) * size]
    return np.frombuffer(keys, np.dtype((np.void, size)))[indices].tobytes()


def leading(flags: npt.NDArray[np.bool_]) -> int:
    """Return how many flags are True before the first that is False."""
    return int(np.append(flags, False).argmin())


def packed(numbers: npt.NDArray[np.uint32]) -> bytes:
    """Return numbers as C reads them: numbers of another width would be misread."""
    assert numbers.dtype == np.uint32
    return numbers.tobytes()
