"""What quotas promise, said once more: held against every store of a cache."""

from __future__ import annotations

from typing import Any

from kvoffd.cache.namespace import BlockState, Namespace

HELD = (BlockState.WRITING, BlockState.READY, BlockState.LEAVING)


def held(namespace: Namespace) -> int:
    """Pool bytes of a namespace."""
    return sum(namespace.bytes_in[state] for state in HELD)


class QuotaOracle:
    """Watches a cache: no store of new blocks takes a namespace beyond its quota."""

    def __init__(self, cache: BlockCache) -> None:
        self._blocks = cache.blocks
        self._take, self._allowance = self._blocks.take_slots, self._blocks.allowance
        self._blocks.take_slots = self.take_slots  # type: ignore[method-assign]
        self._blocks.allowance = self.allowance  # type: ignore[method-assign]
        self._pending = 0
        """Slots that the change of the cache that is going on has taken."""

    def allowance(self, namespace: Namespace) -> Any:
        self._pending = 0
        return self._allowance(namespace)

    def take_slots(self, namespace: Namespace, slot_bytes: int, count: int, *others: Any, **named: Any) -> list[int]:
        block_bytes = named.get("block_bytes", others[4] if len(others) > 4 else 0)
        offsets = self._take(namespace, slot_bytes, count, *others, **named)
        self._pending += slot_bytes * len(offsets)
        quota_bytes = self._blocks.quotas.of(namespace.fingerprint)
        if quota_bytes is not None and block_bytes and offsets:
            assert held(namespace) + self._pending <= quota_bytes, "a namespace has more than its quota"
        return offsets
