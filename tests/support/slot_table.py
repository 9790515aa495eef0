"""Slots of the pool's table one at a time, as tests write them."""

from __future__ import annotations

from typing import NamedTuple

from kvoffd.pool.pool import Pool
from kvoffd.pool.table import SlotTable


class SlotOwner(NamedTuple):
    """The shard whose bytes a slot holds."""

    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int


def mark_writing(
    table: Pool | SlotTable, offset: int, fingerprint: bytes, group: int, key: bytes, rank: int, world_size: int
) -> None:
    """As ``SlotTable.mark_all_writing``, for one slot."""
    table.mark_all_writing([offset], fingerprint, group, [key], rank, world_size)


def mark_ready(table: Pool | SlotTable, offset: int, first_block: int, length: int, checksum: int = 0) -> None:
    """As ``SlotTable.mark_all_ready``, for one slot."""
    table.mark_all_ready([offset], [first_block], length, [checksum])
