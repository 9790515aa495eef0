"""What the cache asks of whoever looks after the tiers below the pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvoffd.cache.block import Block
from kvoffd.cache.namespace import Namespace


class TieringHooks(Protocol):
    """Called in the middle of a change or an answer. It may note, and forget in the tiers, but not call the cache."""

    def find(
        self, namespace: Namespace, groups: Sequence[tuple[int, list[bytes]]], states: Sequence[bytes]
    ) -> list[bytes]:
        """What a lookup tells of keys that the pool does not have: PENDING for those that come up now, or do already.

        ``states`` are those of the pool, one byte a key, for each of ``groups``.
        """

    def used(self, blocks: Sequence[Block]) -> None:
        """A lookup found these ready."""

    def stored(self, blocks: Sequence[Block]) -> None:
        """A store made these ready, or a promotion did."""

    def evicted(self, blocks: Sequence[Block]) -> None:
        """These left the pool for want of room."""

    def forget(self, namespace: Namespace, group: int, keys: Iterable[bytes]) -> None:
        """These keys must not come back."""

    def forget_all(self, namespace: Namespace) -> int:
        """No key of the namespace must come back. Returns how many blocks that were."""

    def has(self, namespace: Namespace, group: int, key: bytes) -> bool:
        """Whether a tier could bring this key up."""
