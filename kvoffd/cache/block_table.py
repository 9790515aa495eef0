"""The blocks of the pool, by number: arrays with what is known of each, and the index that finds them by key.

A block's number is that of its first slot, the one of rank 0; the slots of the other ranks hang from it in a ring. What
must outlive the daemon is in the slot table's records, what need not in the arrays here. ``blocks.c`` does the work.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.pool.allocator import SlotIds
from kvoffd.system.native import native
from kvoffd_proto import messages

BlockIds: TypeAlias = npt.NDArray[np.uint32]
"""Numbers of blocks: of their first slots."""

NO_BLOCK = 2**32 - 1
FREE, WRITING, READY = int(messages.ABSENT), int(messages.WRITING), int(messages.READY)
"""States of a block, as lookups answer with them: FREE has no block; of a WRITING one a shard is missing."""
DROPPED = 16
"""Out of the index, its slots still held by a pin or a running write."""
NOT_FIRST = 17
"""State of a slot that is not a block's first."""
RESERVED, WRITING_SHARD, WRITTEN = 0, 1, 2
"""State of a shard: its slot is taken; a store writes it; all of it is there."""
SHARD_STATE, UNVERIFIED, CORRUPT = 3, 4, 8
"""Bits of ``shard``: its state; its bytes are not compared yet, or have no checksum yet; they are wrong."""
KNOWN_MISSES = 2**19
"""Keys of which it is known why they left, 8 bytes each. A key replaces one at random."""


class _Blocks(ctypes.Structure):
    """``struct blocks`` of blocks.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("records", "state", "shard", "pins", "missing", "group", "next")),
        ("entries", ctypes.c_void_p),
        ("used", ctypes.c_uint64),
        ("bits", ctypes.c_uint32),
        ("seed", ctypes.c_uint64 * 2),
        ("crc", ctypes.c_uint32 * 256 * 8),
    )


class BlockTable:
    """Arrays by slot number, and the index. For one thread.

    Args:
        records: of the slot table, by slot.
    """

    def __init__(self, records: npt.NDArray[np.void]) -> None:
        slots = len(records)
        self.records = records
        self.generation = 0
        """The highest that a record has."""
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
        self._arrays = self.state, self.shard, self.pins, self.missing, self.group, self.next
        self._key = records["key"]
        self._native = native()
        self._misses = np.zeros(KNOWN_MISSES, np.uint64)
        self._blocks = _Blocks(records.ctypes.data, *(one.ctypes.data for one in self._arrays))
        self.address = ctypes.addressof(self._blocks)
        """Of the ``struct blocks``."""
        if not self._native.blocks_open(self.address, os.urandom(16)):
            raise MemoryError
        self._close = weakref.finalize(self, self._native.blocks_close, ctypes.pointer(self._blocks))

    @property
    def nbytes(self) -> int:
        """Memory of the index and the arrays, untouched pages among it."""
        return int(8 << self._blocks.bits) + self._misses.nbytes + sum(one.nbytes for one in self._arrays)

    def find(self, group: int, keys: bytes, key_bytes: int) -> tuple[bytes, BlockIds]:
        """By key: the state of its block and the number; FREE and NO_BLOCK where there is none."""
        count = len(keys) // key_bytes
        states, blocks = np.empty(count, np.uint8), np.empty(count, np.uint32)
        self._native.blocks_find(self.address, group, keys, count, key_bytes, _at(states), _at(blocks))
        return states.tobytes(), blocks

    def enter(
        self, slots: npt.NDArray[np.uint32], group: int, keys: bytes, key_bytes: int, namespace: int, group_in_it: int
    ) -> BlockIds:
        """Make blocks of free slots, [blocks, ranks], for keys none of which is there. Returns their numbers.

        The records name the namespace and its group; all shards are still to be written.
        """
        slots = np.ascontiguousarray(slots)
        count, ranks = slots.shape
        entered = self._native.blocks_enter(
            *(self.address, _at(slots), count, ranks, group, keys, key_bytes, namespace, group_in_it)
        )
        assert entered == count, "a key is there, a slot is not free, or there is no memory"
        return np.ascontiguousarray(slots[:, 0])

    def publish(
        self,
        blocks: BlockIds,
        slots: SlotIds,
        first_blocks: Sequence[int] | npt.NDArray[np.uint16],
        length: int,
        checksums: Sequence[int] | npt.NDArray[np.uint64],
    ) -> BlockIds:
        """Note that shards of WRITING blocks, all of one length, are whole. Returns the blocks that are READY by it.

        They come from the last to the first, with rising generations: it is the order of use for a successor, and a
        chain's tail is older than its root. A successor does not trust bytes without a checksum, which is 0.
        """
        count, ready = len(blocks), np.empty(len(blocks), np.uint32)
        firsts, sums = np.array(first_blocks, np.uint16), np.array(checksums, np.uint64)
        slots, blocks = np.ascontiguousarray(slots), np.ascontiguousarray(blocks)
        assert len(slots) == len(firsts) == len(sums) == count
        found = self._native.blocks_publish(
            *(self.address, _at(blocks), _at(slots), count, _at(firsts), length, _at(sums)),
            *(self.generation, _at(ready)),
        )
        self.generation += count
        return ready[:found]

    def set_checksum(self, slot: int, checksum: int) -> None:
        """Enter the checksum of a shard that was published without one."""
        self._native.blocks_set_checksum(self.address, slot, checksum)

    def drop(self, blocks: BlockIds) -> None:
        """Take blocks out of the index. They are DROPPED then, and no successor brings them back."""
        dropped = self._native.blocks_drop(self.address, _at(blocks), len(blocks))
        assert dropped == len(blocks), "a block is not in the index"

    def release(self, blocks: BlockIds, ranks: int) -> tuple[SlotIds, int]:
        """End the DROPPED ones of blocks that nothing holds. Returns their slots, and how many were UNVERIFIED.

        Slots whose shard is CORRUPT keep that mark, in their records too, and must not be used again.
        """
        slots, unverified = np.empty(len(blocks) * ranks, np.uint32), np.zeros(1, np.uint64)
        found = self._native.blocks_release(self.address, _at(blocks), len(blocks), _at(slots), _at(unverified))
        return slots[: found * ranks], int(unverified[0])

    def is_written(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Whether a store writes a shard of each block."""
        answers = np.empty(len(blocks), np.bool_)
        self._native.blocks_written_now(self.address, _at(blocks), len(blocks), _at(answers))
        return answers

    def pin(self, blocks: BlockIds) -> BlockIds:
        """Keep the bytes of blocks, once more for each time one is named. Returns those that nothing pinned before."""
        return self._pin(blocks, 1)

    def unpin(self, blocks: BlockIds) -> BlockIds:
        """Undo one pin for each time a block is named. Returns those that nothing pins any more."""
        return self._pin(blocks, -1)

    def _pin(self, blocks: BlockIds, by: int) -> BlockIds:
        changed = np.empty(len(blocks), np.uint32)
        found = self._native.blocks_pin(self.address, _at(blocks), len(blocks), by, _at(changed))
        return changed[:found]

    def slots(self, blocks: BlockIds, ranks: int) -> npt.NDArray[np.uint32]:
        """[blocks, ranks] the slots of blocks that have so many."""
        found = np.empty((len(blocks), ranks), np.uint32)
        found[:, 0] = blocks
        for rank in range(1, ranks):
            found[:, rank] = self.next[found[:, rank - 1]]
        return found

    def slots_of_rank(self, blocks: BlockIds, rank: int) -> SlotIds:
        """The slots of one rank's shards."""
        for _ in range(rank):
            blocks = self.next[blocks]
        return blocks

    def keys(self, blocks: BlockIds, key_bytes: int) -> bytes:
        """The keys of blocks of one group, end to end."""
        return self._key[blocks, :key_bytes].tobytes()

    def note_misses(self, group: int, keys: bytes, key_bytes: int, reason: int) -> None:
        """These keys are not there from now on, for this reason, 1 to 15."""
        count = len(keys) // key_bytes
        self._native.blocks_note(
            *(self.address, _at(self._misses), KNOWN_MISSES, group, keys, count, key_bytes, reason)
        )

    def count_misses(self, group: int, keys: bytes, key_bytes: int, states: bytes) -> list[int]:
        """How many of the keys whose state is FREE are not there for which reason; 0 is not known."""
        counts = (ctypes.c_uint64 * 16)()
        self._native.blocks_count(
            *(self.address, _at(self._misses), KNOWN_MISSES, group, keys),
            *(len(states), key_bytes, states, ctypes.addressof(counts)),
        )
        return list(counts)


def _at(array: npt.NDArray[np.generic]) -> int:
    """The address of a contiguous array's items."""
    assert array.flags.c_contiguous
    return array.ctypes.data
