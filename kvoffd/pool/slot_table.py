"""The slot table: describes the pool's slots in memory that outlives the daemon.

Layout of the file (native byte order, parts begin at pages, numbers unsigned):

============  ====================================================================================================
part          content
============  ====================================================================================================
header        ``HEADER``: magic, format, record size, boot id, pool bytes, region bytes, bytes of the namespaces'
              part; CRC-32 of these fields
regions       8 bytes each: the last slot size of the region; 0 if it never had one
namespaces    two halves, each a whole snapshot: see ``SlotTable.save_namespaces``
records       ``RECORD``, 128 bytes each, by slot number (see ``allocator``)
============  ====================================================================================================

``cache/blocks.c`` writes a record in this order: its owner, while the state is FREE_RECORD; the slot's bytes;
sequence, first block, length and checksum; the CRC of all fields after the state; then the state READY_RECORD, in one
aligned 8-byte store. So a record with that state and a correct CRC has complete bytes, wherever the writer was killed.

This needs no memory fences. A killed process stops each of its threads between two instructions. What a thread stored
before is in the shared pages, on x86 and on ARM, because a retired store cannot be undone. The queue and lock between
two threads order the copy of one before the READY of the other.

The state "!kvBAD!!" marks a slot that lost its bytes: it is never used again.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvoffd.errors import KvoffdError
from kvoffd.pool.allocator import MIN_SLOT_BYTES, PAGE_BYTES, page_up
from kvoffd.system.files import begins_as, read_boot_id
from kvoffd_proto.units import format_size

MAGIC = b"KVOFFDST"
FORMAT_VERSION = 4
HEADER = Struct("=8sII16sQQQ")
CRC = Struct("=I")
RECORD_BYTES = 128
MAX_KEY_BYTES = 64
READY_RECORD = int.from_bytes(b"kvREADY!", "little")
"""State of a record whose slot is complete; one flipped bit in another state cannot produce it."""
FREE_RECORD = 0
BAD_RECORD = int.from_bytes(b"!kvBAD!!", "little")
"""State of a record whose slot holds wrong bytes: the slot is never used again."""
RECORD = np.dtype(
    {
        "names": [
            *("state", "sequence", "namespace", "group", "rank", "first_block", "key_bytes"),
            *("length", "key", "checksum", "crc", "before", "before_key", "before_sum"),
        ],
        "formats": [
            *("=u8", "=u8", "=u4", "=u2", "=u2", "=u2", "u1"),
            *("=u4", ("u1", MAX_KEY_BYTES), "=u8", "=u4", "=u4", "=u8", "=u4"),
        ],
        "offsets": [0, 8, 16, 20, 22, 24, 26, 28, 32, 96, 104, 108, 112, 120],
        "itemsize": RECORD_BYTES,
    }
)
"""``namespace``: its number. ``first_block``: engine blocks left out at the start of the key. ``length``: bytes of the
shard. ``checksum``: their ``checksums.digest``, 0 if none was computed. ``crc``: CRC-32 of the bytes from
``sequence`` to ``checksum``. ``before``: slot of rank 0 of the block before this one in its prompt; ``before_key``: the
first bytes of its key; both are valid only if ``before_sum`` is what the function of that name in ``cache/blocks.h``
returns for both and ``sequence``. Only rank 0's records name a block before, and earlier releases ignore it."""
_MAX_NAMESPACE_BYTES = 4 << 20
_SNAPSHOT = Struct("=QII")  # number of the snapshot; length and CRC-32 of its content
_MAX_SNAPSHOT = 2**62 - 1
"""Numbers of snapshots are accepted below this: later ones must remain."""
_MAX_UNPACKED_BYTES = 64 << 20


class BadTable(KvoffdError):
    """The memory holds no slot table that this daemon can use. The message says why."""


@dataclass(frozen=True, slots=True)
class TableGeometry:
    """Offsets and sizes of the parts of a pool's slot table."""

    pool_bytes: int
    region_bytes: int

    @property
    def regions(self) -> int:
        return -(-self.pool_bytes // self.region_bytes)

    @property
    def slots(self) -> int:
        """Number of slot numbers."""
        return self.regions * (self.region_bytes // MIN_SLOT_BYTES)

    @property
    def regions_at(self) -> int:
        return PAGE_BYTES

    @property
    def namespaces_at(self) -> int:
        return page_up(self.regions_at + 8 * self.regions)

    @property
    def namespace_bytes(self) -> int:
        """Bytes of both halves: a thousandth of the pool, so that a small pool has a small table."""
        return min(_MAX_NAMESPACE_BYTES, max(2 * PAGE_BYTES, page_up(self.pool_bytes // 1000)))

    @property
    def records_at(self) -> int:
        return page_up(self.namespaces_at + self.namespace_bytes)

    @property
    def size_bytes(self) -> int:
        """Size of the table: 1.7 % of the pool and a few pages. Pages that are never written use no memory."""
        return page_up(self.records_at + self.slots * RECORD_BYTES)

    def header(self, boot_id: bytes) -> bytes:
        packed = HEADER.pack(
            MAGIC, FORMAT_VERSION, RECORD_BYTES, boot_id, self.pool_bytes, self.region_bytes, self.namespace_bytes
        )
        return packed + CRC.pack(zlib.crc32(packed))


def is_table(fd: int) -> bool:
    """Return whether the file begins like a slot table of any release, even if its first bytes are damaged."""
    return begins_as(os.pread(fd, HEADER.size, 0), MAGIC)


def check_table(fd: int, wanted: TableGeometry) -> None:
    """Raise BadTable unless the file holds a complete table of this geometry, format and boot."""
    try:
        header, size = os.pread(fd, HEADER.size + CRC.size, 0), os.fstat(fd).st_size
    except OSError as error:
        raise BadTable(f"The slot table cannot be read: {error.strerror}.") from error
    if not begins_as(header, MAGIC):
        raise BadTable("The file is not a slot table of kvoffd.")
    if header[HEADER.size :] != CRC.pack(zlib.crc32(header[: HEADER.size])):
        raise BadTable("The slot table's header is damaged or cut off.")
    _, version, _, boot_id, pool_bytes, region_bytes, _ = HEADER.unpack_from(header)
    if version != FORMAT_VERSION:
        raise BadTable(f"The slot table has format {version}, and this release reads format {FORMAT_VERSION}.")
    if boot_id != read_boot_id():
        raise BadTable("The slot table was written before the machine's last boot.")
    if pool_bytes != wanted.pool_bytes:
        raise BadTable(
            f"The existing pool has {format_size(pool_bytes)} ({pool_bytes} bytes), but "
            f"{format_size(wanted.pool_bytes)} ({wanted.pool_bytes} bytes) are configured."
        )
    if header != wanted.header(boot_id):
        raise BadTable(f"The existing pool has regions of {region_bytes} bytes, which this configuration does not use.")
    if size < wanted.size_bytes:
        raise BadTable(f"The slot table is cut off: {size} of its {wanted.size_bytes} bytes are there.")


class SlotTable:
    """Writes the table of one pool. Not thread-safe.

    Args:
        memory: the whole table, zeros if it is new.
        new: write a header; otherwise ``check_table`` must have accepted the table.
    """

    def __init__(self, memory: memoryview, geometry: TableGeometry, *, new: bool) -> None:
        self.geometry = geometry
        self._bytes = memory[: geometry.size_bytes]
        self.records: npt.NDArray[np.void] = np.frombuffer(self._bytes, RECORD, geometry.slots, geometry.records_at)
        """[slots] see ``RECORD``."""
        self.region_sizes: npt.NDArray[np.uint64] = np.frombuffer(
            self._bytes, np.uint64, geometry.regions, geometry.regions_at
        )
        """[regions] bytes of a slot, as last set."""
        self._halves_at, self._half_bytes = geometry.namespaces_at, geometry.namespace_bytes // 2
        """Offset of the two snapshots of the namespaces, and the bytes that each may have."""
        self._snapshot = 0
        if new:  # the header comes last: a table without it is not accepted
            header = geometry.header(read_boot_id())
            self._bytes[: len(header)] = header

    def save_namespaces(self, snapshot: msgspec.Struct) -> bool:
        """Write what the next daemon must know of the namespaces into the half that is not current.

        The half's number is written last, so a process killed before leaves the other half valid. Returns False, and
        changes nothing, if the snapshot does not fit.
        """
        half_bytes = self._half_bytes
        encoded = msgspec.msgpack.encode(snapshot)
        content = zlib.compress(encoded, 0)  # as it is, in a zlib stream, which is what other releases write and read
        if _SNAPSHOT.size + len(content) > half_bytes:
            content = zlib.compress(encoded, 1)  # milliseconds for 64 namespaces, so only where it must be
        if len(encoded) > _MAX_UNPACKED_BYTES or _SNAPSHOT.size + len(content) > half_bytes:
            return False
        number = self._snapshot + 1
        begin = self._halves_at + number % 2 * half_bytes
        word = self._bytes[begin : begin + 8].cast("Q")
        word[0] = 0  # no snapshot here while the rest is written
        self._bytes[begin + _SNAPSHOT.size : begin + _SNAPSHOT.size + len(content)] = content
        crc = zlib.crc32(content, number)  # so that a number of another snapshot does not fit the content
        self._bytes[begin + 8 : begin + _SNAPSHOT.size] = _SNAPSHOT.pack(number, len(content), crc)[8:]
        word[0] = number
        self._snapshot = number
        return True

    def load_namespaces(self, kind: type[msgspec.Struct]) -> Any:
        """Return the latest complete snapshot as a ``kind``; None if there is none."""
        half_bytes = self._half_bytes
        found = None
        for half in range(2):
            begin = self._halves_at + half * half_bytes
            number, length, crc = _SNAPSHOT.unpack_from(self._bytes, begin)
            content = bytes(self._bytes[begin + _SNAPSHOT.size : begin + min(half_bytes, _SNAPSHOT.size + length)])
            is_of_half = number % 2 == half and number < _MAX_SNAPSHOT
            if number <= self._snapshot or not is_of_half or crc != zlib.crc32(content, number):
                continue
            try:
                unpacked = zlib.decompressobj().decompress(content, _MAX_UNPACKED_BYTES)
                found = msgspec.msgpack.decode(unpacked, type=kind)
            except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            self._snapshot = number
        return found
