"""Which block has the slot at an offset of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvoffd.cache.namespace import Block


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
        """Slots that blocks have."""
        return self._held

    def __iter__(self) -> Iterator[int]:
        """Their offsets, region by region."""
        return (offset for offset, _ in self.items())

    def items(self) -> Iterator[tuple[int, Block]]:
        """Their offsets and blocks, region by region."""
        for number, region in self._regions.items():
            base = number * self._region_bytes
            for at, block in enumerate(region.blocks):
                if block is not None:
                    yield base + at * region.slot_bytes, block

    def get(self, offset: int) -> Block | None:
        """The block that has the slot; None where no block has it."""
        number, within = divmod(offset, self._region_bytes)
        region = self._regions.get(number)
        if region is None or within % region.slot_bytes:
            return None
        return region.blocks[within // region.slot_bytes]

    def put(self, offset: int, slot_bytes: int, block: Block) -> None:
        """The slot, which no block has, is this block's from now on."""
        number, within = divmod(offset, self._region_bytes)
        region = self._regions.get(number)
        if region is None:
            region = self._regions[number] = _Region(slot_bytes, [None] * (self._region_bytes // slot_bytes))
        at = within // slot_bytes
        assert region.slot_bytes == slot_bytes
        assert region.blocks[at] is None
        region.blocks[at] = block
        region.held += 1
        self._held += 1

    def remove(self, offset: int) -> None:
        """The slot is no block's any more."""
        number, within = divmod(offset, self._region_bytes)
        region = self._regions[number]
        at = within // region.slot_bytes
        assert region.blocks[at] is not None
        region.blocks[at] = None
        region.held -= 1
        self._held -= 1
        if not region.held:
            del self._regions[number]  # its slots may have another size next
