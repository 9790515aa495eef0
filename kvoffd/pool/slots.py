"""Which bytes of the pool belong to which slot. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush

from kvoffd.errors import BadGeometry, ShardTooLarge
from kvoffd.pool.nodes import Segment
from kvoffd.pool.runs import RunIndex

PAGE_BYTES = 4096
MIN_SLOT_BYTES = 8192
_REGIONS = 64
_MIN_REGION_BYTES = 4 << 20
_MAX_REGION_BYTES = 256 << 20
"""A region changes its slot size as a whole, so it must not hold more blocks than may go at once."""


class SlotAllocator:
    """Cuts the pool into regions and these into slots; offsets and sizes are in bytes.

    All slots of a region have one size, until the last of them is given back and the region is nobody's again. So
    namespaces with different slot sizes share the pool, and what one leaves the other can use. A region's tail that
    holds no slot counts as free, as does the pool's tail.

    Args:
        pool_bytes: at least 8192.
        region_bytes: a multiple of 4096; about a 64th of the pool, but 4 to 256 MiB, when None. The last region may
            be shorter.
    """

    def __init__(self, pool_bytes: int, region_bytes: int | None = None) -> None:
        if pool_bytes < MIN_SLOT_BYTES:
            raise BadGeometry(f"A pool of {pool_bytes} bytes holds no slot; it needs at least {MIN_SLOT_BYTES} bytes.")
        if region_bytes is None:
            region_bytes = _round_up(
                min(pool_bytes, max(_MIN_REGION_BYTES, min(_MAX_REGION_BYTES, pool_bytes // _REGIONS))), PAGE_BYTES
            )
            region_bytes = min(region_bytes, pool_bytes // PAGE_BYTES * PAGE_BYTES)
        if region_bytes % PAGE_BYTES or not MIN_SLOT_BYTES <= region_bytes <= pool_bytes:
            raise BadGeometry(
                f"Regions of {region_bytes} bytes do not fit a pool of {pool_bytes} bytes; they must be a multiple of "
                f"{PAGE_BYTES}, at least {MIN_SLOT_BYTES} and at most the pool."
            )
        self.pool_bytes = pool_bytes
        self.region_bytes = region_bytes
        self.used_bytes = 0
        self._regions = [
            _Region(base, min(region_bytes, (pool_bytes - base) // PAGE_BYTES * PAGE_BYTES))
            for base in range(0, pool_bytes, region_bytes)
            if pool_bytes - base >= MIN_SLOT_BYTES
        ]
        self._nodes: list[int | None] = [None]
        self._free_regions: dict[int | None, list[int]] = {None: list(range(len(self._regions)))}  # heaps, by node
        self._runs: dict[tuple[int, int | None], RunIndex] = {}  # by slot size and node
        self.spilled_slots = 0
        """Slots that were asked for on one node and handed out on another."""

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot that is handed out."""
        return self.pool_bytes - self.used_bytes

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``: the next multiple of 4096, at least 8192.

        Raises:
            ShardTooLarge: no region could hold it.
        """
        slot_bytes = max(MIN_SLOT_BYTES, _round_up(nbytes, PAGE_BYTES))
        if slot_bytes > self.region_bytes:
            raise ShardTooLarge(
                f"A shard of {nbytes} bytes is larger than the pool's regions of {self.region_bytes} bytes; make the "
                f"pool at least {_REGIONS * slot_bytes} bytes large, or blocks smaller."
            )
        return slot_bytes

    def place(self, segments: Sequence[Segment]) -> None:
        """Says on which NUMA node the regions lie. For an allocator that is new; ``segments`` are of whole regions."""
        for segment in segments:
            for index in range(segment.begin // self.region_bytes, -(-segment.end // self.region_bytes)):
                if index < len(self._regions):
                    self._regions[index].node = segment.node.number
        self._nodes = [segment.node.number for segment in segments] or [None]
        self._find_free_regions()

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        """Hands out up to ``count`` slots: ascending offsets, fewer than asked for where there is no room.

        Those on ``node`` come first. Slots come in runs where possible. Regions of that size come first: a run that
        holds all and is not much longer, else their longest runs. Then come free regions, from the lowest on.
        """
        if slot_bytes % PAGE_BYTES or not MIN_SLOT_BYTES <= slot_bytes <= self.region_bytes:
            raise ValueError(f"{slot_bytes} bytes are no slot size; ask slot_bytes() for one.")
        taken: list[int] = []
        near_first = sorted(self._nodes, key=lambda other: other != node)
        for other in near_first:
            before = len(taken)
            self._take_on(other, slot_bytes, count, taken)
            if near_first[0] == node != other:
                self.spilled_slots += len(taken) - before
        self.used_bytes += len(taken) * slot_bytes
        taken.sort()
        return taken

    def _take_on(self, node: int | None, slot_bytes: int, count: int, taken: list[int]) -> None:
        """Adds what slots the node has to ``taken``, until there are ``count``."""
        runs = self._runs.setdefault((slot_bytes, node), RunIndex())
        while len(taken) < count:
            run = runs.take(count - len(taken), slot_bytes)
            if run is None:
                if not self._open_region(node, slot_bytes, runs):
                    break
                continue
            start, length = run
            offsets = range(start, start + length * slot_bytes, slot_bytes)
            self._regions[start // self.region_bytes].in_use.update(offsets)
            taken.extend(offsets)
        if not runs:
            del self._runs[slot_bytes, node]

    def give_back(self, offsets: Collection[int]) -> None:
        """Takes slots back. One that is not handed out is a bug of the caller's: ValueError, and none was taken."""
        ordered = sorted(offsets)
        regions = [self._region_of(offset) for offset in ordered]
        for offset, region, before in zip(ordered, regions, [-1, *ordered], strict=False):
            if offset not in region.in_use or offset == before:
                raise ValueError(f"Offset {offset} is no slot in use, or given back twice.")
        begin = 0
        for end in range(1, len(ordered) + 1):
            region = regions[begin]
            if (
                end == len(ordered)
                or regions[end] is not region
                or ordered[end] - ordered[end - 1] != region.slot_bytes
            ):
                self._give_back_run(region, ordered[begin:end])
                begin = end

    def _give_back_run(self, region: _Region, offsets: Sequence[int]) -> None:
        """Takes neighbours back."""
        region.in_use.difference_update(offsets)
        slot_bytes = region.slot_bytes
        self.used_bytes -= len(offsets) * slot_bytes
        size_and_node = (slot_bytes, region.node)
        runs = self._runs.setdefault(size_and_node, RunIndex())
        slots_end = region.base + region.nbytes // slot_bytes * slot_bytes
        runs.add(offsets[0], len(offsets), slot_bytes, region.base, slots_end)
        if not region.in_use:
            runs.remove(region.base, slot_bytes)
            if not runs:
                del self._runs[size_and_node]
            region.slot_bytes = 0
            heappush(self._free_regions[region.node], region.base // self.region_bytes)

    def hold(self, slots: Iterable[tuple[int, int]]) -> None:
        """Hands out slots that are in use already: (offset, slot bytes) each. For an allocator that is new.

        Raises:
            ValueError: slots that this allocator would not have handed out together.
        """
        found: dict[int, tuple[int, list[int]]] = {}
        for offset, slot_bytes in slots:
            region = self._region_of(offset)
            size, offsets = found.setdefault(region.base, (slot_bytes, []))
            if size != slot_bytes or (offset - region.base) % slot_bytes or slot_bytes < MIN_SLOT_BYTES:
                raise ValueError(f"A slot of {slot_bytes} bytes at offset {offset} contradicts its region.")
            offsets.append(offset)
        for base, (slot_bytes, offsets) in found.items():
            self._hold_in(self._region_of(base), slot_bytes, sorted(offsets))
        self._find_free_regions()

    def _find_free_regions(self) -> None:
        self._free_regions = {node: [] for node in self._nodes}
        for index, region in enumerate(self._regions):
            if not region.slot_bytes:
                self._free_regions[region.node].append(index)  # ascending, which makes it a heap

    def _hold_in(self, region: _Region, slot_bytes: int, offsets: list[int]) -> None:
        slots_end = region.base + region.nbytes // slot_bytes * slot_bytes
        if len(set(offsets)) < len(offsets) or offsets[-1] >= slots_end or region.in_use:
            raise ValueError(f"The slots of the region at {region.base} are not there, or held twice.")
        region.slot_bytes = slot_bytes
        region.in_use.update(offsets)
        self.used_bytes += len(offsets) * slot_bytes
        free_from = region.base
        for offset in [*offsets, slots_end]:
            if free := (offset - free_from) // slot_bytes:
                runs = self._runs.setdefault((slot_bytes, region.node), RunIndex())
                runs.add(free_from, free, slot_bytes, region.base, slots_end)
            free_from = offset + slot_bytes

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, ascending, itself among them if it is in use."""
        return sorted(self._region_of(offset).in_use)

    def _region_of(self, offset: int) -> _Region:
        index = offset // self.region_bytes
        if not 0 <= index < len(self._regions):
            raise ValueError(f"Offset {offset} lies outside the pool of {self.pool_bytes} bytes.")
        return self._regions[index]

    def _open_region(self, node: int | None, slot_bytes: int, runs: RunIndex) -> bool:
        """Gives the node's lowest free region to this slot size; False where there is none."""
        free = self._free_regions[node]
        # Only the last region can be too short, and being the highest it comes up only when it is the only one left.
        if not free or self._regions[free[0]].nbytes < slot_bytes:
            return False
        region = self._regions[heappop(free)]
        region.slot_bytes = slot_bytes
        slots = region.nbytes // slot_bytes
        runs.add(region.base, slots, slot_bytes, region.base, region.base + slots * slot_bytes)
        return True


class _Region:
    """A stretch of the pool whose slots have one size; 0 while it is nobody's."""

    __slots__ = ("base", "in_use", "nbytes", "node", "slot_bytes")

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = base
        self.nbytes = nbytes
        self.slot_bytes = 0
        self.node: int | None = None
        self.in_use: set[int] = set()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
