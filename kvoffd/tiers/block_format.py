"""The header of a block on a disk and in a shared store: 4 KiB that say which block it is, and its checksums.

Little-endian: a magic, the generation, the group, the lengths of fingerprint and key, the number of shards; fingerprint
and key; of each shard its length in bytes, its checksum and its first block; zeros; and the checksum of all this.
"""

from __future__ import annotations

import struct

from kvoffd.pool.checksums import digest
from kvoffd.tiers.tier import MOST_FIRST_BLOCK, Block, Space, make_space

HEADER_BYTES = 4096
MAGIC = b"kvoffdB1"
_HEAD = struct.Struct("<8sQIHHI")
_SHARD = struct.Struct("<QQI")
_SUM = struct.Struct("<Q")


def fits_header(space: Space, key_bytes: int) -> bool:
    """Whether there is room for the names and all shards of a block."""
    named = _HEAD.size + len(space.fingerprint) + key_bytes + len(space.lengths) * _SHARD.size
    return named + _SUM.size <= HEADER_BYTES


def encode_header(block: Block) -> bytes:
    space, key = block.space, block.key
    parts = [
        _HEAD.pack(MAGIC, space.generation, space.group, len(space.fingerprint), len(key), len(space.lengths)),
        space.fingerprint,
        key,
        *map(_SHARD.pack, space.lengths, block.checksums, block.first_blocks),
    ]
    data = b"".join(parts).ljust(HEADER_BYTES - _SUM.size, b"\0")
    return data + _SUM.pack(digest(memoryview(data)))


def parse_header(data: bytes) -> Block | None:
    """The block that a header tells of; None where it is no whole header, or tells of a block that cannot be."""
    if len(data) != HEADER_BYTES or data[-_SUM.size :] != _SUM.pack(digest(memoryview(data)[: -_SUM.size])):
        return None
    magic, generation, group, fingerprint_bytes, key_bytes, ranks = _HEAD.unpack_from(data)
    names_end = _HEAD.size + fingerprint_bytes + key_bytes
    if magic != MAGIC or group > 0xFFFF or names_end + ranks * _SHARD.size + _SUM.size > HEADER_BYTES:
        return None
    fingerprint, key = data[_HEAD.size : names_end - key_bytes], data[names_end - key_bytes : names_end]
    shards = list(_SHARD.iter_unpack(data[names_end : names_end + ranks * _SHARD.size]))
    lengths, checksums, firsts = zip(*shards, strict=True) if shards else ((), (), ())
    if not all(checksums) or max(firsts, default=0) > MOST_FIRST_BLOCK:
        return None
    return Block(make_space(fingerprint, generation, group, lengths), key, firsts, checksums)


def decode_header(data: bytes, space: Space, key: bytes) -> Block | None:
    """The block that a header tells of; None where it is not a whole header of this very block."""
    block = parse_header(data)
    return block if block is not None and block.space == space and block.key == key else None
