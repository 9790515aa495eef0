"""Who may lose blocks to whom, said once more: held against every eviction of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Block, BlockState, Namespace

HELD = (BlockState.WRITING, BlockState.READY, BlockState.LEAVING)
IDLE_AFTER_S = 600.0


def held(namespace: Namespace) -> int:
    """Pool bytes of a namespace."""
    return sum(namespace.bytes_in[state] for state in HELD)


def kept(cache: BlockCache, namespace: Namespace, now: float) -> float:
    """What it loses to nobody."""
    used_at = cache.blocks.shares._used_at
    own = cache.blocks.shares.of(namespace.fingerprint)
    share = 0.0
    limits = [one for _, one in cache.blocks.shares]
    if any(one.weight is not None for one in limits) and now - used_at.get(namespace, -inf) < IDLE_AFTER_S:
        used = [space for space in cache.namespaces if now - used_at.get(space, -inf) < IDLE_AFTER_S]
        weights = [cache.blocks.shares.of(space.fingerprint).weight or 1.0 for space in used]
        left = cache.slots.pool_bytes - sum(one.minimum_bytes for one in limits)
        share = left * (own.weight or 1.0) / sum(weights)
    return min(
        own.minimum_bytes + share, own.maximum_bytes if own.maximum_bytes is not None else cache.slots.pool_bytes
    )


class ShareOracle:
    """Watches a cache."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._blocks = cache.blocks
        self._evict, self._take, self._claim = self._blocks.evict, self._blocks.take_slots, self._blocks.claim
        self._blocks.evict = self.evict  # type: ignore[method-assign]
        self._blocks.take_slots = self.take_slots  # type: ignore[method-assign]
        self._blocks.claim = self.claim  # type: ignore[method-assign]
        self._claimer: Namespace | None = None
        self._taker: Namespace | None = None
        """Whose store is taking slots now."""
        self._pending = 0
        self.lost_to_others = 0
        """Evictions of one namespace's blocks for another that the limits allowed."""

    def claim(self, namespace: Namespace) -> Any:
        self._claimer, self._pending = namespace, 0
        return self._claim(namespace)

    def take_slots(self, namespace: Namespace, slot_bytes: int, count: int, *others: Any, **named: Any) -> list[int]:
        taker, block_bytes = self._claimer, named.get("block_bytes", others[4] if len(others) > 4 else 0)
        self._taker = taker
        try:
            offsets = self._take(namespace, slot_bytes, count, *others, **named)
        finally:
            self._taker = None
        self._pending += slot_bytes * len(offsets)
        assert taker is not None
        most = self._blocks.shares.of(taker.fingerprint).maximum_bytes
        if most is not None and block_bytes and offsets:
            assert held(taker) + self._pending <= most, "a namespace has more than its maximum"
        return offsets

    def evict(self, blocks: Sequence[Block]) -> None:
        before = {space: held(space) for space in self._cache.namespaces}
        now = self._cache._clock()
        self._evict(blocks)
        if not self._blocks.shares or self._taker is None:
            return
        for owner in {block.namespace for block in blocks} - {self._taker}:
            least = self._blocks.shares.of(owner.fingerprint).minimum_bytes
            assert held(owner) >= least, "a namespace lost its minimum to another one"
            assert before[owner] > kept(self._cache, owner, now) - 1, "a namespace lost some of its share"
            self.lost_to_others += 1
