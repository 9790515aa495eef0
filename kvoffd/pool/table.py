"""Writes the slot table: a new one, or on from where an earlier daemon left it. See ``table_format`` for its layout."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.namespace_log import NamespaceLog, read_namespaces
from kvoffd.pool.records import InheritedSlots, Ints, NamespaceRecord, Rows
from kvoffd.pool.scan import FingerprintEntry, HeldFingerprint, scan
from kvoffd.pool.slots import MIN_SLOT_BYTES, PAGE_BYTES
from kvoffd.pool.table_format import (
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
    RECORD,
    RECORD_BYTES,
    REGION,
    Geometry,
    SlotState,
    check_geometry,
    read_boot_id,
)

_ROW = np.dtype((np.void, RECORD_BYTES))  # without fields, which would be copied one by one
_GENERATION_WORD = FINGERPRINT_BYTES // 8
# Plain numbers: stores write the state of each slot twice, and an enum's member costs as much as the rest of it.
_FREE, _WRITING, _READY = (int(state) for state in SlotState)


class RecoveredSlots(NamedTuple):
    """The slots that an earlier daemon left in a pool, and the namespaces that they belong to."""

    namespaces: list[NamespaceRecord]
    slots: InheritedSlots
    discarded: int
    """Number of records that were struck out: their slots were being written, or the record is torn or contradicted."""


_NUMBERS = np.empty(0, np.int64)
_NO_SLOTS = InheritedSlots([], [], np.empty(0, np.uint32), _NUMBERS, _NUMBERS, np.empty(0, np.uint64))
NOTHING_RECOVERED = RecoveredSlots([], _NO_SLOTS, 0)


class SlotTable:
    """Writes the table of one pool. Not thread-safe: it belongs to the event loop's thread.

    Args:
        memory: where the table goes, all zeros. Owned from here on.
    """

    def __init__(self, memory: PoolMemory, geometry: Geometry) -> None:
        self._open(geometry, memory)
        # The header comes last: a table without one is none.
        self.namespace_log = NamespaceLog(self._namespaces)
        header = geometry.header(read_boot_id())
        self._bytes[: len(header)] = header

    @classmethod
    def adopt(cls, memory: PoolMemory, geometry: Geometry) -> tuple[SlotTable, RecoveredSlots]:
        """Takes over the table in ``memory``, and strikes out every record that is not to be trusted.

        ``memory`` is owned from here on unless it raises. A process killed anywhere in it leaves a table to be adopted.

        Raises:
            BadTable: there is none, or it is not of this format, boot and geometry.
        """
        check_geometry(memory.fd, geometry)
        found = scan(memory.fd, geometry)
        table = cls.__new__(cls)
        table._open(geometry, memory)
        known = read_namespaces(bytes(table._namespaces))
        # One aligned store for each.
        np.frombuffer(table._words, np.uint64)[(table._records_at // 8 + found.discarded * (RECORD_BYTES // 8))] = _FREE
        table._generation = int(found.slots.generations.max(initial=0))
        table._fingerprints.restore(found.entries)
        needed = {held.fingerprint for held in found.entries}
        namespaces = [record for fingerprint, record in known.items() if fingerprint in needed]
        table.namespace_log = NamespaceLog(table._namespaces, namespaces)
        return table, RecoveredSlots(namespaces, found.slots, len(found.discarded))

    def _open(self, geometry: Geometry, memory: PoolMemory) -> None:
        self._geometry = geometry
        self.size_bytes = geometry.size_bytes
        self._records_at = geometry.records_at
        self._last_slot_at = geometry.pool_bytes - MIN_SLOT_BYTES
        self._memory = memory
        self._bytes = memory.buffer[: self.size_bytes]
        self._words = self._bytes.cast("Q")  # an assignment to an item is one aligned store
        self._namespaces = self._bytes[geometry.namespaces_at : geometry.records_at]
        self._fingerprints = _FingerprintTable(self._bytes, self._words, geometry)
        self._generation = 0

    @property
    def fd(self) -> int:
        """Descriptor of the file that begins with the table, to be kept for the daemon's successor."""
        return self._memory.fd

    def set_region(self, region: int, slot_bytes: int) -> None:
        """Notes the slot size of a region. Must come before the region's first record."""
        word = self._geometry.regions_at // REGION.size + region
        if self._words[word] != slot_bytes:
            self._words[word] = slot_bytes

    def mark_all_writing(
        self, offsets: Sequence[int], fingerprint: bytes, group: int, keys: Sequence[bytes], rank: int, world_size: int
    ) -> None:
        """Notes that a shard of each key is being written in its slot: from here on no record of it counts as READY.

        A slot that was ready may be written again. Raises ValueError, and has changed nothing, for one that is being
        written already.
        """
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

    def mark_all_ready(
        self, offsets: Sequence[int], first_blocks: Sequence[int], length: int, checksums: Sequence[int]
    ) -> None:
        """Notes that shards of ``length`` bytes are whole, each from its engine block ``first_block`` of the key on.

        Each slot's generation becomes the highest in this order, so that generations tell in which order slots became
        ready. Raises ValueError, and has changed nothing, for a slot that is not being written.

        Args:
            checksums: the ``digest`` of all ``length`` bytes; 0 where none was taken: no successor trusts these bytes.
        """
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

    def set_checksum(self, offset: int, checksum: int) -> None:
        """Enters the checksum of a shard that was ready before it was taken; nothing follows where it is not ready.

        A successor of a daemon that dies meanwhile does not trust the record, as it did not before.
        """
        record = self._record(offset)
        if self._words[record // 8] == _READY:
            length, _, first_block = CONTENT.unpack_from(self._bytes, record + CONTENT_AT)
            CONTENT.pack_into(self._bytes, record + CONTENT_AT, length, checksum, first_block)
            crc = zlib.crc32(self._bytes[record + OWNER_AT : record + CRC_AT])
            CRC.pack_into(self._bytes, record + CRC_AT, crc)

    def free(self, offsets: Iterable[int]) -> None:
        """Notes that the slots hold nothing from here on, whatever they held."""
        words = self._words
        for record in [self._record(offset) for offset in offsets]:
            if words[record // 8] != _FREE:
                words[record // 8] = _FREE
                _, generation, place, *_ = OWNER.unpack_from(self._bytes, record + OWNER_AT)
                self._fingerprints.let_go(FingerprintEntry(place, generation))

    def rows(self, offsets: Ints) -> Rows:
        """Copies of the records of the slots that begin at ``offsets``."""
        every = np.frombuffer(self._bytes, _ROW, self._geometry.records, self._records_at)
        return every[offsets // MIN_SLOT_BYTES].view(RECORD)

    def close(self) -> None:
        """Unmaps the table; a second call does nothing."""
        self.namespace_log.close()
        self._namespaces.release()
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _record(self, offset: int) -> int:
        if offset % PAGE_BYTES or not 0 <= offset <= self._last_slot_at:
            raise ValueError(f"No slot begins at offset {offset}.")
        return self._records_at + offset // MIN_SLOT_BYTES * RECORD_BYTES


class _FingerprintTable:
    """Gives each namespace an entry, which records name it by.

    An entry that is used again gets a new generation, so that old records never name the new namespace.
    """

    def __init__(self, file: memoryview, words: memoryview, geometry: Geometry) -> None:
        self._file = file
        self._words = words
        self._at = geometry.fingerprints_at
        self._free = list(range(geometry.fingerprints - 1, -1, -1))
        self._entry: dict[bytes, FingerprintEntry] = {}
        self._holders: dict[int, int] = {}  # records by place
        self._name: dict[int, bytes] = {}
        self._generation = 0

    def restore(self, entries: Iterable[HeldFingerprint]) -> None:
        """Keeps the entries that adopted records name, and strikes out all others."""
        for entry, fingerprint, records in entries:
            self._holders[entry.place] = records
            self._name[entry.place] = fingerprint
            # A namespace with two entries is named by either; new records name the last.
            self._entry[fingerprint] = entry
            self._generation = max(self._generation, entry.generation)
        self._free = [place for place in self._free if place not in self._holders]
        for place in self._free:
            word = self._entry_at(place) // 8 + _GENERATION_WORD
            if self._words[word]:  # to write zeros over zeros would allocate a page
                self._generation = max(self._generation, self._words[word] if self._words[word] < 2**62 else 0)
                self._words[word] = 0

    def hold(self, fingerprint: bytes) -> FingerprintEntry:
        """The entry for one more record. Its generation is 0, which names no namespace, when the table is full: this
        daemon can use the slot as any other, but a successor will not find it.
        """
        entry = self._entry.get(fingerprint)
        if entry is None:
            if not self._free:
                return FingerprintEntry(0, 0)
            entry = self._add(fingerprint)
        self._holders[entry.place] += 1
        return entry

    def let_go(self, entry: FingerprintEntry) -> None:
        """Ends what ``hold`` began for one record."""
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

    def _add(self, fingerprint: bytes) -> FingerprintEntry:
        place = self._free.pop()
        self._generation += 1
        at = self._entry_at(place)
        self._file[at : at + FINGERPRINT_BYTES] = fingerprint
        crc = zlib.crc32(FINGERPRINT.pack(fingerprint, self._generation))
        CRC.pack_into(self._file, at + FINGERPRINT.size, crc)
        self._words[at // 8 + _GENERATION_WORD] = self._generation
        self._entry[fingerprint] = entry = FingerprintEntry(place, self._generation)
        self._name[place] = fingerprint
        self._holders[place] = 0
        return entry

    def _entry_at(self, place: int) -> int:
        return self._at + place * FINGERPRINT_ENTRY_BYTES
