"""What the pool and the cache tell each other: the records that outlive the daemon."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvoffd_proto.blocks import ShardSpec
from kvoffd_proto.messages import GroupSpec


class SlotRecord(NamedTuple):
    """A slot whose bytes are whole, as the slot table says."""

    offset: int
    slot_bytes: int
    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int
    first_block: int
    length: int
    checksum: int
    """The ``digest`` of the slot's ``length`` bytes; 0 where none was taken."""
    generation: int
    """Grows with every slot that is written."""


class NamespaceRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A namespace without its blocks, as the slot table keeps it for the daemon's successor."""

    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str
    shard_bytes: tuple[tuple[int, ...] | None, ...]
    """Bytes of a shard by rank and group; None for a rank of which no worker has registered."""
    shards: tuple[tuple[ShardSpec, ...] | None, ...] = ()
    """The parts of a shard by rank and group; empty, or None for a rank, where no engine sent them."""
