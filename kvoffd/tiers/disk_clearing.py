"""Removal of blocks from a disk.

1. ``drop``: lookups do not find the block any more. Its slot stays allocated.
2. ``clear_slots``: the slot is pinned while a thread clears its record.
3. ``DiskMap.unpin``: the slot is free, unless a read or write has pinned it too, or a write to it has failed. If its
   record could not be cleared, it is in ``DiskMap.to_overwrite`` instead.

| method of ``Clearing``  | steps    | of                                                                       |
|-------------------------|----------|--------------------------------------------------------------------------|
| ``drop``                | 1        | evicted blocks, whose records the next writes overwrite                  |
| ``clear_slots``         | 2 and 3  | slots that have no block, as after a write that failed                   |
| ``clear_to_overwrite``  | 2 and 3  | dropped blocks whose records nothing has overwritten                     |
| ``free``                | 1 to 3   | removed blocks                                                           |
| ``free_in_steps``       | 1 to 3   | many blocks, one batch after the other                                   |

A clear, a reset, or a region that changes its slot size is processed in steps of ``CLEARED_AT_ONCE`` blocks. The thread
also writes the rest of the index: its head, and the slot sizes of regions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.threads import Workers
from kvoffd.tiers.disk_file import DiskFile
from kvoffd.tiers.disk_io import End
from kvoffd.tiers.disk_map import DiskMap
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Result, TierStats
from kvoffd_proto.stats import DiskFault


@dataclass(slots=True, eq=False)
class IndexWrite:
    """A write to the index.

    Attributes:
        gone: slots whose records are cleared. They are pinned until it ends.
        is_void: whether no later daemon accepts their blocks, even if that fails: those of a cleared namespace, whose
            generation is higher.
    """

    gone: list[int] = field(default_factory=list)
    is_void: bool = False
    sizes: dict[int, int] = field(default_factory=dict)
    """Pages of a slot, by region."""
    written_bytes: int = 0
    """Bytes written since the files were made, for the head; 0 to leave it."""


class Clearing:
    """Frees slots, and writes to the index. For the daemon's thread.

    Args:
        counters: the tier's, of what it has written.
        make_threads: makes ``Workers`` from their works and ``on_end``.
        on_dropped: called with blocks that were dropped individually.
        on_error: called like ``TierListener.error``, without the tier.

    Attributes:
        is_unlinked: whether a file was unlinked: the next daemon finds nothing.
    """

    def __init__(
        self,
        file: DiskFile,
        disk_map: DiskMap,
        counters: TierStats,
        make_threads: Callable[..., Workers[Any, Any]],
        post: Callable[[Callable[[], None]], None],
        on_dropped: Callable[[BlockGroup, list[bytes]], None],
        on_error: Callable[[DiskFault, str], None],
    ) -> None:
        self._file, self._map, self._counters, self._post = file, disk_map, counters, post
        self._on_dropped, self._on_error = on_dropped, on_error
        self.is_unlinked, self.physical_bytes = False, file.physical_bytes()
        self._freeing: deque[tuple[Iterator[list[int]], bool]] = deque()
        """Remaining slots, in batches, of each namespace and region that is cleared as a whole, and
        ``IndexWrite.is_void`` of it. The first is being cleared."""
        self._running: IndexWrite | None = None
        """The write that clears its last batch; None once that has ended."""
        self._unsized: set[int] = set()
        """Regions whose slot size could not be written."""
        self._written_before = file.head.written_bytes
        """Bytes that earlier daemons wrote."""
        self._closed = False
        """Whether ``finish`` was called: nothing is posted any more."""
        self.threads = make_threads([self._write], on_end=self._write_ended)

    @property
    def is_freeing(self) -> bool:
        """Whether a namespace or region is being cleared."""
        return bool(self._freeing)

    @property
    def lifetime_written_bytes(self) -> int:
        """Bytes written since the files were made. A kill loses those of the last tick or two."""
        return self._written_before + self._counters.written_bytes

    def region_opened(self, number: int, slot_bytes: int) -> None:
        """Write the slot size of a region that gets its first block."""
        self.threads.put(IndexWrite(sizes={number: slot_bytes // PAGE_BYTES}))

    def drop(self, slots: Sequence[int]) -> None:
        """Stop finding blocks; their slots stay allocated."""
        for known, keys in self._map.drop(slots):
            self._on_dropped(known.group, keys)

    def free(self, slots: Sequence[int], *, is_void: bool = False) -> IndexWrite:
        """Do all three steps for the blocks of slots: see the top of this file."""
        self.drop(slots)
        return self.clear_slots(slots, is_void=is_void)

    def clear_slots(self, slots: Sequence[int], *, is_void: bool = False) -> IndexWrite:
        """Clear the records of slots, then free them."""
        self._map.pin(slots)  # no write may take one now: its new record could be cleared
        write = IndexWrite(list(slots), is_void)
        if slots:
            self.threads.put(write)
        return write

    def clear_to_overwrite(self, but: int = 0) -> None:
        """Clear the records in ``DiskMap.to_overwrite``: the blocks may be invalid once a later daemon finds them.
        Those of the slot size ``but`` stay; without it, clear those of ``DiskMap.uncleared`` too."""
        for slot_bytes in [one for one in self._map.to_overwrite if one != but]:
            self.clear_slots(self._map.to_overwrite.pop(slot_bytes))
        if not but:
            self.clear_slots([*self._map.uncleared])

    def free_in_steps(self, slots: Iterator[list[int]], *, is_void: bool) -> None:
        """Drop and clear batches of slots, each once the previous one is free. ``is_void``: see ``IndexWrite``."""
        self._freeing.append((slots, is_void))
        if len(self._freeing) == 1:
            self._post(self._free_batch)

    def _free_batch(self) -> None:
        """Free a batch of slots once the previous batch is free."""
        if not self._freeing or self._running is not None:
            return
        batches, is_void = self._freeing[0]
        if slots := next(batches, None):
            self._running = self.free(slots, is_void=is_void)
            return
        if slots is None:  # an empty batch only lets others have their turn
            self._freeing.popleft()
        if not self._closed:
            self._post(self._free_batch)

    def tick(self) -> None:
        """Write the head, and slot sizes that could not be written, when nothing else is being written."""
        if self.threads.waiting or self.threads.running or self._closed:
            return
        regions = self._map.regions
        sizes = {one: regions[one].slot_bytes // PAGE_BYTES for one in self._unsized & regions.keys()}
        self.threads.put(IndexWrite(sizes=sizes, written_bytes=self.lifetime_written_bytes))
        self._unsized = set()

    def finish(self, until: float) -> bool:
        """Clear all that is pending; return False if some is left at ``until`` (of ``time.monotonic``)."""
        if not self._closed:  # else the thread may have ended
            self.clear_to_overwrite()
        self._closed = True
        while self._freeing and time.monotonic() < until:
            self._running = None  # the thread has all its writes: ``threads.close`` waits for them
            self._free_batch()
        return not self._freeing

    def close_files(self) -> None:
        """Mark the files as closed. Raises OSError."""
        self._file.write_head(is_open=False, written_bytes=self.lifetime_written_bytes, sync=True)

    # --- in the thread, and at its ends ---

    def _write(self, writes: list[IndexWrite]) -> list[End]:
        (write,) = writes
        file = self._file
        try:
            for region, pages in write.sizes.items():
                file.write_slot_pages(region, pages)
            file.clear_records(write.gone)
            if write.written_bytes > file.head.written_bytes:
                file.write_head(is_open=True, written_bytes=write.written_bytes)
            # Looked at here since these calls may hang too.
            self.physical_bytes = file.physical_bytes()
            self.is_unlinked = file.is_unlinked()
        except OSError as error:
            why = f"The disk tier could not write to the index of {file.path}: {error.strerror or error}."
            return [End(Result.FAILED, None, DiskFault.RECORD_FAILED, why)]
        return [End(Result.DONE)]

    def _write_ended(self, write: IndexWrite, end: End) -> None:
        if end.result is not Result.DONE:
            assert end.fault is not None
            self._on_error(end.fault, end.sentence)
            self._unsized |= write.sizes.keys()
            if not write.is_void:  # else their slots may be free: no later daemon accepts what their records name
                self._map.uncleared |= {*write.gone}
        else:
            self._map.uncleared.difference_update(write.gone)
        self._map.unpin(write.gone)
        if write is self._running:
            self._running = None
            self._free_batch()
