"""What the fewest requests found goes first; of as many, what is unused for longest."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from math import inf

from kvoffd.cache.namespace import Block
from kvoffd.cache.policies import AdmitsAll, Chain


class Policy(AdmitsAll):
    """A queue for each number of requests."""

    def __init__(self, pool_bytes: int) -> None:
        self._requests: dict[Block, int] = {}
        self._queues: defaultdict[int, OrderedDict[Block, None]] = defaultdict(OrderedDict)

    def requested(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            for block in reversed(chain.ready):
                del self._queues[self._requests[block]][block]
                self._requests[block] += 1
                self._queues[self._requests[block]][block] = None

    def insert(self, blocks: Sequence[Block], older: bool = False) -> None:
        for block in reversed(blocks) if older else blocks:
            assert block not in self._requests
            self._requests[block] = 0
            self._queues[0][block] = None
            if older:
                self._queues[0].move_to_end(block, last=False)

    def remove(self, blocks: Sequence[Block], evicted: bool) -> None:
        for block in blocks:
            del self._queues[self._requests.pop(block)][block]

    def candidates(self, worth: float = inf) -> Iterator[Block]:
        for requests in sorted(self._queues):
            yield from self._queues[requests]

    def __len__(self) -> int:
        return len(self._requests)
