"""Which blocks go for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import READY, BlockIds, BlockTable
from kvoffd.cache.policy import Group, Policy
from kvoffd.pool.allocator import PAGE_BYTES, SlotAllocator

MAX_SKIPPED_PINNED = 1000
"""Pinned blocks that one eviction passes over; more of them become the newest, as they are in use."""
MAX_REGIONS_COMPARED = 16
"""Regions that are looked into to find the coldest."""
MAX_PASSED = 1024
"""Blocks of others in the policy's order that are passed over for one of a namespace that has its quota."""
WRITTEN_AHEAD, MIN_AHEAD = 4, 1024
"""Of this many times the blocks that are to go, and at least so many, those that wait to be written to a tier go last:
what was just read from a disk goes before what no disk has."""
_NOTHING: BlockIds = np.empty(0, np.uint32)


class Victims:
    """Chooses READY blocks that nothing pins. It changes nothing but their order.

    Args:
        groups: those whose blocks have slots, by number.
        waiting: which blocks wait to be written to a tier, None where none does. Those that do not go before them, of
            the next few.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        blocks: BlockTable,
        policy: Policy,
        groups: Mapping[int, Group],
        waiting: Callable[[BlockIds], npt.NDArray[np.bool_] | None] = lambda _: None,
    ) -> None:
        self._slots, self._blocks, self._policy, self._groups = slots, blocks, policy, groups
        self._waiting = waiting

    def are_left(self, ready_bytes: int) -> bool:
        """Whether any of the READY blocks, of so many bytes, may go."""
        return ready_bytes > self._blocks.pinned_bytes or any(
            (self._blocks.pins[batch] == 0).any() for batch in self._policy.candidates()
        )

    def own(self, group: Group, count: int, below: float) -> BlockIds | None:
        """The next ``count`` blocks with a score lower than ``below``, or as many as there are, if all are of the group
        and may go, as a rule; otherwise None."""
        first = self._policy.first(count, below)
        if (waiting := self._waiting(first)) is not None and waiting.any():
            some = self._policy.first(max(WRITTEN_AHEAD * count, MIN_AHEAD), below)
            first = self._written_first(some[self._blocks.pins[some] == 0])[:count]
            if len(first) < min(count, len(some)):
                return None
        return first if not first.size or self._blocks.group_of(first, loose=True) == group.number else None

    def for_space(self, group: Group, count: int, below: float) -> BlockIds:
        """Blocks with a score lower than ``below`` to evict so that slots for ``count`` blocks of a group come free;
        too few or none if need be.

        Blocks with a slot of a wanted size go in the policy's order. The older blocks of other sizes that are passed
        over on the way help only by whole regions. A region goes once the bytes passed over are as many as it holds: by
        then what is evicted too early in it is outweighed by what stays too long elsewhere. So the sizes share the pool
        by age of use, none starves, and one slot of an odd size does not cost a region of blocks in use.
        """
        blocks = self._blocks
        wanted = {size: count * group.sizes.count(size) for size in group.sizes}
        chosen: list[int] = []
        passed: list[BlockIds] = []
        pinned: list[BlockIds] = []
        passed_pages = patience = 0
        for batch in self._policy.candidates(below):
            if (blocks.pins[batch] != 0).any():
                pinned.append(batch[blocks.pins[batch] != 0])
                batch = batch[blocks.pins[batch] == 0]
            batch = self._written_first(batch)
            while batch.size:
                numbers = blocks.group[batch]
                useful = self._has_slot_of(numbers, {size for size, lacking in wanted.items() if lacking > 0})
                if not patience and not useful.all():
                    region = int(batch[~useful][0]) // self._slots.slots_per_region
                    held = len(self._slots.neighbours(region))
                    patience = held * int(self._slots.slot_bytes[region]) // PAGE_BYTES
                so_far = passed_pages + np.cumsum(np.where(useful, 0, blocks.pages[batch]))
                end = int(np.searchsorted(so_far, patience)) + 1 if patience else len(batch)
                for place in np.flatnonzero(useful[:end]).tolist():
                    its_sizes = self._groups[int(numbers[place])].sizes
                    if not any(wanted.get(size, 0) > 0 for size in its_sizes):
                        end = place  # there are enough of its size now: what follows is looked at anew
                        break
                    chosen.append(int(batch[place]))
                    for size in its_sizes:
                        if size in wanted:
                            wanted[size] -= 1
                    if max(wanted.values()) <= 0:
                        return self._picked(chosen, pinned)
                passed.append(batch[:end][~useful[:end]])
                passed_pages = int(so_far[min(end, len(batch)) - 1])
                batch = batch[end:]
                if patience and passed_pages >= patience:
                    if (region_blocks := self._coldest_region(np.concatenate(passed))).size:
                        return np.union1d(self._picked(chosen, pinned), region_blocks)
                    patience = 2 * passed_pages
        if passed_pages and (region_blocks := self._coldest_region(np.concatenate(passed))).size:
            return np.union1d(self._picked(chosen, pinned), region_blocks)
        return self._picked(chosen, pinned)

    def _written_first(self, blocks: BlockIds) -> BlockIds:
        """The same blocks, those that wait to be written last; the order is otherwise the same."""
        if (waiting := self._waiting(blocks)) is None:
            return blocks
        return np.concatenate([blocks[~waiting], blocks[waiting]])

    def _has_slot_of(self, groups: npt.NDArray[np.uint32], sizes: Set[int]) -> npt.NDArray[np.bool_]:
        """Whether a block of each group has a slot of one of these sizes."""
        if (groups == groups[0]).all():
            return np.full(len(groups), not sizes.isdisjoint(self._groups[int(groups[0])].sizes))
        fitting = [number for number in np.unique(groups).tolist() if not sizes.isdisjoint(self._groups[number].sizes)]
        return np.isin(groups, fitting)

    def _picked(self, chosen: Sequence[int], pinned: Sequence[BlockIds]) -> BlockIds:
        if chosen and sum(map(len, pinned)) > MAX_SKIPPED_PINNED:  # to pass them each time takes long
            skipped = np.concatenate(pinned)
            numbers = self._blocks.group[skipped]
            for number in np.unique(numbers).tolist():
                group, alike = self._groups[number], skipped[numbers == number]
                names = self._blocks.keys(alike, group.key_bytes)
                self._policy.remove(group, alike, names)
                self._policy.insert(group, alike, names)
        return np.array(chosen, np.uint32)

    def _coldest_region(self, passed: BlockIds) -> BlockIds:
        """All blocks of the region of which most was passed over, if all may go; of the oldest ones' regions."""
        blocks, slots = self._blocks, self._slots
        regions = blocks.all_slots(passed) // slots.slots_per_region
        found, first, counts = np.unique(regions, return_index=True, return_counts=True)
        oldest = np.argsort(first)[:MAX_REGIONS_COMPARED]
        held = [(counts[at] / len(slots.neighbours(int(found[at]))), int(found[at])) for at in oldest.tolist()]
        for _, region in sorted(held, reverse=True):
            firsts = blocks.first_slots(slots.neighbours(region))
            if (blocks.state[firsts] == READY).all() and not blocks.pins[firsts].any():
                return np.unique(firsts)
        return _NOTHING

    def of_namespace(self, groups: Sequence[Group], nbytes: int, most: int, below: float) -> BlockIds:
        """Blocks of a namespace's groups of about so many bytes, and at most so many: the next ones in the policy's
        order or, where those of many others come before them, the ones that were stored first."""
        blocks, numbers = self._blocks, [group.number for group in groups]
        victims, passed = _NOTHING, 0
        for batch in self._policy.candidates(below):
            own = batch[np.isin(blocks.group[batch], numbers) & (blocks.pins[batch] == 0)]
            victims, passed = np.concatenate([victims, own]), passed + len(batch) - len(own)
            if passed >= MAX_PASSED or len(victims) >= most or self._bytes_of(victims) >= nbytes:
                break
        if passed >= MAX_PASSED and self._bytes_of(victims) < nbytes:
            each = [blocks.oldest(one, min(most, -(-nbytes // one.block_bytes)), loose=True) for one in groups]
            stored = np.concatenate(each)
            stored = stored[np.argsort(blocks.records["generation"][stored])]
            victims = np.concatenate([victims, stored[~np.isin(stored, victims)]])
        enough = np.searchsorted(np.cumsum(blocks.pages[victims]) * PAGE_BYTES, nbytes)
        return victims[: min(most, int(enough) + 1)]

    def _bytes_of(self, blocks: BlockIds) -> int:
        return int(self._blocks.pages[blocks].sum()) * PAGE_BYTES
