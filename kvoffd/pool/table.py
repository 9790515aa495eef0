"""Writes the slot table, from nothing or from where an earlier daemon left it. The format is in ``format``."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvoffd.pool.format import (
    CONTENT,
    CONTENT_AT,
    CRC,
    CRC_AT,
    FINGERPRINT,
    FINGERPRINT_BYTES,
    FINGERPRINT_ENTRY_BYTES,
    MAX_KEY_BYTES,
    OWNER,
    OWNER_AT,
    RECORD_BYTES,
    REGION,
    Geometry,
    SlotState,
    check_geometry,
    read_boot_id,
)
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.namespace_log import NamespaceLog, read_facts
from kvoffd.pool.records import NamespaceRecord, SlotRecord
from kvoffd.pool.scan import Entry, scan, scan_table
from kvoffd.pool.slots import MIN_SLOT_BYTES, PAGE_BYTES

_GENERATION_WORD = FINGERPRINT_BYTES // 8
# Plain numbers: stores write the state of each slot twice, and an enum's member costs as much as the rest of it.
_FREE, _WRITING, _READY = (int(state) for state in SlotState)


class Inheritance(NamedTuple):
    """What an earlier daemon left in a pool: all of it in use, by slots of the pool."""

    namespaces: list[NamespaceRecord]
    slots: list[SlotRecord]
    doubtful: int
    """Records that were struck out: of slots that were being written, torn, or contradicted."""


class SlotTable:
    """Writes the table of one pool. Not thread-safe: it belongs to the event loop's thread.

    Args:
        memory: where the table is to lie, all zeros; a sealed memfd of its own when None. Owned from here on.
    """

    def __init__(
        self, pool_bytes: int, region_bytes: int, boot_id: bytes | None = None, memory: PoolMemory | None = None
    ) -> None:
        geometry = Geometry.of(pool_bytes, region_bytes)
        self._open(geometry, memory or PoolMemory.create(geometry.size_bytes, "kvoffd-slot-table"))
        # The facts are laid out first: a table without a header is none.
        self._facts = NamespaceLog(self._namespaces)
        header = geometry.header(read_boot_id() if boot_id is None else boot_id)
        self._bytes[: len(header)] = header

    @classmethod
    def adopt(cls, memory: PoolMemory, pool_bytes: int, region_bytes: int) -> tuple[SlotTable, Inheritance]:
        """Goes on with the table in ``memory``, and strikes out every record that is not to be believed.

        ``memory`` is owned from here on where it succeeds. Killed anywhere, it leaves a table to be adopted.

        Raises:
            BadTable: there is none, or it is not of this format, boot and geometry.
        """
        geometry = Geometry.of(pool_bytes, region_bytes)
        check_geometry(memory.fd, geometry)
        found = scan(memory.fd, geometry)
        table = cls.__new__(cls)
        table._open(geometry, memory)
        known = read_facts(bytes(table._namespaces))
        for number in found.doubtful:
            table._words[(table._records_at + number * RECORD_BYTES) // 8] = _FREE
        generations = [record.generation for record in found.records]
        table._generation = max(generations, default=0)
        table._fingerprints.restore(
            (entry, record.fingerprint) for entry, record in zip(found.entries, found.records, strict=True)
        )
        needed = {record.fingerprint for record in found.records}
        namespaces = [facts for fingerprint, facts in known.items() if fingerprint in needed]
        table._facts = NamespaceLog(table._namespaces, namespaces)
        return table, Inheritance(namespaces, found.records, len(found.doubtful))

    def _open(self, geometry: Geometry, memory: PoolMemory) -> None:
        self._geometry = geometry
        self.size_bytes = geometry.size_bytes
        self._records_at = geometry.records_at
        self._last_slot_at = geometry.pool_bytes - MIN_SLOT_BYTES
        self._memory = memory
        self._bytes = memoryview((ctypes.c_uint8 * self.size_bytes).from_address(memory.address)).cast("B")
        self._words = self._bytes.cast("Q")  # an assignment to an item is one aligned store
        self._namespaces = self._bytes[geometry.namespaces_at : geometry.records_at]
        self._fingerprints = _FingerprintTable(self._bytes, self._words, geometry)
        self._generation = 0

    @property
    def fd(self) -> int:
        """The file that holds the table from its start on, to be kept where the daemon's successor finds it."""
        return self._memory.fd

    def set_region(self, region: int, slot_bytes: int) -> None:
        """Notes the slot size of a region. Must come before the first record in it."""
        word = self._geometry.regions_at // REGION.size + region
        if self._words[word] != slot_bytes:
            self._words[word] = slot_bytes

    def note_namespace(self, facts: NamespaceRecord) -> bool:
        """Keeps the facts for a successor; False when there is no room for them."""
        return self._facts.note(facts)

    def mark_writing(self, offset: int, fingerprint: bytes, group: int, key: bytes, rank: int, world_size: int) -> None:
        """Notes that the slot's bytes are being replaced: from here on the record is never taken for READY.

        A slot that was ready is written over; one that is being written has a writer already: ValueError.
        """
        self.mark_all_writing([offset], fingerprint, group, [key], rank, world_size)

    def mark_all_writing(
        self,
        offsets: Sequence[int],
        fingerprint: bytes,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        world_size: int,
    ) -> None:
        """As ``mark_writing``, for a slot of each key, one after the other; after a ValueError none has changed."""
        words, pack_into, buffer = self._words, OWNER.pack_into, self._bytes
        records = [self._record(offset) for offset in offsets]
        states = [words[record // 8] for record in records]
        if _WRITING in states:
            offset = offsets[states.index(_WRITING)]
            raise ValueError(f"The slot at offset {offset} is being written; free it before it is written again.")
        if len(fingerprint) != FINGERPRINT_BYTES or max(map(len, keys), default=0) > MAX_KEY_BYTES:
            raise ValueError(f"Fingerprints have {FINGERPRINT_BYTES} bytes and keys at most {MAX_KEY_BYTES}.")
        generation = self._generation
        self._generation += len(records)
        for offset, record, state, key in zip(offsets, records, states, keys, strict=True):
            if state != _FREE:
                self.free([offset])
            place, entry_generation = self._fingerprints.hold(fingerprint)
            words[record // 8] = _WRITING
            generation += 1
            half = offset % MIN_SLOT_BYTES // PAGE_BYTES
            owner = (generation, entry_generation, place, half, group, rank, world_size, len(key), key)
            pack_into(buffer, record + OWNER_AT, *owner)

    def mark_ready(self, offset: int, first_block: int, length: int, checksum: int = 0) -> None:
        """Notes that the bytes are whole, from engine block ``first_block`` of the key on; length in bytes.

        ``checksum`` is that of all ``length`` bytes, 0 where none was taken: then a successor does not believe them.

        The slot's generation is the highest from now on, so that generations tell in which order slots became ready.
        """
        self.mark_all_ready([offset], [first_block], length, [checksum])

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        """As ``mark_ready``, for slots of one ``length``, in this order; after a ValueError none has changed."""
        words, pack_into, buffer, crc32 = self._words, CONTENT.pack_into, self._bytes, zlib.crc32
        records = [self._record(offset) for offset in offsets]
        for offset, record in zip(offsets, records, strict=True):
            if words[record // 8] != _WRITING:
                raise ValueError(f"The slot at offset {offset} is not being written.")
        generation = self._generation
        self._generation += len(records)
        for record, first_block, checksum in zip(records, first_blocks, checksums, strict=True):
            generation += 1
            words[(record + OWNER_AT) // 8] = generation
            pack_into(buffer, record + CONTENT_AT, length, checksum, first_block)
            CRC.pack_into(buffer, record + CRC_AT, crc32(buffer[record + OWNER_AT : record + CRC_AT]))
            words[record // 8] = _READY

    def free(self, offsets: Iterable[int]) -> None:
        """Notes that the slots hold nothing, whatever they held."""
        words = self._words
        for record in [self._record(offset) for offset in offsets]:
            if words[record // 8] != _FREE:
                words[record // 8] = _FREE
                _, generation, place, *_ = OWNER.unpack_from(self._bytes, record + OWNER_AT)
                self._fingerprints.let_go(Entry(place, generation))

    def scan(self) -> list[SlotRecord]:
        """What a successor of the daemon would find: see ``scan_table``."""
        return scan_table(self._memory.fd)

    def close(self) -> None:
        """Lets the memory go; a second call does nothing."""
        self._facts.close()
        self._namespaces.release()
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _record(self, offset: int) -> int:
        if offset % PAGE_BYTES or not 0 <= offset <= self._last_slot_at:
            raise ValueError(f"No slot begins at offset {offset}.")
        return self._records_at + offset // MIN_SLOT_BYTES * RECORD_BYTES


class _FingerprintTable:
    """Names namespaces by a place. A place that is used again gets a new generation, so old records never fit it."""

    def __init__(self, file: memoryview, words: memoryview, geometry: Geometry) -> None:
        self._file = file
        self._words = words
        self._at = geometry.fingerprints_at
        self._free = list(range(geometry.fingerprints - 1, -1, -1))
        self._entry: dict[bytes, Entry] = {}
        self._holders: dict[int, int] = {}  # records by place
        self._name: dict[int, bytes] = {}
        self._generation = 0

    def restore(self, records: Iterable[tuple[Entry, bytes]]) -> None:
        """Takes up the entries that adopted records hold, one item for each record, and strikes out all others."""
        for entry, fingerprint in records:
            if entry.place not in self._holders:
                self._holders[entry.place] = 0
                self._name[entry.place] = fingerprint
                # A name that has two places is named by either, in new records by the last.
                self._entry[fingerprint] = entry
                self._generation = max(self._generation, entry.generation)
            self._holders[entry.place] += 1
        self._free = [place for place in self._free if place not in self._holders]
        for place in self._free:
            word = self._entry_at(place) // 8 + _GENERATION_WORD
            if self._words[word]:  # reading costs a page less than writing where none was
                self._generation = max(self._generation, self._words[word] if self._words[word] < 2**62 else 0)
                self._words[word] = 0

    def hold(self, fingerprint: bytes) -> Entry:
        """The entry for one more record. Generation 0, which fits no entry, when the table is full: the slot serves
        this daemon as well as any, only a successor will not find it.
        """
        entry = self._entry.get(fingerprint)
        if entry is None:
            if not self._free:
                return Entry(0, 0)
            entry = self._add(fingerprint)
        self._holders[entry.place] += 1
        return entry

    def let_go(self, entry: Entry) -> None:
        """Takes back what ``hold`` gave to one record."""
        place = entry.place
        if entry.generation == 0:
            return
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self._words[self._entry_at(place) // 8 + _GENERATION_WORD] = 0
            del self._holders[place]
            name = self._name.pop(place)
            if self._entry.get(name) == entry:
                del self._entry[name]
            self._free.append(place)

    def _add(self, fingerprint: bytes) -> Entry:
        place = self._free.pop()
        self._generation += 1
        at = self._entry_at(place)
        self._file[at : at + FINGERPRINT_BYTES] = fingerprint
        crc = zlib.crc32(FINGERPRINT.pack(fingerprint, self._generation))
        CRC.pack_into(self._file, at + FINGERPRINT.size, crc)
        self._words[at // 8 + _GENERATION_WORD] = self._generation
        self._entry[fingerprint] = entry = Entry(place, self._generation)
        self._name[place] = fingerprint
        self._holders[place] = 0
        return entry

    def _entry_at(self, place: int) -> int:
        return self._at + place * FINGERPRINT_ENTRY_BYTES
