"""What the cache asks of the pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from kvoffd_proto.blocks import ShardSpec
from kvoffd_proto.messages import GroupSpec


class SlotOwner(NamedTuple):
    """Whose bytes a slot holds."""

    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int


class SlotRecord(NamedTuple):
    """A slot whose bytes are whole, as the pool's own records tell."""

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
    """Of the slot's ``length`` bytes; 0 where none was taken."""
    generation: int
    """Grows with every slot that is written."""


class NamespaceRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All there is to know of a namespace but its blocks. The pool keeps it for the daemon's successor."""

    fingerprint: bytes
    label: str
    world_size: int
    key_bytes: int
    groups: tuple[GroupSpec, ...]
    description: str
    shard_bytes: tuple[tuple[int, ...] | None, ...]
    """By rank and group; None where no worker of the rank has registered."""
    shards: tuple[tuple[ShardSpec, ...] | None, ...] = ()
    """By rank and group, what a shard is made of; empty, or None for a rank, where nobody told."""


class SlotStore(Protocol):
    """Hands out slots of the pool and keeps their record. Offsets and sizes are in bytes.

    The pool is cut into regions; all slots of a region have one size, until the region is empty again.
    """

    @property
    def pool_bytes(self) -> int:
        """Size of the pool."""

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot that is handed out."""

    @property
    def touched_bytes(self) -> int:
        """Bytes whose pages this process has in memory and in its page tables."""

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``. Raises ShardTooLarge where no region could."""

    @property
    def spilled_slots(self) -> int:
        """Slots that were taken on another NUMA node than was asked for."""

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        """Hand out up to ``count`` free slots of a size, in runs and on NUMA ``node`` if possible: their offsets."""

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, which is among them."""

    def mark_all_writing(
        self,
        offsets: Sequence[int],
        fingerprint: bytes,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        world_size: int,
    ) -> None:
        """Record that a shard of each key of a group will be written in its slot now.

        What was there is not to be trusted from here on.
        """

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        """Record that shards of ``length`` bytes are written, but for their first so many engine blocks, in this order.

        The checksums are those of ``digests``, 0 where none was taken.
        """

    def digests(self, slots: Sequence[tuple[int, int]]) -> list[int]:
        """The checksums of slots, given by offset and length in bytes: never 0. May be called from any thread."""

    def note_namespace(self, facts: NamespaceRecord) -> None:
        """Record what is known of a namespace now, before its slots are written."""

    def revoke_record(self, offset: int) -> None:
        """Strike out the record of a slot that is ready. It stays handed out, but no successor may serve its bytes."""

    def free(self, offsets: Collection[int]) -> None:
        """Take slots back, whatever their records say."""
