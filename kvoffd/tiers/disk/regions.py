"""The regions and slots of a disk's file, and which of their records the file does not have yet. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.tiers.disk.file_format import REGIONS_AT, RegionHead, SlotShape
from kvoffd.tiers.tier import TierBlock

HEAD = -1
"""In place of a slot: the head of its region."""


ShapeT = TypeVar("ShapeT", bound=Hashable)
RegionT = TypeVar("RegionT", bound="Region[Any]")
Ints: TypeAlias = npt.NDArray[np.int64]


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


@dataclass(slots=True, eq=False)
class Entry:
    """A slot in use: its block can be read, is being written, or was removed while it is being read."""

    block: TierBlock
    region: DiskRegion
    slot: int
    generation: int
    written_at: float
    """Seconds since 1970."""
    namespace_generation: int = 0
    used: int = 0
    """Number of its last use, among all uses."""
    ready: bool = False
    """Whether it has a record."""
    readers: int = 0
    suspect: bool = False
    """It may be torn: its file was found open, and it was not read since."""

    @property
    def offset(self) -> int:
        return self.region.offset_of(self.slot)


@dataclass(slots=True, eq=False)
class DiskRegion(Region[SlotShape]):
    """A region of the file: its page, the records of its slots, and the slots."""

    generation: int = 0
    newest_use: int = 0
    """Number of the last use of any of its blocks, among all uses."""
    entries: dict[int, Entry | None] = field(default_factory=dict)
    """Slots in use; None for those that were put aside after a failed write."""
    stale: set[int] = field(default_factory=set)
    """Slots of which the file may have a record that does not hold any more; HEAD for all of them."""
    clearing: set[int] = field(default_factory=set)
    """Those of ``stale`` whose records are being written."""

    def is_clear(self, slot: int) -> bool:
        """Whether the file has no record of the slot, so that a kill while it is written over leaves nothing torn."""
        return not {slot, HEAD} & (self.stale | self.clearing)

    def begin_clearing(self, units: set[int] | None) -> None:
        """Notes that the records of these units are being written; None for the head and all records."""
        if units is None:
            self.clearing = set(self.stale)
        else:
            self.clearing = self.stale.intersection([slot for unit in units for slot in self.slots_of(unit)])
        self.stale -= self.clearing

    def end_clearing(self, done: bool) -> None:
        """Notes that they were written, or not."""
        if not done:
            self.stale |= self.clearing
        self.clearing = set()

    @property
    def head(self) -> RegionHead:
        """The content of its first page."""
        assert self.shape is not None
        return RegionHead(self.number, self.generation, self.shape, self.slots)

    def cut_at(self, shape: SlotShape, slots: int, generation: int) -> None:
        """Cuts it into slots of a shape, as its first page will say or says."""
        self.cut(shape, shape.slot_bytes, slots, self.base + shape.slots_at(slots))
        self.generation = generation
        self.newest_use = 0

    def offset_of(self, slot: int) -> int:
        return self.slots_at + slot * self.slot_bytes

    def unit_of(self, slot: int) -> int:
        """Number of the unit of whole pages, among the region's records, that has this slot's record."""
        assert self.shape is not None
        return slot * self.shape.record_bytes // max(PAGE_BYTES, self.shape.record_bytes)

    def slots_of(self, unit: int) -> range:
        """The slots whose records are in this unit."""
        assert self.shape is not None
        each = max(1, PAGE_BYTES // self.shape.record_bytes)
        return range(unit * each, min(self.slots, (unit + 1) * each))


class Dirty:
    """The heads of regions and the units of records that the file does not have yet."""

    def __init__(self) -> None:
        self._units: dict[int, set[int] | None] = {}  # by region; None for its head and all its records

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, region: int) -> bool:
        return region in self._units

    def mark(self, region: DiskRegion, slot: int) -> None:
        """Notes that a slot's record changed."""
        units = self._units.setdefault(region.number, set())
        if units is not None:
            units.add(region.unit_of(slot))

    def mark_head(self, region: DiskRegion) -> None:
        """Notes that a region was cut, or is free again: its head and all its records changed."""
        self._units[region.number] = None

    def take(self, most_regions: int, most_units: int) -> dict[int, set[int] | None]:
        """Takes out up to so many regions, with their changed units, of which so many in all."""
        taken: dict[int, set[int] | None] = {}
        for number in list(islice(self._units, most_regions)):
            units = self._units[number]
            if units is not None and len(units) > most_units:
                taken[number] = some = set(islice(units, most_units))
                units -= some
                break
            taken[number] = self._units.pop(number)
            most_units -= len(units or ())
        return taken

    def give_back(self, taken: dict[int, set[int] | None]) -> None:
        """Puts back what could not be written."""
        for number, units in taken.items():
            since = self._units.setdefault(number, set())
            if since is not None and units is not None:
                since |= units
            else:
                self._units[number] = None


class DiskRegions(RegionSlots[DiskRegion, SlotShape]):
    """Hands out slots of a disk's file, one by one, as neighbours where possible; the lowest free region comes next.

    Args:
        region_bytes: a multiple of 4096.
        count: of regions.
    """

    def __init__(self, region_bytes: int, count: int) -> None:
        regions = [DiskRegion(number, REGIONS_AT + number * region_bytes, region_bytes) for number in range(count)]
        super().__init__(regions, region_bytes, REGIONS_AT)
        self.generation = 0
        """The last generation that a block or a region was given."""
        self.dirty = Dirty()
        self._held: set[int] = set()
        self._emptied_while_held: list[DiskRegion] = []

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, number: int) -> DiskRegion:
        return self._regions[number]

    def __iter__(self) -> Iterator[DiskRegion]:
        return iter(self._regions)

    def next_generation(self) -> int:
        """A generation higher than any before."""
        self.generation += 1
        return self.generation

    def take(self, shape: SlotShape) -> tuple[DiskRegion, int] | None:
        """A free slot of this shape, which the caller must put into the region's ``entries``; None without room."""
        runs = self._take_runs(shape, shape.slot_bytes, 1, None)
        if not runs:
            return None
        region, offset, _ = runs[0]
        return region, (offset - region.slots_at) // shape.slot_bytes

    def give_back(self, region: DiskRegion, slot: int) -> None:
        """Takes a slot back; with its last slot the region is free again."""
        del region.entries[slot]
        self._give_back_run(region, region.offset_of(slot), 1)

    def mark_stale(self, region: DiskRegion, slot: int) -> None:
        """Notes that a slot's record in the file, if there is one, does not hold any more."""
        self.dirty.mark(region, slot)
        region.stale.add(slot)

    def mark_all_stale(self, region: DiskRegion) -> None:
        """Notes that no record of a region that is in the file holds any more."""
        self.dirty.mark_head(region)
        region.stale = {HEAD}

    def hold(self, taken: Mapping[int, set[int] | None]) -> None:
        """Keeps regions from getting another shape while their records are being written."""
        self._held = set(taken)
        for number, units in taken.items():
            self[number].begin_clearing(units)

    def is_held(self, region: DiskRegion) -> bool:
        return region.number in self._held

    def end_hold(self, done: bool) -> None:
        """Ends ``hold``: the records were written, or not."""
        for number in self._held:
            self[number].end_clearing(done)
        self._held.clear()
        for region in self._emptied_while_held:
            super()._region_emptied(region)
        self._emptied_while_held.clear()

    def restore(self) -> None:
        """Takes up the regions that were read from a file, and their entries. Only for new regions."""
        for region in self._regions:
            if region.shape is not None and not region.entries:
                region.shape = None
                if region.number in self.dirty:
                    self.mark_all_stale(region)
            elif region.shape is not None:
                self._restore_region(region, [region.offset_of(slot) for slot in sorted(region.entries)])
        self._find_free_regions()

    def _region_emptied(self, region: DiskRegion) -> None:
        self.mark_all_stale(region)
        if region.number in self._held:
            self._emptied_while_held.append(region)
        else:
            super()._region_emptied(region)

    def _cut(self, region: DiskRegion, shape: SlotShape) -> bool:
        slots = shape.slots(self.region_bytes)
        if slots:
            region.cut_at(shape, slots, self.next_generation())
            self.dirty.mark_head(region)
        return slots > 0
