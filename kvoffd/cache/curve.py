"""How many hits a pool of another size would have, had it the policy lru: learned from a sample of what is asked for.

A request's hits are the keys before the first that is not there, as everywhere; tokens are counted, not keys.

Whether a key is sampled follows from its hash, so that it is at each of its uses or at none. The first keys of chains
are sampled apart from the others, and more of them: one that all prompts begin with may be a large part of all uses.

Source of sampling by hashes, and of a sample of bounded size: C. Waldspurger et al., "Efficient MRC Construction with
SHARDS", FAST 2015.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policy import Chain, Group
from kvoffd_proto.stats import HitCurve

SIZES = (0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0)
"""Of pools, in parts of the pool that is there."""
HALVED_EVERY_S = 86400.0
"""What was counted weighs half a day later."""
FIRST_TOKENS, NEXT_TOKENS = 512, 4096
"""At the start of a chain: keys within them are of the first kind, and of the second; all others are of the third."""
MAX_SAMPLED = 4096
"""Keys of each kind that are kept: then half of them go, and each of the others stands for two."""
_KINDS = 3
_LOG = 8 * MAX_SAMPLED
_NAMES = [f"{size:g}" for size in SIZES]


class _Counts:
    """What was asked for in a namespace, in tokens."""

    def __init__(self) -> None:
        self.asked, self.sampled = np.zeros(_KINDS), np.zeros(_KINDS)
        """[kind] all keys; what stands behind the sampled ones."""
        self.hits = np.zeros((_KINDS, len(SIZES) + 1))
        """Of the sampled ones, by the smallest size with which a use is a hit; those that are none come last."""
        self.found = 0.0
        """By requests, in the pool that there is."""

    def add(self, other: _Counts) -> None:
        self.asked += other.asked
        self.sampled += other.sampled
        self.hits += other.hits
        self.found += other.found

    def halve(self) -> None:
        for counts in (self.asked, self.sampled, self.hits):
            counts *= 0.5
        self.found *= 0.5

    def curve(self) -> HitCurve:
        # Of what was asked for, not of what a sample should have been: a sample too large or small does no harm.
        parts = self.hits[:, :-1].cumsum(axis=1) * (self.asked / np.maximum(self.sampled, 1))[:, None]
        ratios = np.minimum(1.0, parts.sum(axis=0) / max(1.0, self.asked.sum()))
        return HitCurve(round(self.asked.sum()), int(self.found), dict(zip(_NAMES, ratios.tolist(), strict=True)))


class HitRatioCurve:
    """Watches a cache; its memory is bounded. For the cache's thread.

    The sampled keys lie in a log in the order of their last use. The bytes behind a key's place are what an LRU would
    have put in since.
    """

    def __init__(self, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._sizes = pool_bytes * np.array(SIZES)
        self._clock = clock
        self._halved_at = clock()
        self._salt = np.frombuffer(os.urandom(8), np.uint64)
        self._below = np.full(_KINDS, 2**64 - 1, np.uint64)
        """By kind, keys with a smaller hash are sampled."""
        self._scale = np.ones(_KINDS)
        """By kind, how many keys a sampled one stands for."""
        self._places: dict[int, int] = {}
        """By hash, in the log."""
        self._hashes, self._kinds = np.zeros(_LOG, np.uint64), np.zeros(_LOG, np.uint8)
        self._bytes = np.zeros(_LOG)
        """Of the keys that each stands for; 0 where it was used again since."""
        self._end = 0
        self._counts: WeakKeyDictionary[Namespace, _Counts] = WeakKeyDictionary()
        self._gone = _Counts()
        """Of namespaces that were forgotten."""

    @property
    def nbytes(self) -> int:
        return self._hashes.nbytes + self._kinds.nbytes + self._bytes.nbytes + 150 * len(self._places)

    @property
    def seen_bytes(self) -> int:
        """Bytes of the different blocks that were asked for lately, up to the largest size, about."""
        return int(min(self._sizes[-1], self._bytes.sum()))

    def requested(self, chains: Sequence[Chain]) -> None:
        """Note a request."""
        for group, keys, _, run in chains:
            if keys:
                self._note(group, keys, run)

    def _note(self, group: Group, keys: bytes, run: int) -> None:
        counts = self._counts.setdefault(group.namespace, _Counts())
        tokens = group.namespace.groups[group.group].tokens_per_block
        first, following = (max(1, most // tokens) if tokens else 1 for most in (FIRST_TOKENS, NEXT_TOKENS))
        tokens = tokens or 1
        hashes = self._hash(group, keys)
        position = np.arange(len(hashes))
        kinds = (position >= first).astype(np.uint8) + (position >= following)
        counts.asked += tokens * np.bincount(kinds, minlength=_KINDS)
        counts.found += tokens * run
        picked = np.flatnonzero(hashes < self._below[kinds])[: _LOG // 2]
        if not picked.size:
            return
        hashes, kinds = hashes[picked], kinds[picked]
        weights = self._scale[kinds]
        counts.sampled += tokens * np.bincount(kinds, weights, _KINDS)
        names = hashes.tolist()
        places = np.array([self._places.get(name, -1) for name in names])
        if (known := places >= 0).any():
            oldest = places[known].min()
            behind = self._bytes[oldest : self._end][::-1].cumsum()[::-1]
            sizes = np.searchsorted(self._sizes, behind[places[known] - oldest])
            np.add.at(counts.hits, (kinds[known], sizes), tokens * weights[known])
            self._bytes[places[known]] = 0
        if self._end + len(names) > _LOG:
            self._thin()
        begin, self._end = self._end, self._end + len(names)
        some = slice(begin, self._end)  # the tail first: it is what an LRU evicts first
        self._hashes[some], self._kinds[some] = hashes[::-1], kinds[::-1]
        self._bytes[some] = group.block_bytes * self._scale[kinds[::-1]]
        self._places.update(zip(names[::-1], range(begin, self._end), strict=True))

    def _hash(self, group: Group, keys: bytes) -> NDArray[np.uint64]:
        """By key; engines' keys are hashes themselves, others need not be."""
        whose = int.from_bytes(group.namespace.fingerprint[:8], "big") ^ group.group
        wide = -(-group.key_bytes // 8) * 8
        padded = np.zeros((len(keys) // group.key_bytes, wide), np.uint8)
        padded[:, : group.key_bytes] = np.frombuffer(keys, np.uint8).reshape(-1, group.key_bytes)
        words = padded.view(np.uint64)
        mixed = words[:, 0] ^ (self._salt + np.uint64(whose))
        for column in range(1, words.shape[1]):
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) ^ words[:, column]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        found: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
        return found

    def _thin(self) -> None:
        """Make room in the log: leave out what was used again, what no size holds, and half of a kind that has many."""
        live = np.flatnonzero(self._bytes[: self._end])
        live = live[self._bytes[live][::-1].cumsum()[::-1] <= self._sizes[-1]]
        hashes, kinds = self._hashes[live], self._kinds[live]
        for kind in range(_KINDS):
            while np.count_nonzero(kinds == kind) > MAX_SAMPLED:
                self._below[kind] //= 2
                self._scale[kind] *= 2
                self._bytes[: self._end][self._kinds[: self._end] == kind] *= 2
                kept = (kinds != kind) | (hashes < self._below[kind])
                live, hashes, kinds = live[kept], hashes[kept], kinds[kept]
        nbytes = self._bytes[live]
        self._bytes[:] = 0
        self._end = len(live)
        self._hashes[: self._end], self._kinds[: self._end], self._bytes[: self._end] = hashes, kinds, nbytes
        self._places = dict(zip(hashes.tolist(), range(self._end), strict=True))

    def tick(self) -> None:
        """Have what is old weigh less."""
        if self._clock() - self._halved_at >= HALVED_EVERY_S:
            self._halved_at = self._clock()
            for counts in (self._gone, *self._counts.values()):
                counts.halve()

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Go on to count what was asked for in it: it is a part of all."""
        if (counts := self._counts.pop(namespace, None)) is not None:
            self._gone.add(counts)

    def of_namespaces(self, namespaces: Sequence[Namespace]) -> list[HitCurve]:
        """What requests of each namespace had found, in pools of all namespaces."""
        nothing = _Counts()
        return [self._counts.get(namespace, nothing).curve() for namespace in namespaces]

    def in_all(self) -> HitCurve:
        """All namespaces together, those that were forgotten among them."""
        every = _Counts()
        for counts in (self._gone, *self._counts.values()):
            every.add(counts)
        return every.curve()
