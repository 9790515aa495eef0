"""The format of a disk tier's file, which describes itself.

All numbers are little-endian, all parts aligned to pages of 4096 bytes, all checksums XXH3 of 64 bits::

    head, twice | (room) | region 0 | region 1 | ...            a region: its page | records | slots

The **head** (``Head``) is written to its two places in turn; the one with the higher number and a right checksum
counts, so that a torn one costs nothing. A **region** has slots of one size and begins with a page that says which, and
with the records of its slots. A **slot** holds the shards of one block, by rank, each padded to pages; its **record**
(``pack_record``) says which block, and the length, first engine block and checksum of each shard.

The records stand together and not beside the data, so that the index of a million blocks is rebuilt from 256 MB that
are read in a few hundred pieces instead of a million; that a block needs one write and its share of a page of records,
which it has in common with its neighbours; and that removing a block costs no write to its slot. A record is written
after its data, and the one of the slot's last block is cleared before: a daemon that is killed leaves nothing torn.
Neither waits for the device's cache: after a failure of the machine, the checksums of the shards tell on the next read
which blocks are torn. Only removing waits for it (fdatasync).

The checksum of a record has a seed made of the file's id, the region, its generation and the slot: so records that an
earlier file or an earlier use of the region left are never taken for records of this one.

Generations count all blocks and regions that were ever written to the file. A namespace that is removed leaves a
**floor** in the head until its records are gone: its records up to that generation do not count.

A record has the generation of its namespace too, as the daemon counts them. Of a namespace only records of the highest
one count that the daemon or the file knows, so that no older copy of the file brings back what was removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from struct import Struct
from typing import NamedTuple

import xxhash

from kvoffd.pool.allocator import PAGE_BYTES, page_up
from kvoffd.tiers.tier import MOST_FIRST_BLOCK, TierBlock, TierKey, TierShard

FILE_NAME = "kvoffd.disk"
FORMAT_VERSION = 3
MAGIC = b"KVOFFDDK"
MAX_FINGERPRINT_BYTES = 32
MAX_KEY_BYTES = 64
MAX_WORLD_SIZE = 0xFFFF
HEAD_PAGES = 2
REGIONS_AT = 64 << 10
MAX_FLOORS = 64

_REGION_MAGIC = b"KVOFFDRG"
_RECORD_MAGIC = b"KVOFFDSL"
_CHECKSUM = Struct("<Q")
_CHECKSUM_AT = PAGE_BYTES - _CHECKSUM.size
# magic, version, number of floors, number of this head, file id, region bytes, regions, generation, written bytes,
# written blocks, last suspect generation, time of the file's birth, 1 while it is open, boot id
_HEAD = Struct("<8sIIQ16sQQQQQQdB7x16s")
_FLOOR = Struct("<B32s7xQ")
assert _HEAD.size + MAX_FLOORS * _FLOOR.size <= _CHECKSUM_AT
# magic, number, generation, slot bytes, record bytes, slots
_REGION = Struct("<8sQQQII")
# magic, generation, generation of the namespace, time of writing, group, world size, length of fingerprint and key,
# fingerprint, key
_RECORD = Struct("<8sQQdHHBB2x32s64s")
_SHARD = Struct("<QQI")  # length, checksum, first block
_LEAST_RECORD_BYTES = 256
_MASK = 2**64 - 1


class BadHead(Exception):
    """There is no head of this format. ``ours``: the file is a disk tier's all the same."""

    def __init__(self, sentence: str, ours: bool) -> None:
        super().__init__(sentence)
        self.ours = ours


@dataclass
class Head:
    """The description of the file as a whole."""

    file_id: bytes
    region_bytes: int
    regions: int
    created_at: float
    """Seconds since 1970."""
    number: int = 0
    generation: int = 0
    """At least the generation of every block that was there when the head was written."""
    written_bytes: int = 0
    """Since the file was made, records and heads included."""
    written_blocks: int = 0
    suspect_generation: int = 0
    """Blocks up to this generation may be torn: they were in the file when the machine ended without closing it."""
    is_open: bool = True
    """False when the last daemon closed the file in good order."""
    boot_id: bytes = bytes(16)
    """Of the boot of the machine in which the head was written; see ``read_boot_id``."""
    floors: dict[bytes, int] = field(default_factory=dict)
    """Generations by fingerprint of removed namespaces: blocks up to that generation are removed."""

    def pack(self) -> bytes:
        """One page."""
        packed = _HEAD.pack(
            *(MAGIC, FORMAT_VERSION, len(self.floors), self.number, self.file_id, self.region_bytes, self.regions),
            *(self.generation, self.written_bytes, self.written_blocks, self.suspect_generation),
            *(self.created_at, self.is_open, self.boot_id),
        )
        floors = b"".join(_FLOOR.pack(len(name), name, floor) for name, floor in self.floors.items())
        return _pack_page(packed + floors)


def read_head(pages: memoryview) -> Head:
    """The head that counts of the two. Raises BadHead."""
    heads: list[Head] = []
    versions: set[int] = set()
    for at in range(0, HEAD_PAGES * PAGE_BYTES, PAGE_BYTES):
        page = bytes(pages[at : at + PAGE_BYTES])
        if page[: len(MAGIC)] != MAGIC:
            continue
        if len(page) < PAGE_BYTES:
            versions.add(0)
            continue
        versions.add(_HEAD.unpack_from(page)[1])
        if _is_whole(page) and (head := _unpack_head(page)) is not None:
            heads.append(head)
    if heads:
        return max(heads, key=lambda head: head.number)
    if not versions:
        raise BadHead("It is no file of kvoffd's.", ours=False)
    if FORMAT_VERSION not in versions:
        raise BadHead(f"It has format {max(versions)}, and this release reads format {FORMAT_VERSION}.", ours=True)
    raise BadHead("Its head is damaged.", ours=True)


def _unpack_head(page: bytes) -> Head | None:
    _, version, floors, number, file_id, region_bytes, regions, *rest = _HEAD.unpack_from(page)
    generation, written_bytes, written_blocks, suspect, created_at, is_open, boot_id = rest
    if version != FORMAT_VERSION or floors > MAX_FLOORS or region_bytes < PAGE_BYTES or region_bytes % PAGE_BYTES:
        return None
    head = Head(file_id, region_bytes, regions, created_at, number, generation, written_bytes, written_blocks)
    head.suspect_generation, head.is_open, head.boot_id = suspect, bool(is_open), boot_id
    for index in range(floors):
        length, name, floor = _FLOOR.unpack_from(page, _HEAD.size + index * _FLOOR.size)
        head.floors[name[:length]] = floor
    return head


class SlotShape(NamedTuple):
    """The size of a region's slots and of their records."""

    slot_bytes: int
    record_bytes: int

    @classmethod
    def of(cls, block: TierBlock) -> SlotShape:
        slot_bytes = sum(page_up(shard.length) for shard in block.shards)
        return cls(max(PAGE_BYTES, slot_bytes), record_bytes(len(block.shards)))

    def slots(self, region_bytes: int) -> int:
        slots = max(0, (region_bytes - PAGE_BYTES) // (self.slot_bytes + self.record_bytes))
        while slots and self.slots_at(slots) + slots * self.slot_bytes > region_bytes:
            slots -= 1
        return slots

    def slots_at(self, slots: int) -> int:
        """Where in a region of so many slots the first one begins."""
        return PAGE_BYTES + page_up(slots * self.record_bytes)


class RegionHead(NamedTuple):
    """The first page of a region."""

    number: int
    generation: int
    shape: SlotShape
    slots: int

    def pack(self, file_id: bytes) -> bytes:
        """One page."""
        content = _REGION.pack(_REGION_MAGIC, self.number, self.generation, *self.shape, self.slots)
        return _pack_page(content, _seed(file_id))


def read_region(page: memoryview, file_id: bytes, number: int, region_bytes: int) -> RegionHead | None:
    """Reads a region's first page; None where it was never written, is another region's, or is damaged."""
    magic, found, generation, slot_bytes, record, slots = _REGION.unpack_from(page)
    if magic != _REGION_MAGIC or not _is_whole(page, _seed(file_id)):
        return None
    shape = SlotShape(slot_bytes, record)
    sound = found == number and slot_bytes >= PAGE_BYTES and slot_bytes % PAGE_BYTES == 0 and _is_record_bytes(record)
    if not sound or slots != shape.slots(region_bytes):
        return None
    return RegionHead(number, generation, shape, slots)


class Record(NamedTuple):
    """The content of a slot's record."""

    block: TierBlock
    generation: int
    written_at: float
    """Seconds since 1970."""
    namespace_generation: int = 0


def region_seed(file_id: bytes, head: RegionHead) -> int:
    """The seed of a region's records, to which the slot's number is added."""
    return xxhash.xxh3_64_intdigest(_CHECKSUM.pack(head.number) + _CHECKSUM.pack(head.generation), _seed(file_id))


def pack_record(record: Record, seed: int, nbytes: int) -> bytes:
    """``nbytes`` for one slot: see ``record_bytes``."""
    (fingerprint, group, key), shards = record.block
    content = _RECORD.pack(
        *(_RECORD_MAGIC, record.generation, record.namespace_generation, record.written_at),
        *(group, len(shards), len(fingerprint), len(key), fingerprint, key),
    )
    content += b"".join(_SHARD.pack(shard.length, shard.checksum, shard.first_block) for shard in shards)
    return (content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content, seed & _MASK))).ljust(nbytes, b"\0")


def read_record(records: bytes, at: int, shape: SlotShape, seed: int) -> Record | None:
    """The record at ``at``; None where there is none that is whole and fits the slot."""
    magic, generation, of_namespace, written_at, *rest, fingerprint, key = _RECORD.unpack_from(records, at)
    group, world_size, *lengths = rest
    if magic != _RECORD_MAGIC or not world_size or record_bytes(world_size) != shape.record_bytes:
        return None
    shards_at = at + _RECORD.size
    end = shards_at + world_size * _SHARD.size
    if _CHECKSUM.unpack_from(records, end)[0] != xxhash.xxh3_64_intdigest(records[at:end], seed & _MASK):
        return None
    shards = tuple(
        TierShard(length, first_block, checksum)
        for length, checksum, first_block in _SHARD.iter_unpack(records[shards_at:end])
    )
    if any(shard.first_block > MOST_FIRST_BLOCK for shard in shards):
        return None
    block = TierBlock(TierKey(fingerprint[: lengths[0]], group, key[: lengths[1]]), shards)
    return Record(block, generation, written_at, of_namespace) if SlotShape.of(block) == shape else None


@cache
def record_bytes(world_size: int) -> int:
    """Bytes of a record with so many shards: a power of two, so that no page cuts one, or whole pages."""
    needed = _RECORD.size + world_size * _SHARD.size + _CHECKSUM.size
    if needed > PAGE_BYTES:
        return page_up(needed)
    return max(_LEAST_RECORD_BYTES, 1 << (needed - 1).bit_length())


def _is_record_bytes(nbytes: int) -> bool:
    return nbytes >= _LEAST_RECORD_BYTES and (nbytes % PAGE_BYTES == 0 or PAGE_BYTES % nbytes == 0)


def _pack_page(content: bytes, seed: int = 0) -> bytes:
    content = content.ljust(_CHECKSUM_AT, b"\0")
    return content + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(content, seed))


def _is_whole(page: bytes | memoryview, seed: int = 0) -> bool:
    """Whether the page has the checksum that ``_pack_page`` gave it."""
    return bool(_CHECKSUM.unpack_from(page, _CHECKSUM_AT)[0] == xxhash.xxh3_64_intdigest(page[:_CHECKSUM_AT], seed))


def _seed(file_id: bytes) -> int:
    return xxhash.xxh3_64_intdigest(file_id)
