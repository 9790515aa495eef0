"""Which bytes of the file belong to which slot, and which records the file does not have yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from kvoffd.pool.runs import RunIndex
from kvoffd.pool.slots import PAGE_BYTES
from kvoffd.tiers.disk.format import REGIONS_AT, RegionHead, SlotShape
from kvoffd.tiers.tier import TierBlock


class Entry:
    """A slot in use: by a block that is there, being written, or gone but being read still."""

    __slots__ = ("block", "generation", "readers", "ready", "region", "slot", "suspect", "used", "written_at")

    def __init__(self, block: TierBlock, region: Region, slot: int, generation: int, written_at: float) -> None:
        self.block = block
        self.region = region
        self.slot = slot
        self.generation = generation
        self.written_at = written_at
        self.used = 0
        """Number of its last use among all uses."""
        self.ready = False
        """Whether it has a record."""
        self.readers = 0
        self.suspect = False
        """It was in a file that nobody had closed, and was not read since it was opened: it may be torn."""

    @property
    def offset(self) -> int:
        """Where in the file it is."""
        return self.region.offset_of(self.slot)


class Region:
    """A stretch of the file whose slots have one shape; None while it is nobody's."""

    __slots__ = ("base", "entries", "generation", "newest_use", "number", "shape", "slots", "slots_at")

    def __init__(self, number: int, base: int) -> None:
        self.number = number
        self.base = base
        self.generation = 0
        self.shape: SlotShape | None = None
        self.slots = 0
        self.slots_at = base
        self.newest_use = 0
        self.entries: dict[int, Entry | None] = {}
        """Slots in use; None for those that are put aside."""

    @property
    def head(self) -> RegionHead:
        """What its first page has to say."""
        assert self.shape is not None
        return RegionHead(self.number, self.generation, self.shape, self.slots)

    def cut(self, shape: SlotShape, slots: int, generation: int) -> None:
        """Gives it to a shape."""
        self.shape = shape
        self.slots = slots
        self.generation = generation
        self.slots_at = self.base + shape.slots_at(slots)
        self.newest_use = 0

    def offset_of(self, slot: int) -> int:
        """Where in the file a slot is."""
        assert self.shape is not None
        return self.slots_at + slot * self.shape.slot_bytes

    def unit_of(self, slot: int) -> int:
        """The piece of the records, of whole pages, that has this slot's."""
        assert self.shape is not None
        return slot * self.shape.record_bytes // max(PAGE_BYTES, self.shape.record_bytes)

    def slots_of(self, unit: int) -> range:
        """The slots whose records are in this piece."""
        assert self.shape is not None
        each = max(1, PAGE_BYTES // self.shape.record_bytes)
        return range(unit * each, min(self.slots, (unit + 1) * each))


class Dirty:
    """What the file says otherwise: heads of regions, and pieces of their records."""

    def __init__(self) -> None:
        self._units: dict[int, set[int] | None] = {}  # by region; None for its head

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, region: int) -> bool:
        return region in self._units

    def mark(self, region: Region, slot: int) -> None:
        """A record differs."""
        units = self._units.setdefault(region.number, set())
        if units is not None:
            units.add(region.unit_of(slot))

    def mark_head(self, region: Region) -> None:
        """The region was cut anew, or is nobody's: its head and all its records differ."""
        self._units[region.number] = None

    def take(self, most_regions: int) -> dict[int, set[int] | None]:
        """Takes off so many regions with what differs in them."""
        numbers = [number for number, _ in zip(self._units, range(most_regions), strict=False)]
        return {number: self._units.pop(number) for number in numbers}

    def give_back(self, taken: dict[int, set[int] | None]) -> None:
        """What was taken differs still, for all that is known."""
        for number in taken:
            self._units[number] = None


class Regions:
    """Hands out slots, one by one, as neighbours where possible; the lowest free region comes next.

    Args:
        region_bytes: a multiple of 4096.
        count: of regions.
    """

    def __init__(self, region_bytes: int, count: int) -> None:
        self.region_bytes = region_bytes
        self.generation = 0
        """The last that was given out: to a block or a region."""
        self.used_bytes = 0
        self.dirty = Dirty()
        self._regions = [Region(number, REGIONS_AT + number * region_bytes) for number in range(count)]
        self._free = list(range(count))  # a heap
        self._runs: dict[SlotShape, RunIndex] = {}
        self._held: set[int] = set()
        self._free_when_let_go: list[int] = []

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, number: int) -> Region:
        return self._regions[number]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def next_generation(self) -> int:
        """One more than any before."""
        self.generation += 1
        return self.generation

    def take(self, shape: SlotShape) -> tuple[Region, int] | None:
        """A free slot of this shape, which the caller must put into the region's ``entries``; None without room."""
        runs = self._runs.setdefault(shape, RunIndex())
        if not runs and not self._open(shape, runs):
            del self._runs[shape]
            return None
        run = runs.take(1, shape.slot_bytes)
        assert run is not None
        if not runs:
            del self._runs[shape]
        region = self._regions[(run[0] - REGIONS_AT) // self.region_bytes]
        self.used_bytes += shape.slot_bytes
        return region, (run[0] - region.slots_at) // shape.slot_bytes

    def give_back(self, region: Region, slot: int) -> None:
        """Takes a slot back, and the region with its last one."""
        del region.entries[slot]
        shape = region.shape
        assert shape is not None
        self.used_bytes -= shape.slot_bytes
        runs = self._runs.setdefault(shape, RunIndex())
        end = region.slots_at + region.slots * shape.slot_bytes
        runs.add(region.offset_of(slot), 1, shape.slot_bytes, region.slots_at, end)
        if not region.entries:
            runs.remove(region.slots_at, shape.slot_bytes)
            region.shape = None
            self.dirty.mark_head(region)
            if region.number in self._held:
                self._free_when_let_go.append(region.number)
            else:
                heappush(self._free, region.number)
        if not runs:
            del self._runs[shape]

    def hold(self, numbers: Iterable[int]) -> None:
        """Keeps regions from getting another shape: their records are being written where its slots might be."""
        self._held = set(numbers)

    def is_held(self, region: Region) -> bool:
        """Whether it is one of those."""
        return region.number in self._held

    def let_go(self) -> None:
        """Ends ``hold``."""
        self._held.clear()
        for number in self._free_when_let_go:
            heappush(self._free, number)
        self._free_when_let_go.clear()

    def restored(self) -> None:
        """Takes up what was read from a file: regions that were cut, and their entries. For regions that are new."""
        for region in self._regions:
            if region.shape is not None and not region.entries:
                region.shape = None
                if region.number in self.dirty:
                    self.dirty.mark_head(region)
            elif region.shape is not None:
                self._restore(region, region.shape)
        self._free = [region.number for region in self._regions if region.shape is None]

    def _restore(self, region: Region, shape: SlotShape) -> None:
        self.used_bytes += len(region.entries) * shape.slot_bytes
        runs = self._runs.setdefault(shape, RunIndex())
        end = region.offset_of(region.slots)
        free_from = 0
        for slot in [*sorted(region.entries), region.slots]:
            if free := slot - free_from:
                runs.add(region.offset_of(free_from), free, shape.slot_bytes, region.slots_at, end)
            free_from = slot + 1
        if not runs:
            del self._runs[shape]

    def _open(self, shape: SlotShape, runs: RunIndex) -> bool:
        slots = shape.slots(self.region_bytes)
        if not self._free or not slots:
            return False
        region = self._regions[heappop(self._free)]
        region.cut(shape, slots, self.next_generation())
        self.dirty.mark_head(region)
        end = region.offset_of(slots)
        runs.add(region.slots_at, slots, shape.slot_bytes, region.slots_at, end)
        return True
