"""Least recently used goes first, and only what was asked for before is stored.

What was asked for once is remembered as long as requests for about four pools' worth of other keys come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from sys import getsizeof

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import DECLINED, GHOST_PART, Chain, Offer
from kvoffd.cache.policies.lru import Policy as LruPolicy

REMEMBERED_POOLS = 4
GHOST_BYTES, INT_BYTES = 100, 48
"""Memory of a remembered key, which is an int and its place in a set, measured: 62 to 97 bytes; and of the int."""


class _Sighted:
    """A set of keys, given as hashes, that forgets the oldest ones by halves."""

    def __init__(self) -> None:
        self._old: set[int] = set()
        self._young: set[int] = set()

    def __and__(self, hashes: Iterable[int]) -> set[int]:
        asked = set(hashes)
        return (asked & self._young) | (asked & self._old)

    def add(self, hashes: Iterable[int], limit: int) -> None:
        """Add keys, and keep no more than about ``limit``."""
        self._young.update(hashes)
        if len(self._young) > limit // 2:
            self._old, self._young = self._young, set()

    def __len__(self) -> int:
        return len(self._old) + len(self._young)

    @property
    def nbytes(self) -> int:
        return len(self) * INT_BYTES + getsizeof(self._old) + getsizeof(self._young) if len(self) else 0


class Policy(LruPolicy):
    """An LRU, before it the keys that were asked for once, and again."""

    def __init__(self, pool_bytes: int) -> None:
        super().__init__(pool_bytes)
        self._pool_bytes = pool_bytes
        self._once = _Sighted()
        self._again = _Sighted()

    def requested(self, chains: Sequence[Chain]) -> None:
        super().requested(chains)
        for chain in chains:
            self._note(chain.namespace, chain.group, chain.namespace.split(chain.group, chain.keys))

    def offers(self, namespace: Namespace, group: int, keys: Sequence[bytes], starts: Sequence[int]) -> Sequence[Offer]:
        hashes = _hashes(namespace, group, keys)
        again = self._again & hashes
        if unknown := set(hashes) - again - (self._once & hashes):  # no lookup asked for them
            self._once.add(unknown, self._limit(namespace, group))
        runs = groupby(hashes, again.__contains__)
        return [Offer(sum(1 for _ in run), inf if asked_again else DECLINED) for asked_again, run in runs]

    def declined(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        """What is declined was not asked for again: nothing else is to be remembered."""

    @property
    def ghosts(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def nbytes(self) -> int:
        return self._once.nbytes + self._again.nbytes

    def _note(self, namespace: Namespace, group: int, keys: Sequence[bytes]) -> None:
        hashes, limit = _hashes(namespace, group, keys), self._limit(namespace, group)
        self._again.add((self._once & hashes) | (self._again & hashes), limit)
        self._once.add(hashes, limit)

    def _limit(self, namespace: Namespace, group: int) -> int:
        """How many keys each of the sets may have."""
        remembered = REMEMBERED_POOLS * self._pool_bytes // max(1, namespace.block_bytes(group))
        return min(remembered, self._pool_bytes // GHOST_PART // GHOST_BYTES // 2)


def _hashes(namespace: Namespace, group: int, keys: Sequence[bytes]) -> list[int]:
    salt = hash((namespace.fingerprint, group))
    return [found ^ salt for found in map(hash, keys)]
