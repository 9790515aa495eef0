"""What quotas promise, said once more: held against every change of a cache."""

from __future__ import annotations

from typing import Any

from kvoffd.cache.cache import Cache
from kvoffd.cache.policy import Group


class QuotaOracle:
    """Watches a cache: new blocks never take a namespace beyond its quota."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._take = cache, cache._take
        cache._take = self.take  # type: ignore[method-assign]

    def take(self, group: Group, keys: bytes, below: float) -> Any:
        slots = self._take(group, keys, below)
        quota_bytes = self._cache.quotas.get(group.namespace.fingerprint)
        if quota_bytes is not None and len(slots):
            assert group.namespace.held_bytes <= quota_bytes, "a namespace has more than its quota"
        return slots
