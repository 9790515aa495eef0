"""The tier's file: claimed, made, made larger or smaller, and read."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvoffd.pool.slots import PAGE_BYTES, page_up
from kvoffd.tiers.disk.calls import ALLOCATE_BYTES, DiskCalls, aligned_buffer, read_all, write_all
from kvoffd.tiers.disk.errors import DiskError, OpeningStopped
from kvoffd.tiers.disk.format import FILE_NAME, HEAD_PAGES, REGIONS_AT, BadHead, Head, read_head
from kvoffd_proto.units import format_size

logger = logging.getLogger(__name__)

_REGIONS = 64
_LEAST_REGION_BYTES = 16 << 20
_MOST_REGION_BYTES = 1 << 30
_LEAST_REGIONS = 2
_RECORDS_SHIFT = 9
_LEAST_RECORDS_BYTES = 32 << 10
_METADATA_SHIFT = 9  # a 512th: ext4 needs 4 KiB for 340 extents

OnProgress = Callable[[str, int, int], None]
"""Told what is being done, and how many bytes of how many are."""


def default_region_bytes(size_bytes: int) -> int:
    """About a 64th of the tier, 16 MiB to 1 GiB of slots and some room for their records, but never too large for two.

    The room is extra, so that slots of a power of two fill a region but for little.
    """
    slots_bytes = max(_LEAST_REGION_BYTES, min(_MOST_REGION_BYTES, size_bytes // _REGIONS))
    region_bytes = slots_bytes + (slots_bytes >> _RECORDS_SHIFT) + _LEAST_RECORDS_BYTES
    usable_bytes = size_bytes - (size_bytes >> _METADATA_SHIFT) - REGIONS_AT
    return max(PAGE_BYTES, min(page_up(region_bytes), usable_bytes // _LEAST_REGIONS // PAGE_BYTES * PAGE_BYTES))


@dataclass
class Notes:
    """What was found that an operator should know: kinds and sentences, as for the listener."""

    errors: list[tuple[str, str]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


class DiskFile:
    """The open, locked file, of whole regions, all of it allocated.

    Args:
        region_bytes: for a new file; an old one keeps its own.

    Raises:
        DiskError: the directory cannot be used.
        OpeningStopped: ``should_stop`` said so.
    """

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        region_bytes: int,
        calls: DiskCalls,
        wall_clock: Callable[[], float],
        on_progress: OnProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        self.path = directory / FILE_NAME
        self.notes = Notes()
        self.direct = False
        self._calls = calls
        self._on_progress = on_progress
        self._should_stop = should_stop
        self.fd = -1
        try:
            self.fd = self._claim(directory)
            self.head = self._read_head() or self._start_anew(region_bytes, wall_clock())
            self.was_open = self.head.is_open and self.head.regions > 0
            """Whether the last owner went without closing it: what it was writing may be torn."""
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
        """Whole pages of the file. Raises OSError."""
        pages = aligned_buffer(nbytes)
        read_all(self._calls, self.fd, [pages], offset)
        return pages

    def physical_bytes(self) -> int:
        """What the file takes of the device."""
        return self._calls.stat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Lets file and lock go, whatever the file system says to that; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                self._calls.close(fd)
            except OSError as error:  # the descriptor is gone all the same
                logger.warning("Closing %s failed: %s.", self.path, error.strerror or error)

    def _claim(self, directory: Path) -> int:
        try:
            directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(
                f"The disk tier's directory {directory} cannot be opened ({error.strerror}); make it, writable for the "
                "daemon's user, or name another."
            ) from error
        try:
            fd = self._calls.open(FILE_NAME, directory_fd)
        except OSError as error:
            raise DiskError(
                f"{self.path} cannot be opened ({error.strerror}); make {directory} writable for the daemon's user, or "
                "name another directory."
            ) from error
        finally:
            os.close(directory_fd)
        try:
            self._check_ours(fd)
            if not self._calls.lock(fd):
                raise DiskError(
                    f"{self.path} is in use, by another kvoffd or by this one under another name; give each disk tier "
                    "a directory of its own."
                )
        except BaseException:
            self._calls.close(fd)
            raise
        return fd

    def _check_ours(self, fd: int) -> None:
        status = self._calls.stat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise DiskError(f"{self.path} is no disk tier's file and is left as it is; name another directory.")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise DiskError(
                f"{self.path} belongs to user {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):04o}; a disk "
                f"tier is believed only if it belongs to the daemon's user ({os.geteuid()}) and nobody else may open "
                "it (0600). Remove it or name another directory."
            )

    def _read_head(self) -> Head | None:
        """None where there is nothing, or something of ours that is of no use."""
        size = self._calls.stat(self.fd).st_size
        if size == 0:
            return None
        pages = aligned_buffer(HEAD_PAGES * PAGE_BYTES)
        whole = min(size, len(pages))
        read_all(self._calls, self.fd, [pages[:whole]], 0)
        try:
            return read_head(pages)
        except BadHead as error:
            if not error.ours:
                raise DiskError(
                    f"{self.path} is no disk tier's file and is left as it is; name another directory, or remove it."
                ) from error
            self.notes.errors.append(("started_anew", f"The disk tier {self.path} is started anew: {error}"))
            return None

    def _start_anew(self, region_bytes: int, created_at: float) -> Head:
        """An empty file. Its blocks are never copied: there is never more than one of them on the device."""
        self._calls.truncate(self.fd, 0)
        head = Head(secrets.token_bytes(16), region_bytes, 0, created_at)
        self._write_head(head)
        return head

    def _fit(self, size_bytes: int) -> None:
        """Gives the file as many regions as go into ``size_bytes``, all of them allocated."""
        head = self.head
        # What the file system needs for itself, to say where the file's parts are, counts too and grows with use.
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
        status = self._calls.stat(self.fd)
        if head.regions and status.st_size < self._end(head.regions):
            missing = self._end(head.regions) - status.st_size
            self.notes.errors.append(
                ("truncated", f"{self.path} was cut off: {missing} bytes at its end are gone, and their blocks.")
            )
        if regions > head.regions or status.st_blocks * 512 < status.st_size or status.st_size < self._end(regions):
            self._allocate(self._end(regions))
        while self.physical_bytes() > size_bytes and regions > 1:
            regions -= 1
            self._calls.truncate(self.fd, self._end(regions))
        head.regions = regions
        head.is_open = True

    def _cut(self, regions: int) -> None:
        """The head goes first: it never names what is not there."""
        self.head.regions = regions
        self._write_head(self.head)
        self._calls.truncate(self.fd, self._end(regions))

    def _end(self, regions: int) -> int:
        return REGIONS_AT + regions * self.head.region_bytes

    def _allocate(self, size: int) -> None:
        before = self._calls.stat(self.fd).st_size
        for offset in range(0, size, ALLOCATE_BYTES):
            if self._should_stop():
                raise OpeningStopped(f"{self.path} was not made: told to stop.")
            try:
                self._calls.allocate(self.fd, offset, min(ALLOCATE_BYTES, size - offset))
            except OSError as error:
                self._calls.truncate(self.fd, before)
                raise DiskError(
                    f"{self.path} cannot have {size} bytes ({format_size(size)}): {error.strerror}. Make room on the "
                    "disk, or give the tier less."
                ) from error
            self._on_progress("allocating", min(size, offset + ALLOCATE_BYTES), size)

    def _probe(self) -> bool:
        """Writes the head, and with O_DIRECT where file system and device take that: whether they do."""
        try:
            self._calls.set_direct(self.fd, True)
            self._write_head(self.head)
            pages = self.read_pages(self.head.number % HEAD_PAGES * PAGE_BYTES, PAGE_BYTES)
            if bytes(pages) == self.head.pack():
                return True
            why = "what is read is not what was written"
        except OSError as error:
            why = error.strerror or str(error)
        self._calls.set_direct(self.fd, False)
        self._write_head(self.head)
        self.notes.errors.append(
            (
                "not_direct",
                f"{self.path} does not take O_DIRECT ({why}): the disk tier goes through the page cache, which costs "
                "memory and CPU time.",
            )
        )
        return False

    def _write_head(self, head: Head) -> None:
        head.number += 1
        page = aligned_buffer(PAGE_BYTES)
        page[:] = head.pack()
        write_all(self._calls, self.fd, [page], head.number % HEAD_PAGES * PAGE_BYTES)
        self._calls.sync(self.fd)
