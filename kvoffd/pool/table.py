"""The slot table: the pool's description of itself, in memory that outlives the daemon.

Layout of the file (native byte order, all parts page-aligned, numbers unsigned):

============  ====================================================================================================
part          content
============  ====================================================================================================
header        ``_HEADER``: magic, format version, size of a record, boot id, pool bytes, region bytes, least slot
              bytes, number and offset of regions, fingerprints and records; CRC-32 of all that
regions       8 bytes each: the size of the region's slots, as it was last given to a slot size; 0 for never
fingerprints  64 bytes each (``_FINGERPRINT``): namespaces that slots belong to; generation 0 is no entry
records       128 bytes each (``_OWNER``, ``_CONTENT``), number ``slot offset // 8192``
============  ====================================================================================================

A record is written in this order: state WRITING; everything else; (the bytes of the slot); first block, length, CRC;
state READY, in one aligned 8-byte store. Whoever finds READY and a right CRC therefore finds whole bytes, wherever the
writer was killed. The file is sparse: records of slots that were never used take no memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from uuid import UUID

from kvoffd.errors import KvoffdError
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.slots import MIN_SLOT_BYTES, PAGE_BYTES

MAGIC = b"KVOFFDST"
FORMAT_VERSION = 1
RECORD_BYTES = 128
FINGERPRINT_BYTES = 32
MAX_KEY_BYTES = 64

_MOST_FINGERPRINTS = 4096
# magic, version, record bytes, boot id, pool, region, least slot, (count, offset) of regions, fingerprints, records
_HEADER = Struct("=8sII16sQQQQQQQQQ")
_CRC = Struct("=I")
_REGION = Struct("=Q")
# fingerprint, generation; the CRC of both comes last
_FINGERPRINT = Struct("=32sQ")
_FINGERPRINT_ENTRY_BYTES = 64
_GENERATION_WORD = FINGERPRINT_BYTES // 8
# Behind the 8 bytes of the state: generation, generation and place of the fingerprint, offset within the 8 KiB in
# pages, group, rank, world size, length of the key, key; then what is known at the end: length, checksum of the bytes
# (0 for none), first block; then the CRC.
_OWNER = Struct("=QQHBxHHHB64sx")
_CONTENT = Struct("=QQI")
_OWNER_AT = 8
_CONTENT_AT = _OWNER_AT + _OWNER.size
_CRC_AT = _CONTENT_AT + _CONTENT.size
assert _CRC_AT + _CRC.size <= RECORD_BYTES


class BadTable(KvoffdError):
    """The memory that should hold a slot table holds none that this release can read."""


class SlotState(IntEnum):
    """State of a record."""

    FREE = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A slot whose bytes are whole."""

    offset: int
    slot_bytes: int
    fingerprint: bytes
    group: int
    key: bytes
    rank: int
    world_size: int
    first_block: int
    length: int
    checksum: int
    generation: int


def table_bytes(pool_bytes: int, region_bytes: int) -> int:
    """Size of the table of such a pool: 1.6 % of it and a few pages."""
    return _Geometry.of(pool_bytes, region_bytes).size_bytes


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Where the parts of the table lie."""

    pool_bytes: int
    region_bytes: int
    regions: int
    fingerprints: int
    records: int

    @classmethod
    def of(cls, pool_bytes: int, region_bytes: int) -> _Geometry:
        # As many namespaces as a thousandth of the pool can name, so that the table of a small pool stays small.
        fingerprints = min(_MOST_FINGERPRINTS, max(PAGE_BYTES, pool_bytes // 1000) // _FINGERPRINT_ENTRY_BYTES)
        return cls(pool_bytes, region_bytes, -(-pool_bytes // region_bytes), fingerprints, pool_bytes // MIN_SLOT_BYTES)

    @property
    def regions_at(self) -> int:
        return PAGE_BYTES

    @property
    def fingerprints_at(self) -> int:
        return _page_up(self.regions_at + self.regions * _REGION.size)

    @property
    def records_at(self) -> int:
        return _page_up(self.fingerprints_at + self.fingerprints * _FINGERPRINT_ENTRY_BYTES)

    @property
    def size_bytes(self) -> int:
        return _page_up(self.records_at + self.records * RECORD_BYTES)

    def header(self, boot_id: bytes) -> bytes:
        packed = _HEADER.pack(
            *(MAGIC, FORMAT_VERSION, RECORD_BYTES, boot_id),
            *(self.pool_bytes, self.region_bytes, MIN_SLOT_BYTES),
            *(self.regions, self.regions_at, self.fingerprints, self.fingerprints_at, self.records, self.records_at),
        )
        return packed + _CRC.pack(zlib.crc32(packed))


class SlotTable:
    """Writes the table of one pool. Not thread-safe: it belongs to the event loop's thread."""

    def __init__(self, pool_bytes: int, region_bytes: int, boot_id: bytes | None = None) -> None:
        self._geometry = _Geometry.of(pool_bytes, region_bytes)
        self.size_bytes = self._geometry.size_bytes
        self._records_at = self._geometry.records_at
        self._last_slot_at = pool_bytes - MIN_SLOT_BYTES
        self._memory = PoolMemory.create(self.size_bytes, "kvoffd-slot-table")
        self._bytes = memoryview((ctypes.c_uint8 * self.size_bytes).from_address(self._memory.address)).cast("B")
        self._words = self._bytes.cast("Q")  # an assignment to an item is one aligned store
        header = self._geometry.header(read_boot_id() if boot_id is None else boot_id)
        self._bytes[: len(header)] = header
        self._fingerprints = _FingerprintTable(self._bytes, self._words, self._geometry)
        self._generation = 0

    @property
    def fd(self) -> int:
        """The sealed memfd, to be kept where the daemon's successor finds it."""
        return self._memory.fd

    def set_region(self, region: int, slot_bytes: int) -> None:
        """Notes the slot size of a region. Must come before the first record in it."""
        word = self._geometry.regions_at // 8 + region
        if self._words[word] != slot_bytes:
            self._words[word] = slot_bytes

    def mark_writing(self, offset: int, fingerprint: bytes, group: int, key: bytes, rank: int, world_size: int) -> None:
        """Notes that the slot's bytes are being replaced: from here on the record is never taken for READY.

        A slot that was ready is written over; one that is being written has a writer already: ValueError.
        """
        record = self._record(offset)
        if self._words[record // 8] == SlotState.WRITING:
            raise ValueError(f"The slot at offset {offset} is being written; free it before it is written again.")
        if len(fingerprint) != FINGERPRINT_BYTES or len(key) > MAX_KEY_BYTES:
            raise ValueError(f"Fingerprints have {FINGERPRINT_BYTES} bytes and keys at most {MAX_KEY_BYTES}.")
        self.free(offset)
        entry = self._fingerprints.hold(fingerprint)
        self._words[record // 8] = SlotState.WRITING
        self._generation += 1
        half = offset % MIN_SLOT_BYTES // PAGE_BYTES
        owner = (self._generation, entry.generation, entry.place, half, group, rank, world_size, len(key), key)
        _OWNER.pack_into(self._bytes, record + _OWNER_AT, *owner)

    def mark_ready(self, offset: int, first_block: int, length: int) -> None:
        """Notes that the bytes are whole, from engine block ``first_block`` of the key on; length in bytes."""
        record = self._record(offset)
        if self._words[record // 8] != SlotState.WRITING:
            raise ValueError(f"The slot at offset {offset} is not being written.")
        _CONTENT.pack_into(self._bytes, record + _CONTENT_AT, length, 0, first_block)
        crc = zlib.crc32(self._bytes[record + _OWNER_AT : record + _CRC_AT])
        _CRC.pack_into(self._bytes, record + _CRC_AT, crc)
        self._words[record // 8] = SlotState.READY

    def free(self, offset: int) -> None:
        """Notes that the slot holds nothing, whatever it held."""
        record = self._record(offset)
        if self._words[record // 8] != SlotState.FREE:
            self._words[record // 8] = SlotState.FREE
            _, generation, place, *_ = _OWNER.unpack_from(self._bytes, record + _OWNER_AT)
            self._fingerprints.let_go(_Entry(place, generation))

    def scan(self) -> Iterator[SlotRecord]:
        """What a successor of the daemon would find: see ``scan_table``."""
        return scan_table(self._memory.fd)

    def close(self) -> None:
        """Lets the memory go; a second call does nothing."""
        self._words.release()
        self._bytes.release()
        self._memory.close()

    def _record(self, offset: int) -> int:
        if offset % PAGE_BYTES or not 0 <= offset <= self._last_slot_at:
            raise ValueError(f"No slot begins at offset {offset}.")
        return self._records_at + offset // MIN_SLOT_BYTES * RECORD_BYTES


class _Entry(NamedTuple):
    """A place in the fingerprint table, at a time."""

    place: int
    generation: int


class _FingerprintTable:
    """Names namespaces by a place. A place that is used again gets a new generation, so old records never fit it."""

    def __init__(self, file: memoryview, words: memoryview, geometry: _Geometry) -> None:
        self._file = file
        self._words = words
        self._at = geometry.fingerprints_at
        self._free = list(range(geometry.fingerprints - 1, -1, -1))
        self._entry: dict[bytes, _Entry] = {}
        self._holders: dict[int, int] = {}  # records by place
        self._name: dict[int, bytes] = {}
        self._generation = 0

    def hold(self, fingerprint: bytes) -> _Entry:
        """The entry for one more record. Generation 0, which fits no entry, when the table is full: the slot serves
        this daemon as well as any, only a successor will not find it.
        """
        entry = self._entry.get(fingerprint)
        if entry is None:
            if not self._free:
                return _Entry(0, 0)
            entry = self._add(fingerprint)
        self._holders[entry.place] += 1
        return entry

    def let_go(self, entry: _Entry) -> None:
        """Takes back what ``hold`` gave to one record."""
        place = entry.place
        if entry.generation == 0:
            return
        self._holders[place] -= 1
        if self._holders[place] == 0:
            self._words[self._entry_at(place) // 8 + _GENERATION_WORD] = 0
            del self._holders[place], self._entry[self._name.pop(place)]
            self._free.append(place)

    def _add(self, fingerprint: bytes) -> _Entry:
        place = self._free.pop()
        self._generation += 1
        at = self._entry_at(place)
        self._file[at : at + FINGERPRINT_BYTES] = fingerprint
        crc = zlib.crc32(_FINGERPRINT.pack(fingerprint, self._generation))
        _CRC.pack_into(self._file, at + _FINGERPRINT.size, crc)
        self._words[at // 8 + _GENERATION_WORD] = self._generation
        self._entry[fingerprint] = entry = _Entry(place, self._generation)
        self._name[place] = fingerprint
        self._holders[place] = 0
        return entry

    def _entry_at(self, place: int) -> int:
        return self._at + place * _FINGERPRINT_ENTRY_BYTES


def scan_table(fd: int) -> Iterator[SlotRecord]:
    """Reads a table, this daemon's or its predecessor's, and yields the slots whose bytes are whole.

    Records that are FREE, WRITING, torn, of a namespace that is gone or at odds with their region are left out. Reads
    the file's data only, never its holes, which reading through a mapping would fill.

    Raises:
        BadTable: the file is no slot table, or one of another format, boot or geometry than it says.
    """
    geometry = _read_geometry(fd)
    regions = memoryview(os.pread(fd, geometry.regions * 8, geometry.regions_at)).cast("Q")
    fingerprints = _read_fingerprints(fd, geometry)
    position, end = geometry.records_at, geometry.records_at + geometry.records * RECORD_BYTES
    while (position := _next_data(fd, position)) < end:
        page = os.pread(fd, min(PAGE_BYTES, end - position), position)
        states = memoryview(page).cast("Q")[:: RECORD_BYTES // 8].tolist()
        for index, state in enumerate(states):
            if state == SlotState.READY:
                at = index * RECORD_BYTES
                number = (position - geometry.records_at + at) // RECORD_BYTES
                if record := _read_record(page[at : at + RECORD_BYTES], number, geometry, regions, fingerprints):
                    yield record
        position += PAGE_BYTES


def _read_geometry(fd: int) -> _Geometry:
    """The table's geometry, checked against its own CRC, this format and the running boot."""
    header = os.pread(fd, _HEADER.size + _CRC.size, 0)
    if len(header) < _HEADER.size + _CRC.size or header[:8] != MAGIC:
        raise BadTable("The file is no slot table of kvoffd.")
    fields = _HEADER.unpack_from(header)
    geometry = _Geometry(fields[4], fields[5], fields[7], fields[9], fields[11])
    if fields[1] != FORMAT_VERSION:
        raise BadTable(
            f"The slot table has format {fields[1]}, this release reads {FORMAT_VERSION}; start with an empty pool."
        )
    if fields[3] != read_boot_id():
        raise BadTable("The slot table is from before the machine's last boot; start with an empty pool.")
    if geometry.header(fields[3]) != header or os.fstat(fd).st_size < geometry.size_bytes:
        raise BadTable("The slot table's header is damaged; start with an empty pool.")
    return geometry


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> bytes:
    """16 bytes that change with every boot of the machine; zeros where the kernel does not tell."""
    try:
        return UUID(path.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def _read_fingerprints(fd: int, geometry: _Geometry) -> dict[_Entry, bytes]:
    """Fingerprints by their entry."""
    data = os.pread(fd, geometry.fingerprints * _FINGERPRINT_ENTRY_BYTES, geometry.fingerprints_at)
    found = {}
    for index in range(geometry.fingerprints):
        at = index * _FINGERPRINT_ENTRY_BYTES
        fingerprint, generation = _FINGERPRINT.unpack_from(data, at)
        (crc,) = _CRC.unpack_from(data, at + _FINGERPRINT.size)
        if generation and crc == zlib.crc32(data[at : at + _FINGERPRINT.size]):
            found[_Entry(index, generation)] = fingerprint
    return found


def _read_record(
    data: bytes,
    number: int,
    geometry: _Geometry,
    regions: memoryview,
    fingerprints: dict[_Entry, bytes],
) -> SlotRecord | None:
    (crc,) = _CRC.unpack_from(data, _CRC_AT)
    if crc != zlib.crc32(data[_OWNER_AT:_CRC_AT]):
        return None
    generation, entry_generation, place, half, group, rank, world_size, key_bytes, key = _OWNER.unpack_from(
        data, _OWNER_AT
    )
    length, checksum, first_block = _CONTENT.unpack_from(data, _CONTENT_AT)
    fingerprint = fingerprints.get(_Entry(place, entry_generation))
    # A slot may begin in the middle of its 8 KiB; where, only the record knows.
    offset = number * MIN_SLOT_BYTES + half * PAGE_BYTES
    region = offset // geometry.region_bytes
    slot_bytes = regions[region]
    fits = slot_bytes and (offset - region * geometry.region_bytes) % slot_bytes == 0 and length <= slot_bytes
    if fingerprint is None or not fits:
        return None
    return SlotRecord(
        offset,
        slot_bytes,
        fingerprint,
        group,
        key[:key_bytes],
        rank,
        world_size,
        first_block,
        length,
        checksum,
        generation,
    )


def _next_data(fd: int, position: int) -> int:
    """Where the file's next data begins at or after ``position``; its end when there is none."""
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(fd).st_size


def _page_up(value: int) -> int:
    return -(-value // PAGE_BYTES) * PAGE_BYTES
