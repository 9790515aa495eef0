"""The two files of a disk tier, locked and allocated: ``kvoffd.disk`` has the blocks, ``kvoffd.index`` their places.

``kvoffd.disk`` begins with a page that identifies the file, followed by regions with slots of one size, as in the pool
(``SlotAllocator``). A slot has a block's header (``header.py``) and its shards, each padded to pages. It is read and
written with O_DIRECT.

``kvoffd.index`` has two copies of the head, of which the valid one with the higher number counts; the pages of a slot
of each region; and a record for each slot by its number. It uses the page cache: a record may be stale, damaged or
belong to another copy of the files. That loses blocks, but never returns a wrong one: header and checksums decide.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffd.errors import KvoffdError
from kvoffd.pool.allocator import MIN_SLOT_BYTES, PAGE_BYTES
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.files import (
    FileCalls,
    FileInUse,
    aligned_buffer,
    allocate_in_steps,
    begins_as,
    claim_file,
    foreign_owner,
    held_bytes,
    is_regular,
    open_directory,
    read_all,
    write_all,
)
from kvoffd.tiers import DISK_NAME
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import DiskFault
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

INDEX_NAME = "kvoffd.index"
RECORD = np.dtype(
    [
        ("tag", "<u8"),
        ("nbytes", "<u4"),
        ("written_at", "<u4"),
        ("key_bytes", "u1"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("second", "<u2"),
        ("zero", "V13"),
    ]
)
"""Record of a slot: its block's group and key, the bytes of all its shards, and the hour and its second in which it was
written. The tag of an empty slot is 0. Earlier releases ignore the second, and write 0."""
HOUR_S = 3600
_DISK_MAGIC, _INDEX_MAGIC = b"kvoffdD4", b"kvoffdI4"
_NAME_BYTES = 24
"""Bytes at the beginning of ``kvoffd.disk`` that identify it: the magic, and the ``file_id`` of the index's head."""
_HEAD = Struct("<8s16sQQQQ?16x")
_SUM = Struct("<Q")
HEAD_PAGES = 2
_SIZES_AT = HEAD_PAGES * PAGE_BYTES
MAX_REGIONS = 1 << 16
_RECORDS_AT = _SIZES_AT + 4 * MAX_REGIONS
_REGIONS, _MIN_REGIONS = 64, 16
_MIN_REGION_BYTES, _MAX_REGION_BYTES = 16 << 20, 1 << 30
_METADATA_SHIFT = 9
"""Shift of the size reserved for the file system's metadata, such as extents: a 512th. ext4 needs 4 KiB for 340."""
_ALLOCATED_SLOT_BYTES = 1 << 16
"""Slot size for which opening a disk allocates records: a 683rd of its size."""
_ALLOCATE_STEP_BYTES = 1 << 30
"""Large enough for few calls; see ``allocate_in_steps``."""


class DiskError(KvoffdError):
    """The directory cannot be used as a tier. The message says why and what to do."""

    code = ErrorCode.NO_SPACE


class OpeningStopped(KvoffdError):
    """Opening was stopped before it was done."""


@dataclass(frozen=True)
class Head:
    """The head of the index."""

    file_id: bytes
    """Random bytes, which ``kvoffd.disk`` has too: so the two files belong together."""
    number: int
    """Number of the write of this head: of the two copies, the one with the higher number counts."""
    region_bytes: int
    regions: int
    written_bytes: int
    """Bytes written since the file was made, by all daemons."""
    is_open: bool
    """Whether a daemon uses the files, or ended without closing them."""

    def pack(self) -> bytes:
        fields = self.file_id, self.number, self.region_bytes, self.regions, self.written_bytes, self.is_open
        data = _HEAD.pack(_INDEX_MAGIC, *fields)
        return (data + _SUM.pack(xxhash.xxh3_64_intdigest(data))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Head | None:
        """Return the head; None if there is none, or it is damaged."""
        data = page[: _HEAD.size]
        if len(page) < PAGE_BYTES or _SUM.unpack_from(page, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data):
            return None
        magic, *fields = _HEAD.unpack(data)
        head = cls(*fields)
        sound = magic == _INDEX_MAGIC and head.region_bytes % PAGE_BYTES == 0 and head.regions <= MAX_REGIONS
        return head if sound and head.region_bytes >= MIN_SLOT_BYTES else None


def default_region_bytes(size_bytes: int) -> int:
    """Return a 64th of the disk, at most 1 GiB and at least 16 MiB, or on a small disk a 16th; a little less, so that
    regions take up all of it.

    Each block size needs its own regions: with fewer regions, some sizes would get none.
    """
    usable = usable_bytes(size_bytes)
    wanted = max(_MIN_REGION_BYTES, min(_MAX_REGION_BYTES, usable // _REGIONS), usable // MAX_REGIONS)
    regions = max(_MIN_REGIONS, usable // wanted)
    return max(MIN_SLOT_BYTES, usable // regions // PAGE_BYTES * PAGE_BYTES)


def usable_bytes(size_bytes: int) -> int:
    """Return the bytes for regions in a tier of this size. The index may become as large as for the smallest slots: a
    region's records stay allocated when it gets larger ones."""
    index_bytes = size_bytes // MIN_SLOT_BYTES * RECORD.itemsize
    return size_bytes - (size_bytes >> _METADATA_SHIFT) - index_bytes - 8 * PAGE_BYTES


class DiskFile:
    """The open and locked files; all of ``kvoffd.disk`` is allocated.

    Args:
        region_bytes: for new files, derived from the size when None; existing files keep theirs.

    Raises:
        DiskError: the directory cannot be used.
        OpeningStopped: ``should_stop`` returned True.
    """

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        region_bytes: int | None = None,
        calls: FileCalls | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.directory, self.path = directory, directory / DISK_NAME
        self.size_bytes = size_bytes
        self.errors: list[tuple[DiskFault, str]] = []
        """Errors found while opening, as for ``TierListener.error``."""
        self.calls = calls or FileCalls()
        self.fd = self.index_fd = -1
        self._should_stop = should_stop
        with self.closed_on_error():
            self.fd = self._claim(DISK_NAME)
            self.index_fd = self._claim(INDEX_NAME)
            self.head = self._read_head() or self._start_empty(region_bytes or default_region_bytes(size_bytes))
            self.may_be_torn = self.head.is_open
            """Whether the files were not closed: blocks that were being written may be incomplete."""
            self._resize()
            self.direct = self._probe()
            """Whether O_DIRECT is used for blocks."""
            self.write_head(is_open=True, sync=True)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the files if the ``with`` block, of the tier's opening, raises. An OSError becomes a DiskError."""
        try:
            yield
        except OSError as error:
            self.close()
            raise DiskError(
                f"{self.path} cannot be used ({error.strerror or error}); check the disk, or name another directory."
            ) from error
        except BaseException:
            self.close()
            raise

    # --- the index, for any thread ---------------------------------------------------------------

    @property
    def slots_per_region(self) -> int:
        return self.head.region_bytes // MIN_SLOT_BYTES

    def write_head(self, *, is_open: bool, written_bytes: int = 0, sync: bool = False) -> None:
        """Write the head. ``written_bytes``: since the files were made; a higher number stays. Raises OSError."""
        number, written_bytes = self.head.number + 1, max(self.head.written_bytes, written_bytes)
        head = replace(self.head, number=number, is_open=is_open, written_bytes=written_bytes)
        write_all(self.calls, self.index_fd, [memoryview(head.pack())], head.number % HEAD_PAGES * PAGE_BYTES)
        if sync:
            self.calls.sync(self.index_fd)
        self.head = head

    def write_slot_pages(self, region: int, pages: int) -> None:
        """Write the pages of a region's slots, and allocate their records. Raises OSError."""
        write_all(self.calls, self.index_fd, [memoryview(np.array([pages], "<u4").tobytes())], _SIZES_AT + 4 * region)
        self._allocate_records(region, self.head.region_bytes // (pages * PAGE_BYTES))

    def _allocate_records(self, region: int, count: int) -> None:
        """Allocate records, so that they can be written even if other files fill the file system."""
        at = _RECORDS_AT + region * self.slots_per_region * RECORD.itemsize
        self.calls.allocate(self.index_fd, at, count * RECORD.itemsize)

    def write_records(self, first: int, records: npt.NDArray[np.void]) -> None:
        """Write the records of consecutive slots. Raises OSError."""
        at = _RECORDS_AT + first * RECORD.itemsize
        write_all(self.calls, self.index_fd, [memoryview(records.tobytes())], at)

    def clear_records(self, slots: Sequence[int]) -> None:
        """Clear the records of slots. Raises OSError."""
        for first, count in runs_of(slots):
            self.write_records(first, np.zeros(count, RECORD))

    def clear_region(self, region: int) -> None:
        """Clear a region's records, as far as there are any. Raises OSError."""
        first = region * self.slots_per_region
        at = _RECORDS_AT + first * RECORD.itemsize
        behind = self.calls.stat(self.index_fd).st_size - at
        there = min(self.slots_per_region, -(-behind // RECORD.itemsize))  # rounded up
        nbytes = there * RECORD.itemsize
        # Regions that were never used have no data, and reading that would take 70 s per TiB.
        is_there = there > 0 and self.calls.has_data(self.index_fd, at, nbytes)
        if is_there and np.frombuffer(self._read_index(at, nbytes), np.uint64).any():
            self.write_records(first, np.zeros(there, RECORD))

    def sync(self) -> None:
        """Flush both files to the device. Raises OSError."""
        self.calls.sync(self.fd)
        self.calls.sync(self.index_fd)

    def read_slot_pages(self) -> npt.NDArray[np.uint32]:
        """Read the pages of a slot by region; 0 if never written. Raises OSError."""
        return np.frombuffer(self._read_index(_SIZES_AT, 4 * self.head.regions), "<u4")

    def read_records(self, first: int, count: int) -> npt.NDArray[np.void]:
        """Read the records of consecutive slots. Raises OSError."""
        return np.frombuffer(self._read_index(_RECORDS_AT + first * RECORD.itemsize, count * RECORD.itemsize), RECORD)

    def _read_index(self, offset: int, nbytes: int) -> bytearray:
        """Read from the index, with zeros behind its end. Raises OSError."""
        data = bytearray(nbytes)
        there = max(0, min(nbytes, self.calls.stat(self.index_fd).st_size - offset))
        if there:
            read_all(self.calls, self.index_fd, [memoryview(data)[:there]], offset)
        return data

    def physical_bytes(self) -> int:
        """Return the bytes that the files use on the device. Raises OSError."""
        return sum(held_bytes(self.calls.stat(fd)) for fd in (self.fd, self.index_fd))

    def is_unlinked(self) -> bool:
        """Return whether a file was unlinked: its content is lost at the close. Raises OSError."""
        return any(self.calls.stat(fd).st_nlink == 0 for fd in (self.fd, self.index_fd))

    def close(self) -> None:
        """Close the files, which unlocks them; an error is only logged. A second call does nothing."""
        fds, self.fd, self.index_fd = (self.fd, self.index_fd), -1, -1
        for fd in fds:
            try:
                if fd >= 0:
                    self.calls.close(fd)
            except OSError as error:  # the descriptor is closed all the same
                logger.warning("Closing a file of %s failed: %s.", self.directory, error.strerror or error)

    # --- opening ---------------------------------------------------------------------------------

    def _claim(self, name: str) -> int:
        """Open and lock one of the files; return its descriptor. Raises DiskError."""
        path = self.directory / name
        try:
            directory_fd = open_directory(self.directory)
        except OSError as error:
            raise DiskError(
                f"The disk tier's directory {self.directory} cannot be opened ({error.strerror}); make it, writable "
                "for the daemon's user, or name another."
            ) from error

        def check_ours(fd: int, status: os.stat_result) -> None:
            if not is_regular(status):
                raise DiskError(f"{path} is not a disk tier's file and is left unchanged; name another directory.")
            if fault := foreign_owner(status, "a disk tier"):
                raise DiskError(f"{path} {fault}. Remove it or name another directory.")

        try:
            return claim_file(self.calls, name, directory_fd, create=True, check=check_ours)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DiskError(
                    f"{path} is a symbolic link, which is not followed; remove it, or name the directory it points to."
                ) from error
            raise DiskError(
                f"{path} cannot be opened ({error.strerror}); make {self.directory} writable for the daemon's user, or "
                "name another directory."
            ) from error
        except FileInUse as error:
            raise DiskError(
                f"{path} is in use, by another kvoffd or by this one under another name; give each disk tier its own "
                "directory."
            ) from error
        finally:
            os.close(directory_fd)

    def _read_head(self) -> Head | None:
        """Return the head of both files; None if they are new, or files of kvoffd that are unusable."""
        size = self.calls.stat(self.fd).st_size
        name = aligned_buffer(PAGE_BYTES)
        read_all(self.calls, self.fd, [name[: min(size, PAGE_BYTES)]], 0)
        if size and not begins_as(bytes(name[:size]), _DISK_MAGIC):
            raise DiskError(
                f"{self.path} is not a disk tier's file and is left unchanged; name another directory, or remove it."
            )
        index = bytes(self._read_index(0, HEAD_PAGES * PAGE_BYTES))
        heads = [Head.unpack(index[at : at + PAGE_BYTES]) for at in range(0, len(index), PAGE_BYTES)]
        head = max((head for head in heads if head is not None), key=lambda head: head.number, default=None)
        if head is not None and bytes(name[:_NAME_BYTES]) == _DISK_MAGIC + head.file_id:
            return head
        if size:
            why = f"{INDEX_NAME} is damaged, or another file's"
            self.errors.append((DiskFault.STARTED_ANEW, f"The disk tier {self.path} starts empty: {why}."))
        return None

    def _start_empty(self, region_bytes: int) -> Head:
        """Empty both files; return their new head, without regions."""
        for fd in (self.fd, self.index_fd):
            self.calls.truncate(fd, 0)
        return Head(secrets.token_bytes(16), 0, region_bytes, 0, 0, is_open=False)

    def _file_bytes(self, regions: int) -> int:
        """Return the size of ``kvoffd.disk`` with this many regions."""
        return PAGE_BYTES + regions * self.head.region_bytes

    def _resize(self) -> None:
        """Set the number of regions to what the size allows, and allocate them."""
        head, size_bytes = self.head, self.size_bytes
        regions = min(MAX_REGIONS, usable_bytes(size_bytes) // head.region_bytes)
        if regions < 1:
            raise DiskError(
                f"{format_size(size_bytes)} ({size_bytes} bytes) are too few for {self.path}, whose regions have "
                f"{format_size(head.region_bytes)}; give it more, or remove the file."
            )
        status = self.calls.stat(self.fd)
        if regions < head.regions:
            self._shrink(regions)
        elif status.st_size < self._file_bytes(head.regions) and head.regions:
            missing = self._file_bytes(head.regions) - status.st_size
            cut = f"{self.path} was cut off: {missing} bytes at its end are lost, and their blocks."
            self.errors.append((DiskFault.TRUNCATED, cut))
        has_holes = held_bytes(status) < status.st_size
        if regions > head.regions or has_holes or status.st_size < self._file_bytes(regions):
            self._allocate(self._file_bytes(regions))
        self.calls.allocate(self.index_fd, 0, _SIZES_AT + 4 * regions)
        for region in range(regions):  # smaller slots have more records, which are allocated when they are used
            self._allocate_records(region, max(1, head.region_bytes // _ALLOCATED_SLOT_BYTES))
        self.head = replace(self.head, regions=regions)
        # The file system may have taken more than was reserved for it.
        while (excess := self.physical_bytes() - size_bytes) > 0 and self.head.regions > 1:
            too_many = -(-excess // head.region_bytes)  # rounded up
            self._shrink(max(1, self.head.regions - too_many))

    def _shrink(self, regions: int) -> None:
        """Remove the regions behind the first ones."""
        before = self.head.regions
        logger.info("%s shrinks: %d of its %d regions are removed.", self.path, before - regions, before)
        # The head comes first: it must never name a region that does not exist.
        self.head = replace(self.head, regions=regions)
        self.write_head(is_open=True, sync=True)
        self.calls.truncate(self.fd, self._file_bytes(regions))
        records_end = _RECORDS_AT + regions * self.slots_per_region * RECORD.itemsize
        if self.calls.stat(self.index_fd).st_size > records_end:  # so that old records do not return after a growth
            self.calls.truncate(self.index_fd, records_end)

    def _allocate(self, size: int) -> None:
        """Allocate all of ``kvoffd.disk``, or leave its size as it was."""
        before = self.calls.stat(self.fd).st_size
        try:
            for _ in allocate_in_steps(self.calls, self.fd, size, _ALLOCATE_STEP_BYTES):
                if self._should_stop():
                    raise OpeningStopped(f"{self.path} was not made: its opening was stopped.")
        except OSError as error:
            self.calls.truncate(self.fd, before)
            raise DiskError(
                f"{self.path} cannot have {size} bytes ({format_size(size)}): {error.strerror}. Free space on the "
                "disk, or make the tier smaller."
            ) from error

    def _probe(self) -> bool:
        """Write the file's name with O_DIRECT or else without; return whether file system and device accept it."""
        page = aligned_buffer(PAGE_BYTES)
        page[:_NAME_BYTES] = _DISK_MAGIC + self.head.file_id
        try:
            self.calls.set_direct(self.fd, True)
            self._write_name(page)
            found = aligned_buffer(PAGE_BYTES)
            read_all(self.calls, self.fd, [found], 0)
            if found == page:
                return True
            why = "reads do not return what was written"
        except OSError as error:
            why = error.strerror or str(error)
        self.calls.set_direct(self.fd, False)
        self._write_name(page)
        self.errors.append(
            (
                DiskFault.NOT_DIRECT,
                f"{self.path} does not support O_DIRECT ({why}): the disk tier uses the page cache, which costs memory "
                "and CPU time.",
            )
        )
        return False

    def _write_name(self, page: memoryview) -> None:
        write_all(self.calls, self.fd, [page], 0)
        self.calls.sync(self.fd)


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive slots as first and count."""
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and slot == found[-1][0] + found[-1][1]:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((slot, 1))
    return found
