"""The policies ``lru`` (evicts the least recently used) and ``arc`` (balances blocks seen once and blocks seen again).

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The names there:
T1 ``ONCE``, T2 ``AGAIN``, B1 ``ONCE_GHOSTS``, B2 ``AGAIN_GHOSTS``, p ``target``. Implemented in ``queues.c``. The
paper's cache holds a fixed number of pages. The pool holds bytes, so its capacity in blocks is the number that it was
seen to hold, which adapts when block sizes change.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import GHOST_DIVISOR, Chain, InOrder
from kvoffd.system.native import CHAR_P, COUNT, DOUBLE, ITEMS, KEYS, NUMBER, VOID_P, declare, native
from kvoffd_proto.stats import LearnedStats

declare(
    queues_new=(VOID_P, NUMBER, NUMBER, CHAR_P),
    queues_free=(None, VOID_P),
    queues_insert=(COUNT, VOID_P, *KEYS, CHAR_P),
    queues_use=(None, VOID_P, *ITEMS),
    queues_remove=(None, VOID_P, *ITEMS, NUMBER),
    queues_candidates=(COUNT, VOID_P, DOUBLE, *ITEMS),
)

ENTRY_BYTES = 50
"""Largest memory of a block's entry or a ghost, including its place in the index."""


class Queues(InOrder):
    """``struct queues``. For ``lru``, there is one queue and no ghosts. Admits everything that a store offers.

    Args:
        slots: number of slot numbers.
        pool_bytes: for ``arc``; 0 for ``lru``.
    """

    lowest = -inf
    accessed_bytes = 0

    def __init__(self, slots: int, pool_bytes: int = 0) -> None:
        self._native = native()
        most_ghosts = max(1, pool_bytes // GHOST_DIVISOR // ENTRY_BYTES) if pool_bytes else 0
        self._at = self._native.queues_new(slots, most_ghosts, os.urandom(16))
        if not self._at:
            raise MemoryError
        self._close = weakref.finalize(self, self._native.queues_free, self._at)
        self._counts = (ctypes.c_uint64 * 4).from_address(self._at)
        super().__init__(partial(self._native.queues_candidates, self._at))

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self._native.queues_use(self._at, packed(chain.ready), len(chain.ready))

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        of = group.number, keys, len(blocks), group.key_bytes
        inserted = self._native.queues_insert(self._at, *of, packed(blocks))
        assert inserted == len(blocks), "inserted twice"

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        leaves = not group.namespace.of_bench
        self._native.queues_remove(self._at, packed(blocks), len(blocks), leaves)

    @property
    def ghosts(self) -> int:
        """Number of remembered removed blocks: in the long run at most as many as the pool holds."""
        return self._counts[2] + self._counts[3]

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * sum(self._counts)

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Sequence[tuple[int, float]]:
        return [(len(keys) // group.key_bytes, inf)]

    def rejected(self, group: Group, keys: bytes) -> None:
        raise AssertionError("nothing is rejected")

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        return np.ones(len(keys) // group.key_bytes)

    def remember(self, nbytes: int) -> None:
        """Do nothing: it remembers as many keys as ARC needs."""

    def describe(self) -> LearnedStats:
        return LearnedStats()

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        """Do nothing: this policy has no state."""
