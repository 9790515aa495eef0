"""Blocks that lack a shard which nobody is writing. Until it comes they only take room; it may never come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from itertools import takewhile
from operator import attrgetter

from kvoffd.cache.namespace import Block


class HalfStored:
    """Such blocks, and since when they wait; the one that waits longest first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[Block, float] = {}
        self._nbytes = self._index_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._since)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._since)

    def add(self, block: Block) -> None:
        self._since[block] = self._clock()
        self._nbytes += block.slot_bytes
        self._index_bytes += block.index_bytes

    def remove(self, block: Block) -> None:
        if self._since.pop(block, None) is not None:
            self._nbytes -= block.slot_bytes
            self._index_bytes -= block.index_bytes

    def overdue(self, until: float) -> list[Block]:
        """Those that have waited since ``until``, or longer."""
        return [block for block, _ in takewhile(lambda item: item[1] <= until, self._since.items())]

    def beyond(self, most_bytes: int, wanted_bytes: int, protected: Set[Block]) -> list[Block]:
        """Where all hold more than ``most_bytes``: the first that hold what is too much, or as much as is wanted."""
        return self._first(min(self._nbytes - most_bytes, wanted_bytes), protected, attrgetter("slot_bytes"))

    def beyond_in_index(self, most_bytes: int, wanted_bytes: int, protected: Set[Block]) -> list[Block]:
        """The same of what is known of them."""
        return self._first(min(self._index_bytes - most_bytes, wanted_bytes), protected, attrgetter("index_bytes"))

    def _first(self, excess: int, protected: Set[Block], bytes_of: Callable[[Block], int]) -> list[Block]:
        found: list[Block] = []
        for block in self._since if excess > 0 else ():
            if block not in protected:
                found.append(block)
                excess -= bytes_of(block)
                if excess <= 0:
                    break
        return found
