"""A block: what one key names, made of one shard per rank."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from kvoffd_proto import messages

if TYPE_CHECKING:
    from kvoffd.cache.namespace import Namespace


class BlockState(IntEnum):
    """Where a block is in its life. The first three are told by lookups; a block that comes up from a tier is WRITING,
    and PENDING to those who ask."""

    ABSENT = messages.ABSENT
    """In no index and without slots: not born yet, or gone."""
    WRITING = messages.WRITING
    """In the index, but a shard is missing or not completely written."""
    READY = messages.READY
    """In the index, all shards written: may be read, and evicted when nothing pins it."""
    LEAVING = 4
    """Out of the index for good, its slots still held by a pin or a running write."""


class Shard:
    """One rank's part of a block, in its slot."""

    __slots__ = ("checksum", "corrupt", "first_block", "offset", "slot_bytes", "verified", "written")

    def __init__(self, offset: int, slot_bytes: int) -> None:
        self.offset = offset
        self.slot_bytes = slot_bytes
        self.first_block = 0
        """Engine blocks at the start of the key that were left out; the written range begins behind them."""
        self.written = False
        """False while a store writes it, and only then."""
        self.checksum = 0
        """Of the bytes that were stored; 0 while they are written, or where none was taken."""
        self.verified = True
        """False where an earlier daemon wrote it, until its bytes are found to be those that were stored."""
        self.corrupt = False
        """Its bytes are not those that were stored: nobody may read them, and the slot is never used again."""


class Block:
    """What one key names. Compared by identity: a key that is stored anew is another block."""

    __slots__ = ("group", "key", "missing", "namespace", "pins", "shards", "slot_bytes", "state")

    def __init__(self, namespace: Namespace, group: int, key: bytes) -> None:
        self.namespace = namespace
        self.group = group
        self.key = key
        self.state = BlockState.ABSENT
        self.pins = 0
        """Leases and running loads that need the bytes to stay."""
        self.shards: dict[int, Shard] = {}
        """By rank: shards that are written or being written."""
        self.missing = namespace.world_size
        """Shards that are not written yet; 0 makes the block ready."""
        self.slot_bytes = 0
        """Pool bytes of all its slots."""

    @property
    def verified(self) -> bool:
        """False where an earlier daemon wrote a shard of it and nobody has looked at the bytes since."""
        return all(shard.verified for shard in self.shards.values())

    @property
    def writers(self) -> int:
        """Stores that are writing a shard of it now."""
        return len(self.shards) + self.missing - self.namespace.world_size
