"""Promoted blocks, until an engine loads them or they leave the pool."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.prompt_tokens import LoadedKeys, Source
from kvoffd.cache.tickets import LoadTicket
from kvoffd.tiering.promotions import Promotions
from kvoffd.tiers.tier import PEER


class PromotedBlocks:
    """The source of each block that was promoted and not loaded since.

    Args:
        blocks: number of the pool's blocks.

    Attributes:
        sources: all sources in the order in which they were added.
    """

    def __init__(self, blocks: int) -> None:
        self.sources: list[Promotions] = []
        self._source_of = np.zeros(blocks, np.uint8)
        """[blocks] 1 plus the index of the block's source; 0 if it was not promoted, or was loaded since."""

    def replace_source(self, source: Promotions, new: Promotions) -> None:
        """Replace a source by one that has promoted nothing yet."""
        number = self.sources.index(source)
        self.sources[number] = new
        self._source_of[self._source_of == 1 + number] = 0

    def promoted(self, source: Promotions, block: int) -> None:
        self._source_of[block] = 1 + self.sources.index(source)

    def stored(self, blocks: BlockIds) -> None:
        self._source_of[blocks] = 0  # a dropped block may have had the same number

    def evicted(self, blocks: BlockIds) -> None:
        """Count those that no engine has loaded, at their sources."""
        numbers, self._source_of[blocks] = self._source_of[blocks], 0
        for number in numbers[numbers > 0].tolist():
            self.sources[number - 1].unused_blocks += 1

    def loaded(self, tickets: Sequence[LoadTicket]) -> LoadedKeys | None:
        """See ``TierHooks``."""
        if not (self.sources and tickets):
            return None
        largest = max(tickets, key=lambda ticket: len(ticket.blocks) * ticket.group.weight)
        numbers = self._source_of[largest.blocks]
        for ticket in tickets:
            self._source_of[ticket.blocks] = 0
        if not numbers.any():
            return None
        found = np.unique(numbers[numbers > 0]).tolist()
        sources = {number: _as_counted(self.sources[number - 1]) for number in found}
        return LoadedKeys(largest.group.tokens, numbers.tobytes(), sources)


def _as_counted(source: Promotions) -> Source:
    if not source.shared:
        return Source("disk", "disk")
    return Source("peer" if source.name.startswith(PEER) else "store", source.name)
