"""What has to be written so that the file says what the tier has. Pure: others write it."""

from __future__ import annotations

from typing import NamedTuple

from kvoffd.pool.slots import PAGE_BYTES
from kvoffd.tiers.disk.calls import aligned_buffer
from kvoffd.tiers.disk.format import HEAD_PAGES, MAX_FLOORS, Head, Record, pack_record, region_seed
from kvoffd.tiers.disk.regions import DiskRegion, DiskRegions

# In one go: what waits meanwhile is written in the next.
_MOST_REGIONS = 64


class Update(NamedTuple):
    """Writes that belong together, in this order."""

    writes: list[tuple[int, memoryview]]
    """Offset in the file and whole pages, the head first."""
    sync: bool
    """Whether the device's cache is to be emptied behind it, and behind the head."""
    regions: dict[int, set[int] | None]

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return sum(len(pages) for _, pages in self.writes)


class Records:
    """Keeps the file's head and records up to date, one update at a time."""

    def __init__(self, head: Head, regions: DiskRegions) -> None:
        self.head = head
        self._regions = regions
        self._head_differs = False
        self._sync = False
        self._unsynced = False
        self._running: Update | None = None

    @property
    def is_urgent(self) -> bool:
        """Whether something is to be forgotten that the file still has."""
        return self._sync

    @property
    def differs(self) -> bool:
        """Whether the file is to be told anything."""
        return self._head_differs or self._sync or len(self._regions.dirty) > 0

    def note_head(self) -> None:
        """The head has changed."""
        self._head_differs = True

    @property
    def may_differ(self) -> bool:
        """Whether the device may say otherwise than the tier, as far as a crash can show."""
        return self.differs or self._running is not None or self._unsynced

    def forget(self) -> None:
        """Something was removed: what is dirty now, and what was written, must reach the device."""
        self._sync = True

    def forget_namespace(self, fingerprint: bytes) -> None:
        """What was written of a namespace up to now does not count any more."""
        floors = self.head.floors
        if fingerprint in floors or len(floors) < MAX_FLOORS:  # else its records alone tell, when all are written
            floors[fingerprint] = self._regions.generation
            self._head_differs = True
        self._sync = True

    def begin(self) -> Update | None:
        """The next update; None where there is nothing to write, or one is being written.

        Raises OSError where there is no memory for its pages; then nothing has changed.
        """
        if self._running is not None or not self.differs:
            return None
        taken = self._regions.dirty.take(_MOST_REGIONS)
        writes: list[tuple[int, memoryview]] = []
        try:
            if self._head_differs:
                writes.append(self._write_of_head())
            for number, units in taken.items():
                writes += self._writes_of(self._regions[number], units)
        except OSError:
            self._regions.dirty.give_back(taken)
            self.head.number -= self._head_differs  # its next one must not go where the last one is
            raise
        self._head_differs = False
        self._running = Update(writes, self._sync, taken)
        self._regions.hold(taken)
        return self._running

    def end(self, done: bool) -> None:
        """The update was written; where it was not, all of it is to be written again."""
        update = self._running
        assert update is not None
        self._running = None
        self._regions.end_hold()
        if not done:
            self._regions.dirty.give_back(update.regions)
            self._head_differs = True
            return
        self.head.written_bytes += update.nbytes
        self._unsynced = not update.sync
        if update.sync and not len(self._regions.dirty):
            self._sync = False

    def drop_floors(self) -> None:
        """No record is left of what was removed: to be called when nothing of it is in a slot."""
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
            # One write: a head that is there without its records brings nothing back, since their seed is new.
            end = region.unit_of(region.slots - 1) + 1
            head = region.head.pack(self.head.file_id)
            return [(region.base, _aligned([head, *(self._unit(region, unit) for unit in range(end))]))]
        writes: list[tuple[int, memoryview]] = []
        for run in _runs(sorted(units)):
            pages = _aligned([self._unit(region, unit) for unit in run])
            writes.append((records_at + run[0] * unit_bytes, pages))
        return writes

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
                records.append(
                    pack_record(Record(entry.block, entry.generation, entry.written_at), seed + slot, nbytes)
                )
        return b"".join(records).ljust(max(PAGE_BYTES, nbytes), b"\0")


def _aligned(parts: list[bytes]) -> memoryview:
    content = b"".join(parts)
    buffer = aligned_buffer(len(content))
    buffer[:] = content
    return buffer


def _runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers, cut where one is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
