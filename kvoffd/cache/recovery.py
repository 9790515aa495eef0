"""Recovers the blocks of an earlier daemon from the slot table, in one pass: ``recover.c`` checks the records.

A record is valid if it is READY, its CRC is right, it has a checksum, and it agrees with its region and its namespace's
saved geometry. A block is valid if the records of all its ranks are. All other records are erased.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, BlockTable
from kvoffd.cache.namespace import Group
from kvoffd.cache.states import CORRUPT, NOT_FIRST
from kvoffd.pool.allocator import SlotAllocator, SlotIds
from kvoffd.pool.slot_table import FREE_RECORD, RECORD_BYTES, SlotTable
from kvoffd.system.native import NUMBER, VOID_P, declare, native
from kvoffd.system.structures import RECOVERY

declare(
    keep_gil=False,
    recover_records=(None, VOID_P, VOID_P, NUMBER, NUMBER),
    recover_blocks=(None, VOID_P),
    recover_order=(None, VOID_P, NUMBER, VOID_P, NUMBER, VOID_P, VOID_P),
)

_BATCH_BYTES = 4 << 20


class RecoveredBlocks(NamedTuple):
    blocks: BlockIds
    """READY blocks, the least recently used first."""
    quarantined: SlotIds
    """Slots in which an earlier daemon found wrong bytes: they are not used again."""
    reset: int
    """Records erased because their namespace was reset, left out, or had no space in the slot table."""
    unwritten: int
    """Records of namespaces that are newer than what was read of them: the last save was damaged."""
    incomplete: int
    """Records of blocks that lack a rank."""
    damaged: int
    """Records that are torn, have no checksum, or contradict the saved geometry."""


class _Recovery(ctypes.Structure):
    """``struct recovery`` of recover.c."""

    __slots__ = ()
    _fields_ = RECOVERY


def recover(
    fd: int,
    table: SlotTable,
    slots: SlotAllocator,
    blocks: BlockTable,
    groups: Iterable[Group],
    next_number: int,
) -> RecoveredBlocks:
    """Enter the complete blocks of an earlier daemon into an empty BlockTable and SlotAllocator, and erase the rest.

    Only the file's data is read, not its holes: reading those through a mapping would allocate them. A process killed
    at any point of this leaves a table from which the next one recovers the same blocks.

    Args:
        fd: the file that begins with the table.
        groups: those of the known namespaces whose ranks have all registered.
        next_number: the first number of a namespace that the save which was read may lack.
    """
    geometry, count = table.geometry, table.geometry.slots
    # In the order of the numbers in the records, by which C searches them.
    packed = [group.packed for group in sorted(groups, key=lambda one: (one.namespace.number, one.index))]
    native_groups = (ctypes.c_char_p * len(packed))(*packed)
    # Sized for the worst case; pages that are not written use no memory.
    heads, discarded, bad, used = (np.empty(count, np.uint32) for _ in range(4))
    sequences = np.empty(count, np.uint64)
    recovery = _Recovery(
        pool_bytes=geometry.pool_bytes,
        region_bytes=geometry.region_bytes,
        slots_per_region=slots.slots_per_region,
        regions=slots.regions,
        group_count=len(packed),
        at_slot_bytes=table.region_sizes.ctypes.data,
        at_groups=ctypes.addressof(native_groups),
        at_blocks=blocks.address,
        at_heads=heads.ctypes.data,
        at_sequences=sequences.ctypes.data,
        at_discarded=discarded.ctypes.data,
        at_bad=bad.ctypes.data,
        at_used=used.ctypes.data,
        next_number=next_number,
    )
    reference = ctypes.byref(recovery)
    _judge_records(fd, table, reference)
    native().recover_blocks(reference)
    quarantined = bad[: recovery.bad_found].copy()
    table.records["state"][discarded[: recovery.discarded_found]] = FREE_RECORD
    blocks.state[quarantined] = NOT_FIRST  # not FREE: no block may get them
    blocks.shard[quarantined] = CORRUPT
    slots.restore(np.concatenate([used[: recovery.used_found], quarantined]), table.region_sizes.astype(np.int64))
    whole = recovery.heads_found
    blocks.sequence = int(sequences[:whole].max(initial=0))
    counted = recovery.reset_found, recovery.unwritten_found, recovery.incomplete_found
    by_use = _order_of_use(blocks, heads[:whole], sequences[:whole])
    return RecoveredBlocks(by_use, quarantined, *counted, recovery.discarded_found - sum(counted))


def _order_of_use(blocks: BlockTable, heads: BlockIds, sequences: npt.NDArray[np.uint64]) -> BlockIds:
    """Return complete blocks in the order in which they were stored, except that those before others of their prompt
    count as used when these were stored: a prompt of several steps loses its tail first."""
    by_time, placed, ordered = heads[np.argsort(sequences)], np.zeros(len(blocks.state), np.uint8), np.empty_like(heads)
    to_order = by_time.ctypes.data, len(by_time), placed.ctypes.data, ordered.ctypes.data
    native().recover_order(blocks.address, len(blocks.state), *to_order)
    return ordered


def _judge_records(fd: int, table: SlotTable, recovery: object) -> None:
    """Check the records in the file's data, which may consist of many small pieces of a page."""
    judge = native().recover_records
    begin = table.geometry.records_at
    end = begin + table.geometry.slots * RECORD_BYTES
    # One buffer for all reads: for a new one, the kernel would have to find new pages each time.
    buffer = memoryview(bytearray(min(_BATCH_BYTES, end - begin)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    position = hole_at = begin
    while position < end:
        if position == hole_at:
            position = _seek(fd, position, os.SEEK_DATA)
            if position >= end:
                break
            hole_at = min(end, _seek(fd, position, os.SEEK_HOLE))  # once per piece: the kernel scans page by page
        stop = min(hole_at, position + len(buffer))
        # Data begins and ends at pages, and pages hold whole records; a file truncated since then gives fewer.
        count = os.preadv(fd, [buffer[: stop - position]], position) // RECORD_BYTES
        judge(recovery, address, count, (position - begin) // RECORD_BYTES)
        position = stop


def _seek(fd: int, position: int, whence: int) -> int:
    """Return where the file's next data or hole begins at or after ``position``; the file's end if there is none."""
    try:
        return os.lseek(fd, position, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(fd).st_size
