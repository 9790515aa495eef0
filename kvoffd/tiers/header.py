"""A block below the pool: what names it, and the header before its bytes, on a disk and in a shared store."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import xxhash

HEADER_BYTES = 4096
"""Of a block on a disk and in a shared store: they say which block it is, and its checksums.

Little-endian: a magic, the generation, the group, the lengths of fingerprint and key, the number of shards; fingerprint
and key; of each shard its length in bytes, its checksum and its first block; zeros; and the checksum of all this."""
MAGIC = b"kvoffdB1"
_HEAD = struct.Struct("<8sQIHHI")
_SHARD = struct.Struct("<QQI")
_SUM = struct.Struct("<Q")
MOST_GENERATION = 2**62
"""Of a block that is believed: others can follow."""
MOST_FIRST_BLOCK = 0xFFFF
"""The last engine block of a key that a shard may begin with: the cache has no room for more."""

REMEMBERED_GROUPS = 1024
"""Whose hash is not taken again."""


class BlockGroup(NamedTuple):
    """One group of the blocks of a namespace. A reset raises ``generation``: what was written before is absent then.

    Attributes:
        fingerprint: of the namespace, 32 bytes.
        generation: when the namespace was last reset, in microseconds since 1970, or a little more; 0 for never.
        number: of the group in the namespace.
        lengths: bytes of a block's shard, by rank.
        tag: 64 bits of a hash of the first three.
    """

    fingerprint: bytes
    generation: int
    number: int
    lengths: tuple[int, ...]
    tag: int

    @property
    def nbytes(self) -> int:
        """Bytes of a block, all ranks together."""
        return sum(self.lengths)


def make_block_group(fingerprint: bytes, generation: int, number: int, lengths: Sequence[int]) -> BlockGroup:
    return _made(fingerprint, generation, number, tuple(lengths))


@lru_cache(REMEMBERED_GROUPS)
def _made(fingerprint: bytes, generation: int, number: int, lengths: tuple[int, ...]) -> BlockGroup:
    identity = fingerprint + generation.to_bytes(8, "little") + number.to_bytes(2, "little")
    tag = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little")
    return BlockGroup(fingerprint, generation, number, lengths, tag)


class Block(NamedTuple):
    """A block as it is written, and as a read found it.

    Attributes:
        group: that it is of.
        key: at most 64 bytes.
        first_blocks: by rank, the first engine block of the shard that is valid.
        checksums: by rank, as in the pool's slot table; never 0.
    """

    group: BlockGroup
    key: bytes
    first_blocks: tuple[int, ...]
    checksums: tuple[int, ...]


def fits_header(group: BlockGroup, key_bytes: int) -> bool:
    """Whether there is room for the names and all shards of a block."""
    named = _HEAD.size + len(group.fingerprint) + key_bytes + len(group.lengths) * _SHARD.size
    return named + _SUM.size <= HEADER_BYTES


def _names(group: BlockGroup, key: bytes) -> bytes:
    """What a header begins with."""
    head = _HEAD.pack(MAGIC, group.generation, group.number, len(group.fingerprint), len(key), len(group.lengths))
    return head + group.fingerprint + key


def encode_header(block: Block) -> bytes:
    shards = map(_SHARD.pack, block.group.lengths, block.checksums, block.first_blocks)
    data = b"".join([_names(block.group, block.key), *shards]).ljust(HEADER_BYTES - _SUM.size, b"\0")
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def decode_header(data: bytes | memoryview, group: BlockGroup, key: bytes) -> Block | None:
    """The block that a header tells of; None where it is not a whole header of this very block, or of one that cannot
    be."""
    names = _names(group, key)
    end = len(names) + len(group.lengths) * _SHARD.size
    if data[: len(names)] != names or len(data) != HEADER_BYTES or end + _SUM.size > HEADER_BYTES:
        return None
    if data[-_SUM.size :] != _SUM.pack(xxhash.xxh3_64_intdigest(data[: -_SUM.size])):
        return None
    shards = list(_SHARD.iter_unpack(data[len(names) : end]))
    lengths, checksums, firsts = zip(*shards, strict=True) if shards else ((), (), ())
    if lengths != group.lengths or not all(checksums) or max(firsts, default=0) > MOST_FIRST_BLOCK:
        return None
    return Block(group, key, firsts, checksums)


def parse_header(data: bytes | memoryview) -> Block | None:
    """As ``decode_header``, of whatever block."""
    if len(data) != HEADER_BYTES:
        return None
    _, generation, number, fingerprint_bytes, key_bytes, ranks = _HEAD.unpack_from(data)
    key_at = _HEAD.size + fingerprint_bytes
    shards_at = key_at + key_bytes
    if generation > MOST_GENERATION or number > 0xFFFF or shards_at + ranks * _SHARD.size > HEADER_BYTES:
        return None
    lengths = [_SHARD.unpack_from(data, shards_at + rank * _SHARD.size)[0] for rank in range(ranks)]
    group = make_block_group(bytes(data[_HEAD.size : key_at]), generation, number, lengths)
    return decode_header(data, group, bytes(data[key_at:shards_at]))
