"""How a block lies in a shared store: one value, a header before the shards' bytes.

The key is ``kvoffd/1/FINGERPRINT/GENERATION/GROUP/KEY``, the first and the last in hexadecimal; a raised generation
makes all blocks of a namespace void. The header (little-endian) has a magic, the number of shards, the generation, the
group, the lengths of fingerprint and key and those themselves; of each shard its length in bytes, its checksum and its
first block; and the checksum of all this.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from kvoffd.tiers.tier import MOST_FIRST_BLOCK, Digest, TierBlock, TierKey, TierShard

MAGIC = b"kvoffdO1"
_HEAD = struct.Struct("<8sQIHHI")
_SHARD = struct.Struct("<QQI")
_SUM = struct.Struct("<Q")


def generation_key(fingerprint: bytes) -> bytes:
    """Where a namespace's generation is kept, as a decimal number; where it is missing the generation is 0."""
    return b"kvoffd/1/%s/generation" % fingerprint.hex().encode()


def decode_generation(value: bytes) -> int | None:
    """The number that is kept there, 0 for an empty value; None where it is no number of up to 18 digits."""
    return int(value or 0) if re.fullmatch(rb"[0-9]{0,18}", value) else None


def key_prefix(fingerprint: bytes, generation: int, group: int) -> bytes:
    """What the keys of a group begin with; a block's key follows, in hexadecimal."""
    return b"kvoffd/1/%s/%d/%d/" % (fingerprint.hex().encode(), generation, group)


def object_key(block_id: TierKey, generation: int) -> bytes:
    return key_prefix(block_id.fingerprint, generation, block_id.group) + block_id.key.hex().encode()


def header_bytes(block_id: TierKey, shards: int) -> int:
    return _HEAD.size + len(block_id.fingerprint) + len(block_id.key) + shards * _SHARD.size + _SUM.size


def encode_header(block: TierBlock, generation: int, digest: Digest) -> bytes:
    fingerprint, group, key = block.id
    parts = [
        _HEAD.pack(MAGIC, generation, group, len(fingerprint), len(key), len(block.shards)),
        fingerprint,
        key,
        *(_SHARD.pack(shard.length, shard.checksum, shard.first_block) for shard in block.shards),
    ]
    data = b"".join(parts)
    return data + _SUM.pack(digest(memoryview(data)))


def decode_header(
    data: bytes, block_id: TierKey, lengths: Sequence[int], generation: int, digest: Digest
) -> TierBlock | None:
    """The block that a header of the right length tells of; None where it is not a whole header of this very block."""
    at = header_bytes(block_id, 0) - _SUM.size
    shards = []
    for length in lengths:
        _, checksum, first_block = _SHARD.unpack_from(data, at)
        shards.append(TierShard(length, first_block, checksum))
        at += _SHARD.size
    block = TierBlock(block_id, tuple(shards))
    sound = all(shard.checksum and shard.first_block <= MOST_FIRST_BLOCK for shard in shards)
    return block if sound and encode_header(block, generation, digest) == data else None
