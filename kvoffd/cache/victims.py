"""Which blocks go for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import READY, BlockIds, BlockTable
from kvoffd.cache.namespace import Namespace
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
        self._oldest: dict[Namespace, deque[tuple[int, int]]] = {}
        """Of namespaces with a quota: blocks that were there at some time and their generations, the oldest first."""

    def forget(self, namespace: Namespace) -> None:
        """Its blocks are gone."""
        self._oldest.pop(namespace, None)

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

    def of_namespace(
        self, namespace: Namespace, groups: Sequence[int], nbytes: int, most: int, below: float
    ) -> BlockIds:
        """Blocks of a namespace's groups of about so many bytes, and at most so many: the next ones in the policy's
        order or, where those of many others come before them, the ones that were stored first."""
        blocks = self._blocks
        victims: dict[int, None] = {}
        passed = 0
        for batch in self._policy.candidates(below):
            loose = np.isin(blocks.group[batch], groups) & (blocks.pins[batch] == 0)
            for block in batch[loose].tolist():
                if nbytes <= 0 or len(victims) >= most:
                    break
                victims[block] = None
                nbytes -= int(blocks.pages[block]) * PAGE_BYTES
            passed += len(batch) - int(loose.sum())
            if nbytes <= 0 or len(victims) >= most or passed >= MAX_PASSED:
                break
        oldest = self._oldest.get(namespace) or deque()
        refilled = passed < MAX_PASSED
        while nbytes > 0 and len(victims) < most and (oldest or not refilled):
            if not oldest:
                oldest, refilled = self._by_age(groups), True
                self._oldest[namespace] = oldest
                continue
            block, generation = oldest.popleft()
            if blocks.records["generation"][block] != generation or blocks.state[block] != READY:
                continue
            if blocks.group[block] in groups and not blocks.pins[block] and block not in victims:
                victims[block] = None
                nbytes -= int(blocks.pages[block]) * PAGE_BYTES
        return np.array(list(victims), np.uint32)

    def _by_age(self, groups: Sequence[int]) -> deque[tuple[int, int]]:
        """The READY blocks of groups with their generations, the one that was stored first first."""
        found = np.flatnonzero(np.isin(self._blocks.group, groups) & (self._blocks.state == READY))
        generations = self._blocks.records["generation"][found]
        order = np.argsort(generations)
        return deque(zip(found[order].tolist(), generations[order].tolist(), strict=True))
