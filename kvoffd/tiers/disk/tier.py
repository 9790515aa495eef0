"""The disk tier: one directory of a local drive."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from kvoffd.tiers.disk.calls import DiskCalls
from kvoffd.tiers.disk.deferred_events import DeferredEvents, call
from kvoffd.tiers.disk.execute import Digest, Ended, Executor, buffers_of
from kvoffd.tiers.disk.file import DiskFile, OnProgress, default_region_bytes
from kvoffd.tiers.disk.format import MAX_FINGERPRINT_BYTES, MAX_KEY_BYTES, MAX_WORLD_SIZE, SlotShape
from kvoffd.tiers.disk.index import DiskIndex
from kvoffd.tiers.disk.options import DiskOptions
from kvoffd.tiers.disk.queue import DiskQueue, Job, Kind
from kvoffd.tiers.disk.records import Records
from kvoffd.tiers.disk.regions import Entry
from kvoffd.tiers.disk.report import DiskReport, ages_of, oldest_age_s, shapes_of
from kvoffd.tiers.disk.scan import rebuild
from kvoffd.tiers.disk.workers import ThreadWorkers, Workers
from kvoffd.tiers.tier import OnDone, Tier, TierBlock, TierKey, TierListener, TierResult, TierStats

logger = logging.getLogger(__name__)

_HEAD_EVERY_S = 60.0
_MANY_DIRTY_REGIONS = 32
_LEAVING_PER_TURN = 2000
_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_LAST_TRIES = 3
_PUT_ASIDE_SHARE = 100  # one part in so many

MakeWorkers = Callable[[DiskQueue, Executor, Callable[[], float], Callable[[], None]], Workers]


class DiskTier(Tier):
    """Keeps blocks in one preallocated file of a directory: see ``format``. Made by ``open``."""

    @classmethod
    def open(
        cls,
        directory: Path,
        size_bytes: int,
        *,
        pool: memoryview,
        digest: Digest,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        options: DiskOptions = DiskOptions(),  # noqa: B008 - immutable
        calls: DiskCalls | None = None,
        wall_clock: Callable[[], float] = time.time,
        make_workers: MakeWorkers | None = None,
        on_progress: OnProgress = lambda what, done, total: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> DiskTier:
        """Makes the file or reads its index: for any thread, since that takes a while. What is found is not told to
        the listener: see ``groups``.

        Args:
            size_bytes: the most that the file may take of the device.
            pool: the pool's bytes, writable, mapped until ``close`` returned True.
            digest: the checksum of a shard, as the pool takes it. For any thread.
            clock: of deadlines, in seconds. For any thread.
            post: has something called in the daemon's thread, in the order of the calls. For any thread.
            wall_clock: seconds since 1970, for the age of blocks.
            on_progress: called in this thread: what is being done, bytes done, of bytes in all.
            should_stop: asked in this thread now and then.

        Raises:
            DiskError: the directory cannot be used; the sentence says what to do.
            OpeningStopped: ``should_stop`` said so.
        """
        begun = time.monotonic()
        calls = calls or DiskCalls()
        region_bytes = options.region_bytes or default_region_bytes(size_bytes)
        file = DiskFile(directory, size_bytes, region_bytes, calls, wall_clock, on_progress, should_stop)
        try:
            book = rebuild(file, on_progress, should_stop)
            executor = Executor(calls, file.fd, str(file.path), digest, file.physical_bytes())
        except BaseException:
            file.close()
            raise
        tier = cls(directory, size_bytes, file, book, executor, pool, clock, post, listener, options, wall_clock)
        name = f"kvoffd-disk-{directory.name}"
        make_workers = make_workers or partial(ThreadWorkers, threads=options.reads_in_flight, name=name)
        queue = DiskQueue(
            options.reads_in_flight, options.writes_in_flight, options.merge_bytes, options.write_patience_s
        )
        tier.workers = make_workers(queue, executor, clock, tier._wake)
        tier._open_seconds = time.monotonic() - begun
        tier._tell_notes()
        return tier

    workers: Workers
    """Who reads and writes. A simulation has them work; nobody else needs them."""

    def __init__(
        self,
        directory: Path,
        size_bytes: int,
        file: DiskFile,
        book: DiskIndex,
        executor: Executor,
        pool: memoryview,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        options: DiskOptions,
        wall_clock: Callable[[], float],
    ) -> None:
        self.name = f"disk:{directory}"
        self._size_bytes = size_bytes
        self._file = file
        self._book = book
        self._records = Records(file.head, book.regions)
        self._executor = executor
        self._pool = pool
        self._clock = clock
        self._post = post
        self._options = options
        self._wall_clock = wall_clock
        self._open_seconds = 0.0
        self._found_blocks = book.blocks
        self._voice = DeferredEvents(self, listener, self._wake)
        self._counts: Counter[str] = Counter()
        self._under_way: Counter[Kind] = Counter()
        self._put_aside_bytes = 0
        self._pause_s = 0.0
        self._write_after = self._update_after = float("-inf")
        self._head_at = clock()
        self._last_failures = 0
        self._turns = threading.RLock()
        self._draining = self._closed = self._hangs = self._last_begun = False

    @property
    def hangs(self) -> bool:
        """A call does not come back: nothing is taken until it does."""
        return self._hangs

    @property
    def is_settled(self) -> bool:
        """Whether all that was removed is forgotten by the device too: until then it may come back after a crash."""
        return not self._records.is_urgent and not self._book.leaving

    def groups(self) -> Collection[tuple[bytes, int]]:
        return self._book.groups()

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._book.index(fingerprint, group)

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return {} if self._hangs else self._book.index(fingerprint, group)

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        if self._book.get(block.id) is not None or self._book.is_writing(block.id):
            return False
        buffers = buffers_of(self._pool, block, offsets)
        if not self._takes_write() or not self._fits(block):
            self._counts["refused"] += 1
            return False
        entry, evicted = self._book.take(block, self._wall_clock())
        if evicted:
            self._counts["evicted"] += len(evicted)
            self._voice.removed(evicted)
        if entry is None:
            self._counts["refused"] += 1
            return False
        self._submit(Job(Kind.WRITE, entry.offset, buffers, self._clock(), entry=entry, on_done=on_done))
        return True

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        entry = self._book.get(block_id)
        if entry is None or self._closed or self._hangs or self._under_way[Kind.READ] >= self._options.queued_reads:
            return False
        buffers = buffers_of(self._pool, entry.block, offsets)
        entry.readers += 1
        self._submit(Job(Kind.READ, entry.offset, buffers, self._clock(), deadline, entry, on_done))
        return True

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        self._book.touch(block_ids)

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        block_ids = list(block_ids)
        self._book.forget_writing(block_ids)
        entries = [entry for block_id in dict.fromkeys(block_ids) if (entry := self._book.get(block_id)) is not None]
        for entry in entries:
            self._book.drop(entry)
        # Of a block that was evicted a while ago the device may have a record still.
        if entries or self._records.may_differ:
            self._records.forget()
        if entries:
            self._voice.removed([entry.block.id for entry in entries])
        self._update()
        return len(entries)

    def remove_namespace(self, fingerprint: bytes) -> int:
        removed = self._book.remove_namespace(fingerprint)
        self._records.forget_namespace(fingerprint)
        if removed:
            self._voice.removed(removed)
        self._update()
        return len(removed)

    def tick(self) -> None:
        now = self._clock()
        self.workers.end_late()
        self._look_for_hanging()
        if now - self._head_at >= _HEAD_EVERY_S:
            self._head_at = now
            self._records.note_head()
        if not self._book.leaving:
            self._records.drop_floors()
        self._update(now=True)

    def stats(self) -> TierStats:
        load = self.workers.load()
        counts = self._counts
        return TierStats(
            size_bytes=self._size_bytes,
            used_bytes=self._book.regions.used_bytes,
            physical_bytes=self._executor.physical_bytes,
            blocks=self._book.blocks,
            read_blocks=counts["read"],
            read_bytes=counts["read_bytes"],
            written_blocks=counts["written"],
            written_bytes=counts["written_bytes"],
            evicted_blocks=counts["evicted"],
            refused_writes=counts["refused"],
            queued_reads=load.queued_reads,
            queued_writes=load.queued_writes,
            running_reads=load.running_reads,
            running_writes=load.running_writes,
            busy_seconds=load.busy_seconds,
            errors=dict(self._voice.errors),
        )

    def report(self) -> DiskReport:
        """What ``stats`` does not say."""
        head, now = self._file.head, self._wall_clock()
        return DiskReport(
            path=str(self._file.path),
            direct=self._file.direct,
            region_bytes=head.region_bytes,
            regions=head.regions,
            free_regions=sum(region.shape is None for region in self._book.regions),
            shapes=shapes_of(self._book),
            put_aside_bytes=self._put_aside_bytes,
            created_at=head.created_at,
            lifetime_written_bytes=head.written_bytes,
            lifetime_written_blocks=head.written_blocks,
            oldest_age_s=oldest_age_s(self._book, now),
            ages=ages_of(self._book, now),
            hangs=self._hangs,
            draining=self._draining,
            open_seconds=self._open_seconds,
            found_blocks=self._found_blocks,
        )

    def drain(self) -> None:
        self._draining = True

    def close(self, deadline_s: float) -> bool:
        """See Tier. Where something hangs, the file stays open and locked; asking again later is fine.

        For any thread, if no other method is called meanwhile.
        """
        with self._turns:
            closed = self._file.fd < 0 or self._close(time.monotonic() + deadline_s)
        if not closed:
            self._wake()  # what was posted meanwhile was not done
        return closed

    def _close(self, until: float) -> bool:
        self._closed = True
        self.workers.end_waiting(TierResult.CANCELLED)
        idle = self.workers.wait_idle(until)
        self._turn()
        if not idle or not self._write_last(until) or not self.workers.stop(until):
            return False
        self._turn()
        self._file.close()
        self._pool = memoryview(b"")
        return True

    def _takes_write(self) -> bool:
        return not (
            self._draining
            or self._closed
            or self._hangs
            or self._under_way[Kind.WRITE] >= self._options.queued_writes
            or self._clock() < self._write_after
        )

    def _fits(self, block: TierBlock) -> bool:
        fits = (
            len(block.id.fingerprint) <= MAX_FINGERPRINT_BYTES
            and len(block.id.key) <= MAX_KEY_BYTES
            and 0 < len(block.shards) <= MAX_WORLD_SIZE
            and SlotShape.of(block).slots(self._book.regions.region_bytes) > 0
        )
        if not fits and not self._voice.errors["too_large"]:  # said once: there will be many like it
            self._voice.error(
                "too_large",
                f"Blocks of {block.nbytes} bytes do not fit the regions of {self.name}, which have "
                f"{self._book.regions.region_bytes} bytes; remove its file and make the tier larger.",
            )
        return fits

    def _submit(self, job: Job) -> None:
        self._under_way[job.kind] += 1
        self.workers.submit(job)

    def _wake(self) -> None:
        self._post(self._posted_turn)

    def _posted_turn(self) -> None:
        if self._turns.acquire(blocking=False):  # else it is being closed by another thread, which has its own turns
            try:
                self._turn()
            finally:
                self._turns.release()

    def _tell_notes(self) -> None:
        for sentence in self._file.notes.sentences:
            logger.info("%s", sentence)
        for kind, sentence in self._file.notes.errors:
            self._voice.error(kind, sentence)

    def _turn(self) -> None:
        """Tells what there is to tell, and goes on."""
        self._voice.deliver()
        for ended in self.workers.collect():
            self._end(ended)
        if self._book.leaving:
            self._book.empty_slots(_LEAVING_PER_TURN)
            self._records.forget()
            self._wake()
        self._update()
        self._voice.deliver()

    def _end(self, ended: Ended) -> None:
        job, result = ended.job, ended.result
        self._under_way[job.kind] -= 1
        if ended.error_kind:
            self._voice.error(ended.error_kind, ended.sentence)
        if job.kind is Kind.UPDATE:
            self._records.end(result is TierResult.DONE)
            if result is not TierResult.DONE:
                self._update_after = self._clock() + _LEAST_PAUSE_S
                self._last_failures += self._last_begun and result is TierResult.FAILED
            return
        assert job.entry is not None and job.on_done is not None  # noqa: PT018
        end = self._end_read if job.kind is Kind.READ else self._end_write
        result = end(job, job.entry, result)
        self._voice.deliver()
        call(partial(job.on_done, result))

    def _end_read(self, job: Job, entry: Entry, result: TierResult) -> TierResult:
        is_there = self._book.read_done(entry)
        if result is TierResult.DONE:
            if not is_there:
                return TierResult.GONE
            entry.suspect = False
            self._counts["read"] += 1
            self._counts["read_bytes"] += entry.block.nbytes
        elif result in (TierResult.CORRUPT, TierResult.FAILED) and is_there:
            self._book.drop(entry)
            self._voice.removed([entry.block.id])
        return result

    def _end_write(self, job: Job, entry: Entry, result: TierResult) -> TierResult:
        if result is not TierResult.DONE:
            put_aside = result is TierResult.FAILED and self._may_put_aside(job.nbytes)
            self._book.not_written(entry, put_aside)
            if result is TierResult.FAILED:
                self._pause_s = min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * self._pause_s))
                self._write_after = self._clock() + self._pause_s
            return result
        self._pause_s = 0.0
        head = self._file.head
        head.written_bytes += job.nbytes
        head.written_blocks += 1
        self._counts["written"] += 1
        self._counts["written_bytes"] += entry.block.nbytes
        if not self._book.written(entry):
            return TierResult.GONE
        self._voice.stored(entry.block)
        return result

    def _may_put_aside(self, nbytes: int) -> bool:
        """Whether the slot of a failed write is left alone from now on: up to a hundredth of the tier is."""
        if (self._put_aside_bytes + nbytes) * _PUT_ASIDE_SHARE > self._size_bytes:
            return False
        self._put_aside_bytes += nbytes
        return True

    def _update(self, now: bool = False) -> None:
        """Has the file told what it does not know: soon, and at once where something is to be forgotten."""
        records = self._records
        if self._closed or self._hangs or self._clock() < self._update_after:
            return
        if now or records.is_urgent or len(self._book.regions.dirty) >= _MANY_DIRTY_REGIONS:
            self._submit_update()

    def _submit_update(self) -> None:
        try:
            update = self._records.begin()
        except OSError as error:
            self._voice.error("no_memory", f"{self.name} could not record what it has: {error.strerror or error}.")
            self._update_after = self._clock() + _LEAST_PAUSE_S
            self._last_failures += self._last_begun
            return
        if update is not None:
            self._submit(Job(Kind.UPDATE, 0, (), self._clock(), update=update))

    def _look_for_hanging(self) -> None:
        longest_s = self.workers.load().longest_s
        hangs = longest_s > self._options.hang_timeout_s
        if hangs and not self._hangs:
            self._voice.error(
                "hung",
                f"A call of {self.name} has not come back for {longest_s:.0f} s; the tier takes nothing until it does. "
                "Look at the device (dmesg).",
            )
        if self._hangs and not hangs:
            logger.info("%s answers again.", self.name)
        self._hangs = hangs
        if hangs:
            self.workers.end_waiting(TierResult.DEADLINE)

    def _write_last(self, until: float) -> bool:
        """Leaves a file that says all, and that it was closed in good order; False where that takes too long now."""
        while self._book.empty_slots(_LEAVING_PER_TURN):
            if time.monotonic() >= until:
                return False
        head = self._file.head
        if not self._last_begun:
            self._last_begun = True
            self._records.forget()  # what the head says last must not reach the device before all else
        while (self._records.differs or head.is_open) and self._last_failures < _LAST_TRIES:
            if not self._records.differs:
                head.is_open = False
                self._records.note_head()
                self._records.forget()
            self._submit_update()
            if not self.workers.wait_idle(until):
                return False
            self._turn()
        if self._records.is_urgent:
            self._give_up_file()
        return True

    def _give_up_file(self) -> None:
        """What should be forgotten could not be written down: then all is forgotten."""
        try:
            self._executor.calls.truncate(self._file.fd, 0)
        except OSError as error:
            self._voice.error("forget_failed", f"{self._file.path} may bring removed blocks back: {error}; remove it.")
        self._voice.deliver()
