"""The blocks of a disk tier, and which of them are evicted when there is no room. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from kvoffd.tiers.disk.file_format import SlotShape
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions, Entry
from kvoffd.tiers.tier import TierBlock, TierKey

AGE_STEP_S = 3600
ENTRY_BYTES, SHARD_BYTES = 724, 31
"""Memory of the daemon for a block on disk and for each of its shards; measured with keys of 32 bytes."""
LEAST_INDEX_BYTES, INDEX_PART = 32 << 20, 256
# Blocks that are being read cannot be evicted; a write that finds this many of them first is not worth a longer search.
_MOST_PASSED_OVER = 64
# Slots of a removed namespace, or of a region that is to have another shape: few enough not to hold the event loop up.
_FREED_AT_ONCE = 500


def index_bytes(size_bytes: int) -> int:
    """The memory that a disk tier of so many bytes may take for what it knows of its blocks."""
    return max(LEAST_INDEX_BYTES, size_bytes // INDEX_PART)


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


class DiskIndex:
    """The entries of all blocks: by key, and by their last use.

    For a new block the least recently used block of the same shape is evicted. A whole region of another shape is
    evicted instead, that of its least recently used block, where all blocks in it were used less recently, or where no
    block of the same shape can be evicted; one of very many blocks in parts, and new blocks find no room until it is
    done. Blocks that are being read or written stay. Where they take ``max_bytes`` of memory the least recently used
    one of any shape goes first: small blocks would cost too much.
    """

    def __init__(self, regions: DiskRegions, max_bytes: int) -> None:
        self.regions = regions
        self._max_bytes = max_bytes
        self._shards = 0
        self._shards_of = Counter[tuple[bytes, int]]()
        """Of the blocks of each group."""
        self.blocks = 0
        self.found_generations: dict[bytes, int] = {}
        """By fingerprint, the generations of the namespaces that the file had blocks of when it was opened."""
        self.ages: Counter[int] = Counter()
        """Number of blocks by the hour (AGE_STEP_S) since 1970 in which they were written."""
        self.removed_entries: list[dict[bytes, Entry]] = []
        """Entries of removed namespaces, no dict empty: no longer in the index, but still in their slots."""
        self._groups: dict[tuple[bytes, int], dict[bytes, Entry]] = {}
        self._writing: dict[TierKey, Entry] = {}
        self._by_use: dict[SlotShape, OrderedDict[Entry, None]] = {}
        self._uses = 0

    def groups(self) -> list[tuple[bytes, int]]:
        return list(self._groups)

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return GroupIndex(self._groups.get((fingerprint, group), {}))

    def get(self, block_id: TierKey) -> Entry | None:
        """The entry of a block that can be read."""
        return self._groups.get(block_id[:2], {}).get(block_id.key)

    def is_writing(self, block_id: TierKey) -> bool:
        return block_id in self._writing

    def take(
        self, block: TierBlock, written_at: float, namespace_generation: int = 0
    ) -> tuple[Entry | None, list[TierKey]]:
        """Takes a slot for a block that is to be written; returns it and the blocks that were evicted for it.

        The slot is None where there is no room.
        """
        shape = SlotShape.of(block)
        evicted: list[TierKey] = []
        while self._is_full(len(block.shards)):
            heads = [entry for other in self._by_use if (entry := self._coldest(other)) is not None]
            if not heads:
                return None, evicted
            coldest = min(heads, key=lambda entry: entry.used)
            if self.drop(coldest):
                evicted.append(coldest.block.id)
        place = self.regions.take(shape)
        if place is None:
            evicted += [entry.block.id for entry in self._make_room(shape) if self.drop(entry)]
            place = self.regions.take(shape)
        if place is None:
            return None, evicted
        entry = Entry(block, *place, self.regions.next_generation(), written_at, namespace_generation)
        entry.region.entries[entry.slot] = entry
        self._writing[block.id] = entry
        return entry, evicted

    def written(self, entry: Entry) -> bool:
        """Notes that a block was written; False where it was removed meanwhile: then its slot is free again."""
        if self._writing.get(entry.block.id) is not entry:
            self.regions.give_back(entry.region, entry.slot)
            return False
        del self._writing[entry.block.id]
        self.add(entry)
        self.regions.dirty.mark(entry.region, entry.slot)
        return True

    def not_written(self, entry: Entry, put_aside: bool) -> None:
        """Notes that a write failed. ``put_aside`` keeps the slot from being used again."""
        if self._writing.get(entry.block.id) is entry:
            del self._writing[entry.block.id]
        if put_aside:
            entry.region.entries[entry.slot] = None
        else:
            self.regions.give_back(entry.region, entry.slot)

    def add(self, entry: Entry) -> None:
        """Adds an entry whose block can be read, as the most recently used."""
        entry.ready = True
        name = entry.block.id[:2]
        self._groups.setdefault(name, {})[entry.block.id.key] = entry
        shape = entry.region.shape
        assert shape is not None
        self._by_use.setdefault(shape, OrderedDict())[entry] = None
        self._use(entry)
        self.blocks += 1
        self._shards += len(entry.block.shards)
        self._shards_of[name] += len(entry.block.shards)
        self.ages[int(entry.written_at // AGE_STEP_S)] += 1

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        for block_id in block_ids:
            entry = self.get(block_id)
            if entry is not None and (shape := entry.region.shape) is not None:
                self._by_use[shape].move_to_end(entry)
                self._use(entry)

    def drop(self, entry: Entry) -> bool:
        """Removes an entry; its slot is free when nobody reads it. False where the index did not have it any more."""
        name = entry.block.id[:2]
        group = self._groups.get(name, {})
        known = group.get(entry.block.id.key) is entry
        if known:
            del group[entry.block.id.key]
            self.blocks -= 1
            self._shards -= len(entry.block.shards)
            self._shards_of[name] -= len(entry.block.shards)
            if not group:
                del self._groups[name], self._shards_of[name]
        if entry.ready:
            entry.ready = False
            self._forget_use(entry)
            self.regions.mark_stale(entry.region, entry.slot)
            if not entry.readers:
                self.regions.give_back(entry.region, entry.slot)
        return known

    def read_done(self, entry: Entry) -> bool:
        """Notes that a read ended; False where the block was removed meanwhile."""
        entry.readers -= 1
        if not entry.ready and not entry.readers:
            self.regions.give_back(entry.region, entry.slot)
        return entry.ready and self.get(entry.block.id) is entry

    def forget_writing(self, block_ids: Iterable[TierKey]) -> None:
        """Removes blocks that are being written: they will not be readable afterwards."""
        for block_id in block_ids:
            self._writing.pop(block_id, None)

    def remove_namespace(self, fingerprint: bytes) -> int:
        """Removes a namespace at once; ``free_removed`` frees its slots. Returns how many blocks it had."""
        self.forget_writing([block_id for block_id in self._writing if block_id.fingerprint == fingerprint])
        before = self.blocks
        for name in [name for name in self._groups if name[0] == fingerprint]:
            entries = self._groups.pop(name)
            self.blocks -= len(entries)
            self._shards -= self._shards_of.pop(name)
            self.removed_entries.append(entries)
        return before - self.blocks

    def free_removed(self) -> list[TierKey]:
        """Frees some slots of removed namespaces. Returns their blocks."""
        gone: list[TierKey] = []
        while self.removed_entries and len(gone) < _FREED_AT_ONCE:
            _, entry = self.removed_entries[0].popitem()
            if not self.removed_entries[0]:
                del self.removed_entries[0]
            self.drop(entry)
            gone.append(entry.block.id)
        return gone

    def forget_removed(self, block_id: TierKey) -> bool:
        """Frees the slot that a block had before its namespace was removed; False where there is none."""
        for number, entries in enumerate(self.removed_entries):
            entry = entries.get(block_id.key)
            if entry is not None and entry.block.id == block_id:
                del entries[block_id.key]
                if not entries:
                    del self.removed_entries[number]
                self.drop(entry)
                return True
        return False

    def oldest_age_s(self, now: float) -> float:
        """Time since the oldest block was written, to the hour; 0 without blocks. ``now``: seconds since 1970."""
        return max(0.0, now - min(self.ages) * AGE_STEP_S) if self.ages else 0.0

    def _is_full(self, shards: int) -> bool:
        """Whether a block of so many shards would need more memory than the index may take."""
        blocks, shards = self.blocks + len(self._writing) + 1, self._shards + shards
        return blocks * ENTRY_BYTES + shards * SHARD_BYTES > self._max_bytes

    def _make_room(self, shape: SlotShape) -> list[Entry]:
        """The entries to evict for one more of this shape; none where none can be."""
        own = self._coldest(shape)
        region = self._coldest_region(shape, own)
        if region is not None:
            return [entry for entry in islice(region.entries.values(), _FREED_AT_ONCE) if entry is not None]
        return [own] if own is not None else []

    def _coldest(self, shape: SlotShape) -> Entry | None:
        looked_at = islice(self._by_use.get(shape, ()), _MOST_PASSED_OVER)
        return next((entry for entry in looked_at if not entry.readers), None)

    def _coldest_region(self, shape: SlotShape, own: Entry | None) -> DiskRegion | None:
        heads = [next(iter(entries)) for other, entries in self._by_use.items() if other != shape]
        for entry in sorted(heads, key=lambda entry: entry.used):
            region = entry.region
            if own is not None and region.newest_use >= own.used:
                continue
            can_go = all(other is not None and other.ready and not other.readers for other in region.entries.values())
            if can_go and not self.regions.is_held(region):
                return region
        return None

    def _use(self, entry: Entry) -> None:
        self._uses += 1
        entry.used = entry.region.newest_use = self._uses

    def _forget_use(self, entry: Entry) -> None:
        shape = entry.region.shape
        assert shape is not None
        del self._by_use[shape][entry]
        if not self._by_use[shape]:
            del self._by_use[shape]
        step = int(entry.written_at // AGE_STEP_S)
        self.ages[step] -= 1
        if not self.ages[step]:
            del self.ages[step]
