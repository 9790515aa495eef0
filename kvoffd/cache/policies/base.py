"""What an eviction policy is: an order over the readable blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvoffd.cache.block import Block


class EvictionPolicy(Protocol):
    """Keeps the readable blocks in the order in which they should go. Knows nothing of pins, slots or sizes."""

    def insert(self, block: Block) -> None:
        """Take up a block that became readable. It must not be there yet."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Note a use of ``blocks``, given root first. The tail becomes older than the root, so that leaves go first."""

    def remove(self, block: Block, evicted: bool) -> None:
        """Let a block go. ``evicted`` says that it went for lack of room, which a policy may remember."""

    def candidates(self) -> Iterator[Block]:
        """All blocks, next to evict first. The caller may stop anywhere; any change of the policy ends the iterator."""

    def __len__(self) -> int:
        """Number of blocks."""
