"""Does the jobs of a disk tier's queue, on threads."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvoffd.errors import NoMoreThreads
from kvoffd.pool.allocator import PAGE_BYTES, page_up
from kvoffd.system.files import ShortRead, held_bytes, read_all, write_all
from kvoffd.system.threads import DaemonThreads
from kvoffd.tiers.disk.file import DiskFile
from kvoffd.tiers.disk.queue import Batch, DiskJob, DiskQueue, Kind
from kvoffd.tiers.tier import Digest, TierBlock, TierResult
from kvoffd_proto.stats import DiskFault

logger = logging.getLogger(__name__)


class JobEnd(NamedTuple):
    job: DiskJob
    result: TierResult
    error_kind: DiskFault | None = None
    """As for ``TierListener.tier_error``; None where nothing was wrong."""
    sentence: str = ""


class Executor:
    """Does jobs on one file: reads and writes, straight from and into the pool. Any number of threads may ``run``."""

    def __init__(self, file: DiskFile, digest: Digest) -> None:
        self._calls = file.calls
        self._fd = file.fd
        self._path = file.path
        self._digest = digest
        self.physical_bytes = file.physical_bytes()
        """Bytes that the file takes of the device, as of the last update."""

    def run(self, batch: Batch, now: float) -> list[JobEnd]:
        """Does the jobs of a batch; returns how each of them ended. Does not raise."""
        late = [JobEnd(job, TierResult.DEADLINE) for job in batch.jobs if now >= job.deadline]
        jobs = [job for job in batch.jobs if now < job.deadline] if late else batch.jobs
        if batch.kind is Kind.UPDATE:
            return [self._update(job) for job in jobs]
        return late + self._together(jobs, batch.kind)

    def _together(self, jobs: Sequence[DiskJob], kind: Kind) -> list[JobEnd]:
        """Does all jobs in one call; one by one where that fails, so that only the bad one fails."""
        if not jobs:
            return []
        if len(jobs) > 1 and jobs[-1].offset - jobs[0].offset != sum(job.nbytes for job in jobs[:-1]):
            return [ended for job in jobs for ended in self._together([job], kind)]
        buffers = [buffer for job in jobs for buffer in job.buffers]
        try:
            if kind is Kind.READ:
                read_all(self._calls, self._fd, buffers, jobs[0].offset)
            else:
                write_all(self._calls, self._fd, buffers, jobs[0].offset)
        except OSError as error:
            if len(jobs) > 1:
                return [ended for job in jobs for ended in self._together([job], kind)]
            return [self._failed(jobs[0], error)]
        return [self._verify(job) if kind is Kind.READ else JobEnd(job, TierResult.DONE) for job in jobs]

    def _verify(self, job: DiskJob) -> JobEnd:
        entry = job.entry
        assert entry is not None
        for rank, (shard, buffer) in enumerate(zip(entry.block.shards, job.buffers, strict=True)):
            if self._digest(buffer[: shard.length]) != shard.checksum:
                sentence = (
                    f"The block {entry.block.id.key.hex()} at offset {job.offset} of {self._path} is not what was "
                    f"written there (rank {rank}); it is dropped and will be recomputed."
                )
                return JobEnd(job, TierResult.CORRUPT, DiskFault.TORN if entry.suspect else DiskFault.CORRUPT, sentence)
        return JobEnd(job, TierResult.DONE)

    def _update(self, job: DiskJob) -> JobEnd:
        update = job.update
        assert update is not None
        try:
            for index, (offset, pages) in enumerate(update.writes):
                write_all(self._calls, self._fd, [pages], offset)
                if update.sync and index == 0:
                    self._calls.sync(self._fd)
            if update.sync:
                self._calls.sync(self._fd)
            self.physical_bytes = held_bytes(self._calls.stat(self._fd))
        except OSError as error:
            return self._failed(job, error)
        return JobEnd(job, TierResult.DONE)

    def _failed(self, job: DiskJob, error: OSError) -> JobEnd:
        verb = {Kind.READ: "read", Kind.WRITE: "write", Kind.UPDATE: "record"}[job.kind]
        if isinstance(error, ShortRead):
            kind = DiskFault.SHORT_READ
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            kind = DiskFault.NO_SPACE
        else:
            kind = DiskFault(f"{verb}_failed")
        what = f"{job.nbytes} bytes at offset {job.offset}" if job.update is None else "its records"
        sentence = f"The disk tier could not {verb} {what} of {self._path}: {error.strerror or error}."
        return JobEnd(job, TierResult.FAILED, kind, sentence)


def buffers_of(pool: memoryview, block: TierBlock, offsets: Sequence[int]) -> list[memoryview]:
    """The pages of the pool that hold the block's shards, which lie at these offsets.

    Raises:
        ValueError: they are not in the pool, not as many as the shards, or a shard has no checksum.
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


class Load(NamedTuple):
    """How many jobs wait and run, and for how long."""

    queued_reads: int
    queued_writes: int
    running_reads: int
    running_writes: int
    longest_s: float
    """How long the oldest running call has taken so far."""
    busy_seconds: float


class Workers:
    """Does the jobs of a queue on ``threads`` threads.

    Args:
        notify: called after jobs have ended, from any thread: ``collect`` returns them.
    """

    def __init__(
        self,
        queue: DiskQueue,
        executor: Executor,
        clock: Callable[[], float],
        notify: Callable[[], None],
        threads: int,
        name: str,
    ) -> None:
        self._queue = queue
        self._executor = executor
        self._clock = clock
        self._notify = notify
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._ended: deque[JobEnd] = deque()
        self._busy_seconds = 0.0
        self._stopped = False
        try:
            self._threads = DaemonThreads((f"{name}-{index}", self._run) for index in range(threads))
        except NoMoreThreads:
            with self._changed:  # those that there are shall end
                self._stopped = True
                self._changed.notify_all()
            raise

    def submit(self, job: DiskJob) -> None:
        """Queues a job. It ends exactly once."""
        with self._changed:
            self._queue.put(job)
            self._changed.notify()

    def end_late(self) -> None:
        with self._changed:
            jobs = self._queue.late(self._clock())
        self._end_unbegun(jobs, TierResult.DEADLINE)

    def end_waiting(self, result: TierResult) -> None:
        with self._changed:
            jobs = self._queue.clear()
        self._end_unbegun(jobs, result)

    def collect(self, most: int) -> list[JobEnd]:
        """Takes jobs that have ended, the first so many."""
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]

    @property
    def has_ended(self) -> bool:
        """Whether there are jobs to collect."""
        return bool(self._ended)

    def load(self) -> Load:
        """Jobs that wait and run now. Updates count as writes."""
        queue = self._queue
        with self._changed:
            return Load(
                queue.waiting(Kind.READ),
                queue.waiting(Kind.WRITE) + queue.waiting(Kind.UPDATE),
                queue.running_jobs(Kind.READ),
                queue.running_jobs(Kind.WRITE) + queue.running_jobs(Kind.UPDATE),
                queue.longest_s(self._clock()),
                self._busy_seconds,
            )

    def wait_idle(self, until: float) -> bool:
        """Waits until no job waits or runs; False where one still does at ``until`` (of ``time.monotonic``)."""
        with self._changed:
            return self._idle.wait_for(lambda: not self._queue.jobs, max(0.0, until - time.monotonic()))

    def stop(self, until: float) -> None:
        """Ends the threads, none of which has a job, and waits for that, but not beyond ``until``."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._threads.join(until)

    def _end_unbegun(self, jobs: list[DiskJob], result: TierResult) -> None:
        self._ended.extend(JobEnd(job, result) for job in jobs)
        if jobs:
            self._notify()

    def _do(self, batch: Batch) -> None:
        begun = time.perf_counter()
        try:
            ended = self._executor.run(batch, batch.begun_at)
        except Exception as error:  # a bug: its jobs fail, the thread goes on
            logger.exception("A disk thread failed; its %d jobs fail, the thread goes on.", len(batch.jobs))
            sentence = f"A disk thread failed ({error!r}): a bug; the log has more."
            ended = [JobEnd(job, TierResult.FAILED, DiskFault.BUG, sentence) for job in batch.jobs]
        with self._changed:
            self._busy_seconds += time.perf_counter() - begun
            self._queue.done(batch)
            self._ended.extend(ended)
            # This thread takes the next job: no other need be woken.
            if not self._queue.jobs:
                self._idle.notify_all()
        self._notify()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._do(batch)

    def _next(self) -> Batch | None:
        with self._changed:
            while (batch := self._queue.next(self._clock())) is None and not self._stopped:
                self._changed.wait()
            return batch
