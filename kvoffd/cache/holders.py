"""Which block has the slot at an offset of the pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvoffd.cache.namespace import Block
from kvoffd.pool.records import Ints


@dataclass(slots=True)
class _Region:
    slot_bytes: int
    blocks: list[Block | None]
    """By number of the slot in the region."""
    held: int = 0


class SlotHolders:
    """The blocks by the offsets of their slots. As the slots of a region have one size, a slot costs eight bytes here.

    Args:
        region_bytes: see SlotAllocator.
    """

    def __init__(self, region_bytes: int) -> None:
        self._region_bytes = region_bytes
        self._regions: dict[int, _Region] = {}
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def offsets(self) -> array[int]:
        """Offsets of all slots that blocks have, region by region.

        In one go: where regions are full, twenty milliseconds for a million.
        """
        found = array("Q")
        for number, region in self._regions.items():
            base, count = number * self._region_bytes, len(region.blocks)
            every = np.arange(base, base + count * region.slot_bytes, region.slot_bytes, dtype=np.uint64)
            if region.held < count:
                every = every[[block is not None for block in region.blocks]]
            found.frombytes(every.tobytes())
        return found

    def get(self, offset: int) -> Block | None:
        """The block that has the slot; None where no block has it."""
        number, within = divmod(offset, self._region_bytes)
        region = self._regions.get(number)
        if region is None or within % region.slot_bytes:
            return None
        at = within // region.slot_bytes  # may be past the last where slots of another size were before
        return region.blocks[at] if at < len(region.blocks) else None

    def put(self, slot_bytes: int, slots: Sequence[tuple[int, Block]]) -> None:
        """Slots of one size, which no block has, are these blocks' from now on."""
        size, regions = self._region_bytes, self._regions
        for offset, block in slots:
            number = offset // size
            region = regions.get(number)
            if region is None:
                region = self._cut(number, slot_bytes)
            at = (offset - number * size) // slot_bytes
            assert region.blocks[at] is None, "it is another block's"
            region.blocks[at] = block
            region.held += 1
        self._held += len(slots)

    def put_all(self, slot_bytes: int, offsets: Ints, blocks: Sequence[Block]) -> None:
        """As ``put``, for many slots at once: their offsets, and the block of each."""
        numbers, within = np.divmod(offsets, self._region_bytes)
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(blocks)]
        for begin, end in pairwise(bounds):
            number = int(numbers[begin])
            region = self._regions.get(number) or self._cut(number, slot_bytes)
            holders, places = region.blocks, (within[begin:end] // slot_bytes).tolist()
            assert [holders[at] for at in places] == [None] * len(places), "one is another block's"
            for at, block in zip(places, blocks[begin:end], strict=True):
                holders[at] = block
            region.held += len(places)
        self._held += len(blocks)

    def _cut(self, number: int, slot_bytes: int) -> _Region:
        region = self._regions[number] = _Region(slot_bytes, [None] * (self._region_bytes // slot_bytes))
        return region

    def remove(self, offsets: Sequence[int]) -> None:
        size, regions = self._region_bytes, self._regions
        for offset in offsets:
            number = offset // size
            region = regions[number]
            at = (offset - number * size) // region.slot_bytes
            assert region.blocks[at] is not None, "it is no block's"
            region.blocks[at] = None
            region.held -= 1
            if not region.held:
                del regions[number]  # its slots may have another size next
        self._held -= len(offsets)
