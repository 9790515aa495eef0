"""Adaptive replacement: blocks seen once and blocks seen again compete for the pool.

Source: N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. The names
there: T1 ``_once``, T2 ``_again``, B1 ``_once_ghosts``, B2 ``_again_ghosts``, p ``_target``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import inf

from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.policies import GHOST_PART, AdmitsAll, Chain

Ghost = tuple[Namespace, int, bytes]
"""What is remembered of an evicted block: its namespace, group and key."""
GHOST_BYTES = 200
"""Memory of a ghost with a key of 32 bytes: a tuple, the key, and its place in a dict. Measured: 185 to 199 bytes."""


class Policy(AdmitsAll):
    """Two queues of blocks, two of ghosts, and the share of the pool that blocks seen once should have.

    The paper's cache holds a fixed number of pages. The pool holds bytes, so its capacity in blocks is taken from
    how many it was seen to hold, and follows when larger or smaller blocks take over.
    """

    def __init__(self, pool_bytes: int) -> None:
        self._once: OrderedDict[Block, None] = OrderedDict()
        self._again: OrderedDict[Block, None] = OrderedDict()
        self._once_ghosts: OrderedDict[Ghost, None] = OrderedDict()
        self._again_ghosts: OrderedDict[Ghost, None] = OrderedDict()
        self._target = 0.0
        self._capacity = 0
        self._most_ghosts = pool_bytes // GHOST_PART // GHOST_BYTES

    def insert(self, blocks: Sequence[Block], older: bool = False) -> None:
        if older:
            return self._insert_older(blocks)
        for block in blocks:
            self._insert(block)

    def _insert_older(self, blocks: Sequence[Block]) -> None:
        """Nobody asked for them since the daemon began: they tell nothing of the shares."""
        for block in reversed(blocks):
            assert block not in self._once
            assert block not in self._again
            ghost = (block.namespace, block.group, block.key)
            self._once_ghosts.pop(ghost, None)
            self._again_ghosts.pop(ghost, None)
            self._once[block] = None
            self._once.move_to_end(block, last=False)
        self._keep_in_bounds()

    def _insert(self, block: Block) -> None:
        assert block not in self._once
        assert block not in self._again
        ghost = (block.namespace, block.group, block.key)
        if ghost in self._once_ghosts:
            self._target += max(1.0, len(self._again_ghosts) / len(self._once_ghosts))
            del self._once_ghosts[ghost]
            self._again[block] = None
        elif ghost in self._again_ghosts:
            self._target -= max(1.0, len(self._once_ghosts) / len(self._again_ghosts))
            del self._again_ghosts[ghost]
            self._again[block] = None
        else:
            self._once[block] = None
        self._keep_in_bounds()

    def requested(self, chains: Sequence[Chain]) -> None:
        once, again = self._once, self._again
        for chain in chains:
            for block in reversed(chain.ready):
                if block in again:
                    again.move_to_end(block)
                else:
                    del once[block]
                    again[block] = None

    def remove(self, blocks: Sequence[Block], evicted: bool) -> None:
        for block in blocks:
            first = block in self._once
            queue, ghosts = (self._once, self._once_ghosts) if first else (self._again, self._again_ghosts)
            del queue[block]
            if evicted:
                ghosts[block.namespace, block.group, block.key] = None

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        once, again = iter(self._once), iter(self._again)
        once_left, again_left = len(self._once), len(self._again)
        while once_left or again_left:
            if once_left and (once_left > self._target or not again_left):
                once_left -= 1
                yield next(once)
            else:
                again_left -= 1
                yield next(again)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def ghosts(self) -> int:
        """Number of evicted blocks remembered: at most as many as the pool holds, in the long run, or fewer."""
        return len(self._once_ghosts) + len(self._again_ghosts)

    @property
    def nbytes(self) -> int:
        return self.ghosts * GHOST_BYTES

    def _keep_in_bounds(self) -> None:
        resident = len(self)
        self._capacity = min(max(self._capacity, resident), 2 * resident)
        self._target = min(max(self._target, 0.0), float(self._capacity))
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and resident + self.ghosts > 2 * self._capacity:
            self._again_ghosts.popitem(last=False)
        while self.ghosts > self._most_ghosts:
            max(self._once_ghosts, self._again_ghosts, key=len).popitem(last=False)
