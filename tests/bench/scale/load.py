"""Requests for a cache of any size: keys by number, so that none of them is kept here."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

KEY_BYTES = 32
"""As vLLM's sha256 hashes."""
TOKENS = 16
SLOT_BYTES = 8192
LEAST_CHAIN, MOST_CHAIN = 16, 64
RECENT = 1024
CONTINUED = 0.3
"""Share of the requests that begin with all keys of a recent one."""
_GOLDEN, _FIRST, _SECOND = (np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def keys_of(first: int, count: int) -> bytes:
    """The keys from number ``first`` on, end to end: four words each of splitmix64 (Steele and others, 2014)."""
    words = np.arange(first * KEY_BYTES // 8, (first + count) * KEY_BYTES // 8, dtype=np.uint64) * _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return (words ^ (words >> np.uint64(31))).tobytes()


class Part(NamedTuple):
    """Keys that follow each other."""

    first: int
    count: int


class Requests:
    """Requests of 16 to 64 new keys each; some continue one of the last thousand."""

    def __init__(self, first: int = 0, seed: int = 1) -> None:
        self.next_key = first
        self._random = random.Random(seed)
        self._recent = [Part(0, 0)] * RECENT
        self._made = 0

    def request(self, count: int = 0) -> tuple[bytes, Part]:
        """All its keys, root first, and which of them are new: ``count``, or a number of its own."""
        count = count or self._random.randint(LEAST_CHAIN, MOST_CHAIN)
        new = Part(self.next_key, count)
        self.next_key += count
        before = Part(0, 0)
        if self._random.random() < CONTINUED:
            before = self._recent[self._random.randrange(RECENT)]
        self._recent[self._made % RECENT] = new
        self._made += 1
        return keys_of(*before) + keys_of(*new), new
