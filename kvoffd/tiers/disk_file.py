"""The two files of a disk tier, locked and allocated: ``kvoffd.disk`` has the blocks, ``kvoffd.index`` says where.

``kvoffd.disk`` begins with a page that names the file; behind it lie regions of slots of one size, as the pool has them
(``SlotAllocator``). A slot has a block's header (``tier.py``) and its shards, each padded to pages. It is read and
written past the page cache.

``kvoffd.index`` has the head, twice, of which the one with the higher number and a right checksum counts; of each
region the pages of a slot; and a record of each slot by its number. It goes through the page cache: a record may be
old, damaged or of another copy of the files. That costs blocks, but never brings a wrong one: header and checksums
decide.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Sequence
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
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import DiskFault
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

DISK_NAME, INDEX_NAME = "kvoffd.disk", "kvoffd.index"
RECORD = np.dtype(
    [
        ("tag", "<u8"),
        ("nbytes", "<u4"),
        ("written_at", "<u4"),
        ("key_bytes", "u1"),
        ("key", f"V{MAX_KEY_BYTES}"),
        ("zero", "V15"),
    ]
)
"""Of a slot: its block's group and key, the bytes of all its shards, and the hour in which it was written. The tag of
an empty slot is 0."""
_DISK_MAGIC, _INDEX_MAGIC, _OLD_MAGIC = b"kvoffdD4", b"kvoffdI4", b"KVOFFDDK"
_HEAD = Struct("<8s16sQQQQ?16x")
_SUM = Struct("<Q")
HEAD_PAGES = 2
_SIZES_AT = HEAD_PAGES * PAGE_BYTES
MAX_REGIONS = 1 << 16
_RECORDS_AT = _SIZES_AT + 4 * MAX_REGIONS
_REGIONS, _LEAST_REGIONS = 64, 16
_LEAST_REGION_BYTES, _MOST_REGION_BYTES = 16 << 20, 1 << 30
_METADATA_SHIFT = 9
"""A 512th of the size is for the file system's own metadata, which says where the file's parts are: ext4 needs 4 KiB
for 340 extents."""
_INDEX_SHIFT = 8
"""A 256th is for the index."""
_ALLOCATED_SLOT_BYTES = 1 << 16
"""Records of slots of this size are allocated when a disk is opened, a 683rd of its size."""
_ALLOCATE_STEP_BYTES = 1 << 30
"""Large enough for few calls; see ``allocate_in_steps``."""


class DiskError(KvoffdError):
    """The directory cannot be used as a tier. The message says why and what to do."""

    code = ErrorCode.NO_SPACE


class OpeningStopped(KvoffdError):
    """Opening was stopped before it was done."""


@dataclass(frozen=True)
class Head:
    file_id: bytes
    number: int
    region_bytes: int
    regions: int
    written_bytes: int
    """Since the file was made, by all daemons."""
    is_open: bool

    def pack(self) -> bytes:
        fields = self.file_id, self.number, self.region_bytes, self.regions, self.written_bytes, self.is_open
        data = _HEAD.pack(_INDEX_MAGIC, *fields)
        return (data + _SUM.pack(xxhash.xxh3_64_intdigest(data))).ljust(PAGE_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes) -> Head | None:
        """None where it is none, or damaged."""
        data = page[: _HEAD.size]
        if len(page) < PAGE_BYTES or _SUM.unpack_from(page, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(data):
            return None
        magic, *fields = _HEAD.unpack(data)
        head = cls(*fields)
        sound = magic == _INDEX_MAGIC and head.region_bytes % PAGE_BYTES == 0 and head.regions <= MAX_REGIONS
        return head if sound and head.region_bytes >= MIN_SLOT_BYTES else None


def default_region_bytes(size_bytes: int) -> int:
    """About a 64th of the disk, at most 1 GiB; at least 16 MiB, or on a small disk a 16th. Little is left over.

    Each size of blocks has regions of its own: of fewer, some sizes would have none.
    """
    usable = _usable(size_bytes)
    wanted = max(_LEAST_REGION_BYTES, min(_MOST_REGION_BYTES, usable // _REGIONS), usable // MAX_REGIONS)
    regions = max(_LEAST_REGIONS, usable // wanted)
    return max(MIN_SLOT_BYTES, usable // regions // PAGE_BYTES * PAGE_BYTES)


def _usable(size_bytes: int) -> int:
    """Bytes for regions in a tier of this size."""
    return size_bytes - (size_bytes >> _METADATA_SHIFT) - (size_bytes >> _INDEX_SHIFT) - 8 * PAGE_BYTES


class DiskFile:
    """The open and locked files; all of ``kvoffd.disk`` is allocated.

    Args:
        region_bytes: for new files, chosen by the size when None; old ones keep their own.

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
        """What was found while it was opened, as for ``TierListener.error``."""
        self.calls = calls or FileCalls()
        self.fd = self.index_fd = -1
        self._should_stop = should_stop
        try:
            self.fd, self.index_fd = (self._claim(name) for name in (DISK_NAME, INDEX_NAME))
            self.head = self._read_head() or self._start_anew(region_bytes or default_region_bytes(size_bytes))
            self.may_be_torn = self.head.is_open
            """Whether it was not closed: what was being written then may be there in part."""
            self._fit()
            self.direct = self._probe()
            """Whether blocks are read and written past the page cache."""
            self.write_head(is_open=True, sync=True)
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
        """Raises OSError. ``written_bytes``: since the last time."""
        number, total = self.head.number + 1, self.head.written_bytes + written_bytes
        head = replace(self.head, number=number, is_open=is_open, written_bytes=total)
        write_all(self.calls, self.index_fd, [memoryview(head.pack())], head.number % HEAD_PAGES * PAGE_BYTES)
        if sync:
            self.calls.sync(self.index_fd)
        self.head = head

    def write_slot_pages(self, region: int, pages: int) -> None:
        """Note how many pages a region's slots have, and allocate their records. Raises OSError."""
        write_all(self.calls, self.index_fd, [memoryview(np.array([pages], "<u4").tobytes())], _SIZES_AT + 4 * region)
        self._allocate_records(region, self.head.region_bytes // (pages * PAGE_BYTES))

    def _allocate_records(self, region: int, count: int) -> None:
        """So that a file system that others fill up loses none."""
        at = _RECORDS_AT + region * self.slots_per_region * RECORD.itemsize
        self.calls.allocate(self.index_fd, at, count * RECORD.itemsize)

    def write_records(self, first: int, records: npt.NDArray[np.void]) -> None:
        """Write the records of slots that follow one another. Raises OSError."""
        at = _RECORDS_AT + first * RECORD.itemsize
        write_all(self.calls, self.index_fd, [memoryview(records.tobytes())], at)

    def clear_records(self, first: int, count: int) -> None:
        """Clear what records there are of slots that follow one another. Raises OSError."""
        at = _RECORDS_AT + first * RECORD.itemsize
        there = min(count, -(-(self.calls.stat(self.index_fd).st_size - at) // RECORD.itemsize))
        nbytes = there * RECORD.itemsize
        # Of regions that were never used nothing is there, and to read that takes 70 s for each TiB.
        is_there = there > 0 and self.calls.has_data(self.index_fd, at, nbytes)
        if is_there and np.frombuffer(self._read_index(at, nbytes), np.uint64).any():
            self.write_records(first, np.zeros(there, RECORD))

    def sync(self) -> None:
        """Returns when what was written is on the device. Raises OSError."""
        self.calls.sync(self.fd)
        self.calls.sync(self.index_fd)

    def read_slot_pages(self) -> npt.NDArray[np.uint32]:
        """By region, as far as they were written. Raises OSError."""
        return np.frombuffer(self._read_index(_SIZES_AT, 4 * self.head.regions), "<u4")

    def read_records(self, first: int, count: int) -> npt.NDArray[np.void]:
        """The records of slots that follow one another. Raises OSError."""
        return np.frombuffer(self._read_index(_RECORDS_AT + first * RECORD.itemsize, count * RECORD.itemsize), RECORD)

    def _read_index(self, offset: int, nbytes: int) -> bytearray:
        """Zeros behind the end of the file. Raises OSError."""
        data = bytearray(nbytes)
        there = max(0, min(nbytes, self.calls.stat(self.index_fd).st_size - offset))
        if there:
            read_all(self.calls, self.index_fd, [memoryview(data)[:there]], offset)
        return data

    def physical_bytes(self) -> int:
        """Bytes that the files take of the device. Raises OSError."""
        return sum(held_bytes(self.calls.stat(fd)) for fd in (self.fd, self.index_fd))

    def is_removed(self) -> bool:
        """Whether one of the files has no name any more: all is lost when it is closed. Raises OSError."""
        return any(self.calls.stat(fd).st_nlink == 0 for fd in (self.fd, self.index_fd))

    def close(self) -> None:
        """Closes the files and so unlocks them; an error is only logged. A second call does nothing."""
        fds, self.fd, self.index_fd = (self.fd, self.index_fd), -1, -1
        for fd in fds:
            try:
                if fd >= 0:
                    self.calls.close(fd)
            except OSError as error:  # the descriptor is gone all the same
                logger.warning("Closing a file of %s failed: %s.", self.directory, error.strerror or error)

    # --- opening ---------------------------------------------------------------------------------

    def _claim(self, name: str) -> int:
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
                raise DiskError(f"{path} is no disk tier's file and is left as it is; name another directory.")
            if fault := foreign_owner(status, "a disk tier"):
                raise DiskError(f"{path} {fault}. Remove it or name another directory.")

        try:
            return claim_file(self.calls, name, directory_fd, create=True, check=check_ours)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DiskError(
                    f"{path} is a link, which is not followed; remove it, or name the directory that it leads to."
                ) from error
            raise DiskError(
                f"{path} cannot be opened ({error.strerror}); make {self.directory} writable for the daemon's user, or "
                "name another directory."
            ) from error
        except FileInUse as error:
            raise DiskError(
                f"{path} is in use, by another kvoffd or by this one under another name; give each disk tier a "
                "directory of its own."
            ) from error
        finally:
            os.close(directory_fd)

    def _read_head(self) -> Head | None:
        """The head of both files; None where they are new, or kvoffd's and of no use."""
        size = self.calls.stat(self.fd).st_size
        name = aligned_buffer(PAGE_BYTES)
        read_all(self.calls, self.fd, [name[: min(size, PAGE_BYTES)]], 0)
        if size and not any(begins_as(bytes(name[:size]), magic) for magic in (_DISK_MAGIC, _OLD_MAGIC)):
            raise DiskError(
                f"{self.path} is no disk tier's file and is left as it is; name another directory, or remove it."
            )
        index = bytes(self._read_index(0, HEAD_PAGES * PAGE_BYTES))
        heads = [Head.unpack(index[at : at + PAGE_BYTES]) for at in range(0, len(index), PAGE_BYTES)]
        head = max((head for head in heads if head is not None), key=lambda head: head.number, default=None)
        if head is not None and bytes(name[:24]) == _DISK_MAGIC + head.file_id:
            return head
        if size:
            old = bytes(name[:8]) == _OLD_MAGIC
            why = "it has the format of an earlier release" if old else f"{INDEX_NAME} is damaged, or another file's"
            self.errors.append((DiskFault.STARTED_ANEW, f"The disk tier {self.path} is started anew: {why}."))
        return None

    def _start_anew(self, region_bytes: int) -> Head:
        for fd in (self.fd, self.index_fd):
            self.calls.truncate(fd, 0)
        return Head(secrets.token_bytes(16), 0, region_bytes, 0, 0, is_open=False)

    def _end(self, regions: int) -> int:
        return PAGE_BYTES + regions * self.head.region_bytes

    def _fit(self) -> None:
        """Give the file as many regions as go into its size, all of them allocated."""
        head, size_bytes = self.head, self.size_bytes
        regions = min(MAX_REGIONS, _usable(size_bytes) // head.region_bytes)
        if regions < 1:
            raise DiskError(
                f"{format_size(size_bytes)} ({size_bytes} bytes) are too few for {self.path}, whose regions have "
                f"{format_size(head.region_bytes)}; give it more, or remove the file."
            )
        status = self.calls.stat(self.fd)
        if regions < head.regions:
            logger.info(
                "%s is made smaller: %d of its %d regions are gone.", self.path, head.regions - regions, head.regions
            )
            # The head says so first: it never names a region that is not there.
            self.head = replace(head, regions=regions)
            self.write_head(is_open=True, sync=True)
            self.calls.truncate(self.fd, self._end(regions))
            records_end = _RECORDS_AT + regions * self.slots_per_region * RECORD.itemsize
            if self.calls.stat(self.index_fd).st_size > records_end:  # lest they come back where it grows again
                self.calls.truncate(self.index_fd, records_end)
        elif status.st_size < self._end(head.regions) and head.regions:
            missing = self._end(head.regions) - status.st_size
            cut = f"{self.path} was cut off: {missing} bytes at its end are gone, and their blocks."
            self.errors.append((DiskFault.TRUNCATED, cut))
        if regions > head.regions or held_bytes(status) < status.st_size or status.st_size < self._end(regions):
            self._allocate(self._end(regions))
        self.calls.allocate(self.index_fd, 0, _SIZES_AT + 4 * regions)
        for region in range(regions):  # smaller slots have more records, which are allocated when they come
            self._allocate_records(region, max(1, head.region_bytes // _ALLOCATED_SLOT_BYTES))
        while self.physical_bytes() > size_bytes and regions > 1:
            regions -= 1
            self.calls.truncate(self.fd, self._end(regions))
        self.head = replace(self.head, regions=regions)

    def _allocate(self, size: int) -> None:
        before = self.calls.stat(self.fd).st_size
        try:
            for _ in allocate_in_steps(self.calls, self.fd, size, _ALLOCATE_STEP_BYTES):
                if self._should_stop():
                    raise OpeningStopped(f"{self.path} was not made: its opening was stopped.")
        except OSError as error:
            self.calls.truncate(self.fd, before)
            raise DiskError(
                f"{self.path} cannot have {size} bytes ({format_size(size)}): {error.strerror}. Make room on the "
                "disk, or give the tier less."
            ) from error

    def _probe(self) -> bool:
        """Write the file's name with O_DIRECT, or without it; returns whether file system and device take it."""
        page = aligned_buffer(PAGE_BYTES)
        page[:24] = _DISK_MAGIC + self.head.file_id
        try:
            self.calls.set_direct(self.fd, True)
            self._write_name(page)
            found = aligned_buffer(PAGE_BYTES)
            read_all(self.calls, self.fd, [found], 0)
            if found == page:
                return True
            why = "what is read is not what was written"
        except OSError as error:
            why = error.strerror or str(error)
        self.calls.set_direct(self.fd, False)
        self._write_name(page)
        self.errors.append(
            (
                DiskFault.NOT_DIRECT,
                f"{self.path} does not take O_DIRECT ({why}): the disk tier goes through the page cache, which costs "
                "memory and CPU time.",
            )
        )
        return False

    def _write_name(self, page: memoryview) -> None:
        write_all(self.calls, self.fd, [page], 0)
        self.calls.sync(self.fd)


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """First and count of slots that follow one another."""
    found: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if found and slot == found[-1][0] + found[-1][1]:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((slot, 1))
    return found
