"""What is believed of an earlier daemon's slot table, record by record: what the arrays and the C must find too."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable

from kvoffd.pool.allocator import MIN_SLOT_BYTES, PAGE_BYTES
from kvoffd.pool.records import NamespaceRecord
from kvoffd.pool.table_format import (
    CONTENT,
    CONTENT_AT,
    CRC,
    CRC_AT,
    FINGERPRINT,
    FINGERPRINT_ENTRY_BYTES,
    MAX_KEY_BYTES,
    OWNER,
    OWNER_AT,
    RECORD_BYTES,
    Geometry,
    SlotState,
    read_geometry,
)
from tests.kit.slot_table import SlotRecord


def plain_scan(fd: int) -> tuple[list[SlotRecord], list[int]]:
    """The slots whose bytes are whole, by offset, and the numbers of the records to strike out. Raises BadTable."""
    geometry = read_geometry(fd)
    data = os.pread(fd, geometry.size_bytes, 0)
    found: list[SlotRecord] = []
    discarded: list[int] = []
    for number in range(geometry.records):
        at = geometry.records_at + number * RECORD_BYTES
        if int.from_bytes(data[at : at + 8], "little") != SlotState.FREE:
            record = _read(data, geometry, number)
            if record is None:
                discarded.append(number)
            else:
                found.append(record)
    return found, discarded


def _read(data: bytes, geometry: Geometry, number: int) -> SlotRecord | None:
    at = geometry.records_at + number * RECORD_BYTES
    record = data[at : at + RECORD_BYTES]
    if int.from_bytes(record[:8], "little") != SlotState.READY:
        return None
    if CRC.pack(zlib.crc32(record[OWNER_AT:CRC_AT])) != record[CRC_AT : CRC_AT + CRC.size]:
        return None
    generation, entry_generation, place, half, group, rank, world, key_bytes, key = OWNER.unpack_from(record, OWNER_AT)
    length, checksum, first_block = CONTENT.unpack_from(record, CONTENT_AT)
    if place >= geometry.fingerprints or half >= MIN_SLOT_BYTES // PAGE_BYTES or key_bytes > MAX_KEY_BYTES:
        return None
    entry_at = geometry.fingerprints_at + place * FINGERPRINT_ENTRY_BYTES
    entry = data[entry_at : entry_at + FINGERPRINT_ENTRY_BYTES]
    name, named = FINGERPRINT.unpack_from(entry)
    if CRC.pack(zlib.crc32(entry[: FINGERPRINT.size])) != entry[FINGERPRINT.size :][: CRC.size]:
        return None
    if not named or named != entry_generation or generation >= 2**62 or first_block >= 2**16:
        return None
    offset = number * MIN_SLOT_BYTES + half * PAGE_BYTES
    region = offset // geometry.region_bytes
    base, size_at = region * geometry.region_bytes, geometry.regions_at + region * 8
    slot_bytes = int.from_bytes(data[size_at : size_at + 8], "little")
    end = min(base + geometry.region_bytes, geometry.pool_bytes // PAGE_BYTES * PAGE_BYTES)
    if not MIN_SLOT_BYTES <= slot_bytes <= geometry.region_bytes or slot_bytes % PAGE_BYTES:
        return None
    if (offset - base) % slot_bytes or offset + slot_bytes > end or length > slot_bytes:
        return None
    owner = name, group, key[:key_bytes], rank, world
    return SlotRecord(offset, slot_bytes, *owner, first_block, length, checksum, generation)


def plain_plan(
    namespaces: Iterable[NamespaceRecord], slots: Iterable[SlotRecord], slot_bytes: Callable[[int], int]
) -> tuple[list[list[SlotRecord]], list[SlotRecord]]:
    """The slots of each whole block of sound namespaces, by rank, the newest block first; and the slots to free."""
    known = {namespace.fingerprint: namespace for namespace in namespaces}
    found: dict[tuple[bytes, int, bytes], list[SlotRecord]] = {}
    refused: list[SlotRecord] = []
    for slot in slots:
        namespace = known.get(slot.fingerprint)
        if namespace is not None and slot.checksum and _fits(slot, namespace, slot_bytes):
            found.setdefault((slot.fingerprint, slot.group, slot.key), []).append(slot)
        else:
            refused.append(slot)
    blocks: list[list[SlotRecord]] = []
    for (fingerprint, _, _), shards in found.items():
        shards.sort(key=lambda shard: shard.generation)
        last = {shard.rank: shard for shard in shards}
        if len(last) == known[fingerprint].world_size:
            blocks.append([last[rank] for rank in sorted(last)])
            refused += [shard for shard in shards if last[shard.rank] is not shard]
        else:
            refused += shards
    blocks.sort(key=lambda shards: max(shard.generation for shard in shards), reverse=True)
    return blocks, sorted(refused, key=lambda slot: slot.offset)


def _fits(slot: SlotRecord, namespace: NamespaceRecord, slot_bytes: Callable[[int], int]) -> bool:
    if slot.world_size != namespace.world_size or slot.rank >= namespace.world_size:
        return False
    sizes = namespace.shard_bytes[slot.rank]
    if sizes is None or slot.group >= len(sizes) or len(slot.key) != namespace.key_bytes:
        return False
    return slot.length == sizes[slot.group] and slot.slot_bytes == slot_bytes(slot.length)
