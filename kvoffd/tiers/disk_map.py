"""The blocks on a disk: their slots, and an index that finds them by key."""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvoffd.pool.allocator import PAGE_BYTES, SlotAllocator, page_up
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.files import aligned_buffer, read_all
from kvoffd.system.native import CHAR_P, COUNT, INT, ITEMS, KEYS, VOID_P, declare, native
from kvoffd.system.structures import DISK_INDEX, DISK_REGION
from kvoffd.tiers.disk_file import HOUR_S, DiskFile, OpeningStopped
from kvoffd.tiers.header import HEADER_BYTES, BlockGroup, decode_header

declare(keep_gil=False, disk_enter=(COUNT, VOID_P, *ITEMS, VOID_P))
declare(
    disk_open=(INT, VOID_P, CHAR_P),
    disk_close=(None, VOID_P),
    disk_find=(None, VOID_P, *KEYS, VOID_P),
    disk_remove=(None, VOID_P, *ITEMS),
)

NO_SLOT = 2**32 - 1
"""Answer of ``find`` about a key without a block."""
LOOKED_AT_ONCE, REGIONS_AT_ONCE = 4096, 64
"""Slots and regions that the clock hand passes, or that a search for a removed namespace examines, before the daemon's
thread does other work: one or two milliseconds."""
CLEARED_AT_ONCE = 256
"""Blocks of a cleared namespace, or of a region that changes its slot size, whose slots are freed before the daemon's
thread does other work: one or two milliseconds."""
EVICTED_AT_ONCE = 16
"""Neighbouring blocks that the clock hand evicts together, so that one call can write their slots."""
SAMPLES = 128
"""Blocks of a group in one region that are remembered when a disk is opened."""
HEADERS_TRIED, ALL_HEADERS_TRIED = 1024, 1 << 16
"""Headers that are read to identify a group until one has it, and for all groups, about ten seconds. One is enough
unless an index is older than the data, after a power cut: then most blocks may be written over, neighbours first. So
they are spread evenly."""
NEVER = 2**32 - 1
"""Hour of a slot without a block."""


@dataclass(slots=True, eq=False)
class KnownGroup:
    """A group that has blocks, from its first one until it is removed as a whole."""

    group: BlockGroup
    number: int = 0
    """The group's number in ``Region.groups``; 0 before ``add_group``."""
    blocks: int = 0
    is_readable: bool = True
    """False once it is removed as a whole."""
    padded: Sequence[int] = ()
    """Bytes of a block's shards in the file, by rank."""
    slot_bytes: int = 0
    """Bytes of a block in the file."""

    def __post_init__(self) -> None:
        self.padded = list(map(page_up, self.group.lengths))
        self.slot_bytes = HEADER_BYTES + sum(self.padded)


class _RegionAddresses(ctypes.Structure):
    """``struct disk_region`` of disk_index.c."""

    __slots__ = ()
    _fields_ = DISK_REGION


class _Index(ctypes.Structure):
    """``struct disk_index`` of disk_index.c."""

    __slots__ = ()
    _fields_ = DISK_INDEX


class _LastWrite(NamedTuple):
    """Latest write to a region by an earlier daemon: its second since 1970, and its place in the region."""

    second: int
    place: int


class PinnedSlot(NamedTuple):
    """A slot that is pinned for a block's read or write.

    Attributes:
        offset: of the slot's header in the file.
        nbytes: bytes of the block in the file.
        padded: bytes of its shards in the file, by rank.
    """

    slot: int
    offset: int
    nbytes: int
    padded: Sequence[int]


class Passed(NamedTuple):
    """Blocks to evict that the clock hand has found: ``victims``, or all of a ``region``, or none.

    Attributes:
        victims: slots of the wanted size, with the blocks to evict.
        region: number of a region of another slot size, all of whose blocks go.
        blocks: number of the blocks to evict.
        is_round: whether the hand has passed all regions twice, and found nothing. If it found nothing otherwise, it
            continues at the next call.
    """

    victims: Sequence[int] = ()
    region: int | None = None
    blocks: int = 0
    is_round: bool = False


class Region:
    """State of a region's slots, by their places in it: see ``DiskMap``.

    The arrays of which C has the ``addresses`` are never replaced.

    Attributes:
        begin: offset of its first slot in the file.
    """

    def __init__(self, begin: int, slot_bytes: int, slots: int) -> None:
        self.begin, self.slot_bytes = begin, slot_bytes
        self.slots = slots
        self.keys = np.zeros((slots, MAX_KEY_BYTES), np.uint8)
        self.key_bytes = np.zeros(slots, np.uint8)
        self.groups = array("I", bytes(4 * slots))
        """Numbers of the blocks' groups; 0 if a slot has none. ``group_numbers`` is the same memory: an array is faster
        for one slot, NumPy for many."""
        self.pins = array("H", bytes(2 * slots))
        self.used = bytearray(slots)
        """Whether the slot has a block that was used since the hand last passed."""
        self.found = bytearray(slots)
        """Whether an earlier daemon wrote the block."""
        self.hours = array("I", [NEVER]) * slots
        """Hour in which the block was written, since 1970."""
        self.hand = 0
        """The slot that the clock hand comes to next, if it is in this region."""

    def addresses(self) -> _RegionAddresses:
        return _RegionAddresses(self.keys.ctypes.data, self.key_bytes.ctypes.data, self.groups.buffer_info()[0])

    @property
    def group_numbers(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.groups, np.uint32)

    def key(self, place: int) -> bytes:
        return self.keys[place, : self.key_bytes[place]].tobytes()

    def skip_all(self) -> int:
        """Move the hand past all slots, and clear their marks of use. Returns how many blocks the region has, if all
        are to be evicted; 0 if more than half were used, or a slot is pinned."""
        there, used = int(np.count_nonzero(self.group_numbers)), np.count_nonzero(np.frombuffer(self.used, np.uint8))
        self.hand, self.used = self.slots, bytearray(self.slots)
        return 0 if 2 * used > there or np.frombuffer(self.pins, np.uint16).any() else there

    def evict_next(self, looked_at: int) -> list[int]:
        """Move the hand over at most ``looked_at`` slots; return the places of the blocks to evict, which were not used
        since it last passed. It stops at the first ones, and clears the marks of those that were."""
        end = min(self.slots, self.hand + looked_at)
        most = max(1, min(EVICTED_AT_ONCE, self.slots // 8))  # a small part of a region with few slots
        victims: list[int] = []
        while self.hand < end and len(victims) < most:
            place = self.hand
            self.hand += 1
            if not self.groups[place] or self.pins[place]:
                continue
            if self.used[place]:
                self.used[place] = 0
            else:
                victims.append(place)
        return victims


class DiskMap:
    """The slots of a disk's file and the blocks in them. Not thread-safe.

    Its methods change the state of a slot. ``DiskTier`` and ``Clearing``, which know how writes have ended, also change
    ``put_aside``, ``to_overwrite`` and ``uncleared``.

    | the slot             | has a group | is pinned by        | until                                              |
    |----------------------|-------------|---------------------|----------------------------------------------------|
    | is free              | no          |                     | a write takes it                                   |
    | is being written     | no          | the write           | ``add``; if the write fails, its record is cleared |
    | has a block          | yes         | reads               | ``drop``                                           |
    | is to be overwritten | no          |                     | a write takes it, or its record is cleared         |
    | is being cleared     | no          | the clearing, reads | ``unpin`` by the last of them: then it is free, or |
    |                      |             |                     | to be overwritten if its record is still there     |
    | is put aside         | no          |                     | the tier is closed                                 |

    Attributes:
        blocks, nbytes: number of readable blocks, and their bytes.
        put_aside: slots that are never freed because a write to them failed.
        to_overwrite: slots without a block, by slot size, whose records are still there: of evicted blocks, and of
            those whose records could not be cleared. The next writes overwrite them; until then a later daemon would
            find the blocks.
        uncleared: slots that are pinned or put aside, and whose records could not be cleared.
    """

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        head = file.head
        self.slots = SlotAllocator(head.regions * head.region_bytes, head.region_bytes)
        self.regions: OrderedDict[int, Region] = OrderedDict()
        """Regions by number, in the order in which the hand comes to them. (Removals at the start slow a dict.)"""
        self.readable_by_tag: dict[int, KnownGroup] = {}
        """Groups with readable blocks."""
        self.by_number: dict[int, KnownGroup] = {}
        """These, and groups that are being removed as a whole: their slots are not free yet."""
        self.last_number = 0
        """Number of the group that was added last."""
        self._addresses = (_RegionAddresses * head.regions)()
        """Addresses of the regions' arrays, by number, for ``_index``. They hold while the region is in ``regions``."""
        self._native = native()
        regions_at = ctypes.addressof(self._addresses)
        self._index = _Index(at_regions=regions_at, slots_per_region=self.slots.slots_per_region)
        """Finds the slots of blocks by group and key."""
        self._index_at = ctypes.addressof(self._index)
        if not self._native.disk_open(self._index_at, os.urandom(16)):
            raise MemoryError
        self._close_index = weakref.finalize(self, self._native.disk_close, ctypes.pointer(self._index))
        self.blocks = self.nbytes = 0
        self.put_aside: set[int] = set()
        self.to_overwrite: dict[int, list[int]] = {}
        self.uncleared: set[int] = set()
        self._hours: Counter[int] = Counter()
        """Number of blocks by the hour in which they were written."""
        self._last_writes: dict[int, _LastWrite] = {}
        """The earlier daemon's, by region, while the tier is opened: see ``_restore_hand``."""

    def open(self, generation: Callable[[bytes], int], should_stop: Callable[[], bool]) -> dict[bytes, int]:
        """Restore the blocks of the index, except those of outdated generations. Returns the newest generations.

        A record has its group's tag alone, a hash. The group is in the headers of the blocks: some are read.
        """
        samples = self._read_index(should_stop)
        newest: dict[bytes, int] = {}
        left = ALL_HEADERS_TRIED
        for tag, (number, parts) in samples.items():
            if should_stop():
                raise OpeningStopped(f"{self._file.path} was not opened: that was stopped.")
            slots = _spread(np.concatenate(parts), max(1, min(HEADERS_TRIED, left)))
            group, tried = self._group_of(tag, slots)
            left -= tried
            if group is not None:
                self.readable_by_tag[tag] = KnownGroup(group, number)
                newest[group.fingerprint] = max(group.generation, newest.get(group.fingerprint, 0))
        for known in list(self.readable_by_tag.values()):
            group = known.group
            if group.generation < max(generation(group.fingerprint), newest[group.fingerprint]):
                del self.readable_by_tag[group.tag]
        self.last_number = len(samples)
        self.by_number = {known.number: known for known in self.readable_by_tag.values()}
        self._enter_readable()
        self._allocate_found()
        self._restore_hand()
        return newest

    def _enter_readable(self) -> None:
        """Add the readable blocks to the index, and clear all other records, so that these never come back."""
        is_known = np.zeros(self.last_number + 1, np.bool_)  # by the number of the group
        is_known[list(self.by_number)] = True
        gone: list[int] = []  # slots whose records are cleared
        for number, region in self.regions.items():
            first, numbers = number * self.slots.slots_per_region, region.group_numbers
            gone += (np.flatnonzero((numbers > 0) & ~is_known[numbers]) + first).tolist()
            there = (np.flatnonzero(is_known[numbers]) + first).astype(np.uint32)
            # A key has two records if its block was evicted and written again: that of the higher slot counts.
            gone += self.enter(there.tobytes(), len(there))
        for slot in gone:
            region, place = self.at(slot)
            region.groups[place], region.hours[place] = 0, NEVER
        self._file.clear_records(gone)

    def _read_index(self, should_stop: Callable[[], bool]) -> dict[int, tuple[int, list[npt.NDArray[np.int64]]]]:
        """Fill the regions with possible blocks, by their records. Returns by tag the number that its group gets, and
        some of its slots in each region."""
        file, samples = self._file, dict[int, tuple[int, list[npt.NDArray[np.int64]]]]()
        for number, pages in enumerate(file.read_slot_pages().tolist()):
            if should_stop():
                raise OpeningStopped(f"{file.path} was not opened: that was stopped.")
            first, size = number * file.slots_per_region, pages * PAGE_BYTES
            if not self.slots.slot_size(1) <= size <= self.slots.region_bytes:
                # Its slot size did not reach the device. Old records would count once the region is reused.
                file.clear_region(number)
                continue
            slots = self.slots.slots_in(number, size)
            records = file.read_records(first, slots)
            sound = (records["tag"] != 0) & (records["key_bytes"] > 0) & (records["key_bytes"] <= MAX_KEY_BYTES)
            places = np.flatnonzero(sound & (records["nbytes"] <= size - HEADER_BYTES))
            if not len(places):
                continue
            region, records = self.open_region(number, size), records[places]
            region.keys[places] = np.ascontiguousarray(records["key"]).view(np.uint8).reshape(-1, MAX_KEY_BYTES)
            region.key_bytes[places] = records["key_bytes"]
            np.frombuffer(region.hours, np.uint32)[places] = records["written_at"]
            np.frombuffer(region.found, np.uint8)[places] = 1
            seconds = records["written_at"].astype(np.int64) * HOUR_S + records["second"]
            last = len(seconds) - 1 - int(seconds[::-1].argmax())
            self._last_writes[number] = _LastWrite(int(seconds[last]), int(places[last]))
            tags, of_tag, counts = np.unique(records["tag"], return_inverse=True, return_counts=True)
            slots_by_tag = (places + first)[np.argsort(of_tag, kind="stable")]  # the slots of each tag together
            begin, group_numbers = 0, list[int]()
            for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
                group_number, parts = samples.setdefault(tag, (len(samples) + 1, []))
                parts.append(_spread(slots_by_tag[begin : begin + count], SAMPLES))
                group_numbers.append(group_number)
                begin += count
            region.group_numbers[places] = np.array(group_numbers, np.uint32)[of_tag]
        return samples

    def _group_of(self, tag: int, slots: npt.NDArray[np.int64]) -> tuple[BlockGroup | None, int]:
        """Return the group of a tag from the headers of some slots, None if none of them has it, and how many were
        read."""
        for number, slot in enumerate(slots.tolist(), start=1):
            page = aligned_buffer(HEADER_BYTES)
            try:
                read_all(self._file.calls, self._file.fd, [page], self.offset(slot))
            except OSError:
                continue
            if (block := decode_header(page)) is not None and block.group.tag == tag:
                return block.group, number
        return None, len(slots)

    def _allocate_found(self) -> None:
        """Count the blocks found, allocate their slots, and close regions without any."""
        slots, sizes = [np.empty(0, np.uint32)], np.zeros(self.slots.regions, np.int64)
        counts = np.zeros(self.last_number + 1, np.int64)
        for number, region in list(self.regions.items()):
            there = np.flatnonzero(region.group_numbers)
            if not len(there):
                del self.regions[number]
                continue
            slots.append((there + number * self.slots.slots_per_region).astype(np.uint32))
            sizes[number] = region.slot_bytes
            counts += np.bincount(region.group_numbers[there], minlength=len(counts))
            hours, of_hour = np.unique(np.frombuffer(region.hours, np.uint32)[there], return_counts=True)
            self._hours.update(dict(zip(hours.tolist(), of_hour.tolist(), strict=True)))
        self.slots.restore(np.concatenate(slots), sizes)
        for known in self.by_number.values():
            known.blocks = int(counts[known.number])
            self.blocks += known.blocks
            self.nbytes += known.blocks * known.group.nbytes

    def _restore_hand(self) -> None:
        """Put the hand behind the latest write, where an earlier daemon had it. If it began at the first region, it
        would evict what was written last before what is older."""
        writes, self._last_writes = self._last_writes, {}
        for number in sorted(self.regions, key=lambda number: writes[number].second):
            self.regions.move_to_end(number)
        if not self.regions:
            return
        number, region = next(reversed(self.regions.items()))
        place = writes[number].place + 1
        if region.group_numbers[place:].any():  # else it had passed the region, which comes last
            region.hand = place
            self.regions.move_to_end(number, last=False)

    def known(self, group: BlockGroup) -> KnownGroup | None:
        """Return what is known of a group with readable blocks; None if it has none, or of another geometry."""
        known = self.readable_by_tag.get(group.tag)
        return known if known is not None and known.group == group else None

    def find(self, group: BlockGroup, keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """Return the slots of readable blocks by key; NO_SLOT if there is none, or one of another geometry."""
        if (known := self.known(group)) is None or not keys:
            return np.full(len(keys), NO_SLOT, np.uint32)
        sizes, found = set(map(len, keys)), np.empty(len(keys), np.uint32)
        if len(sizes) > 1:  # the namespace once had keys of another length
            return np.concatenate([self.find(group, [key]) for key in keys])
        joined, size = b"".join(keys), sizes.pop()
        self._native.disk_find(self._index_at, known.number, joined, len(keys), size, found.ctypes.data)
        return found

    def slots_of(self, group: BlockGroup, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the keys that have one."""
        return [slot for slot in self.find(group, keys).tolist() if slot != NO_SLOT]

    def enter(self, slots: bytes, count: int) -> list[int]:
        """Add the blocks of slots, numbers of 4 bytes, to the index. Returns the slots of replaced blocks, which had
        the same keys."""
        replaced = np.empty(count, np.uint32)
        found = self._native.disk_enter(self._index_at, slots, count, replaced.ctypes.data)
        return cast(list[int], replaced[:found].tolist())

    def keys_of(self, known: KnownGroup) -> list[bytes]:
        return [
            region.key(place)
            for region in self.regions.values()
            for place in np.flatnonzero(region.group_numbers == known.number).tolist()
        ]

    @property
    def oldest_hour(self) -> int | None:
        """Hour in which the oldest block was written, since 1970; None without blocks."""
        return min(self._hours, default=None)

    def open_region(self, number: int, slot_bytes: int) -> Region:
        begin = PAGE_BYTES + number * self.slots.region_bytes  # the first page identifies the file
        region = self.regions[number] = Region(begin, slot_bytes, self.slots.slots_in(number, slot_bytes))
        self._addresses[number] = region.addresses()
        return region

    def at(self, slot: int) -> tuple[Region, int]:
        """Return a slot's region, and its place there."""
        number, place = divmod(slot, self.slots.slots_per_region)
        return self.regions[number], place

    def offset(self, slot: int) -> int:
        """Return a slot's offset in the file."""
        region, place = self.at(slot)
        return region.begin + place * region.slot_bytes

    # --- the state of slots ----------------------------------------------------------------------

    def pin_for(self, known: KnownGroup, slot: int) -> PinnedSlot:
        """Pin a slot for a read or write of a group's block, until ``end_read``, or ``add`` or ``unpin``."""
        region, place = self.at(slot)
        region.pins[place] += 1
        return PinnedSlot(slot, region.begin + place * region.slot_bytes, known.slot_bytes, known.padded)

    def pin(self, slots: Sequence[int]) -> None:
        """Keep slots, which a write to the index uses, from becoming free."""
        for slot in slots:
            region, place = self.at(slot)
            region.pins[place] += 1

    def unpin(self, slots: Sequence[int]) -> None:
        """Unpin slots whose read, write or clearing has ended. Frees those without a block and another pin."""
        free: list[int] = []
        for slot in slots:
            region, place = self.at(slot)
            region.pins[place] -= 1
            if region.pins[place] or region.groups[place] or slot in self.put_aside:
                continue
            if slot in self.uncleared:
                self.uncleared.remove(slot)
                self.to_overwrite.setdefault(region.slot_bytes, []).append(slot)
            else:
                free.append(slot)
        if not free:
            return
        self.slots.free(np.array(free, np.uint32))
        for number in {slot // self.slots.slots_per_region for slot in free}:
            if not self.slots.slot_bytes[number]:  # all of it is free: its next slots may have another size
                del self.regions[number]

    def add_group(self, known: KnownGroup) -> None:
        """Add a new group, instead of one of another geometry, whose blocks were removed."""
        if (before := self.readable_by_tag.get(known.group.tag)) is not None:
            del self.by_number[before.number]
        known.number = self.last_number = self.last_number + 1
        self.readable_by_tag[known.group.tag] = self.by_number[known.number] = known

    def end_read(self, slot: int, *, is_whole: bool) -> bool:
        """Unpin a slot that was read. Return whether it still has a readable block: then that is the one that was read,
        since a pinned slot gets no other. ``is_whole``: the bytes were those of the block, which counts as used."""
        region, place = self.at(slot)
        known = self.by_number.get(region.groups[place])
        is_there = known is not None and known.is_readable
        if is_there and is_whole:
            region.found[place], region.used[place] = 0, 1
        self.unpin([slot])
        return is_there

    def was_found(self, slot: int) -> bool:
        """Return whether an earlier daemon wrote the slot's block, and no read has shown that it is whole."""
        region, place = self.at(slot)
        return bool(region.found[place])

    def spare(self, group: BlockGroup, keys: Sequence[bytes]) -> None:
        """Have the hand spare these blocks once, as after a read."""
        for slot in self.slots_of(group, keys):
            region, place = self.at(slot)
            region.used[place] = 1

    def advance_hand(self, slot_bytes: int) -> Passed:
        """Advance the clock hand until it has found blocks to evict for slots of this size; recently used blocks get a
        second chance.

        If the hand reaches a region of another size, all of it goes unless over half was used or a slot is pinned. It
        stops after ``LOOKED_AT_ONCE`` slots, and continues from there.
        """
        left = LOOKED_AT_ONCE
        for _ in range(2 * len(self.regions)):  # in its first round it may only clear marks of use
            number, region = next(iter(self.regions.items()))  # where the hand is
            hand_before, whole_blocks, victims = region.hand, 0, list[int]()
            if region.slot_bytes == slot_bytes:
                victims = region.evict_next(left)
            else:
                whole_blocks = region.skip_all()
            # Coming to a region takes time too, even if few of its slots are passed.
            left -= max(LOOKED_AT_ONCE // REGIONS_AT_ONCE, region.hand - hand_before)
            if region.hand == region.slots:
                region.hand = 0
                self.regions.move_to_end(number)
            if whole_blocks:
                return Passed(region=number, blocks=whole_blocks)
            if victims:
                first = number * self.slots.slots_per_region
                return Passed([first + place for place in victims], blocks=len(victims))
            if left <= 0:
                return Passed()
        return Passed(is_round=True)

    def add(self, known: KnownGroup, key: bytes, slot: int, hour: int) -> None:
        """Add a block that was written to a slot, and end the write's pin."""
        region, place = self.at(slot)
        region.pins[place] -= 1
        region.keys[place, : len(key)] = np.frombuffer(key, np.uint8)
        region.key_bytes[place], region.groups[place], region.hours[place] = len(key), known.number, hour
        region.used[place] = region.found[place] = 0
        self._hours[hour] += 1
        self.enter(slot.to_bytes(4, "little"), 1)
        known.blocks += 1
        self.blocks += 1
        self.nbytes += known.group.nbytes

    def drop(self, slots: Sequence[int]) -> list[tuple[KnownGroup, list[bytes]]]:
        """Remove the blocks of slots from the index. Returns their keys, except those of groups removed as a whole."""
        self._native.disk_remove(self._index_at, np.array(slots, np.uint32).tobytes(), len(slots))
        keys: dict[int, list[bytes]] = {}
        for slot in slots:
            region, place = self.at(slot)
            keys.setdefault(region.groups[place], []).append(region.key(place))
            hour = region.hours[place]
            self._hours[hour] -= 1
            if not self._hours[hour]:
                del self._hours[hour]
            region.groups[place], region.hours[place], region.used[place] = 0, NEVER, 0
        gone = [(known, keys[known.number]) for known in map(self.by_number.__getitem__, keys) if known.is_readable]
        for known, its in gone:
            known.blocks -= len(its)
            self.blocks -= len(its)
            self.nbytes -= len(its) * known.group.nbytes
        return gone

    def remove_whole(self, gone: Sequence[KnownGroup]) -> Iterator[list[int]]:
        """Stop finding blocks of these groups, which are forgotten once the returned slots were all taken and dropped:
        see ``_slots_in_batches``."""
        for known in gone:
            del self.readable_by_tag[known.group.tag]
            known.is_readable = False
            self.blocks -= known.blocks
            self.nbytes -= known.blocks * known.group.nbytes
        return self._slots_of_whole([known.number for known in gone], list(self.regions))

    def _slots_of_whole(self, gone: Sequence[int], regions: Sequence[int]) -> Iterator[list[int]]:
        """Yield the slots of groups by number, in these regions; then forget the groups."""
        yield from self._slots_in_batches(regions, lambda region: np.isin(region.group_numbers, gone))
        for number in gone:
            del self.by_number[number]

    def slots_of_region(self, number: int) -> Iterator[list[int]]:
        """Return the slots of a region's blocks, except those that are being read: see ``_slots_in_batches``."""
        return self._slots_in_batches(
            [number], lambda one: (one.group_numbers > 0) & (np.frombuffer(one.pins, "H") == 0)
        )

    def _slots_in_batches(
        self, numbers: Sequence[int], chosen: Callable[[Region], npt.NDArray[np.bool_]]
    ) -> Iterator[list[int]]:
        """Yield the chosen slots of some regions, ``CLEARED_AT_ONCE`` at a time.

        Drop the blocks of each batch before the next: a region is searched until none is chosen in it. A batch may be
        empty, after a search that took as long as clearing one.
        """
        for at in range(0, len(numbers), REGIONS_AT_ONCE):
            slots = list[int]()
            for number in numbers[at : at + REGIONS_AT_ONCE]:
                while (region := self.regions.get(number)) is not None:  # else it changed its slot size
                    there = np.flatnonzero(chosen(region))[: CLEARED_AT_ONCE - len(slots)]
                    slots += (there + number * self.slots.slots_per_region).tolist()
                    if len(slots) < CLEARED_AT_ONCE:
                        break
                    yield slots
                    slots = []
            yield slots


def _spread(slots: npt.NDArray[np.int64], most: int) -> npt.NDArray[np.int64]:
    """Return up to ``most`` of the slots, evenly spread, the first one included."""
    count = min(most, len(slots))
    places: npt.NDArray[np.int64] = np.arange(count) * len(slots) // count
    return slots[places]
