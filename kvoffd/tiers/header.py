"""A block below the pool: its identity, and the header before its bytes, on a disk and in a shared store."""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import xxhash

HEADER_BYTES = 4096
"""Size of the header that identifies a block on a disk or in a shared store, and has its checksums.

Little-endian: a magic, the generation, the group, the lengths of fingerprint and key, the number of shards; fingerprint
and key; for each shard its length in bytes, its checksum and its first block; zeros; and the checksum of all this."""
MAGIC = b"kvoffdB1"
_HEAD = struct.Struct("<8sQIHHI")
_SHARD = struct.Struct("<QQI")
_SUM = struct.Struct("<Q")
MAX_GENERATION = 2**62
"""Largest generation in a header: a reset must be able to raise it."""
MAX_FIRST_BLOCK = 0xFFFF
"""Largest first engine block of a shard: the cache has 16 bits for it."""

REMEMBERED_GROUPS = 1024
"""Groups whose hash is cached."""


class BlockGroup(NamedTuple):
    """A group of a namespace's blocks. A reset raises ``generation``: blocks of lower generations are absent.

    Attributes:
        fingerprint: of the namespace, 32 bytes.
        generation: of the namespace: see ``generations.py``. Of what is on disks the node's own, in microseconds since
            1970; of what is in shared stores, or at peers, the fleet's, in seconds. 0 for never.
        group_index: place of the group in its namespace.
        lengths: bytes of a block's shard, by rank.
        tag: 64 bits of a hash of the first three: a group that gets other lengths has the same tag.
        nbytes: bytes of a block's shards of all ranks.
    """

    fingerprint: bytes
    generation: int
    group_index: int
    lengths: tuple[int, ...]
    tag: int
    nbytes: int


@lru_cache(REMEMBERED_GROUPS)
def make_block_group(fingerprint: bytes, generation: int, group_index: int, lengths: tuple[int, ...]) -> BlockGroup:
    """Return a group as it is on this node's disks, or in shared stores: see ``BlockGroup.generation``."""
    identity = fingerprint + generation.to_bytes(8, "little") + group_index.to_bytes(2, "little")
    tag = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")
    return BlockGroup(fingerprint, generation, group_index, lengths, tag, sum(lengths))


def stored_group(group: BlockGroup, generation: int) -> BlockGroup:
    """Return a group as it is in shared stores, in this fleet generation of its namespace."""
    return make_block_group(group.fingerprint, generation, group.group_index, group.lengths)


class Block(NamedTuple):
    """A block as it is written, or was found by a read.

    Attributes:
        group: its group.
        key: at most 64 bytes.
        first_blocks: the first valid engine block of each shard, by rank.
        checksums: by rank, as in the pool's slot table; never 0.
    """

    group: BlockGroup
    key: bytes
    first_blocks: tuple[int, ...]
    checksums: tuple[int, ...]


def fits_header(group: BlockGroup, key_bytes: int) -> bool:
    """Return whether the identity and all shards of a block fit the header."""
    named = _HEAD.size + len(group.fingerprint) + key_bytes + len(group.lengths) * _SHARD.size
    return named + _SUM.size <= HEADER_BYTES


def encode_header(block: Block) -> bytes:
    group, key = block.group, block.key
    head = _HEAD.pack(MAGIC, group.generation, group.group_index, len(group.fingerprint), len(key), len(group.lengths))
    shards = map(_SHARD.pack, group.lengths, block.checksums, block.first_blocks)
    data = b"".join([head, group.fingerprint, key, *shards]).ljust(HEADER_BYTES - _SUM.size, b"\0")
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_header(data: bytes | memoryview) -> Block | None:
    """Return the block of a header, the caller's or another; None unless it is intact, with possible values."""
    if len(data) != HEADER_BYTES or data[-_SUM.size :] != _SUM.pack(xxhash.xxh3_64_intdigest(data[: -_SUM.size])):
        return None
    magic, generation, group_index, fingerprint_bytes, key_bytes, ranks = _HEAD.unpack_from(data)
    key_at = _HEAD.size + fingerprint_bytes
    shards_at = key_at + key_bytes
    end = shards_at + ranks * _SHARD.size
    if magic != MAGIC or generation > MAX_GENERATION or group_index > 0xFFFF or end + _SUM.size > HEADER_BYTES:
        return None
    shards = list(_SHARD.iter_unpack(data[shards_at:end]))
    lengths, checksums, firsts = zip(*shards, strict=True) if shards else ((), (), ())
    if not all(checksums) or max(firsts, default=0) > MAX_FIRST_BLOCK:
        return None
    group = make_block_group(bytes(data[_HEAD.size : key_at]), generation, group_index, lengths)
    return Block(group, bytes(data[key_at:shards_at]), firsts, checksums)
