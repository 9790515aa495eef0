"""Slots of the pool's table one at a time, as tests write them."""

from __future__ import annotations

from typing import NamedTuple

from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import SlotRecord
from kvoffd.pool.scan import scan
from kvoffd.pool.table import SlotTable
from kvoffd.pool.table_format import Geometry, read_geometry


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
    return scan(fd, read_geometry(fd)).records


def mark_writing(
    table: Pool | SlotTable, offset: int, fingerprint: bytes, group: int, key: bytes, rank: int, world_size: int
) -> None:
    """As ``SlotTable.mark_all_writing``, for one slot."""
    table.mark_all_writing([offset], fingerprint, group, [key], rank, world_size)


def mark_ready(table: Pool | SlotTable, offset: int, first_block: int, length: int, checksum: int = 0) -> None:
    """As ``SlotTable.mark_all_ready``, for one slot."""
    table.mark_all_ready([offset], [first_block], length, [checksum])
