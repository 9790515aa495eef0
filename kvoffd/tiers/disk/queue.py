"""The jobs of a disk: in which order they are done, and which of them in one call. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvoffd.tiers.disk.regions import Entry
from kvoffd.tiers.tier import OnDone

MOST_BUFFERS = 512


class Kind(IntEnum):
    """What a job does; the lowest goes first."""

    READ = 0
    UPDATE = 1
    WRITE = 2


class Update(NamedTuple):
    """Writes to the head and the records, to be done in this order."""

    writes: list[tuple[int, memoryview]]
    """Offset in the file and whole pages, the head first."""
    sync: bool
    """Whether the device's cache is flushed (fdatasync) after the head and after all of them."""
    regions: dict[int, set[int] | None]
    """The regions whose records are written, as ``Dirty.take`` returned them."""
    removals: int
    """So many removals, the first ones, hold after a crash once this is done."""

    @property
    def nbytes(self) -> int:
        return sum(len(pages) for _, pages in self.writes)


@dataclass(slots=True, eq=False)
class DiskJob:
    """The read or write of one block, or an update of the file's records. Compared by identity."""

    kind: Kind
    offset: int
    buffers: Sequence[memoryview]
    queued_at: float
    deadline: float = float("inf")
    entry: Entry | None = None
    on_done: OnDone | None = None
    update: Update | None = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(map(len, self.buffers))


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs of one kind that are done in one call, in the order of their offsets."""

    kind: Kind
    jobs: list[DiskJob]
    begun_at: float


class DiskQueue:
    """Jobs that wait or run: reads go before updates, updates before writes. Not thread-safe.

    While reads keep coming, a write waits ``patience_s`` and is then begun, one at a time.

    Args:
        most_reads: batches of reads that may run at a time.
        most_writes: batches of writes that may run at a time.
        merge_bytes: neighbours in the file are done in one call of up to so many bytes.
    """

    def __init__(self, most_reads: int, most_writes: int, merge_bytes: int, patience_s: float) -> None:
        self._most = {Kind.READ: most_reads, Kind.UPDATE: 1, Kind.WRITE: most_writes}
        self._merge_bytes = merge_bytes
        self._patience_s = patience_s
        # Of a dict the first one is looked for behind all that are gone.
        self._waiting: dict[Kind, OrderedDict[DiskJob, None]] = {kind: OrderedDict() for kind in Kind}
        self._by_offset: dict[Kind, dict[int, DiskJob]] = {kind: {} for kind in Kind}
        self.running: dict[Kind, set[Batch]] = {kind: set() for kind in Kind}
        self.jobs = 0
        """Number of jobs that wait or run."""

    def put(self, job: DiskJob) -> None:
        self._waiting[job.kind][job] = None
        self._by_offset[job.kind].setdefault(job.offset, job)
        self.jobs += 1

    def next(self, now: float) -> Batch | None:
        """Takes the batch to be run now, until ``done``; None where there is none, or enough batches run."""
        kind = self._next_kind(now)
        if kind is None:
            return None
        first = next(iter(self._waiting[kind]))
        self._take(first)
        jobs = [first] if kind is Kind.UPDATE else self._with_neighbours(first)
        batch = Batch(kind, jobs, now)
        self.running[kind].add(batch)
        return batch

    def done(self, batch: Batch) -> None:
        self.running[batch.kind].remove(batch)
        self.jobs -= len(batch.jobs)

    def late(self, now: float) -> list[DiskJob]:
        """Removes and returns the waiting jobs whose deadline has passed."""
        return self._remove(job for jobs in self._waiting.values() for job in jobs if now >= job.deadline)

    def clear(self) -> list[DiskJob]:
        return self._remove(job for jobs in self._waiting.values() for job in jobs)

    def waiting(self, kind: Kind) -> int:
        return len(self._waiting[kind])

    def running_jobs(self, kind: Kind) -> int:
        return sum(len(batch.jobs) for batch in self.running[kind])

    def longest_s(self, now: float) -> float:
        """How long the oldest running batch has taken so far."""
        return max((now - batch.begun_at for batches in self.running.values() for batch in batches), default=0.0)

    def _next_kind(self, now: float) -> Kind | None:
        ready = [kind for kind in Kind if self._waiting[kind] and len(self.running[kind]) < self._most[kind]]
        if not ready or ready[0] is not Kind.READ:
            return ready[0] if ready else None
        for kind in ready[1:]:
            oldest = next(iter(self._waiting[kind]))
            if now - oldest.queued_at >= self._patience_s and not self.running[kind]:
                return kind
        return Kind.READ

    def _with_neighbours(self, first: DiskJob) -> list[DiskJob]:
        """The job and the waiting jobs that follow it in the file without a gap, as many as one call takes."""
        jobs = [first]
        nbytes, buffers = first.nbytes, len(first.buffers)
        by_offset = self._by_offset[first.kind]
        while (job := by_offset.get(first.offset + nbytes)) is not None:
            nbytes += job.nbytes
            buffers += len(job.buffers)
            if nbytes > self._merge_bytes or buffers > MOST_BUFFERS:
                break
            self._take(job)
            jobs.append(job)
        return jobs

    def _take(self, job: DiskJob) -> None:
        del self._waiting[job.kind][job]
        if self._by_offset[job.kind].get(job.offset) is job:
            del self._by_offset[job.kind][job.offset]

    def _remove(self, jobs: Iterable[DiskJob]) -> list[DiskJob]:
        taken = list(jobs)
        for job in taken:
            self._take(job)
        self.jobs -= len(taken)
        return taken
