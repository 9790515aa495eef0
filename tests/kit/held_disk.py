"""The disk tier over a file in memory, whose reads and writes end when a test says so, and as it says."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any
from zlib import crc32

from kvoffd.tiers.disk.disk_tier import DiskOptions, DiskTier
from kvoffd.tiers.disk.file_format import REGIONS_AT, SlotShape
from kvoffd.tiers.disk.opening import open_disk_tier
from kvoffd.tiers.disk.queue import Batch, DiskJob, Kind
from kvoffd.tiers.disk.regions import Entry
from kvoffd.tiers.tier import Digest, TierKey, TierListener, TierResult
from tests.kit.memory_disk import PAGE, MemoryDisk, WorkersWithoutThreads


def checksum(data: memoryview | bytes) -> int:
    return crc32(data) + 1


class PoolBytes:
    """Memory of a pool."""

    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap(-1, size))

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.view[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self.view[offset : offset + len(data)] = data

    def sum_of(self, offset: int, length: int) -> int:
        return checksum(self.view[offset : offset + length])


class HeldWorkers(WorkersWithoutThreads):
    """Does a job when it is told to; records of what is there at once."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.jobs: dict[DiskJob, None] = {}
        """Reads and writes that were begun, in this order."""

    def submit(self, job: DiskJob) -> None:
        super().submit(job)
        if job.kind is not Kind.UPDATE:
            self.jobs[job] = None
        self._begin()

    def _begin(self) -> None:
        while self._queue.next(self._clock()) is not None:
            pass

    def end(self, job: DiskJob, now: float) -> None:
        """Do a job, which may still wait for others; ``now`` is when it was begun."""
        self._do(self._taken(job, now))
        self._begin()

    def end_undone(self, job: DiskJob, result: TierResult) -> None:
        """End a job without doing it."""
        self._queue.done(self._taken(job, 0.0))
        self._end_unbegun([job], result)
        self._begin()

    def _taken(self, job: DiskJob, now: float) -> Batch:
        self.jobs.pop(job, None)
        running = self._queue.running[job.kind]
        batch = next((one for one in running if job in one.jobs), None)
        if batch is None:
            self._queue._take(job)
            running.add(batch := Batch(job.kind, [job], now))
        batch.begun_at = now
        return batch

    def end_updates(self, now: float) -> None:
        for job in self.updates:
            self.end(job, now)

    @property
    def updates(self) -> list[DiskJob]:
        """Those of records that are not done."""
        running = [job for batch in self._queue.running[Kind.UPDATE] for job in batch.jobs]
        return [*running, *self._queue._waiting[Kind.UPDATE]]

    def wait_idle(self, until: float) -> bool:
        for job in [*self.jobs, *self.updates]:
            self.end(job, 0.0)
        return True


class HeldDisk:
    """A disk tier and the device below it.

    Args:
        file: also one that another life has written.
        blocks: of ``block_bytes`` that a small disk holds; 0 for a large one.
        most_jobs: reads, and writes, that are taken at a time.
    """

    def __init__(
        self,
        file: MemoryDisk,
        pool: PoolBytes,
        clock: Callable[[], float],
        listener: TierListener,
        blocks: int = 0,
        block_bytes: int = PAGE,
        most_jobs: int = 2**30,
        digest: Digest = checksum,
    ) -> None:
        self.file = file
        self._clock = clock
        self._posted: deque[Callable[[], None]] = deque()
        region_bytes = SlotShape(block_bytes, 256).slots_at(blocks) + blocks * block_bytes if blocks else 32 * PAGE
        regions = 1 if blocks else max(16, len(pool.view) // (64 * PAGE))
        size = REGIONS_AT + regions * region_bytes
        self.tier: DiskTier = open_disk_tier(
            Path("/"),
            size + size // 511 + PAGE,
            pool=pool.view,
            digest=digest,
            clock=clock,
            post=self._posted.append,
            listener=listener,
            options=DiskOptions(2**30, 1, region_bytes, most_jobs, most_jobs),
            calls=file,
            wall_clock=clock,
            make_workers=HeldWorkers,
        )
        self.settle()

    @property
    def workers(self) -> HeldWorkers:
        assert isinstance(self.tier.workers, HeldWorkers)
        return self.tier.workers

    @property
    def jobs(self) -> dict[DiskJob, None]:
        self.settle()
        return self.workers.jobs

    @property
    def blocks(self) -> list[TierKey]:
        """What is there, least recently used first."""
        entries: list[Entry] = [one for group in self.tier._index._groups.values() for one in group.values()]
        return [entry.block.id for entry in sorted(entries, key=lambda entry: entry.used)]

    def settle(self) -> None:
        """Give the listener all news, and keep records of what is there."""
        while self._posted or self.workers.updates:
            self.workers.end_updates(self._clock())
            while self._posted:
                self._posted.popleft()()

    def end(self, job: DiskJob, now: float | None = None, fault: TierResult | None = None) -> None:
        """Do a job or let it fail, and call its ``on_done``."""
        assert job.entry is not None
        reading, begun = job.kind is Kind.READ, self._clock() if now is None else now
        if fault is TierResult.FAILED:
            self.file.fault = _fails
        if fault is TierResult.CORRUPT and reading:
            self._flip(job.entry)
        if fault in (None, TierResult.DONE, TierResult.FAILED) or (fault is TierResult.CORRUPT and reading):
            self.workers.end(job, begun)
        else:
            assert fault is not None
            self.workers.end_undone(job, fault)
        self.file.fault = lambda name, number: None
        self.settle()

    def end_all(self, now: float | None = None, fault: TierResult | None = None) -> int:
        """End all jobs, also those that begin meanwhile; returns how many there were."""
        count = 0
        while self.jobs:
            self.end(next(iter(self.jobs)), now, fault)
            count += 1
        return count

    def spoil(self, block_id: TierKey) -> None:
        """Flip one bit of a stored block."""
        entry = self.tier._index.get(block_id)
        assert entry is not None
        self._flip(entry)

    def _flip(self, entry: Entry) -> None:
        at = entry.offset
        for shard in entry.block.shards:
            if shard.length:
                self.file.flip(at + shard.length - 1, 0)
                return
            at += -(-shard.length // PAGE) * PAGE


def _fails(name: str, number: int) -> int | None:
    raise OSError(errno.EIO, "Input/output error")
