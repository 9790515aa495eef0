"""What happens when blocks leave a disk: from then on nothing finds them, a thread clears their records, and then their
slots are free.

What a clear or reset removes, and a region that is taken for another block size, goes in steps of ``CLEARED_AT_ONCE``
blocks. The thread also writes the rest of the index: its head, and the regions' sizes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.threads import Workers
from kvoffd.tiers.disk_file import RECORD, DiskFile, runs_of
from kvoffd.tiers.disk_map import DiskMap
from kvoffd.tiers.disk_reads import End
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Result
from kvoffd_proto.stats import DiskFault


@dataclass(slots=True, eq=False)
class Note:
    """Something to be written to the index. ``gone``: slots whose records are cleared."""

    gone: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """By region, the pages of a slot."""
    written_bytes: int = 0


class Clearing:
    """Frees slots, and writes to the index. For the daemon's thread.

    Args:
        make_threads: makes ``Workers`` of what their threads do and of what is called at the end of each task.
        on_dropped: called with blocks that were dropped one by one.
        on_error: called as ``TierListener.error``, without the tier.

    Attributes:
        put_aside: slots that are never free: a write there failed.
        removed: whether a file has no name any more: the next daemon finds nothing.
    """

    def __init__(
        self,
        file: DiskFile,
        disk_map: DiskMap,
        make_threads: Callable[[Callable[[list[Note]], list[End]], Callable[[Note, End], None]], Workers[Any, Any]],
        post: Callable[[Callable[[], None]], None],
        on_dropped: Callable[[BlockGroup, list[bytes]], None],
        on_error: Callable[[DiskFault, str], None],
    ) -> None:
        self._file, self._map, self._post = file, disk_map, post
        self._on_dropped, self._on_error = on_dropped, on_error
        self.put_aside: set[int] = set()
        self.removed, self.physical_bytes = False, file.physical_bytes()
        self._leaving: deque[Iterator[list[int]]] = deque()
        """Of each namespace and region that goes as a whole, the slots that it has still."""
        self._clearing: Note | None = None
        """Of the slots that were taken of the first of them last."""
        self._unsized: set[int] = set()
        """Regions whose size could not be noted."""
        self._written_bytes = 0
        """Of blocks, since the head was written."""
        self._closed = False
        self.threads = make_threads(self._write, self._note_ended)

    @property
    def leaves(self) -> bool:
        """Whether a namespace or region goes as a whole."""
        return bool(self._leaving)

    @property
    def lifetime_written_bytes(self) -> int:
        """Bytes written since the files were made. A kill loses those of the last tick or two."""
        return self._file.head.written_bytes + self._written_bytes

    def written(self, nbytes: int) -> None:
        """Count bytes of a block that was written."""
        self._written_bytes += nbytes

    def region_opened(self, number: int, slot_bytes: int) -> None:
        self.threads.put(Note(sizes={number: slot_bytes // PAGE_BYTES}))

    def drop(self, slots: Sequence[int]) -> None:
        """Blocks are not there any more; their slots are still taken."""
        for known, keys in self._map.drop(slots):
            self._on_dropped(known.group, keys)

    def slots_gone(self, slots: Sequence[int]) -> Note:
        """Have the records of slots cleared, and the slots free then: what was written there before would be lost."""
        for slot in slots:
            region, place = self._map.at(slot)
            region.pins[place] += 1
        note = Note(list(slots))
        if slots:
            self.threads.put(note)
        return note

    def unpin(self, slots: Sequence[int]) -> None:
        free: list[int] = []
        for slot in slots:
            region, place = self._map.at(slot)
            region.pins[place] -= 1
            if not region.pins[place] and not region.groups[place] and slot not in self.put_aside:
                free.append(slot)
        if not free:
            return
        self._map.slots.free(np.array(free, np.uint32))
        for number in {slot // self._map.slots.slots_per_region for slot in free}:
            if not self._map.slots.slot_bytes[number]:
                del self._map.regions[number]

    def leave(self, slots: Iterator[list[int]]) -> None:
        """Free slots, some at a time."""
        self._leaving.append(slots)
        if len(self._leaving) == 1:
            self._post(self._clear_some)

    def _clear_some(self) -> None:
        """Free some slots of what goes as a whole, once those before are free."""
        if not self._leaving or self._clearing is not None:
            return
        if slots := next(self._leaving[0], None):
            self.drop(slots)
            self._clearing = self.slots_gone(slots)
            return
        if slots is None:
            self._leaving.popleft()
        if not self._closed:
            self._post(self._clear_some)

    def tick(self) -> None:
        if self.threads.waiting or self.threads.running or self._closed:
            return
        regions = self._map.regions
        sizes = {one: regions[one].slot_bytes // PAGE_BYTES for one in self._unsized & regions.keys()}
        self.threads.put(Note(sizes=sizes, written_bytes=self._written_bytes))
        self._unsized, self._written_bytes = set(), 0

    def finish(self, until: float) -> bool:
        """Clear all that goes; False where some is left at ``until`` (of ``time.monotonic``)."""
        self._closed = True
        while self._leaving and time.monotonic() < until:
            self._clearing = None  # nobody waits for the thread
            self._clear_some()
        return not self._leaving

    def close_files(self) -> None:
        """Note that they were closed. Raises OSError."""
        self._file.write_head(is_open=False, written_bytes=self._written_bytes, sync=True)

    # --- in the thread, and at its ends ---

    def _write(self, notes: list[Note]) -> list[End]:
        (note,) = notes
        file = self._file
        try:
            for region, pages in note.sizes.items():
                file.write_slot_pages(region, pages)
            for first, count in runs_of(note.gone):
                file.write_records(first, np.zeros(count, RECORD))
            if note.written_bytes:
                file.write_head(is_open=True, written_bytes=note.written_bytes)
            self.physical_bytes = file.physical_bytes()
            self.removed = file.is_removed()
        except OSError as error:
            why = f"The disk tier could not write to the index of {file.path}: {error.strerror or error}."
            return [End(Result.FAILED, None, DiskFault.RECORD_FAILED, why)]
        return [End(Result.DONE)]

    def _note_ended(self, note: Note, end: End) -> None:
        if end.result is not Result.DONE:
            assert end.fault is not None
            self._on_error(end.fault, end.sentence)
            self._unsized |= note.sizes.keys()
        self.unpin(note.gone)
        if note is self._clearing:
            self._clearing = None
            self._clear_some()
