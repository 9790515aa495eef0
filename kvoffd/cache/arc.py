"""Adaptive replacement: blocks seen once and blocks seen again compete for the pool.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The names
there: T1 ``_once``, T2 ``_again``, B1 ``_once_ghosts``, B2 ``_again_ghosts``, p ``_target``.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import inf

import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.policy import BATCH, GHOST_PART, MAX_BATCH, AdmitsAll, Chain, Group
from kvoffd.system.native import native

GHOST_BYTES = 160
"""Memory of a ghost: a number, and its place in an OrderedDict."""
_BLOCK_BYTES = 100
"""Memory of a block's place in a queue."""


class Arc(AdmitsAll):
    """Two queues of blocks, two of ghosts, and the share of the pool that blocks seen once should have.

    The paper's cache holds a fixed number of pages. The pool holds bytes, so its capacity in blocks is taken from
    how many it was seen to hold, and follows when larger or smaller blocks take over.
    """

    def __init__(self, pool_bytes: int) -> None:
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._once_ghosts: OrderedDict[int, None] = OrderedDict()
        """By a hash of the group's number and the key. Two with one hash would cost a decision about one block."""
        self._again_ghosts: OrderedDict[int, None] = OrderedDict()
        self._seed = os.urandom(16)
        self._make_buffer(MAX_BATCH)
        self._target = 0.0
        self._capacity = 0
        self._most_ghosts = pool_bytes // GHOST_PART // GHOST_BYTES

    def requested(self, chains: Sequence[Chain]) -> None:
        once, again = self._once, self._again
        for _, _, ready, _ in chains:
            for block in ready[::-1].tolist():
                if block in again:
                    again.move_to_end(block)
                else:
                    del once[block]
                    again[block] = None

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        once, once_ghosts, again_ghosts = self._once, self._once_ghosts, self._again_ghosts
        resident, names = len(once) + len(self._again), self._names(group, keys)
        if once_ghosts.keys().isdisjoint(names) and again_ghosts.keys().isdisjoint(names):
            once.update(dict.fromkeys(blocks.tolist()))
            names = []
        for block, ghost in zip(blocks.tolist(), names, strict=False):
            if ghost in once_ghosts:
                self._target += max(1.0, len(again_ghosts) / len(once_ghosts))
                del once_ghosts[ghost]
                self._again[block] = None
            elif ghost in again_ghosts:
                self._target -= max(1.0, len(once_ghosts) / len(again_ghosts))
                del again_ghosts[ghost]
                self._again[block] = None
            else:
                once[block] = None
        assert len(once) + len(self._again) == resident + len(blocks), "inserted twice"
        self._keep_in_bounds()

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        once, once_ghosts, again, again_ghosts = self._once, self._once_ghosts, self._again, self._again_ghosts
        if group.namespace.of_bench:
            once_ghosts, again_ghosts = OrderedDict(), OrderedDict()
        for block, ghost in zip(blocks.tolist(), self._names(group, keys), strict=True):
            if block in once:
                del once[block]
                once_ghosts[ghost] = None
            else:
                del again[block]
                again_ghosts[ghost] = None

    def candidates(self, below: float = inf, first: int = BATCH) -> Iterator[BlockIds]:
        of_once = max(0, len(self._once) - int(self._target))
        following = chain(islice(self._once, of_once), self._again, islice(self._once, of_once, None))
        while batch := list(islice(following, first)):
            yield np.array(batch, np.uint32)
            first = MAX_BATCH

    @property
    def ghosts(self) -> int:
        """Removed blocks that are remembered: at most as many as the pool holds, in the long run, or fewer."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    @property
    def nbytes(self) -> int:
        return self.ghosts * GHOST_BYTES + (len(self._once) + len(self._again)) * _BLOCK_BYTES

    def _keep_in_bounds(self) -> None:
        resident = len(self._once) + len(self._again)
        self._capacity = min(max(self._capacity, resident), 2 * resident)
        self._target = min(max(self._target, 0.0), float(self._capacity))
        excess = len(self._once) + len(self._once_ghosts) - self._capacity
        for _ in range(min(excess, len(self._once_ghosts))):
            self._once_ghosts.popitem(last=False)
        for _ in range(min(resident + self.ghosts - 2 * self._capacity, len(self._again_ghosts))):
            self._again_ghosts.popitem(last=False)
        while self.ghosts > self._most_ghosts:
            max(self._once_ghosts, self._again_ghosts, key=len).popitem(last=False)

    def _names(self, group: Group, keys: bytes) -> list[int]:
        count = len(keys) // group.key_bytes
        if count > len(self._hashes):
            self._make_buffer(2 * count)
        native().key_hashes(self._seed, group.number, keys, count, group.key_bytes, self._hashes_at)
        names: list[int] = self._hashes[:count].tolist()
        return names

    def _make_buffer(self, count: int) -> None:
        """To ask each new array for its address takes longer than a copy."""
        self._hashes = np.empty(count, np.uint64)
        self._hashes_at = self._hashes.ctypes.data
