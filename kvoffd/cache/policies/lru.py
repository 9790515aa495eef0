"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvoffd.cache.namespace import Block


class Policy:
    """One queue; a use moves a block to its young end, a chain tail first."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Block, None] = OrderedDict()

    def insert(self, block: Block) -> None:
        assert block not in self._queue
        self._queue[block] = None

    def touch(self, blocks: Sequence[Block]) -> None:
        move_to_end = self._queue.move_to_end
        for block in reversed(blocks):
            move_to_end(block)

    def remove(self, block: Block, evicted: bool) -> None:
        del self._queue[block]

    def candidates(self) -> Iterator[Block]:
        return iter(self._queue)

    def __len__(self) -> int:
        return len(self._queue)
