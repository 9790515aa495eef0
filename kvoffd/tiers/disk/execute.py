"""Does jobs: reads and writes of the file, straight from and into the pool."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvoffd.pool.slots import PAGE_BYTES, page_up
from kvoffd.tiers.disk.calls import DiskCalls, ShortRead, read_all, write_all
from kvoffd.tiers.disk.queue import Batch, Job, Kind
from kvoffd.tiers.tier import TierBlock, TierResult

Digest = Callable[[memoryview], int]


class Ended(NamedTuple):
    """How a job ended."""

    job: Job
    result: TierResult
    error_kind: str = ""
    """As for the listener; empty where nothing was wrong."""
    sentence: str = ""


@dataclass
class Executor:
    """Reads and writes one file. Any number of threads may ``run`` at a time."""

    calls: DiskCalls
    fd: int
    path: str
    digest: Digest
    physical_bytes: int
    """What the file takes of the device, as of the last update."""

    def run(self, batch: Batch, now: float) -> list[Ended]:
        """Does the jobs of a batch and says how each ended. Does not raise."""
        late = [Ended(job, TierResult.DEADLINE) for job in batch.jobs if now >= job.deadline]
        jobs = [job for job in batch.jobs if now < job.deadline] if late else batch.jobs
        if batch.kind is Kind.UPDATE:
            return [self._update(job) for job in jobs]
        return late + self._together(jobs, batch.kind)

    def _together(self, jobs: Sequence[Job], kind: Kind) -> list[Ended]:
        """All in one call; one by one where that fails, so that the bad one alone fails."""
        if not jobs:
            return []
        if len(jobs) > 1 and jobs[-1].offset - jobs[0].offset != sum(job.nbytes for job in jobs[:-1]):
            return [ended for job in jobs for ended in self._together([job], kind)]
        buffers = [buffer for job in jobs for buffer in job.buffers]
        try:
            if kind is Kind.READ:
                read_all(self.calls, self.fd, buffers, jobs[0].offset)
            else:
                write_all(self.calls, self.fd, buffers, jobs[0].offset)
        except OSError as error:
            if len(jobs) > 1:
                return [ended for job in jobs for ended in self._together([job], kind)]
            return [self._failed(jobs[0], error)]
        return [self._verify(job) if kind is Kind.READ else Ended(job, TierResult.DONE) for job in jobs]

    def _verify(self, job: Job) -> Ended:
        entry = job.entry
        assert entry is not None
        for rank, (shard, buffer) in enumerate(zip(entry.block.shards, job.buffers, strict=True)):
            if self.digest(buffer[: shard.length]) != shard.checksum:
                sentence = (
                    f"The block {entry.block.id.key.hex()} at offset {job.offset} of {self.path} is not what was "
                    f"written there (rank {rank}); it is dropped and will be recomputed."
                )
                return Ended(job, TierResult.CORRUPT, "torn" if entry.suspect else "corrupt", sentence)
        return Ended(job, TierResult.DONE)

    def _update(self, job: Job) -> Ended:
        update = job.update
        assert update is not None
        try:
            for index, (offset, pages) in enumerate(update.writes):
                write_all(self.calls, self.fd, [pages], offset)
                if update.sync and index == 0:
                    self.calls.sync(self.fd)
            if update.sync:
                self.calls.sync(self.fd)
            self.physical_bytes = self.calls.stat(self.fd).st_blocks * 512
        except OSError as error:
            return self._failed(job, error)
        return Ended(job, TierResult.DONE)

    def _failed(self, job: Job, error: OSError) -> Ended:
        verb = {Kind.READ: "read", Kind.WRITE: "write", Kind.UPDATE: "record"}[job.kind]
        if isinstance(error, ShortRead):
            kind = "short_read"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = "no_space"
        else:
            kind = f"{verb}_failed"
        what = f"{job.nbytes} bytes at offset {job.offset}" if job.update is None else "its records"
        sentence = f"The disk tier could not {verb} {what} of {self.path}: {error.strerror or error}."
        return Ended(job, TierResult.FAILED, kind, sentence)


def buffers_of(pool: memoryview, block: TierBlock, offsets: Sequence[int]) -> list[memoryview]:
    """The block's slots of the pool, as far as their pages hold bytes of it.

    Raises:
        ValueError: they are not in the pool, not as many as the shards, or there is no checksum to compare.
    """
    buffers: list[memoryview] = []
    for shard, offset in zip(block.shards, offsets, strict=True):
        nbytes = page_up(shard.length)
        if offset < 0 or offset % PAGE_BYTES or shard.length < 0 or offset + nbytes > len(pool):
            raise ValueError(f"{shard.length} bytes at offset {offset} are no slot of the pool.")
        if shard.checksum == 0:
            raise ValueError("A block without checksums cannot be kept: nothing could tell that it is whole.")
        buffers.append(pool[offset : offset + nbytes])
    return buffers
