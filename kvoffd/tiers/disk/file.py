"""The tier's file: locked, made, made larger or smaller, and read."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvoffd.errors import KvoffdError
from kvoffd.pool.allocator import PAGE_BYTES, page_up
from kvoffd.system.files import (
    FileCalls,
    FileInUse,
    aligned_buffer,
    allocate_in_steps,
    claim_file,
    foreign_owner,
    held_bytes,
    is_regular,
    open_directory,
    read_all,
    read_boot_id,
    write_all,
)
from kvoffd.tiers.disk.file_format import FILE_NAME, HEAD_PAGES, REGIONS_AT, BadHead, Head, read_head
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.stats import DiskFault
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

_REGIONS = 64
_LEAST_REGION_BYTES = 16 << 20
_MOST_REGION_BYTES = 1 << 30
_LEAST_REGIONS = 2
_RECORDS_SHIFT = 9
_LEAST_RECORDS_BYTES = 32 << 10
_METADATA_SHIFT = 9  # a 512th: ext4 needs 4 KiB for 340 extents

# Large enough for few calls; see ``allocate_in_steps``.
_ALLOCATE_STEP_BYTES = 1 << 30


class DiskError(KvoffdError):
    """The directory cannot be used as a tier. The message says why and what to do."""

    code = ErrorCode.NO_ROOM


class OpeningStopped(KvoffdError):
    """Opening was stopped before it was done."""


def default_region_bytes(size_bytes: int) -> int:
    """About a 64th of the tier: 16 MiB to 1 GiB of slots and room for their records; never so large that only one fits.

    The records' room comes on top, so that slots whose size is a power of two leave little of a region unused.
    """
    slots_bytes = max(_LEAST_REGION_BYTES, min(_MOST_REGION_BYTES, size_bytes // _REGIONS))
    region_bytes = slots_bytes + (slots_bytes >> _RECORDS_SHIFT) + _LEAST_RECORDS_BYTES
    usable_bytes = size_bytes - (size_bytes >> _METADATA_SHIFT) - REGIONS_AT
    return max(PAGE_BYTES, min(page_up(region_bytes), usable_bytes // _LEAST_REGIONS // PAGE_BYTES * PAGE_BYTES))


@dataclass
class Notes:
    """What was found while the file was opened, for the operator."""

    errors: list[tuple[DiskFault, str]] = field(default_factory=list)
    """Kind and sentence of each, as for ``TierListener.tier_error``."""
    sentences: list[str] = field(default_factory=list)


class DiskFile:
    """The open and locked file: whole regions, all of them allocated.

    Args:
        region_bytes: for a new file, chosen by its size when None; an old file keeps its own.

    Raises:
        DiskError: the directory cannot be used.
        OpeningStopped: ``should_stop`` returned True.
    """

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        region_bytes: int | None,
        calls: FileCalls,
        wall_clock: Callable[[], float],
        should_stop: Callable[[], bool],
    ) -> None:
        self.path = directory / FILE_NAME
        self.size_bytes = size_bytes
        self.notes = Notes()
        self.direct = False
        """Whether reads and writes go past the page cache."""
        self.calls = calls
        self.boot_id = read_boot_id()
        self._should_stop = should_stop
        self.fd = -1
        try:
            self.fd = self._claim(directory)
            self.head = self._read_head() or self._start_anew(
                region_bytes or default_region_bytes(size_bytes), wall_clock()
            )
            self.rebooted = self.head.boot_id != self.boot_id or not any(self.boot_id)
            """Whether the machine was started since the file's head was written, or the kernel does not tell."""
            self.may_be_torn = self.rebooted and self.head.is_open and self.head.regions > 0
            """Whether the machine ended before the file was closed: its drive may have kept records without blocks."""
            self._fit(size_bytes)
            self.direct = self._probe()
        except OSError as error:
            self.close()
            raise DiskError(
                f"{self.path} cannot be used ({error.strerror or error}); check the disk, or name another directory."
            ) from error
        except BaseException:
            self.close()
            raise

    def read_pages(self, offset: int, nbytes: int) -> memoryview:
        pages = aligned_buffer(nbytes)
        read_all(self.calls, self.fd, [pages], offset)
        return pages

    def physical_bytes(self) -> int:
        """Bytes that the file takes of the device. Raises OSError."""
        return held_bytes(self.calls.stat(self.fd))

    def close(self) -> None:
        """Closes the file and so unlocks it; an error is only logged. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                self.calls.close(fd)
            except OSError as error:  # the descriptor is gone all the same
                logger.warning("Closing %s failed: %s.", self.path, error.strerror or error)

    def _claim(self, directory: Path) -> int:
        try:
            directory_fd = open_directory(directory)
        except OSError as error:
            raise DiskError(
                f"The disk tier's directory {directory} cannot be opened ({error.strerror}); make it, writable for the "
                "daemon's user, or name another."
            ) from error
        try:
            return claim_file(self.calls, FILE_NAME, directory_fd, create=True, check=self._check_ours)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise DiskError(
                    f"{self.path} is a link, which is not followed; remove it, or name the directory that it leads to."
                ) from error
            raise DiskError(
                f"{self.path} cannot be opened ({error.strerror}); make {directory} writable for the daemon's user, or "
                "name another directory."
            ) from error
        except FileInUse as error:
            raise DiskError(
                f"{self.path} is in use, by another kvoffd or by this one under another name; give each disk tier "
                "a directory of its own."
            ) from error
        finally:
            os.close(directory_fd)

    def _check_ours(self, fd: int, status: os.stat_result) -> None:
        if not is_regular(status):
            raise DiskError(f"{self.path} is no disk tier's file and is left as it is; name another directory.")
        if fault := foreign_owner(status, "a disk tier"):
            raise DiskError(f"{self.path} {fault}. Remove it or name another directory.")

    def _read_head(self) -> Head | None:
        """The file's head; None for a new file, or one of kvoffd's whose head cannot be used."""
        size = self.calls.stat(self.fd).st_size
        if size == 0:
            return None
        pages = aligned_buffer(HEAD_PAGES * PAGE_BYTES)
        whole = min(size, len(pages))
        read_all(self.calls, self.fd, [pages[:whole]], 0)
        try:
            return read_head(pages)
        except BadHead as error:
            if not error.ours:
                raise DiskError(
                    f"{self.path} is no disk tier's file and is left as it is; name another directory, or remove it."
                ) from error
            self.notes.errors.append((DiskFault.STARTED_ANEW, f"The disk tier {self.path} is started anew: {error}"))
            return None

    def _start_anew(self, region_bytes: int, created_at: float) -> Head:
        """Empties the file and writes a new head."""
        self.calls.truncate(self.fd, 0)
        head = Head(secrets.token_bytes(16), region_bytes, 0, created_at, boot_id=self.boot_id)
        self._write_head(head)
        return head

    def _fit(self, size_bytes: int) -> None:
        """Gives the file as many regions as go into ``size_bytes``, all of them allocated."""
        head = self.head
        # The file system's own metadata, which says where the file's parts are, counts too and grows with use.
        regions = (size_bytes - (size_bytes >> _METADATA_SHIFT) - REGIONS_AT) // head.region_bytes
        if regions < 1:
            raise DiskError(
                f"{format_size(size_bytes)} ({size_bytes} bytes) are too few for {self.path}, whose regions have "
                f"{format_size(head.region_bytes)}; give it more, or remove the file."
            )
        if regions < head.regions:
            self.notes.sentences.append(
                f"{self.path} was made smaller: {head.regions - regions} of its {head.regions} regions are gone."
            )
            self._cut(regions)
        status = self.calls.stat(self.fd)
        if head.regions and status.st_size < self._end(head.regions):
            missing = self._end(head.regions) - status.st_size
            self.notes.errors.append(
                (
                    DiskFault.TRUNCATED,
                    f"{self.path} was cut off: {missing} bytes at its end are gone, and their blocks.",
                )
            )
        if regions > head.regions or held_bytes(status) < status.st_size or status.st_size < self._end(regions):
            self._allocate(self._end(regions))
        while self.physical_bytes() > size_bytes and regions > 1:
            regions -= 1
            self.calls.truncate(self.fd, self._end(regions))
        head.regions = regions
        head.is_open = True

    def _cut(self, regions: int) -> None:
        """Drops regions at the end. The head is written first: it never names a region that is not there."""
        self.head.regions = regions
        self._write_head(self.head)
        self.calls.truncate(self.fd, self._end(regions))

    def _end(self, regions: int) -> int:
        return REGIONS_AT + regions * self.head.region_bytes

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
        """Writes the head with O_DIRECT, or without it; returns whether the file system and the device take it."""
        try:
            self.calls.set_direct(self.fd, True)
            self._write_head(self.head)
            pages = self.read_pages(self.head.number % HEAD_PAGES * PAGE_BYTES, PAGE_BYTES)
            if bytes(pages) == self.head.pack():
                return True
            why = "what is read is not what was written"
        except OSError as error:
            why = error.strerror or str(error)
        self.calls.set_direct(self.fd, False)
        self._write_head(self.head)
        self.notes.errors.append(
            (
                DiskFault.NOT_DIRECT,
                f"{self.path} does not take O_DIRECT ({why}): the disk tier goes through the page cache, which costs "
                "memory and CPU time.",
            )
        )
        return False

    def _write_head(self, head: Head) -> None:
        head.number += 1
        page = aligned_buffer(PAGE_BYTES)
        page[:] = head.pack()
        write_all(self.calls, self.fd, [page], head.number % HEAD_PAGES * PAGE_BYTES)
        self.calls.sync(self.fd)
