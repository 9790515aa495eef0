"""Making room: which blocks go when a slot of some size is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvoffd.cache.holders import SlotHolders
from kvoffd.cache.namespace import OFFSET_AT, PAGES, Block, BlockState
from kvoffd.pool.pool import Pool

MAX_REGIONS_COMPARED = 16
"""Regions that are looked into to find the coldest; each costs a pass over its slots."""


def choose_victims(
    candidates: Iterable[Block],
    slots: Pool,
    holders: SlotHolders,
    slot_bytes: int,
    count: int,
    protected: Set[Block],
    *,
    once: bool,
) -> list[Block]:
    """Blocks to evict, next first, so that ``count`` slots of ``slot_bytes`` come free; too few or none if need be.

    ``candidates`` are those that may go, ``holders`` the blocks by the offsets of their slots. Neither a pinned block
    is chosen nor a ``protected`` one.

    Blocks with a slot of the wanted size go in the policy's order. The older blocks of other sizes that are passed
    over on the way help only by whole regions. A region is taken over once the bytes passed over are as many as it
    holds: by then what is evicted too early in it is outweighed by what stays too long elsewhere. So the sizes share
    the pool by age of use, none starves, and one slot of an odd size does not cost a region of blocks in use.

    ``once``: where the first regions cannot be taken over, and nothing else was found, the others are not looked at.
    While there are inherited blocks, which keep their regions, each call would go through all blocks in vain.
    """
    chosen: dict[Block, None] = {}
    passed: list[Block] = []
    passed_bytes = 0
    patience_bytes = 0
    for block in candidates:
        if block.pins or block in protected:
            continue
        if len(block.words) == 2:
            gained = int(block.slot_bytes == slot_bytes)
        else:
            gained = block.namespace.slot_sizes(block.group).count(slot_bytes)
        if gained:
            chosen[block] = None
            count -= gained
            if count <= 0:
                return list(chosen)
            continue
        passed.append(block)
        passed_bytes += block.slot_bytes
        if not patience_bytes:
            shard = block.shard(0)
            patience_bytes = len(slots.neighbours(shard.offset)) * shard.slot_bytes
        if passed_bytes >= patience_bytes:
            if region := _coldest_region(passed, slots, holders, protected):
                return list(chosen | dict.fromkeys(region))
            if once and not chosen:
                return []
            patience_bytes = 2 * passed_bytes
    return list(chosen | dict.fromkeys(_coldest_region(passed, slots, holders, protected) if passed else ()))


def _coldest_region(
    passed: Iterable[Block], slots: Pool, holders: SlotHolders, protected: Set[Block]
) -> Iterable[Block]:
    """All blocks of the region, among the oldest ones', of which most was passed over; none if all are held."""
    regions: list[list[int]] = []
    passed_in: list[int] = []
    region_of: dict[int, int] = {}
    for block in passed:
        for word in block.words[::2]:
            offset = word >> OFFSET_AT & PAGES
            found = region_of.get(offset)
            if found is None:
                if len(regions) == MAX_REGIONS_COMPARED:
                    continue
                found = len(regions)
                offsets = slots.neighbours(offset)
                regions.append(offsets)
                passed_in.append(0)
                region_of.update(dict.fromkeys(offsets, found))
            passed_in[found] += 1
    coldest_first = sorted(range(len(regions)), key=lambda index: passed_in[index] / len(regions[index]), reverse=True)
    for index in coldest_first:
        there = [holders.get(offset) for offset in regions[index]]
        blocks = dict.fromkeys(block for block in there if block is not None)
        if None in there:
            continue  # a slot in quarantine keeps its region
        if all(block.state is BlockState.READY and not block.pins and block not in protected for block in blocks):
            return blocks
    return ()
