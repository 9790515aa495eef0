"""Slots of the pool's table one at a time, as tests write them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvoffd.pool.allocator import MIN_SLOT_BYTES
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import InheritedSlots, Kind, Rows
from kvoffd.pool.scan import scan
from kvoffd.pool.table import SlotTable
from kvoffd.pool.table_format import CONTENT, CONTENT_AT, KEY_AT, RECORD, RECORD_BYTES, Geometry, read_geometry


class SlotRecord(NamedTuple):
    """A slot whose bytes are whole, as the slot table says."""

    offset: int
    slot_bytes: int
    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int
    first_block: int
    length: int
    checksum: int
    """The ``digest`` of the slot's ``length`` bytes; 0 where none was taken."""
    generation: int
    """Grows with every slot that is written."""


class SlotOwner(NamedTuple):
    """The shard whose bytes a slot holds."""

    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int


def make_table(pool_bytes: int, region_bytes: int) -> SlotTable:
    """A new table in memory of its own."""
    geometry = Geometry.of(pool_bytes, region_bytes)
    return SlotTable(PoolMemory.create(geometry.size_bytes, "kvoffd-test-table"), geometry)


def scan_table(fd: int) -> list[SlotRecord]:
    """The slots whose bytes are whole, in this daemon's table or its predecessor's. Raises BadTable."""
    geometry = read_geometry(fd)
    return records_of(fd, geometry, scan(fd, geometry).slots)


def records_of(fd: int, geometry: Geometry, left: InheritedSlots) -> list[SlotRecord]:
    """What a table in a file says of slots."""
    records = []
    for offset, number, generation in zip(left.offsets, left.kind_of, left.generations, strict=True):
        row = os.pread(fd, RECORD_BYTES, geometry.records_at + int(offset) // MIN_SLOT_BYTES * RECORD_BYTES)
        kind = left.kinds[number]
        length, checksum, first_block = CONTENT.unpack_from(row, CONTENT_AT)
        assert (length, bool(checksum)) == (kind.length, bool(kind.has_checksum))
        records.append(
            SlotRecord(
                *(
                    int(offset),
                    kind.slot_bytes,
                    left.names[kind.name],
                    kind.group,
                    row[KEY_AT : KEY_AT + kind.key_bytes],
                ),
                *(kind.rank, kind.world_size, first_block, length, checksum, int(generation)),
            )
        )
    return records


def inherited_slots(records: Iterable[SlotRecord]) -> InheritedSlots:
    """What a scan finds where there are these records. Offsets need not be distinct."""
    ordered = sorted(records, key=lambda record: record.offset)
    names = list(dict.fromkeys(record.fingerprint for record in ordered))
    kinds: dict[tuple[int, ...], int] = {}
    kind_of = []
    for record in ordered:
        owner = names.index(record.fingerprint), record.group, record.rank, record.world_size
        kind = (record.slot_bytes, record.length, *owner, len(record.key), bool(record.checksum))
        kind_of.append(kinds.setdefault(kind, len(kinds)))
    blocks = [hash((record.fingerprint, record.group, record.key)) % 2**64 for record in ordered]
    return InheritedSlots(
        names,
        [Kind(*kind) for kind in kinds],
        np.array(kind_of, np.uint32),
        np.array([record.offset for record in ordered], np.int64),
        np.array([record.generation for record in ordered], np.int64),
        np.array(blocks, np.uint64),
    )


def in_use(slots: Iterable[tuple[int, int]]) -> InheritedSlots:
    """Slots by offset and size."""
    return inherited_slots(SlotRecord(offset, size, b"", 0, b"", 0, 1, 0, size, 1, 1) for offset, size in slots)


def rows_of(records: Iterable[SlotRecord]) -> Rows:
    """The rows of a table for these records, as far as an adoption reads them."""
    rows = bytearray()
    for record in records:
        row = bytearray(RECORD_BYTES)
        CONTENT.pack_into(row, CONTENT_AT, record.length, record.checksum, record.first_block)
        row[KEY_AT : KEY_AT + len(record.key)] = record.key
        rows += row
    return np.frombuffer(bytes(rows), RECORD)


def mark_writing(
    table: Pool | SlotTable, offset: int, fingerprint: bytes, group: int, key: bytes, rank: int, world_size: int
) -> None:
    """As ``SlotTable.mark_all_writing``, for one slot."""
    table.mark_all_writing([offset], fingerprint, group, [key], rank, world_size)


def mark_ready(table: Pool | SlotTable, offset: int, first_block: int, length: int, checksum: int = 0) -> None:
    """As ``SlotTable.mark_all_ready``, for one slot."""
    table.mark_all_ready([offset], [first_block], length, [checksum])
