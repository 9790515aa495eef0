"""The policy ``lru`` evicts the least recently used block. Implemented in ``lru.c``."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import Chain, InOrder
from kvoffd.system.native import COUNT, ITEMS, VOID_P, declare, native
from kvoffd_proto.stats import LearnedStats

declare(
    lru_insert=(COUNT, VOID_P, *ITEMS),
    lru_use=(None, VOID_P, *ITEMS),
    lru_remove=(None, VOID_P, *ITEMS),
    lru_candidates=(COUNT, VOID_P, *ITEMS),
)

LINK_BYTES = 8


class Lru(InOrder):
    """Admits everything that a store offers. ``slots``: number of slot numbers."""

    lowest = -inf
    accessed_bytes = ghosts = 0

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

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._native.lru_remove(self._at, packed(blocks), len(blocks))
        self._blocks -= len(blocks)

    @property
    def nbytes(self) -> int:
        return LINK_BYTES * self._blocks

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Sequence[tuple[int, float]]:
        return [(len(keys) // group.key_bytes, inf)]

    def rejected(self, group: Group, keys: bytes) -> None:
        raise AssertionError("nothing is rejected")

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        return np.ones(len(keys) // group.key_bytes)

    def remember(self, nbytes: int) -> None:
        """Do nothing: this policy remembers no keys."""

    def describe(self) -> LearnedStats:
        return LearnedStats()

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        """Do nothing: this policy has no state."""
