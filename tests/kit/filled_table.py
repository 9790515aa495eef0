"""Pools that an earlier daemon left full: slot tables of millions of records, made fast. The slots hold zeros."""

from __future__ import annotations

import os
import zlib
from itertools import pairwise

import numpy as np

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import NamespaceRecord
from kvoffd.pool.table_format import (
    CRC,
    CRC_AT,
    KEY_AT,
    OWNER_AT,
    RECORD,
    RECORD_BYTES,
    Geometry,
    digest,
    read_geometry,
)
from kvoffd.system.limits import MemoryLimit
from kvoffd_proto.messages import GroupSpec
from tests.kit.slot_table import SlotOwner, mark_ready, mark_writing

NAME = b"n" * 32
"""The fingerprint of the one namespace."""
KEY_BYTES = 32
CHAIN = 64
"""Blocks that are stored at once: the shards of each rank are neighbours."""
_AT_ONCE = 1 << 16
_NO_LIMIT = MemoryLimit(2**62, "nothing")


def key_of(block: int) -> bytes:
    """The key of a block, given by its number: the highest was stored last."""
    return block.to_bytes(KEY_BYTES, "big")


def namespace_record(ranks: int, shard_bytes: int) -> NamespaceRecord:
    """The namespace that all blocks are in."""
    return NamespaceRecord(NAME, "full", ranks, KEY_BYTES, (GroupSpec("full", 16),), "{}", ((shard_bytes,),) * ranks)


def left_behind(pool_bytes: int, blocks: int, ranks: int = 1, shard_bytes: int = 8192) -> tuple[int, int]:
    """Descriptors of a pool and its table, both memfds, in which so many blocks are ready. The caller closes them.

    The pool's memory is not touched.
    """
    pool = Pool(pool_bytes, limit=_NO_LIMIT)
    try:
        fill(pool, blocks, ranks, shard_bytes)
        return os.dup(pool.memory_fds[0]), os.dup(pool.memory_fds[1])
    finally:
        pool.close()


def fill(pool: Pool, blocks: int, ranks: int = 1, shard_bytes: int = 8192) -> None:
    """Writes the records of so many blocks into the table of a new pool, which hands out none of these slots."""
    pool.note_namespace(namespace_record(ranks, shard_bytes))
    slot_bytes, slots = pool.slot_bytes(shard_bytes), blocks * ranks
    (first,) = pool.take(slot_bytes, 1)
    assert first == 0
    mark_writing(pool, first, *SlotOwner(NAME, 0, key_of(0), 0, ranks))
    mark_ready(pool, first, 0, shard_bytes, checksum=digest(memoryview(bytes(shard_bytes))))
    fd = pool.memory_fds[1]
    geometry = read_geometry(fd)
    region_bytes = geometry.region_bytes
    template = os.pread(fd, RECORD_BYTES, geometry.records_at)
    in_region = region_bytes // slot_bytes
    regions = -(-slots // in_region)
    last = pool.pool_bytes - (regions - 1) * region_bytes
    assert slots <= (regions - 1) * in_region + min(last, region_bytes) // slot_bytes, "the pool is too small"
    os.pwrite(fd, np.full(regions, slot_bytes, np.uint64).tobytes(), geometry.regions_at)
    for start in range(0, slots, _AT_ONCE):
        numbers = np.arange(start, min(slots, start + _AT_ONCE))
        offsets = numbers // in_region * region_bytes + numbers % in_region * slot_bytes
        chain, within = np.divmod(numbers, CHAIN * ranks)
        length = np.minimum(CHAIN, blocks - chain * CHAIN)
        _write(fd, geometry, template, offsets, chain * CHAIN + within % length, within // length, numbers + 2)


def _write(
    fd: int,
    geometry: Geometry,
    template: bytes,
    offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]],
    ranks: np.ndarray[tuple[int], np.dtype[np.int64]],
    generations: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    data = bytearray(template * len(offsets))
    rows = np.frombuffer(data, RECORD)
    rows["generation"], rows["rank"] = generations, ranks
    rows["half"] = offsets % 8192 // PAGE_BYTES
    keys = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)[:, KEY_AT : KEY_AT + KEY_BYTES]
    keys[:, KEY_BYTES - 8 :] = blocks.astype(">u8").view(np.uint8).reshape(-1, 8)
    view, crc32 = memoryview(data), zlib.crc32
    for at in range(0, len(data), RECORD_BYTES):
        CRC.pack_into(data, at + CRC_AT, crc32(view[at + OWNER_AT : at + CRC_AT]))
    places = geometry.records_at + offsets // 8192 * RECORD_BYTES
    begins = [0, *(np.flatnonzero(np.diff(places) != RECORD_BYTES) + 1).tolist(), len(places)]
    for begin, end in pairwise(begins):
        os.pwrite(fd, view[begin * RECORD_BYTES : end * RECORD_BYTES], int(places[begin]))
