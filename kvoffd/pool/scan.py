"""Reads a slot table: which slots hold whole bytes, and which records are not to be trusted. ``scan.c`` judges them."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.pool.records import InheritedSlots, Kind
from kvoffd.pool.table_format import CRC, FINGERPRINT, FINGERPRINT_ENTRY_BYTES, RECORD_BYTES, Geometry
from kvoffd.system.native import native

_BATCH_BYTES = 4 << 20
_MOST_KINDS = 1 << 20
"""Ranks and groups of all namespaces; slots of more are not believed."""


class FingerprintEntry(NamedTuple):
    """An entry of the fingerprint table: its place, and which of the namespaces that were named by that place."""

    place: int
    generation: int


class HeldFingerprint(NamedTuple):
    """An entry of the fingerprint table that records name."""

    entry: FingerprintEntry
    fingerprint: bytes
    records: int
    """How many name it."""


class Scan(NamedTuple):
    slots: InheritedSlots
    entries: list[HeldFingerprint]
    """The older ones first."""
    discarded: npt.NDArray[np.uint64]
    """Numbers of the records that are neither FREE nor of ``slots``: being written, torn, or contradicted."""


class Scanner(ctypes.Structure):
    """``struct scan`` of scan.c."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("pool_bytes", "region_bytes", "regions", "entries", "most_kinds")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("slot_bytes", "entry_generations", "names", "holders", "kinds", "kind_places"),
                *("offsets", "generations", "identities", "kind_of", "discarded"),
            )
        ),
        *((name, ctypes.c_uint64) for name in ("slots_found", "kinds_found", "discarded_found")),
        ("seed", ctypes.c_uint64 * 2),
        ("crc", ctypes.c_uint32 * 256 * 8),
    )


def scan(fd: int, geometry: Geometry) -> Scan:
    """Reads the whole table.

    A record counts when it is READY, has a right CRC, and agrees with its namespace's entry and its region. The file's
    data is read, never its holes, which reading through a mapping would fill.
    """
    regions = np.frombuffer(os.pread(fd, geometry.regions * 8, geometry.regions_at), np.uint64)
    fingerprints = _read_fingerprints(fd, geometry)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(fingerprints.values()))}
    generations, holders = (np.zeros(geometry.fingerprints, np.uint64) for _ in range(2))
    names = np.zeros(geometry.fingerprints, np.int32)
    for entry, name in fingerprints.items():
        generations[entry.place], names[entry.place] = entry.generation, numbers[name]
    # As much as there can be; what is not written is not in memory.
    kinds, kind_places = np.empty(_MOST_KINDS, Kind), np.zeros(2 * _MOST_KINDS, np.uint32)
    offsets, slot_generations = (np.empty(geometry.records, np.int64) for _ in range(2))
    identities, discarded = (np.empty(geometry.records, np.uint64) for _ in range(2))
    kind_of = np.empty(geometry.records, np.uint32)
    scanner = Scanner(
        *(geometry.pool_bytes, geometry.region_bytes, geometry.regions, geometry.fingerprints, _MOST_KINDS),
        *(array.ctypes.data for array in (regions, generations, names, holders, kinds, kind_places)),
        *(array.ctypes.data for array in (offsets, slot_generations, identities, kind_of, discarded)),
        seed=(ctypes.c_uint64 * 2).from_buffer_copy(os.urandom(16)),
    )
    _judge_all(fd, geometry, scanner)
    held = [
        HeldFingerprint(entry, name, int(holders[entry.place]))
        for entry, name in sorted(fingerprints.items(), key=lambda item: item[0].generation)
        if holders[entry.place]
    ]
    found = scanner.slots_found
    slots = InheritedSlots(
        list(numbers),
        (Kind * scanner.kinds_found).from_buffer_copy(kinds[: scanner.kinds_found]),
        kind_of[:found],
        offsets[:found],
        slot_generations[:found],
        identities[:found],
    )
    return Scan(slots, held, discarded[: scanner.discarded_found])


def _judge_all(fd: int, geometry: Geometry, scanner: Scanner) -> None:
    """Has the records judged that lie in the file's data: it may lie in many small pieces, one page to a record."""
    judge, reference = native().scan, ctypes.byref(scanner)
    native().scan_prepare(reference)
    # One buffer for all: the kernel would have to find new pages for each new one.
    room = memoryview(bytearray(_BATCH_BYTES))
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    position, end = geometry.records_at, geometry.records_at + geometry.records * RECORD_BYTES
    hole_at = position
    while position < end:
        if position == hole_at:
            position = _seek(fd, position, os.SEEK_DATA)
            if position >= end:
                break
            hole_at = min(end, _seek(fd, position, os.SEEK_HOLE))  # once for all of it: the kernel counts page by page
        stop = min(hole_at, position + _BATCH_BYTES)
        # Data begins and ends with pages, and pages hold whole records; what was cut off in between is gone.
        count = os.preadv(fd, [room[: stop - position]], position) // RECORD_BYTES
        judge(reference, address, count, (position - geometry.records_at) // RECORD_BYTES)
        position = stop


def _read_fingerprints(fd: int, geometry: Geometry) -> dict[FingerprintEntry, bytes]:
    data = os.pread(fd, geometry.fingerprints * FINGERPRINT_ENTRY_BYTES, geometry.fingerprints_at)
    found = {}
    for index in range(geometry.fingerprints):
        at = index * FINGERPRINT_ENTRY_BYTES
        fingerprint, generation = FINGERPRINT.unpack_from(data, at)
        (crc,) = CRC.unpack_from(data, at + FINGERPRINT.size)
        if generation and crc == zlib.crc32(data[at : at + FINGERPRINT.size]):
            found[FingerprintEntry(index, generation)] = fingerprint
    return found


def _seek(fd: int, position: int, whence: int) -> int:
    """Where the file's next data or hole begins at or after ``position``; its end when there is none."""
    try:
        return os.lseek(fd, position, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(fd).st_size
