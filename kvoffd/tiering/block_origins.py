"""Origins of promoted blocks, until an engine loads them or they leave the pool."""

from __future__ import annotations

import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.prompt_tokens import LoadedKeys, Source
from kvoffd.cache.tickets import LoadTicket
from kvoffd.tiering.promotion_source import PromotionSource


class BlockOrigins:
    """The source of each block that was promoted and not loaded since.

    Args:
        blocks: number of the pool's blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._sources: list[PromotionSource] = []
        """All sources in the order in which they were added: unlike the order of asking, it keeps their indices."""
        self._source_of = np.zeros(blocks, np.uint8)
        """[blocks] 1 plus the index of the block's source; 0 if it was not promoted, or was loaded since."""

    def add_source(self, source: PromotionSource) -> None:
        self._sources.append(source)

    def replace_source(self, source: PromotionSource, new: PromotionSource) -> None:
        """Replace a source by one that has promoted nothing yet."""
        index = self._sources.index(source)
        self._sources[index] = new
        self._source_of[self._source_of == 1 + index] = 0

    def promoted(self, source: PromotionSource, block: int) -> None:
        self._source_of[block] = 1 + self._sources.index(source)

    def stored(self, blocks: BlockIds) -> None:
        self._source_of[blocks] = 0  # a dropped block may have had the same number

    def evicted(self, blocks: BlockIds) -> None:
        """Count those that no engine has loaded, at their sources."""
        numbers, self._source_of[blocks] = self._source_of[blocks], 0
        for number in numbers[numbers > 0].tolist():
            self._sources[number - 1].unused_blocks += 1

    def loaded(self, ticket: LoadTicket) -> LoadedKeys | None:
        """See ``TierHooks``."""
        if not self._sources:
            return None
        numbers, self._source_of[ticket.blocks] = self._source_of[ticket.blocks], 0
        if not numbers.any():
            return None
        found = np.unique(numbers[numbers > 0]).tolist()
        sources = {number: _as_counted(self._sources[number - 1]) for number in found}
        return LoadedKeys(ticket.group.tokens, numbers.tobytes(), sources)


def _as_counted(source: PromotionSource) -> Source:
    if not source.shared:
        return Source("disk", "disk")
    return Source("peer" if source.tier.is_peer else "store", source.tier.name)
