"""The policy ``arc`` balances blocks used once and blocks used again. Implemented in ``arc.c``.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The names there:
T1 ``ONCE``, T2 ``AGAIN``, B1 ``ONCE_GHOSTS``, B2 ``AGAIN_GHOSTS``, p ``target``. The paper's cache holds a fixed number
of pages. The pool holds bytes, so its capacity in blocks is the number that it was seen to hold, which adapts when
block sizes change.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import GHOST_DIVISOR, Admission, AdmitsAll, Chain
from kvoffd.system.native import CHAR_P, COUNT, ITEMS, KEYS, NUMBER, VOID_P, declare, native

declare(
    arc_new=(VOID_P, NUMBER, NUMBER, CHAR_P),
    arc_free=(None, VOID_P),
    arc_insert=(COUNT, VOID_P, *KEYS, CHAR_P),
    arc_offer=(None, VOID_P, *KEYS),
    arc_use=(None, VOID_P, *ITEMS),
    arc_follow=(None, VOID_P, NUMBER, *ITEMS),
    arc_remove=(None, VOID_P, *ITEMS, NUMBER),
    arc_candidates=(COUNT, VOID_P, *ITEMS),
)

_ONCE_GHOSTS, _AGAIN_GHOSTS = 2, 3
"""Numbers of two of the queues: see the first enum of arc.c."""
ENTRY_BYTES = 50
"""Largest memory of a block's entry or a ghost, including its place in the index."""


class Arc(AdmitsAll):
    """``slots``: number of slot numbers."""

    def __init__(self, pool_bytes: int, slots: int) -> None:
        self._native = native()
        most_ghosts = max(1, pool_bytes // GHOST_DIVISOR // ENTRY_BYTES)
        self._at = self._native.arc_new(slots, most_ghosts, os.urandom(16))
        if not self._at:
            raise MemoryError
        self._close = weakref.finalize(self, self._native.arc_free, self._at)
        # The first field of ``struct arc``: entries in each of the five queues. The fifth has evicted blocks that are
        # not yet ghosts.
        self._counts = (ctypes.c_uint64 * 5).from_address(self._at)
        write, at = self._native.arc_candidates, self._at
        super().__init__(lambda below, address, most: write(at, address, most))

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self._native.arc_use(self._at, packed(chain.ready), len(chain.ready))

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        self._native.arc_offer(self._at, group.number, keys, len(keys) // group.key_bytes, group.key_bytes)
        return super().admit(group, keys, starts)

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        given = group.number, keys, len(blocks), group.key_bytes, packed(blocks)
        inserted = self._native.arc_insert(self._at, *given)
        assert inserted == len(blocks), "inserted twice"

    def follow(self, before: int, blocks: BlockIds) -> None:
        self._native.arc_follow(self._at, before, packed(blocks), len(blocks))

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._native.arc_remove(self._at, packed(blocks), len(blocks), not group.namespace.of_bench)

    @property
    def ghosts(self) -> int:
        return self._counts[_ONCE_GHOSTS] + self._counts[_AGAIN_GHOSTS]

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES * sum(self._counts)
