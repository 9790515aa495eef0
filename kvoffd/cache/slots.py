"""What the cache asks of the pool."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class SlotOwner(NamedTuple):
    """Whose bytes a slot holds."""

    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int


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

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``. Raises ShardTooLarge where no region could."""

    def take(self, slot_bytes: int, count: int) -> list[int]:
        """Hand out up to ``count`` free slots of a size, in runs where possible: their offsets."""

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, which is among them."""

    def mark_writing(self, offset: int, owner: SlotOwner) -> None:
        """Record that a shard will be written there now; what was there is not to be trusted from here on."""

    def mark_ready(self, offset: int, first_block: int, length: int) -> None:
        """Record that the shard of ``length`` bytes is written, but for its first ``first_block`` engine blocks."""

    def free(self, offset: int) -> None:
        """Take a slot back, whatever its record says."""
