"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from math import inf

from kvoffd.cache.namespace import Block
from kvoffd.cache.policies import AdmitsAll, Chain

_do_all = deque[None](maxlen=0).extend
"""Runs through an iterator, and keeps nothing of it: a third faster than a loop."""
MAX_HELD = 1000
"""Pinned blocks that are passed over for one eviction and stay where they are."""


class Policy(AdmitsAll):
    """One queue; a use moves a block to its young end, a chain tail first."""

    def __init__(self, pool_bytes: int) -> None:
        self._queue: OrderedDict[Block, None] = OrderedDict()

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            _do_all(map(self._queue.move_to_end, reversed(chain.ready)))

    def insert(self, blocks: Sequence[Block], older: bool = False) -> None:
        before = len(self._queue)
        self._queue.update(dict.fromkeys(blocks))
        assert len(self._queue) == before + len(blocks)
        if older:
            move_to_end = self._queue.move_to_end
            for block in reversed(blocks):
                move_to_end(block, last=False)

    def remove(self, blocks: Sequence[Block], evicted: bool) -> None:
        _do_all(map(self._queue.__delitem__, blocks))

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        """Very many that are pinned become the youngest, as they are in use: to pass them each time takes long."""
        held, loose = list[Block](), False
        try:
            for block in self._queue:
                if block.pins:
                    held.append(block)
                else:
                    loose = True
                yield block
        finally:
            if loose and len(held) > MAX_HELD:
                _do_all(map(self._queue.move_to_end, [block for block in held if block in self._queue]))

    def __len__(self) -> int:
        return len(self._queue)
