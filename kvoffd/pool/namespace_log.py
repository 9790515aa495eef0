"""The records of namespaces, kept in the slot table so that a new daemon need not wait for their engines.

The table's part for them has two halves, of which one is current. A half begins with its number, and the half with the
higher number is current. Entries follow: length and CRC-32 of the content, then the content, to the next multiple of 8
bytes. The CRC covers the half's number too, so that entries of an earlier use of the half do not count. The last entry
of a namespace counts. When the half is full, the entries that count are written into the other half, and its number
last. A process killed anywhere in that leaves one half whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from struct import Struct

import msgspec

from kvoffd.pool.records import NamespaceRecord

_NUMBER = Struct("=Q")
_ENTRY = Struct("=II")
_ALIGNMENT = 8
# The record of a namespace of 4096 ranks and 1024 groups is as large as this; it compresses well.
_MOST_UNPACKED_BYTES = 64 << 20

_decoder = msgspec.msgpack.Decoder(NamespaceRecord)


class NamespaceLog:
    """Writes namespaces' records into ``area``, the table's part for them: a multiple of 16 bytes of shared memory.

    Args:
        known: the records to begin with. Everything else in the area is dropped.
    """

    def __init__(self, area: memoryview, known: Iterable[NamespaceRecord] = ()) -> None:
        half_bytes = len(area) // 2
        self._halves = (area[:half_bytes], area[half_bytes : 2 * half_bytes])
        self._numbers = tuple(half[: _NUMBER.size].cast("Q") for half in self._halves)
        self._current = int(self._numbers[1][0] > self._numbers[0][0])
        self._packed = {record.fingerprint: _pack(record) for record in known}
        self._end = 0
        self._rewrite(self._packed)

    def note(self, record: NamespaceRecord) -> bool:
        """Keeps a record, in the place of the namespace's last; False when there is no room for it."""
        packed = _pack(record)
        if packed == self._packed.get(record.fingerprint):
            return True
        wanted = {**self._packed, record.fingerprint: packed}
        if not self._append(packed) and not self._rewrite(wanted):
            return False  # the entry before stays: a successor drops the slots that it does not describe
        self._packed = wanted
        return True

    def forget(self, fingerprint: bytes) -> None:
        """Keeps a record no more. It goes when its half is full; a successor drops records without slots."""
        self._packed.pop(fingerprint, None)

    def close(self) -> None:
        """Releases the memory."""
        for view in (*self._numbers, *self._halves):
            view.release()

    def _append(self, packed: bytes) -> bool:
        half, number = self._halves[self._current], self._numbers[self._current][0]
        end = _append(half, self._end, number, packed)
        self._end = end or self._end
        return end != 0

    def _rewrite(self, entries: Mapping[bytes, bytes]) -> bool:
        """Writes the entries that count into the other half; False, and nothing changes, when it is too small."""
        other = 1 - self._current
        number = max(self._numbers[0][0], self._numbers[1][0]) + 1
        if number >= 2**63:  # a number like that was never counted to
            number = 1
        self._numbers[other][0] = 0
        end = _NUMBER.size
        for packed in entries.values():
            end = _append(self._halves[other], end, number, packed)
            if not end:
                return False
        self._numbers[other][0] = number
        self._numbers[self._current][0] = 0
        self._current, self._end = other, end
        return True


def read_namespaces(area: bytes) -> dict[bytes, NamespaceRecord]:
    """The records of a log, by fingerprint. Reads up to the first entry that is not whole."""
    half_bytes = len(area) // 2
    halves = (area[:half_bytes], area[half_bytes : 2 * half_bytes])
    half = max(halves, key=lambda half: _NUMBER.unpack_from(half)[0])
    number = _NUMBER.unpack_from(half)[0]
    found: dict[bytes, NamespaceRecord] = {}
    position = _NUMBER.size
    while number and position + _ENTRY.size <= len(half):
        length, crc = _ENTRY.unpack_from(half, position)
        packed = half[position + _ENTRY.size : position + _ENTRY.size + length]
        if not length or crc != _crc(number, packed) or (record := _unpack(packed)) is None:
            break
        found[record.fingerprint] = record
        position = _after(position, length)
    return found


def _append(half: memoryview, position: int, number: int, packed: bytes) -> int:
    """Writes an entry; returns where the next one goes, or 0 when this one does not fit."""
    begin = position + _ENTRY.size
    if begin + len(packed) > len(half):
        return 0
    half[begin : begin + len(packed)] = packed
    _ENTRY.pack_into(half, position, len(packed), _crc(number, packed))
    return _after(position, len(packed))


def _after(position: int, length: int) -> int:
    return -(-(position + _ENTRY.size + length) // _ALIGNMENT) * _ALIGNMENT


def _crc(number: int, packed: bytes) -> int:
    return zlib.crc32(packed, zlib.crc32(_NUMBER.pack(number)))


def _pack(record: NamespaceRecord) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(record), 1)


def _unpack(packed: bytes) -> NamespaceRecord | None:
    try:
        return _decoder.decode(zlib.decompressobj().decompress(packed, _MOST_UNPACKED_BYTES))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
