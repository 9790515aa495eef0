"""What is known of the namespaces, kept in the slot table so that a new daemon need not wait for their engines.

The part of the table is cut in halves, of which one is in force. A half begins with its number, the higher of the two
being in force, and is filled with entries: length and CRC-32 of the content, then the content, to the next multiple of
8 bytes. The CRC covers the half's number too, so that what an earlier use of the half left is no entry. The last entry
of a namespace counts. When the half is full, the entries that count are written into the other one, and its number
last. A process killed anywhere in that leaves one half whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from struct import Struct

import msgspec

from kvoffd.pool.records import NamespaceRecord

_NUMBER = Struct("=Q")
_ENTRY = Struct("=II")
_ALIGNMENT = 8
# A namespace of 4096 ranks and 1024 groups has so many numbers; they compress well.
_MOST_UNPACKED_BYTES = 64 << 20

_decoder = msgspec.msgpack.Decoder(NamespaceRecord)


class NamespaceLog:
    """Facts of namespaces in ``area``, which is the table's part for them: a multiple of 16 bytes of shared memory.

    Args:
        known: what is to be in it from the start. Everything else in the area is forgotten.
    """

    def __init__(self, area: memoryview, known: Iterable[NamespaceRecord] = ()) -> None:
        half_bytes = len(area) // 2
        self._halves = (area[:half_bytes], area[half_bytes : 2 * half_bytes])
        self._numbers = tuple(half[: _NUMBER.size].cast("Q") for half in self._halves)
        self._current = self._in_force()
        self._packed = {facts.fingerprint: _pack(facts) for facts in known}
        self._end = 0
        self._rewrite()

    def note(self, facts: NamespaceRecord) -> bool:
        """Keeps ``facts``, in the place of what was known of that namespace; False when there is no room for it."""
        packed = _pack(facts)
        before = self._packed.get(facts.fingerprint)
        if packed == before:
            return True
        self._packed[facts.fingerprint] = packed
        if self._append(packed) or self._rewrite():
            return True
        # Not the entry before: it is out of date, so the slots that it does not cover will be dropped.
        if before is not None:
            self._packed[facts.fingerprint] = before
        else:
            del self._packed[facts.fingerprint]
        return False

    def close(self) -> None:
        """Lets the memory go."""
        for view in (*self._numbers, *self._halves):
            view.release()

    def _in_force(self) -> int:
        return int(self._numbers[1][0] > self._numbers[0][0])

    def _append(self, packed: bytes) -> bool:
        half, number = self._halves[self._current], self._numbers[self._current][0]
        end = _append(half, self._end, number, packed)
        self._end = end or self._end
        return end != 0

    def _rewrite(self) -> bool:
        """Writes what counts into the other half; False, and nothing changes, when that does not hold it."""
        other = 1 - self._current
        number = max(self._numbers[0][0], self._numbers[1][0]) + 1
        if number >= 2**63:  # a number like that was never counted to
            number = 1
        self._numbers[other][0] = 0
        end = _NUMBER.size
        for packed in self._packed.values():
            end = _append(self._halves[other], end, number, packed)
            if not end:
                return False
        self._numbers[other][0] = number
        self._numbers[self._current][0] = 0
        self._current, self._end = other, end
        return True


def read_facts(area: bytes) -> dict[bytes, NamespaceRecord]:
    """What a log holds, by fingerprint. Reads up to the first entry that is not whole."""
    half_bytes = len(area) // 2
    halves = (area[:half_bytes], area[half_bytes : 2 * half_bytes])
    half = max(halves, key=lambda half: _NUMBER.unpack_from(half)[0])
    number = _NUMBER.unpack_from(half)[0]
    found: dict[bytes, NamespaceRecord] = {}
    position = _NUMBER.size
    while number and position + _ENTRY.size <= len(half):
        length, crc = _ENTRY.unpack_from(half, position)
        packed = half[position + _ENTRY.size : position + _ENTRY.size + length]
        if not length or crc != _crc(number, packed) or (facts := _unpack(packed)) is None:
            break
        found[facts.fingerprint] = facts
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


def _pack(facts: NamespaceRecord) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(facts), 1)


def _unpack(packed: bytes) -> NamespaceRecord | None:
    try:
        return _decoder.decode(zlib.decompressobj().decompress(packed, _MOST_UNPACKED_BYTES))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
