"""Keeps the head and the records of a disk tier's file up to date: what has to be written, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.files import aligned_buffer
from kvoffd.tiers.disk.file import DiskFile
from kvoffd.tiers.disk.file_format import HEAD_PAGES, MAX_FLOORS, Head, Record, pack_record, region_seed
from kvoffd.tiers.disk.index import DiskIndex
from kvoffd.tiers.disk.queue import DiskJob, Kind, Update
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions
from kvoffd.tiers.disk.workers import Workers
from kvoffd_proto.stats import DiskFault

# Regions in one update; the next one writes what changes meanwhile.
_MOST_REGIONS = 64
# And units of records, of 16 mostly: to pack them keeps the loop.
_MOST_UNITS = 256
_MANY_DIRTY_REGIONS = 32
_PAUSE_S = 1.0
_LAST_TRIES = 3


class RecordUpdates:
    """Makes updates of the file's head and records, one at a time. Pure: others write them."""

    def __init__(self, head: Head, regions: DiskRegions) -> None:
        self.head = head
        self._regions = regions
        self._head_differs = False
        self._sync = False
        self._unsynced = False
        self._running: Update | None = None
        self.removals = 0
        """Removals of blocks, or of namespaces, that were noted."""
        self.kept_removals = 0
        """Of these so many, the first ones, hold after a crash."""
        self._need_records = False
        """Whether some of the others do once all records are written, and not as soon as the head is."""

    @property
    def is_urgent(self) -> bool:
        """Whether blocks were removed that the file still has."""
        return self._sync

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def differs(self) -> bool:
        """Whether the file's head or records are out of date."""
        return self._head_differs or self._sync or len(self._regions.dirty) > 0

    def note_head(self) -> None:
        self._head_differs = True

    @property
    def may_differ(self) -> bool:
        """Whether the file may be out of date after a crash, since not all is written and synced."""
        return self.differs or self._running is not None or self._unsynced

    def sync(self) -> None:
        """Notes that what is dirty now, and what was written, must reach the device."""
        self._sync = True

    def note_removed(self) -> None:
        self._sync = self._need_records = True
        self.removals += 1

    def forget_namespace(self, fingerprint: bytes) -> None:
        """Notes that all blocks of a namespace that were written up to now are removed."""
        floors = self.head.floors
        if fingerprint in floors or len(floors) < MAX_FLOORS:
            floors[fingerprint] = self._regions.generation
            self._head_differs = True
        else:
            self._need_records = True
        self._sync = True
        self.removals += 1

    def begin(self) -> Update | None:
        """The next update; None where there is nothing to write, or one is being written.

        Raises OSError where there is no memory for its pages; then nothing has changed.
        """
        if self._running is not None or not self.differs:
            return None
        taken = self._regions.dirty.take(_MOST_REGIONS, _MOST_UNITS)
        number_before = self.head.number
        try:
            # With every update: it says how much was written to the drive, also after a kill.
            writes = [self._write_of_head()]
            for number, units in taken.items():
                writes += self._writes_of(self._regions[number], units)
        except OSError:
            self._regions.dirty.give_back(taken)
            self.head.number = number_before  # its next one must not go where the last one is
            raise
        self._head_differs = False
        holds = self._sync and not (self._need_records and len(self._regions.dirty))
        self._running = Update(writes, self._sync, taken, self.removals if holds else self.kept_removals)
        self._regions.hold(taken)
        return self._running

    def end(self, done: bool) -> None:
        """Ends an update. One that is not ``done`` is to be written again, all of it."""
        update = self._running
        assert update is not None
        self._running = None
        self._regions.end_hold(done)
        if not done:
            self._regions.dirty.give_back(update.regions)
            self._head_differs = True
            return
        self.head.written_bytes += update.nbytes
        self._unsynced = not update.sync
        self.kept_removals = update.removals
        if update.sync and not len(self._regions.dirty):
            self._sync = False
        if self.kept_removals == self.removals:
            self._need_records = False

    def drop_floors(self) -> None:
        """Drops the floors where no record of removed namespaces is left. Only when none of their slots is in use."""
        if self.head.floors and not self.may_differ:
            self.head.floors.clear()
            self._head_differs = True

    def _write_of_head(self) -> tuple[int, memoryview]:
        head = self.head
        head.number += 1
        head.generation = self._regions.generation
        return head.number % HEAD_PAGES * PAGE_BYTES, _aligned([head.pack()])

    def _writes_of(self, region: DiskRegion, units: set[int] | None) -> list[tuple[int, memoryview]]:
        if region.shape is None:
            return [(region.base, aligned_buffer(PAGE_BYTES))]
        unit_bytes = max(PAGE_BYTES, region.shape.record_bytes)
        records_at = region.base + PAGE_BYTES
        if units is None:
            # In one write: a head without its records is harmless, since the seed of the records is new.
            pages = aligned_buffer(PAGE_BYTES + (region.unit_of(region.slots - 1) + 1) * unit_bytes)
            pages[:PAGE_BYTES] = region.head.pack(self.head.file_id)
            for unit in set(map(region.unit_of, region.entries)):
                at = PAGE_BYTES + unit * unit_bytes
                pages[at : at + unit_bytes] = self._unit(region, unit)
            return [(region.base, pages)]
        return [
            (records_at + run[0] * unit_bytes, _aligned([self._unit(region, unit) for unit in run]))
            for run in _runs(sorted(units))
        ]

    def _unit(self, region: DiskRegion, unit: int) -> bytes:
        assert region.shape is not None
        nbytes = region.shape.record_bytes
        seed = region_seed(self.head.file_id, region.head)
        records: list[bytes] = []
        for slot in region.slots_of(unit):
            entry = region.entries.get(slot)
            if entry is None or not entry.ready:
                records.append(bytes(nbytes))
            else:
                record = Record(entry.block, entry.generation, entry.written_at, entry.namespace_generation)
                records.append(pack_record(record, seed + slot, nbytes))
        return b"".join(records).ljust(max(PAGE_BYTES, nbytes), b"\0")


def _aligned(parts: list[bytes]) -> memoryview:
    content = b"".join(parts)
    buffer = aligned_buffer(len(content))
    buffer[:] = content
    return buffer


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers, cut where one is left out."""
    groups = groupby(enumerate(numbers), lambda item: item[1] - item[0])  # equal as long as none is left out
    return [[number for _, number in group] for _, group in groups]


class RecordWriter:
    """Has a tier's updates written: soon, at once where blocks were removed, and again after a pause where one failed.

    Args:
        submit: queues a job for the workers.
        report_error: kind and sentence, as for ``TierListener.tier_error``.
    """

    def __init__(
        self,
        file: DiskFile,
        index: DiskIndex,
        clock: Callable[[], float],
        submit: Callable[[DiskJob], None],
        report_error: Callable[[DiskFault, str], None],
    ) -> None:
        self.updates = RecordUpdates(file.head, index.regions)
        self._file = file
        self._index = index
        self._clock = clock
        self._submit = submit
        self._report_error = report_error
        self._not_before = float("-inf")
        self._closing = False
        self._failures_while_closing = 0

    def write(self, at_once: bool) -> None:
        """Writes what the file does not have: only what is urgent or much, unless ``at_once``."""
        if self._clock() < self._not_before:
            return
        if at_once or self.updates.is_urgent or len(self._index.regions.dirty) >= _MANY_DIRTY_REGIONS:
            self._submit_update()

    def ended(self, done: bool, failed: bool) -> None:
        """Notes that an update ended: ``done``, or not, as where the device ``failed``."""
        self.updates.end(done)
        if not done:
            self._not_before = self._clock() + _PAUSE_S
            self._failures_while_closing += self._closing and failed

    def write_last(self, until: float, workers: Workers, process_ended: Callable[[], None]) -> bool:
        """Completes the file and marks it closed in good order; False where that is not done ``until``.

        Args:
            until: of ``time.monotonic``.
            process_ended: handles the jobs that the workers have ended.
        """
        while self._index.free_removed():
            if time.monotonic() >= until:
                return False
        updates, head = self.updates, self._file.head
        if not self._closing:
            self._closing = True
            updates.sync()  # the head that says "closed" must not reach the device before all else
        while (updates.differs or head.is_open) and self._failures_while_closing < _LAST_TRIES:
            if not updates.differs:
                head.is_open = False
                updates.note_head()
                updates.sync()
            self._submit_update()
            if not workers.wait_idle(until):
                return False
            process_ended()
        if updates.is_urgent:
            self._empty_file()
        return True

    def _submit_update(self) -> None:
        try:
            update = self.updates.begin()
        except OSError as error:
            name = f"disk:{self._file.path.parent}"
            self._report_error(DiskFault.NO_MEMORY, f"{name} could not record what it has: {error.strerror or error}.")
            self._not_before = self._clock() + _PAUSE_S
            self._failures_while_closing += self._closing
            return
        if update is not None:
            self._submit(DiskJob(Kind.UPDATE, 0, (), self._clock(), update=update))

    def _empty_file(self) -> None:
        """Empties the file, since it still has blocks that were removed and could not be updated."""
        try:
            self._file.calls.truncate(self._file.fd, 0)
        except OSError as error:
            path = self._file.path
            self._report_error(DiskFault.FORGET_FAILED, f"{path} may bring removed blocks back: {error}; remove it.")
