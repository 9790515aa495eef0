"""Which blocks a disk tier has, and which of them go when there is no room. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kvoffd.tiers.disk.format import SlotShape
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions, Entry
from kvoffd.tiers.tier import TierBlock, TierKey

AGE_STEP_S = 3600
# Blocks that are being read are passed over; behind so many of them a write is not worth the search.
_MOST_PASSED_OVER = 64


class GroupIndex(Mapping[bytes, TierBlock]):
    """The blocks of one group, by key: a view."""

    def __init__(self, entries: dict[bytes, Entry]) -> None:
        self._entries = entries

    def __getitem__(self, key: bytes) -> TierBlock:
        return self._entries[key].block

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Taken(NamedTuple):
    """What ``DiskIndex.take`` did."""

    entry: Entry | None
    """A slot for the block; None where there is no room."""
    evicted: list[TierKey]


class DiskIndex:
    """All entries of the regions: by key, and by their last use.

    The least recently used block of the wanted shape makes room; the whole region of another shape's least recently
    used block does where all in it are colder, or where nothing of the wanted shape can go. Blocks that are being read
    or written stay.
    """

    def __init__(self, regions: DiskRegions) -> None:
        self.regions = regions
        self.blocks = 0
        self.ages: Counter[int] = Counter()
        """Number of blocks by the time they were written at, in steps of AGE_STEP_S since 1970."""
        self.leaving: list[Iterator[Entry]] = []
        """Entries of namespaces that were removed: out of the index, in their slots still."""
        self._groups: dict[tuple[bytes, int], dict[bytes, Entry]] = {}
        self._writing: dict[TierKey, Entry] = {}
        self._by_use: dict[SlotShape, OrderedDict[Entry, None]] = {}
        self._uses = 0

    def groups(self) -> list[tuple[bytes, int]]:
        """Fingerprints and groups that there are blocks of."""
        return list(self._groups)

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        """The blocks of a group."""
        return GroupIndex(self._groups.get((fingerprint, group), {}))

    def get(self, block_id: TierKey) -> Entry | None:
        """The entry of a block that is there."""
        return self._groups.get(block_id[:2], {}).get(block_id.key)

    def is_writing(self, block_id: TierKey) -> bool:
        """Whether the block is on its way."""
        return block_id in self._writing

    def take(self, block: TierBlock, written_at: float) -> Taken:
        """Takes a slot for a block that is to be written; others may have to go for it."""
        shape = SlotShape.of(block)
        evicted: list[TierKey] = []
        place = self.regions.take(shape)
        if place is None:
            evicted = [entry.block.id for entry in self._make_room(shape) if self.drop(entry)]
            place = self.regions.take(shape)
        if place is None:
            return Taken(None, evicted)
        entry = Entry(block, *place, self.regions.next_generation(), written_at)
        entry.region.entries[entry.slot] = entry
        self._writing[block.id] = entry
        return Taken(entry, evicted)

    def written(self, entry: Entry) -> bool:
        """The block is in its slot and can be read; False where it was forgotten meanwhile, and the slot is free."""
        if self._writing.get(entry.block.id) is not entry:
            self.regions.give_back(entry.region, entry.slot)
            return False
        del self._writing[entry.block.id]
        self.add(entry)
        self.regions.dirty.mark(entry.region, entry.slot)
        return True

    def not_written(self, entry: Entry, put_aside: bool) -> None:
        """The write came to nothing. ``put_aside`` keeps the slot from being used again."""
        if self._writing.get(entry.block.id) is entry:
            del self._writing[entry.block.id]
        if put_aside:
            entry.region.entries[entry.slot] = None
        else:
            self.regions.give_back(entry.region, entry.slot)

    def add(self, entry: Entry) -> None:
        """Takes up an entry whose block can be read, as the last one used."""
        entry.ready = True
        self._groups.setdefault(entry.block.id[:2], {})[entry.block.id.key] = entry
        shape = entry.region.shape
        assert shape is not None
        self._by_use.setdefault(shape, OrderedDict())[entry] = None
        self._use(entry)
        self.blocks += 1
        self.ages[int(entry.written_at // AGE_STEP_S)] += 1

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        """Notes a use."""
        for block_id in block_ids:
            entry = self.get(block_id)
            if entry is not None and entry.region.shape is not None:
                self._by_use[entry.region.shape].move_to_end(entry)
                self._use(entry)

    def drop(self, entry: Entry) -> bool:
        """Forgets a block that is there; its slot is free when nobody reads it. False where it had left the index."""
        group = self._groups.get(entry.block.id[:2], {})
        known = group.get(entry.block.id.key) is entry
        if known:
            del group[entry.block.id.key]
            if not group:
                del self._groups[entry.block.id[:2]]
            self.blocks -= 1
        if entry.ready:
            entry.ready = False
            self._out_of_use(entry)
            self.regions.dirty.mark(entry.region, entry.slot)
            if not entry.readers:
                self.regions.give_back(entry.region, entry.slot)
        return known

    def read_done(self, entry: Entry) -> bool:
        """A reader is done; False where the block has left meanwhile."""
        entry.readers -= 1
        if not entry.ready and not entry.readers:
            self.regions.give_back(entry.region, entry.slot)
        return entry.ready and self.get(entry.block.id) is entry

    def forget_writing(self, block_ids: Iterable[TierKey]) -> None:
        """Blocks on their way will not be there when they are written."""
        for block_id in block_ids:
            self._writing.pop(block_id, None)

    def remove_namespace(self, fingerprint: bytes) -> list[TierKey]:
        """Takes a namespace out of the index at once; its slots are given back by ``empty_slots``."""
        self.forget_writing([block_id for block_id in self._writing if block_id.fingerprint == fingerprint])
        removed: list[TierKey] = []
        for name in [name for name in self._groups if name[0] == fingerprint]:
            entries = self._groups.pop(name)
            removed += [entry.block.id for entry in entries.values()]
            self.leaving.append(iter(list(entries.values())))
        self.blocks -= len(removed)
        return removed

    def empty_slots(self, most: int) -> bool:
        """Gives back so many slots of removed namespaces; False when there are none left."""
        while self.leaving and most > 0:
            entries = list(islice(self.leaving[0], most))
            for entry in entries:
                self.drop(entry)
            if len(entries) < most:
                del self.leaving[0]
            most -= len(entries)
        return bool(self.leaving)

    def oldest(self) -> int | None:
        """The step of ``ages`` in which the oldest block was written."""
        return min((step for step, count in self.ages.items() if count), default=None)

    def _make_room(self, shape: SlotShape) -> list[Entry]:
        """What has to go for one more of this shape; nothing where nothing can."""
        own = self._coldest(shape)
        region = self._coldest_region(shape)
        if region is not None and (own is None or region.newest_use < own.used):
            return [entry for entry in region.entries.values() if entry is not None]
        return [own] if own is not None else []

    def _coldest(self, shape: SlotShape) -> Entry | None:
        looked_at = islice(self._by_use.get(shape, ()), _MOST_PASSED_OVER)
        return next((entry for entry in looked_at if not entry.readers), None)

    def _coldest_region(self, shape: SlotShape) -> DiskRegion | None:
        heads = [next(iter(entries)) for other, entries in self._by_use.items() if other != shape]
        for entry in sorted(heads, key=lambda entry: entry.used):
            region = entry.region
            can_go = all(other is not None and other.ready and not other.readers for other in region.entries.values())
            if can_go and not self.regions.is_held(region):
                return region
        return None

    def _use(self, entry: Entry) -> None:
        self._uses += 1
        entry.used = entry.region.newest_use = self._uses

    def _out_of_use(self, entry: Entry) -> None:
        shape = entry.region.shape
        assert shape is not None
        del self._by_use[shape][entry]
        if not self._by_use[shape]:
            del self._by_use[shape]
        step = int(entry.written_at // AGE_STEP_S)
        self.ages[step] -= 1
        if not self.ages[step]:
            del self.ages[step]
