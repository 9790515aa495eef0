"""Selection of the blocks to evict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import NO_BLOCKS, BlockIds
from kvoffd.cache.hooks import TierHooks
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import BATCH
from kvoffd.pool.allocator import PAGE_BYTES

MAX_SKIPPED_PINNED = 1000
"""Pinned blocks that one eviction may skip; if there are more, they leave the order until they are unpinned: skipping
them each time takes long, and those behind them might never be considered."""
MAX_CONSIDERED = 65536
"""Blocks from which one eviction chooses."""
MAX_PASSED = 1024
"""Blocks in the policy's order, pinned or of other namespaces, that an eviction for a quota may skip."""
WRITTEN_AHEAD, MIN_AHEAD = 4, 1024
"""Blocks that wait to be written to a tier go last among this multiple of the blocks to evict, at least MIN_AHEAD: a
block that was just read from a disk goes before one that no disk has."""
ANY_PROMPT = 2**64 - 1
"""Number above those of all prompts."""


class Choice(NamedTuple):
    """Blocks to evict for new blocks of a group; none if none may go."""

    blocks: BlockIds
    same_group: bool
    """Whether all are of that group: then ``BlockLife.replace`` can give their slots to the new ones at once."""


class Victims:
    """Chooses READY, unpinned blocks. It may take pinned ones out of the order until they are unpinned.

    ``older_than``: number of the prompt for which others are to go. Blocks of older prompts go, and of others those
    that a tier has or does not want. So a prompt larger than the pool keeps its beginning, without which the rest is
    useless. Of the next few blocks, those that wait to be written to a tier are evicted last.
    """

    def __init__(self, life: BlockLife) -> None:
        self._life, self._slots, self._blocks, self._order = life, life.slots, life.blocks, life.order

    def are_evictable(self, older_than: int) -> bool:
        """Return whether a block near the beginning of the order can be evicted, whatever its score."""
        return any(self._may_go(batch, older_than).any() for batch in self._considered())

    def spares(self, older_than: int) -> bool:
        """Return whether a block near the beginning of the order stays only because its prompt is not older."""
        spared = (self._may_go(one, ANY_PROMPT) & ~self._may_go(one, older_than) for one in self._considered())
        return any(which.any() for which in spared)

    def _considered(self) -> Iterator[BlockIds]:
        """Yield the first blocks of the order in batches, about as many as an eviction may choose from."""
        left = MAX_CONSIDERED
        for batch in self._order.candidates():
            yield batch
            if (left := left - len(batch)) <= 0:
                return

    def _may_go(self, blocks: BlockIds, older_than: int) -> npt.NDArray[np.bool_]:
        """Return which READY blocks are neither pinned nor spared for their prompt."""
        unpinned: npt.NDArray[np.bool_] = self._blocks.pins[blocks] == 0
        spared = self._blocks.prompt[blocks] >= older_than
        if (doubtful := unpinned & spared).any():
            spared[doubtful] = ~self._safe_to_evict(blocks[doubtful])
        return unpinned & ~spared

    def _safe_to_evict(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which of the READY blocks tiers have, or do not want."""
        tiers = self._life.tiers
        return np.zeros(len(blocks), np.bool_) if tiers is None else tiers.safe_to_evict(blocks)

    def choose(self, group: Group, count: int, below: float, older_than: int) -> Choice:
        """Choose blocks with a score below ``below`` to evict for ``count`` new blocks of a group: the next in order,
        or as many as there are, if all are of the group and may go; else by ``for_space``."""
        chosen, tiers = self._order.first(count, below), self._life.tiers
        if not chosen.size:
            return Choice(NO_BLOCKS, same_group=True)
        wanted, spared = (group, count, below, older_than), self._blocks.prompt[chosen] >= older_than
        if spared.any() and not self._safe_to_evict(chosen[spared]).all():
            return Choice(self.for_space(*wanted), same_group=False)
        if tiers is not None and (waiting := tiers.waiting(chosen)) is not None and waiting.any():
            next_in_order, chosen = chosen, self._next_passing_waiting(tiers, count, below, older_than)
            if len(chosen) < len(next_in_order):  # too many of the next are pinned: ``for_space`` passes over those
                return Choice(self.for_space(*wanted), same_group=False)
        if self._blocks.common_group(chosen, unpinned=True) != group.number:
            return Choice(self.for_space(*wanted), same_group=False)
        return Choice(chosen, same_group=True)

    def _next_passing_waiting(self, tiers: TierHooks, count: int, below: float, older_than: int) -> BlockIds:
        """Return the next ``count`` blocks that may go, looking further until enough of them do not wait to be written
        to a tier."""
        ahead, most = count, max(WRITTEN_AHEAD * count, MIN_AHEAD)
        while True:
            ahead = min(most, 4 * ahead)
            batch = self._order.first(ahead, below)
            may_go = batch[self._may_go(batch, older_than)]
            waiting = tiers.waiting(may_go)
            if waiting is None or len(may_go) - waiting.sum() >= count or len(batch) < ahead or ahead == most:
                return self._waiting_last(may_go)[:count]

    def for_space(self, group: Group, count: int, below: float, older_than: int) -> BlockIds:
        """Choose blocks with a score below ``below`` to evict so that slots for ``count`` blocks of a group become
        free; the result may be too few or empty.

        Blocks with a slot of a wanted size go in the policy's order. The older blocks of other sizes that are skipped
        on the way help only by whole regions. A region is evicted once as many bytes were skipped as it holds: by
        then, evicting some of its blocks too early costs less than keeping others too long elsewhere. So the sizes
        share the pool by age of use, none starves, and one slot of an odd size does not cost a region of used blocks.
        What a hint retains costs its region only in its own turn. If the order ends before that many bytes were
        skipped, a region goes only if all its blocks were.
        """
        most, retentions = BATCH, self._order.retentions
        while most < min(2 * count, MAX_CONSIDERED):  # the first ``count`` are not enough, see ``choose``
            most *= 4
        while True:
            order = self._order.first(most, below)
            pinned, last = self._blocks.pins[order] != 0, len(order) < most or most >= MAX_CONSIDERED
            may_go = self._waiting_last(order[self._may_go(order, older_than)])
            offered = self._slots, group, count, may_go, older_than, retentions.hint_of, retentions.numbers
            chosen, enough = self._blocks.choose_victims(*offered, last=last)
            if enough or last:
                if pinned.sum() > MAX_SKIPPED_PINNED:
                    self._order.pass_over(order[pinned])
                return chosen
            most *= 4

    def _waiting_last(self, blocks: BlockIds) -> BlockIds:
        """Return the same blocks in the same order, but with those that wait to be written to a tier last."""
        tiers = self._life.tiers
        if tiers is None or (waiting := tiers.waiting(blocks)) is None:
            return blocks
        return np.concatenate([blocks[~waiting], blocks[waiting]])

    def of_namespace(self, groups: Sequence[Group], nbytes: int, most: int, below: float, older_than: int) -> BlockIds:
        """Choose about ``nbytes`` bytes, and at most ``most`` blocks, of a namespace's groups: the next in the
        policy's order with a score below ``below``. If too many others come before them, add those that were stored
        first, whatever their score, the ones that a hint retains last."""
        blocks, numbers = self._blocks, [group.number for group in groups]
        victims, passed = NO_BLOCKS, 0
        for batch in self._order.candidates(below):
            own = batch[np.isin(blocks.group[batch], numbers)]
            own = own[self._may_go(own, older_than)]
            victims, passed = np.concatenate([victims, own]), passed + len(batch) - len(own)
            if passed >= MAX_PASSED or len(victims) >= most or self._bytes_of(victims) >= nbytes:
                break
        if passed >= MAX_PASSED and self._bytes_of(victims) < nbytes:
            # So many of the oldest that there are enough behind the retained ones, which may all be among them.
            retained_bytes = groups[0].namespace.retained_bytes
            wanted = [
                min(most, -(-nbytes // one.block_bytes)) + -(-retained_bytes // one.block_bytes) for one in groups
            ]
            oldest = np.concatenate(
                [blocks.oldest_unpinned(one, count) for one, count in zip(groups, wanted, strict=True)]
            )
            oldest = oldest[self._may_go(oldest, older_than)]
            retained = self._order.retentions.are_retained(oldest)
            oldest = oldest[np.lexsort((blocks.records["sequence"][oldest], retained))]
            victims = np.concatenate([victims, oldest[~np.isin(oldest, victims)]])
        enough = np.searchsorted(np.cumsum(blocks.pages[victims]) * PAGE_BYTES, nbytes)
        return victims[: min(most, int(enough) + 1)]

    def _bytes_of(self, blocks: BlockIds) -> int:
        return int(self._blocks.pages[blocks].sum()) * PAGE_BYTES
