"""Which blocks go for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
            ahead, most = count, max(WRITTEN_AHEAD * count, MIN_AHEAD)
            while True:
                ahead = min(most, 4 * ahead)
                some = self._policy.first(ahead, below)
                loose = some[self._blocks.pins[some] == 0]
                waiting = self._waiting(loose)
                if waiting is None or len(loose) - waiting.sum() >= count or len(some) < ahead or ahead == most:
                    break
            first = self._written_first(loose)[:count]
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
        blocks, slots = self._blocks, self._slots
        wanted = {size: count * group.sizes.count(size) for size in group.sizes}
        chosen, pinned = [_NOTHING], [_NOTHING]
        passed, passed_pages, patience = _NOTHING, 0, 0

        def take_region() -> bool:
            """Choose the coldest region's blocks; False where none may go."""
            nonlocal passed, passed_pages
            region, its_blocks = self._coldest_region(passed)
            if its_blocks.size:
                chosen.append(its_blocks)
                passed = passed[~np.isin(passed, its_blocks)]
                passed_pages = int(blocks.pages[passed].sum())
                size = max(wanted, key=wanted.__getitem__)
                wanted[size] -= slots.slots_in(region, size)
            return bool(its_blocks.size)

        for batch in self._policy.candidates(below):
            pins = blocks.pins[batch] != 0
            pinned.append(batch[pins])
            batch = self._written_first(batch[~pins])
            while batch.size and wanted:
                gives = self._slots_of(batch, list(wanted))
                useful = gives.any(axis=0)
                if not patience and not useful.all():
                    region = int(batch[~useful][0]) // slots.slots_per_region
                    patience = len(slots.neighbours(region)) * int(slots.slot_bytes[region]) // PAGE_BYTES
                so_far = passed_pages + np.cumsum(np.where(useful, 0, blocks.pages[batch]))
                end = min(len(batch), int(np.searchsorted(so_far, patience)) + 1) if patience else len(batch)
                given = gives[:, :end].cumsum(axis=1)
                for its, lacking in zip(given, wanted.values(), strict=True):  # what follows is looked at anew
                    end = min(end, int(np.searchsorted(its, lacking)) + 1)
                chosen.append(batch[:end][useful[:end]])
                passed, passed_pages = np.concatenate([passed, batch[:end][~useful[:end]]]), int(so_far[end - 1])
                for size, its in zip(wanted, given, strict=True):
                    wanted[size] -= int(its[end - 1])
                batch = batch[end:]
                if patience and passed_pages >= patience and max(wanted.values()) > 0 and not take_region():
                    patience = 2 * passed_pages
                wanted = {size: lacking for size, lacking in wanted.items() if lacking > 0}
            if not wanted:
                break
        if wanted and passed_pages:
            take_region()
        return self._picked(np.concatenate(chosen), np.concatenate(pinned))

    def _written_first(self, blocks: BlockIds) -> BlockIds:
        """The same blocks, those that wait to be written last; the order is otherwise the same."""
        if (waiting := self._waiting(blocks)) is None:
            return blocks
        return np.concatenate([blocks[~waiting], blocks[waiting]])

    def _slots_of(self, blocks: BlockIds, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """[sizes, blocks] how many slots of each size each block has."""
        numbers, place = np.unique(self._blocks.group[blocks], return_inverse=True)
        groups = [self._groups[number].sizes for number in numbers.tolist()]
        return np.array([[of_group.count(size) for of_group in groups] for size in sizes])[:, place]

    def _picked(self, chosen: BlockIds, pinned: BlockIds) -> BlockIds:
        if chosen.size and len(pinned) > MAX_SKIPPED_PINNED:  # to pass them each time takes long
            numbers = self._blocks.group[pinned]
            for number in np.unique(numbers).tolist():
                group, alike = self._groups[number], pinned[numbers == number]
                names = self._blocks.keys(alike, group.key_bytes)
                self._policy.remove(group, alike, names)
                self._policy.insert(group, alike, names)
        return np.unique(chosen)

    def _coldest_region(self, passed: BlockIds) -> tuple[int, BlockIds]:
        """The region of which most was passed over, if all of its blocks may go, and these; of the oldest ones'
        regions."""
        blocks, slots = self._blocks, self._slots
        regions = blocks.all_slots(passed) // slots.slots_per_region
        found, first, counts = np.unique(regions, return_index=True, return_counts=True)
        oldest = np.argsort(first)[:MAX_REGIONS_COMPARED]
        held = [(counts[at] / len(slots.neighbours(int(found[at]))), int(found[at])) for at in oldest.tolist()]
        for _, region in sorted(held, reverse=True):
            firsts = blocks.first_slots(slots.neighbours(region))
            if (blocks.state[firsts] == READY).all() and not blocks.pins[firsts].any():
                return region, np.unique(firsts)
        return 0, _NOTHING

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
