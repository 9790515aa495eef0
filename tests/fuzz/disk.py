"""Pages of a disk tier's file, damaged: with a wrong checksum nothing is read, with a right one nothing impossible."""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import xxhash

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.tiers.disk.file_format import (
    BadHead,
    Head,
    Record,
    RegionHead,
    SlotShape,
    pack_record,
    read_head,
    read_record,
    read_region,
    record_bytes,
    region_seed,
)
from kvoffd.tiers.tier import TierBlock, TierKey, TierShard
from tests.fuzz.choices import Choices

REGION_BYTES = 1 << 20
FILE_ID = b"f" * 16
WORLD = 2


class Pages(NamedTuple):
    """A file's head, a region's page and a record in it."""

    head: Head
    region: RegionHead
    record: Record
    seed: int


@cache
def written() -> Pages:
    """Pages without damage."""
    head = Head(FILE_ID, REGION_BYTES, 4, 1.5, number=3, generation=9, floors={b"n" * 32: 7})
    block = TierBlock(TierKey(b"n" * 32, 1, b"k" * 32), tuple(TierShard(5000, 0, 1 + rank) for rank in range(WORLD)))
    shape = SlotShape.of(block)
    region = RegionHead(2, 8, shape, shape.slots(REGION_BYTES))
    return Pages(head, region, Record(block, 8, 2.5), region_seed(FILE_ID, region) + 5)


def disk_pages(data: bytes) -> None:
    """One of the three, with some bytes changed; every other time its checksum is made right again."""
    choices, right = Choices(data), written()
    kind, sealed = choices.byte() % 3, choices.byte() % 2 == 1
    if kind == 0:
        pages = _changed(choices, right.head.pack(), 0 if sealed else None)
        pages += choices.of((pages, bytes(PAGE_BYTES), right.head.pack()[: choices.number(PAGE_BYTES)]))
        try:
            head = read_head(memoryview(pages))
        except BadHead:
            return
        assert sealed or head == right.head, head
        assert head.region_bytes >= PAGE_BYTES
        assert head.region_bytes % PAGE_BYTES == 0
    elif kind == 1:
        page = _changed(choices, right.region.pack(FILE_ID), xxhash.xxh3_64_intdigest(FILE_ID) if sealed else None)
        region = read_region(memoryview(page), FILE_ID, 2, REGION_BYTES)
        assert region is None or sealed or region == right.region, region
        if region is not None:
            end = region.shape.slots_at(region.slots) + region.slots * region.shape.slot_bytes
            assert end <= REGION_BYTES or not region.slots, region
    else:
        nbytes = record_bytes(WORLD)
        page = pack_record(right.record, right.seed, nbytes)
        page = _changed(choices, page, right.seed if sealed else None, _checksum_at())
        record = read_record(page, 0, right.region.shape, right.seed)
        assert record is None or sealed or record == right.record, record
        assert record is None or SlotShape.of(record.block) == right.region.shape


def _changed(choices: Choices, page: bytes, seed: int | None, checksum_at: int = PAGE_BYTES - 8) -> bytes:
    """``seed`` is that of the checksum to be made right; None leaves it wrong, or as it is where nothing changed."""
    changed = bytearray(page)
    for _ in range(choices.byte() % 5):
        at, piece = choices.number(255), choices.bytes(1 + choices.byte() % 8)
        changed[at : at + len(piece)] = piece[: len(page) - at]
    if seed is not None and bytes(changed) != page:
        content = bytes(changed[:checksum_at])
        changed[checksum_at : checksum_at + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(content, seed % 2**64))
    return bytes(changed)


def _checksum_at() -> int:
    """The offset behind a record's last shard."""
    whole = pack_record(written().record, written().seed, record_bytes(WORLD)).rstrip(b"\0")
    return len(whole) - 8
