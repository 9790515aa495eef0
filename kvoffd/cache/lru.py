"""The policy ``lru`` evicts the least recently used block. Implemented in ``lru.c``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import AdmitsAll, Chain
from kvoffd.system.native import COUNT, ITEMS, NUMBER, VOID_P, declare, native

declare(
    lru_insert=(COUNT, VOID_P, *ITEMS),
    lru_use=(None, VOID_P, *ITEMS),
    lru_follow=(None, VOID_P, NUMBER, *ITEMS),
    lru_remove=(None, VOID_P, *ITEMS),
    lru_candidates=(COUNT, VOID_P, *ITEMS),
)

LINK_BYTES = 8


class Lru(AdmitsAll):
    """``slots``: number of slot numbers."""

    ghosts = 0

    def __init__(self, slots: int) -> None:
        self._native = native()
        self._links = np.zeros((slots + 1, 2), np.uint32)
        self._at = self._links.ctypes.data
        self._blocks = 0
        write, at = self._native.lru_candidates, self._at
        super().__init__(lambda below, address, most: write(at, address, most))

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            self._native.lru_use(self._at, packed(chain.ready), len(chain.ready))

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        inserted = self._native.lru_insert(self._at, packed(blocks), len(blocks))
        assert inserted == len(blocks), "inserted twice"
        self._blocks += len(blocks)

    def follow(self, before: int, blocks: BlockIds) -> None:
        self._native.lru_follow(self._at, before, packed(blocks), len(blocks))

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._native.lru_remove(self._at, packed(blocks), len(blocks))
        self._blocks -= len(blocks)

    @property
    def nbytes(self) -> int:
        return LINK_BYTES * self._blocks
