"""Regions of equal slots: which bytes of the pool, or of a disk's file, belong to which slot. Pure.

The pool and every disk file are cut into regions. All slots of a region have one shape, until the last of them is
given back and the region is free again: so namespaces with different slot sizes share the memory, and what one of them
leaves the others can use. ``RegionSlots`` keeps that; ``SlotAllocator`` is the pool's, ``DiskRegions`` a disk's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import compress, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvoffd.errors import BadGeometry, ShardTooLarge
from kvoffd.pool.records import InheritedSlots, Ints
from kvoffd.system.numa import Locality
from kvoffd_proto.units import exact_size, format_size

PAGE_BYTES = 4096
MIN_SLOT_BYTES = 8192
_REGIONS = 64
_LEAST_REGIONS = 12
_MIN_REGION_BYTES = 4 << 20
_MAX_REGION_BYTES = 256 << 20
"""A region changes its slot size as a whole, so it must not hold more blocks than may be evicted at once."""

ShapeT = TypeVar("ShapeT", bound=Hashable)
RegionT = TypeVar("RegionT", bound="Region[Any]")


def page_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class RunIndex:
    """Runs of free slots of one size: joined when they touch, found by length in about constant time.

    A run is a start offset and a length in slots. Runs are kept in buckets by the bits of their length, so that the
    search for a run looks at one bucket and not at all runs.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._length: dict[int, int] = {}  # by start offset
        self._start: dict[int, int] = {}  # by end offset, exclusive
        self._buckets: dict[int, dict[int, None]] = {}  # by bits of the length; inner dicts are ordered sets of starts

    def __bool__(self) -> bool:
        return bool(self._length)

    def take(self, wanted: int) -> tuple[int, int] | None:
        """Takes up to ``wanted`` slots off one run: their start and number; None when there is no run.

        The run is from the tightest bucket whose runs all hold that many, else from the one with the longest runs.
        """
        if not self._buckets:
            return None
        bits = (wanted - 1).bit_length() + 1  # a run of that many bits has at least 2 ** (bits - 1) >= wanted slots
        bits = min((b for b in self._buckets if b >= bits), default=0) or max(self._buckets)
        # The last one, since a dict finds its first item only behind all that were deleted before it.
        start, _ = self._buckets[bits].popitem()
        length = self._length.pop(start)
        del self._start[start + length * self._slot_bytes]
        if not self._buckets[bits]:
            del self._buckets[bits]
        taken = min(length, wanted)
        if taken < length:
            self._insert(start + taken * self._slot_bytes, length - taken)
        return start, taken

    def add(self, start: int, length: int, floor: int, ceiling: int) -> None:
        """Adds free slots, joined with the runs that touch them inside [floor, ceiling), the slots of their region."""
        end = start + length * self._slot_bytes
        if start > floor and (before := self._start.get(start)) is not None:
            length += self.remove(before)
            start = before
        if end < ceiling and end in self._length:
            length += self.remove(end)
        self._insert(start, length)

    def remove(self, start: int) -> int:
        """Removes the run that begins at ``start``; returns its length in slots."""
        length = self._length.pop(start)
        del self._start[start + length * self._slot_bytes]
        bucket = self._buckets[length.bit_length()]
        del bucket[start]
        if not bucket:
            del self._buckets[length.bit_length()]
        return length

    def _insert(self, start: int, length: int) -> None:
        self._length[start] = length
        self._start[start + length * self._slot_bytes] = start
        self._buckets.setdefault(length.bit_length(), {})[start] = None


@dataclass(slots=True, eq=False)
class Region(Generic[ShapeT]):
    """``nbytes`` from offset ``base`` on, cut into slots of one shape; ``shape`` is None while the region is free."""

    number: int
    base: int
    nbytes: int
    node: int | None = None
    shape: ShapeT | None = None
    slot_bytes: int = 0
    slots: int = 0
    slots_at: int = 0
    used_slots: int = 0

    def cut(self, shape: ShapeT, slot_bytes: int, slots: int, slots_at: int) -> None:
        """Cuts it into ``slots`` slots, the first of them at offset ``slots_at``."""
        self.shape, self.slot_bytes, self.slots, self.slots_at = shape, slot_bytes, slots, slots_at

    @property
    def slots_end(self) -> int:
        """Offset behind the last slot."""
        return self.slots_at + self.slots * self.slot_bytes


class RegionSlots(ABC, Generic[RegionT, ShapeT]):
    """The free regions, and the free slots of the others. Ints and sizes are in bytes.

    Args:
        regions: by number; all but the last have ``region_bytes``, and the first begins at ``base``.
    """

    def __init__(self, regions: Sequence[RegionT], region_bytes: int, base: int = 0) -> None:
        self.region_bytes = region_bytes
        self.used_bytes = 0
        self._regions = regions
        self._base = base
        self._runs: dict[tuple[ShapeT, int | None], RunIndex] = {}  # by shape and NUMA node
        self._find_free_regions()

    @abstractmethod
    def _cut(self, region: RegionT, shape: ShapeT) -> bool:
        """Cuts a free region into slots of a shape; False, and nothing has changed, where not one fits."""

    def _take_runs(
        self, shape: ShapeT, slot_bytes: int, count: int, node: int | None
    ) -> list[tuple[RegionT, int, int]]:
        """Takes up to ``count`` slots of a node, as runs: region, offset and number of slots of each.

        Regions of that shape come first: a run that holds all and is not much longer, else their longest runs. Then
        come free regions, from the lowest on.
        """
        runs = self._runs_of(shape, node, slot_bytes)
        taken: list[tuple[RegionT, int, int]] = []
        while count > 0:
            run = runs.take(count)
            if run is None:
                if not self._open_region(shape, node, runs):
                    break
                continue
            offset, slots = run
            region = self._regions[(offset - self._base) // self.region_bytes]
            region.used_slots += slots
            self.used_bytes += slots * slot_bytes
            count -= slots
            taken.append((region, offset, slots))
        if not runs:
            del self._runs[shape, node]
        return taken

    def _give_back_run(self, region: RegionT, offset: int, count: int) -> None:
        """Takes ``count`` neighbouring slots back; with its last slot the region is free again."""
        shape = region.shape
        assert shape is not None  # it has slots in use
        runs = self._runs_of(shape, region.node, region.slot_bytes)
        runs.add(offset, count, region.slots_at, region.slots_end)
        self.used_bytes -= count * region.slot_bytes
        region.used_slots -= count
        if not region.used_slots:
            runs.remove(region.slots_at)
            if not runs:
                del self._runs[shape, region.node]
            region.shape = None
            self._region_emptied(region)

    def _region_emptied(self, region: RegionT) -> None:
        heappush(self._free_regions[region.node], region.number)

    def _restore_region(self, region: RegionT, used: Sequence[int] | Ints) -> None:
        """Takes up a region that was cut before: the slots at the offsets ``used``, ascending, are in use."""
        shape = region.shape
        assert shape is not None
        runs = self._runs_of(shape, region.node, region.slot_bytes)
        ends = np.concatenate([used, [region.slots_end]])
        begins = np.concatenate([[region.slots_at], ends[:-1] + region.slot_bytes])
        free = (ends - begins) // region.slot_bytes
        for run in np.flatnonzero(free).tolist():
            runs.add(int(begins[run]), int(free[run]), region.slots_at, region.slots_end)
        if not runs:
            del self._runs[shape, region.node]
        region.used_slots = len(used)
        self.used_bytes += len(used) * region.slot_bytes

    def _find_free_regions(self) -> None:
        self._free_regions: defaultdict[int | None, list[int]] = defaultdict(list)  # heaps of numbers, by NUMA node
        for region in self._regions:
            if region.shape is None:
                self._free_regions[region.node].append(region.number)  # ascending, which makes it a heap

    def _open_region(self, shape: ShapeT, node: int | None, runs: RunIndex) -> bool:
        """Gives the node's lowest free region to a shape; False where there is none."""
        free = self._free_regions[node]
        # Only the last region can be too short, and being the highest it comes up only when it is the only one left.
        if not free or not self._cut(self._regions[free[0]], shape):
            return False
        region = self._regions[heappop(free)]
        runs.add(region.slots_at, region.slots, region.slots_at, region.slots_end)
        return True

    def _runs_of(self, shape: ShapeT, node: int | None, slot_bytes: int) -> RunIndex:
        runs = self._runs.get((shape, node))
        if runs is None:
            runs = self._runs[shape, node] = RunIndex(slot_bytes)
        return runs


def default_region_bytes(pool_bytes: int) -> int:
    """About a 64th of the pool, but at most 256 MiB; at least 4 MiB or, where the pool has not 12 times as much, the
    largest power of two of which it has.

    Each slot size may leave all but one slot of a region free, so blocks of ``n`` sizes are evicted while ``n - 1``
    regions are free at most, and what is left behind the last slot of each: ``n - 1`` twelfths of the smallest pool.
    """
    least = min(_MIN_REGION_BYTES, 1 << (pool_bytes // _LEAST_REGIONS).bit_length() - 1)
    return max(MIN_SLOT_BYTES, page_up(max(least, min(_MAX_REGION_BYTES, pool_bytes // _REGIONS))))


def pool_bytes_for(slot_bytes: int) -> int:
    """A size from which on a pool has regions that hold a slot of this size."""
    if slot_bytes > _MIN_REGION_BYTES:
        return _REGIONS * slot_bytes
    return _LEAST_REGIONS << (slot_bytes - 1).bit_length()


def shard_too_large(nbytes: int, region_bytes: int) -> ShardTooLarge:
    """The error for a shard that no region could hold; it says which pool_size would do."""
    slot_bytes = page_up(nbytes)
    shard, region = format_size(nbytes), format_size(region_bytes)
    larger = f"set pool_size to {exact_size(pool_bytes_for(slot_bytes))} or more, or "
    what = f"{larger if slot_bytes <= _MAX_REGION_BYTES else ''}make blocks smaller"
    return ShardTooLarge(f"A shard of {shard} is larger than the pool's regions, {region}: {what}.")


class PoolSegment(NamedTuple):
    """Bytes [begin, end) of the pool, which lie on one NUMA node."""

    begin: int
    end: int
    locality: Locality


def cut_pool(pool_bytes: int, region_bytes: int, nodes: Sequence[Locality]) -> list[PoolSegment]:
    """One segment per node, of whole regions and about equal size; fewer where there are fewer regions than nodes."""
    regions = -(-pool_bytes // region_bytes)
    bounds = [number * regions // len(nodes) * region_bytes for number in range(len(nodes))] + [pool_bytes]
    return [
        PoolSegment(begin, end, node)
        for node, begin, end in zip(nodes, bounds, bounds[1:], strict=False)
        if begin < end
    ]


@dataclass(slots=True, eq=False)
class _PoolRegion(Region[int]):
    """A region of the pool. Its shape is the size of its slots."""

    in_use: bytearray = field(default_factory=bytearray)
    """By number of the slot, whether it is handed out; empty while the region is free."""

    def slot(self, offset: int) -> int:
        """Number of the slot in use at this offset. Raises ValueError where there is none."""
        number, beside = divmod(offset - self.base, self.slot_bytes or 1)
        if beside or number >= len(self.in_use) or not self.in_use[number]:
            raise ValueError(f"Offset {offset} is no slot in use, or given back twice.")
        return number

    def mark(self, first: int, count: int, in_use: bool) -> None:
        """Hands out ``count`` neighbouring slots, or takes them back."""
        self.in_use[first : first + count] = (b"\1" if in_use else b"\0") * count


class SlotAllocator(RegionSlots[_PoolRegion, int]):
    """Hands out slots of the pool. A region's tail that holds no slot counts as free, as does the pool's tail.

    Args:
        pool_bytes: at least 8192.
        region_bytes: a multiple of 4096; see ``default_region_bytes`` when None. The last region may be shorter.
        nodes: NUMA nodes to spread the pool over; none leaves it to the kernel.
    """

    def __init__(self, pool_bytes: int, region_bytes: int | None = None, nodes: Sequence[Locality] = ()) -> None:
        if pool_bytes < MIN_SLOT_BYTES:
            raise BadGeometry(f"A pool of {pool_bytes} bytes holds no slot; it needs at least {MIN_SLOT_BYTES} bytes.")
        if region_bytes is None:
            region_bytes = default_region_bytes(pool_bytes)
        if region_bytes % PAGE_BYTES or not MIN_SLOT_BYTES <= region_bytes <= pool_bytes:
            raise BadGeometry(
                f"Regions of {region_bytes} bytes do not fit a pool of {pool_bytes} bytes; they must be a multiple of "
                f"{PAGE_BYTES}, at least {MIN_SLOT_BYTES} and at most the pool."
            )
        self.pool_bytes = pool_bytes
        self.segments = cut_pool(pool_bytes, region_bytes, nodes)
        self._nodes = [segment.locality.node for segment in self.segments] or [None]
        self.spilled_slots = 0
        """Slots that were asked for on one NUMA node and handed out on another."""
        regions = [
            _PoolRegion(number, base, min(region_bytes, (pool_bytes - base) // PAGE_BYTES * PAGE_BYTES))
            for number, base in enumerate(range(0, pool_bytes, region_bytes))
            if pool_bytes - base >= MIN_SLOT_BYTES
        ]
        for segment in self.segments:
            for region in regions[segment.begin // region_bytes : -(-segment.end // region_bytes)]:
                region.node = segment.locality.node
        super().__init__(regions, region_bytes)

    @property
    def free_bytes(self) -> int:
        return self.pool_bytes - self.used_bytes

    def slot_bytes(self, nbytes: int) -> int:
        """Size of the slot that holds a shard of ``nbytes``: the next multiple of 4096, at least 8192.

        Raises:
            ShardTooLarge: no region could hold it.
        """
        slot_bytes = max(MIN_SLOT_BYTES, page_up(nbytes))
        if slot_bytes > self.region_bytes:
            raise shard_too_large(nbytes, self.region_bytes)
        return slot_bytes

    def take(self, slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        """Hands out up to ``count`` slots, in runs where possible: ascending offsets, fewer where there is no room.

        Slots on NUMA node ``node`` come first.
        """
        if slot_bytes % PAGE_BYTES or not MIN_SLOT_BYTES <= slot_bytes <= self.region_bytes:
            raise ValueError(f"{slot_bytes} bytes are no slot size; ask slot_bytes() for one.")
        taken: list[int] = []
        nearest_first = sorted(self._nodes, key=lambda other: other != node)
        for other in nearest_first:
            before = len(taken)
            for region, offset, slots in self._take_runs(slot_bytes, slot_bytes, count - before, other):
                offsets = range(offset, offset + slots * slot_bytes, slot_bytes)
                region.mark((offset - region.base) // slot_bytes, slots, in_use=True)
                taken.extend(offsets)
            if nearest_first[0] == node != other:
                self.spilled_slots += len(taken) - before
        taken.sort()
        return taken

    def give_back(self, offsets: Collection[int]) -> None:
        """Takes slots back. Raises ValueError, and has taken none, when one of them is not handed out."""
        ordered = sorted(offsets)
        regions = [self._region_of(offset) for offset in ordered]
        numbers = [region.slot(offset) for region, offset in zip(regions, ordered, strict=True)]
        if len(set(ordered)) < len(ordered):
            raise ValueError("A slot is given back twice.")
        begin = 0
        for end in range(1, len(ordered) + 1):
            region = regions[begin]
            if end == len(ordered) or regions[end] is not region or numbers[end] - numbers[end - 1] != 1:
                region.mark(numbers[begin], end - begin, in_use=False)
                self._give_back_run(region, ordered[begin], end - begin)
                begin = end

    def restore(self, inherited: InheritedSlots) -> None:
        """Hands out slots that are in use already. Only for a new allocator.

        Raises:
            ValueError: slots that this allocator would not have handed out together, or not in their order.
        """
        slot_bytes = np.array([kind.slot_bytes for kind in inherited.kinds], np.int64)
        bounds = np.searchsorted(
            inherited.offsets, [region.base for region in self._regions] + [self.pool_bytes]
        ).tolist()
        if bounds[0] or bounds[-1] < len(inherited.offsets):
            raise ValueError(f"A slot lies outside the pool of {self.pool_bytes} bytes.")
        for region, (begin, end) in zip(self._regions, pairwise(bounds), strict=True):
            if begin < end:
                self._restore(region, inherited.offsets[begin:end], slot_bytes[inherited.kind_of[begin:end]])
        self._find_free_regions()

    def _restore(self, region: _PoolRegion, offsets: Ints, slot_bytes: Ints) -> None:
        each = int(slot_bytes[0])
        cut = each >= MIN_SLOT_BYTES and self._cut(region, each)
        numbers, beside = np.divmod(offsets - region.base, max(each, 1))
        if not cut or (slot_bytes != each).any() or beside.any() or offsets[-1] >= region.slots_end:
            raise ValueError(f"A slot contradicts the region at {region.base}, which would have slots of {each} bytes.")
        if (np.diff(numbers) <= 0).any():
            raise ValueError(f"Slots of the region at {region.base} are held twice.")
        np.frombuffer(region.in_use, np.uint8)[numbers] = 1
        self._restore_region(region, offsets)

    def neighbours(self, offset: int) -> list[int]:
        """Offsets of all slots in use in the region of this one, ascending, itself among them if it is in use."""
        region = self._region_of(offset)
        return list(compress(range(region.base, region.slots_end, region.slot_bytes or 1), region.in_use))

    def _cut(self, region: _PoolRegion, shape: int) -> bool:
        if region.nbytes < shape:
            return False
        region.cut(shape, shape, region.nbytes // shape, region.base)
        region.in_use = bytearray(region.slots)
        return True

    def _region_emptied(self, region: _PoolRegion) -> None:
        region.in_use = bytearray()
        super()._region_emptied(region)

    def _region_of(self, offset: int) -> _PoolRegion:
        number = offset // self.region_bytes
        if not 0 <= number < len(self._regions):
            raise ValueError(f"Offset {offset} lies outside the pool of {self.pool_bytes} bytes.")
        return self._regions[number]
