"""Reads a slot table: which slots hold whole bytes, and which records are not to be trusted."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.pool.records import SlotRecord
from kvoffd.pool.slots import MIN_SLOT_BYTES, PAGE_BYTES
from kvoffd.pool.table_format import (
    CRC,
    CRC_AT,
    FINGERPRINT,
    FINGERPRINT_ENTRY_BYTES,
    KEY_AT,
    MAX_KEY_BYTES,
    OWNER_AT,
    RECORD,
    RECORD_BYTES,
    Geometry,
    SlotState,
)

_BATCH_BYTES = 4 << 20


class Entry(NamedTuple):
    """An entry of the fingerprint table: its place, and which of the namespaces that were named by that place."""

    place: int
    generation: int


class Scan(NamedTuple):
    """The records of a table."""

    records: list[SlotRecord]
    """Slots whose bytes are whole, by offset."""
    entries: list[Entry]
    """For each record, the entry that names its namespace."""
    discarded: list[int]
    """Numbers of the records that are neither FREE nor among ``records``: being written, torn, or contradicted."""


def scan(fd: int, geometry: Geometry) -> Scan:
    """Reads the whole table.

    A record counts when it is READY, has a right CRC, and agrees with its namespace's entry and its region. The file's
    data is read, never its holes, which reading through a mapping would fill.
    """
    regions = np.frombuffer(os.pread(fd, geometry.regions * 8, geometry.regions_at), np.uint64).astype(np.int64)
    fingerprints = _read_fingerprints(fd, geometry)
    found = Scan([], [], [])
    for data, numbers in _batches(fd, geometry):
        _read_batch(data, numbers, geometry, regions, fingerprints, found)
    return found


def _batches(fd: int, geometry: Geometry) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
    """The records in use, end to end, and their numbers in the table; those of some MiB of the file's data at a time.

    The data may lie in many small pieces, one page to a record.
    """
    position, end = geometry.records_at, geometry.records_at + geometry.records * RECORD_BYTES
    # One buffer for all: the kernel would have to find new pages for each new one.
    buffer = bytearray(_BATCH_BYTES)
    room = memoryview(buffer)
    first: list[int] = []
    counts: list[int] = []
    filled = 0
    hole_at = position
    while position < end:
        if position == hole_at:
            position = _seek(fd, position, os.SEEK_DATA)
            if position >= end:
                break
            hole_at = min(end, _seek(fd, position, os.SEEK_HOLE))  # once for all of it: the kernel counts page by page
        stop = min(hole_at, position + _BATCH_BYTES - filled)
        # Data begins and ends with pages, and pages hold whole records; what was cut off in between is gone.
        count = os.preadv(fd, [room[filled : filled + stop - position]], position) // RECORD_BYTES
        first.append((position - geometry.records_at) // RECORD_BYTES)
        counts.append(count)
        filled += count * RECORD_BYTES
        position = stop
        if filled > _BATCH_BYTES - PAGE_BYTES:
            yield _used(buffer, first, counts)
            first, counts, filled = [], [], 0
    if filled:
        yield _used(buffer, first, counts)


def _used(buffer: bytearray, first: list[int], counts: list[int]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """The records in use among those that lie in ``buffer``: ``counts[i]`` records from number ``first[i]`` on."""
    in_piece = np.array(counts)
    before = np.cumsum(in_piece) - in_piece
    total = int(in_piece.sum())
    numbers = np.repeat(np.array(first, np.int64) - before, in_piece) + np.arange(total)
    rows = np.frombuffer(buffer, np.uint64, total * (RECORD_BYTES // 8)).reshape(total, -1)
    used = np.flatnonzero(rows[:, 0])
    return rows[used].tobytes(), numbers[used]


def _read_batch(
    data: bytes,
    numbers: npt.NDArray[np.int64],
    geometry: Geometry,
    regions: npt.NDArray[np.int64],
    fingerprints: dict[Entry, bytes],
    found: Scan,
) -> None:
    rows = np.frombuffer(data, RECORD)
    offsets = numbers * MIN_SLOT_BYTES + rows["half"].astype(np.int64) * PAGE_BYTES
    slot_bytes = regions[np.minimum(offsets // geometry.region_bytes, len(regions) - 1)]
    whole = (rows["state"] == SlotState.READY) & _fit(rows, offsets, slot_bytes, geometry)
    good = whole.tolist()
    crcs = rows["crc"].tolist()
    entries = list(map(Entry, rows["place"].tolist(), rows["entry_generation"].tolist()))
    keys: list[bytes] = []
    for index, key_bytes in enumerate(rows["key_bytes"].tolist()):
        start = index * RECORD_BYTES
        if good[index] and (
            zlib.crc32(data[start + OWNER_AT : start + CRC_AT]) != crcs[index] or entries[index] not in fingerprints
        ):
            good[index] = False
        keys.append(data[start + KEY_AT : start + KEY_AT + key_bytes])
    columns = [rows[name].tolist() for name in ("rank", "world_size", "first_block", "length", "checksum")]
    names = [fingerprints.get(entry, b"") for entry in entries]
    records = map(
        SlotRecord,
        *(offsets.tolist(), slot_bytes.tolist(), names, rows["group"].tolist(), keys, *columns),
        rows["generation"].tolist(),
    )
    for record, entry, number, is_good in zip(records, entries, numbers.tolist(), good, strict=True):
        if is_good:
            found.records.append(record)
            found.entries.append(entry)
        else:
            found.discarded.append(number)


def _fit(
    rows: npt.NDArray[np.void],
    offsets: npt.NDArray[np.int64],
    slot_bytes: npt.NDArray[np.int64],
    geometry: Geometry,
) -> npt.NDArray[np.bool_]:
    """Which records can be of slots that their regions are cut into."""
    base = offsets // geometry.region_bytes * geometry.region_bytes
    region_end = np.minimum(base + geometry.region_bytes, geometry.pool_bytes // PAGE_BYTES * PAGE_BYTES)
    possible = (slot_bytes >= MIN_SLOT_BYTES) & (slot_bytes <= geometry.region_bytes) & (slot_bytes % PAGE_BYTES == 0)
    begins = (offsets - base) % np.where(possible, slot_bytes, MIN_SLOT_BYTES) == 0
    ends = offsets + slot_bytes <= region_end
    inside = (rows["length"] <= slot_bytes.astype(np.uint64)) & (rows["key_bytes"] <= MAX_KEY_BYTES)
    return np.asarray(possible & begins & ends & inside & (rows["half"] < MIN_SLOT_BYTES // PAGE_BYTES))


def _read_fingerprints(fd: int, geometry: Geometry) -> dict[Entry, bytes]:
    """Fingerprints by their entry."""
    data = os.pread(fd, geometry.fingerprints * FINGERPRINT_ENTRY_BYTES, geometry.fingerprints_at)
    found = {}
    for index in range(geometry.fingerprints):
        at = index * FINGERPRINT_ENTRY_BYTES
        fingerprint, generation = FINGERPRINT.unpack_from(data, at)
        (crc,) = CRC.unpack_from(data, at + FINGERPRINT.size)
        if generation and crc == zlib.crc32(data[at : at + FINGERPRINT.size]):
            found[Entry(index, generation)] = fingerprint
    return found


def _seek(fd: int, position: int, whence: int) -> int:
    """Where the file's next data or hole begins at or after ``position``; its end when there is none."""
    try:
        return os.lseek(fd, position, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return os.fstat(fd).st_size
