"""The slot table's format: the pool's description of itself, in memory that outlives the daemon.

Layout of the file (native byte order, all parts page-aligned, numbers unsigned):

============  ====================================================================================================
part          content
============  ====================================================================================================
header        ``HEADER``: magic, format version, size of a record, boot id, pool bytes, region bytes, least slot
              bytes, number and offset of regions, fingerprints and records, size and offset of the namespaces'
              part; CRC-32 of all that
regions       8 bytes each: the size of the region's slots, as it was last given to a slot size; 0 for never
fingerprints  64 bytes each (``FINGERPRINT``): namespaces that slots belong to; generation 0 is no entry
namespaces    the records of these namespaces: see ``namespace_log``
records       128 bytes each (``OWNER``, ``CONTENT``), number ``slot offset // 8192``
============  ====================================================================================================

A record is written in this order: state WRITING; everything else; (the bytes of the slot); generation, first block,
length, CRC; state READY, in one aligned 8-byte store. Whoever finds READY and a right CRC therefore finds whole bytes,
wherever the writer was killed.

That needs no fences. A killed process stops between two instructions of each of its threads: what a thread stored
before is in the shared pages, on x86 as on ARM, since a store that was retired cannot be taken back; what comes after
is not. That one thread's copy comes before another's READY is seen to by the queue and lock between them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from uuid import UUID

import numpy as np
import xxhash

from kvoffd.errors import KvoffdError
from kvoffd.pool.records import Rows
from kvoffd.pool.slots import MIN_SLOT_BYTES, PAGE_BYTES, page_up
from kvoffd_proto.units import format_size

MAGIC = b"KVOFFDST"
FORMAT_VERSION = 3
RECORD_BYTES = 128
FINGERPRINT_BYTES = 32
MAX_KEY_BYTES = 64

_MOST_FINGERPRINTS = 4096
_MOST_NAMESPACE_BYTES = 4 << 20
# magic, version, record bytes, boot id, pool, region, least slot; (count, offset) of regions, fingerprints, records;
# (bytes, offset) of the namespaces
HEADER = Struct("=8sII16sQQQQQQQQQQQ")
CRC = Struct("=I")
REGION = Struct("=Q")
# fingerprint, generation; the CRC of both comes last
FINGERPRINT = Struct("=32sQ")
FINGERPRINT_ENTRY_BYTES = 64
# Behind the 8 bytes of the state: generation, generation and place of the fingerprint, offset within the 8 KiB in
# pages, group, rank, world size, length of the key, key; then what is known at the end: length, checksum of the bytes
# (``digest``; 0 for none), first block; then the CRC.
OWNER = Struct("=QQHBxHHHB64sx")
CONTENT = Struct("=QQI")
OWNER_AT = 8
CONTENT_AT = OWNER_AT + OWNER.size
CRC_AT = CONTENT_AT + CONTENT.size
KEY_AT = OWNER_AT + OWNER.size - 1 - MAX_KEY_BYTES
assert CRC_AT + CRC.size <= RECORD_BYTES

_FIELDS = (
    ("state", "=u8", 0),
    ("generation", "=u8", OWNER_AT),
    ("entry_generation", "=u8", OWNER_AT + 8),
    ("place", "=u2", OWNER_AT + 16),
    ("half", "u1", OWNER_AT + 18),
    ("group", "=u2", OWNER_AT + 20),
    ("rank", "=u2", OWNER_AT + 22),
    ("world_size", "=u2", OWNER_AT + 24),
    ("key_bytes", "u1", OWNER_AT + 26),
    ("length", "=u8", CONTENT_AT),
    ("checksum", "=u8", CONTENT_AT + 8),
    ("first_block", "=u4", CONTENT_AT + 16),
    ("crc", "=u4", CRC_AT),
)
_NAMES, _FORMATS, _OFFSETS = (list(column) for column in zip(*_FIELDS, strict=True))
RECORD = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": _OFFSETS, "itemsize": RECORD_BYTES})
"""A record without its key, for numpy."""


def keys_of(rows: Rows, key_bytes: int) -> list[bytes]:
    every = rows.view(np.uint8).reshape(-1, RECORD_BYTES)[:, KEY_AT : KEY_AT + key_bytes]
    keys: list[bytes] = np.frombuffer(every.tobytes(), (np.void, key_bytes)).tolist()
    return keys


# 0 in a record says that there is no checksum; the one content in 2^64 that hashes to 0 gets this one.
_INSTEAD_OF_ZERO = 1


def digest(data: memoryview) -> int:
    """The checksum of a slot's bytes, 64 bits of XXH3: never 0. Releases the GIL for 64 KiB or more.

    XXH3, since it is faster than memory is. Measured on one core of an EPYC: 39 GB/s from 1 MiB on, 30 at 64 KiB, 16 at
    16 KiB, where a copy makes 10 to 24; zlib's CRC-32, the best of Python's own, makes 1 to 3.
    """
    return xxhash.xxh3_64_intdigest(data) or _INSTEAD_OF_ZERO


def digests(data: memoryview, parts: Sequence[tuple[int, int]]) -> list[int]:
    """The ``digest`` of each part of ``data``, given by its offset and length.

    In one expression: whoever holds the GIL between two parts keeps a copy thread waiting for it.
    """
    xxh3 = xxhash.xxh3_64_intdigest
    return [xxh3(data[offset : offset + length]) or _INSTEAD_OF_ZERO for offset, length in parts]


class BadTable(KvoffdError):
    """The memory that should hold a slot table holds none that this daemon can use. The message says why."""


class SlotState(IntEnum):
    """State of a record. READY is a word that no flipped bit makes of another state."""

    FREE = 0
    WRITING = 1
    READY = int.from_bytes(b"kvREADY!", "little")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parts of the table lie."""

    pool_bytes: int
    region_bytes: int
    regions: int
    fingerprints: int
    records: int
    namespace_bytes: int

    @classmethod
    def of(cls, pool_bytes: int, region_bytes: int) -> Geometry:
        # A thousandth of the pool each for fingerprints and namespaces' records keeps a small pool's table small.
        share = max(PAGE_BYTES, pool_bytes // 1000 // PAGE_BYTES * PAGE_BYTES)
        return cls(
            pool_bytes,
            region_bytes,
            -(-pool_bytes // region_bytes),
            min(_MOST_FINGERPRINTS, share // FINGERPRINT_ENTRY_BYTES),
            pool_bytes // MIN_SLOT_BYTES,
            min(_MOST_NAMESPACE_BYTES, share),
        )

    @property
    def regions_at(self) -> int:
        return PAGE_BYTES

    @property
    def fingerprints_at(self) -> int:
        return page_up(self.regions_at + self.regions * REGION.size)

    @property
    def namespaces_at(self) -> int:
        return page_up(self.fingerprints_at + self.fingerprints * FINGERPRINT_ENTRY_BYTES)

    @property
    def records_at(self) -> int:
        return self.namespaces_at + self.namespace_bytes

    @property
    def size_bytes(self) -> int:
        """Size of the table: 1.8 % of the pool and a few pages."""
        return page_up(self.records_at + self.records * RECORD_BYTES)

    def header(self, boot_id: bytes) -> bytes:
        packed = HEADER.pack(
            *(MAGIC, FORMAT_VERSION, RECORD_BYTES, boot_id),
            *(self.pool_bytes, self.region_bytes, MIN_SLOT_BYTES),
            *(self.regions, self.regions_at, self.fingerprints, self.fingerprints_at, self.records, self.records_at),
            *(self.namespace_bytes, self.namespaces_at),
        )
        return packed + CRC.pack(zlib.crc32(packed))


def is_table(fd: int) -> bool:
    """Whether the file begins as a table of kvoffd does, of this release or any other."""
    return os.pread(fd, len(MAGIC), 0) == MAGIC


def read_geometry(fd: int) -> Geometry:
    """The table's geometry, checked against its own CRC, this format, the running boot and the file's size.

    Raises BadTable.
    """
    try:
        header = os.pread(fd, HEADER.size + CRC.size, 0)
    except OSError as error:
        raise BadTable(f"The slot table cannot be read: {error.strerror}.") from error
    if header[: len(MAGIC)] != MAGIC:
        raise BadTable("The file is no slot table of kvoffd.")
    if len(header) < HEADER.size + CRC.size:
        raise BadTable("The slot table is cut off in its header.")
    fields = HEADER.unpack_from(header)
    if fields[1] != FORMAT_VERSION:
        raise BadTable(f"The slot table has format {fields[1]}, and this release reads format {FORMAT_VERSION}.")
    if fields[3] != read_boot_id():
        raise BadTable("The slot table is from before the machine's last boot.")
    # The numbers are looked at only behind the CRC: damaged ones may be of any size.
    sound = header[HEADER.size :] == CRC.pack(zlib.crc32(header[: HEADER.size])) and fields[5] > 0
    if not sound or header != (geometry := Geometry.of(fields[4], fields[5])).header(fields[3]):
        raise BadTable("The slot table's header is damaged.")
    size = os.fstat(fd).st_size
    if size < geometry.size_bytes:
        raise BadTable(f"The slot table is cut off: {size} of its {geometry.size_bytes} bytes are there.")
    return geometry


def check_geometry(fd: int, wanted: Geometry) -> None:
    """Raise BadTable unless the file holds a table of exactly this geometry."""
    found = read_geometry(fd)
    if found.pool_bytes != wanted.pool_bytes:
        raise BadTable(
            f"The existing pool has {format_size(found.pool_bytes)} ({found.pool_bytes} bytes), and "
            f"{format_size(wanted.pool_bytes)} ({wanted.pool_bytes} bytes) are configured."
        )
    if found != wanted:
        raise BadTable(f"The existing pool is cut into regions of {found.region_bytes} bytes, not as this one.")


def read_boot_id() -> bytes:
    """16 bytes that change with every boot of the machine; zeros where the kernel does not tell."""
    try:
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)
