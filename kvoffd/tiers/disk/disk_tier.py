"""The disk tier: reads and writes blocks in one directory of a local drive. See ``opening`` for how one begins."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from kvoffd.tiers.disk.file import DiskFile
from kvoffd.tiers.disk.file_format import MAX_FINGERPRINT_BYTES, MAX_KEY_BYTES, MAX_WORLD_SIZE, SlotShape
from kvoffd.tiers.disk.index import DiskIndex
from kvoffd.tiers.disk.queue import DiskJob, DiskQueue, Kind
from kvoffd.tiers.disk.record_updates import RecordWriter
from kvoffd.tiers.disk.regions import Entry
from kvoffd.tiers.disk.workers import Executor, JobEnd, Workers, buffers_of
from kvoffd.tiers.tier import DeviceTier, Digest, OnDone, Tier, TierBlock, TierKey, TierListener, TierResult, TierStats
from kvoffd_proto.stats import DiskFault

logger = logging.getLogger(__name__)

_LEAST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_PUT_ASIDE_SHARE = 100  # slots of failed writes that are not used again: at most this fraction of the tier
WRITES_IN_FLIGHT = 2
"""Writes that may run at a time: they slow reads down."""
WRITE_PATIENCE_S = 0.5
"""How long a write waits while reads keep coming."""
ENDED_AT_ONCE = 32
"""Jobs whose ends are handled before the daemon's thread does other work."""
FULL_PART = 15 / 16
"""Of what it held when it last evicted, from which on it has no room: regions of several sizes are never all full."""
HANG_TIMEOUT_S = 10.0
"""A call that takes longer hangs."""


NamespaceGeneration = Callable[[bytes], int]
"""The generation of a namespace, by its fingerprint: it is raised when all blocks of the namespace become stale."""


def no_generation(fingerprint: bytes) -> int:
    return 0


class DiskOptions(NamedTuple):
    """What tests and benches have otherwise."""

    reads_in_flight: int = 16
    """Calls that may run at a time, reads and writes; also the number of threads."""
    merge_bytes: int = 2 << 20
    """Neighbours are read or written in one call of up to so many bytes."""
    region_bytes: int | None = None
    """Region size of a new file; chosen by the file's size when None."""
    most_reads: int = 65536
    """Those that may wait or run; more are not taken."""
    most_writes: int = 64


class DeferredEvents:
    """Keeps a tier's events for its listener until ``deliver``, so that none is sent from within a call of the tier.

    Args:
        wake: has ``deliver`` called soon.
    """

    def __init__(self, tier: Tier, listener: TierListener, wake: Callable[[], None]) -> None:
        self.errors: Counter[DiskFault] = Counter()
        self._tier = tier
        self._listener = listener
        self._wake = wake
        self._events: deque[Callable[[], None]] = deque()

    def stored(self, block: TierBlock) -> None:
        self._add(partial(self._listener.tier_stored, self._tier, block))

    def removed(self, ids: Sequence[TierKey]) -> None:
        self._add(partial(self._listener.tier_removed, self._tier, ids))

    def error(self, kind: DiskFault, sentence: str) -> None:
        self.errors[kind] += 1
        self._add(partial(self._listener.tier_error, self._tier, kind, sentence))

    def deliver(self) -> None:
        while self._events:
            _call_back(self._events.popleft())

    def _add(self, event: Callable[[], None]) -> None:
        self._events.append(event)
        self._wake()


def _call_back(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("A callback of a disk tier raised; the tier goes on, but its owner has a bug.")


class DiskTier(DeviceTier):
    """Keeps blocks in one preallocated file of a directory: see ``file_format``. Made by ``open_disk_tier``."""

    def __init__(
        self,
        file: DiskFile,
        index: DiskIndex,
        *,
        pool: memoryview,
        digest: Digest,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
        listener: TierListener,
        options: DiskOptions,
        wall_clock: Callable[[], float],
        make_workers: Callable[..., Workers],
        stored_generation: NamespaceGeneration,
        open_seconds: float,
    ) -> None:
        directory = file.path.parent
        self.name = f"disk:{directory}"
        self._file = file
        self._index = index
        self._pool = pool
        self._clock = clock
        self._post = post
        self._wall_clock = wall_clock
        self._options = options
        self.open_seconds = open_seconds
        self._stored_generation = stored_generation
        self.found_generations = index.found_generations
        """By fingerprint, the generations of the namespaces of which blocks were found."""
        self.found_blocks = index.blocks
        self.direct = file.direct
        self._events = DeferredEvents(self, listener, self._wake)
        self._record_writer = RecordWriter(file, index, clock, self._submit, self._events.error)
        self._updates = self._record_writer.updates
        if file.rebooted:
            self._updates.note_head()
        self._counts: Counter[str] = Counter()  # by their names in TierStats
        self._under_way: Counter[Kind] = Counter()
        self._waiting_writes: list[DiskJob] = []
        """Writes to slots of which the file still has the record of another block."""
        self._put_aside_bytes = self._used_when_full = 0
        self._pause_s = 0.0
        self._write_after = float("-inf")
        # Held while ended jobs are processed: by the daemon's thread, or by the one that closes the tier.
        self._processing = threading.RLock()
        self._closed = False
        self.hangs = False
        """Whether a call does not return: until it does, nothing is taken."""
        self._executor = Executor(file, digest)
        queue = DiskQueue(options.reads_in_flight, WRITES_IN_FLIGHT, options.merge_bytes, WRITE_PATIENCE_S)
        name = f"kvoffd-disk-{directory.name}"
        self.workers = make_workers(queue, self._executor, clock, self._wake, options.reads_in_flight, name)
        """The workers that read and write. Only a simulation uses them from outside, to make them work."""
        for sentence in file.notes.sentences:
            logger.info("%s", sentence)
        for kind, sentence in file.notes.errors:
            self._events.error(kind, sentence)

    def groups(self) -> Collection[tuple[bytes, int]]:
        return self._index.groups()

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return self._index.index(fingerprint, group)

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return {} if self.hangs else self._index.index(fingerprint, group)

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        if self._index.get(block.id) is not None or self._index.is_writing(block.id):
            return False
        buffers = buffers_of(self._pool, block, offsets)
        if not self._takes_write() or not self._fits(block):
            self._counts["refused_writes"] += 1
            return False
        entry, evicted = self._index.take(block, self._wall_clock(), self._stored_generation(block.id.fingerprint))
        if evicted:
            self._counts["evicted_blocks"] += len(evicted)
            self._used_when_full = self._index.regions.used_bytes
            self._events.removed(evicted)
        if entry is None:
            self._counts["refused_writes"] += 1
            return False
        job = DiskJob(Kind.WRITE, entry.offset, buffers, self._clock(), entry=entry, on_done=on_done)
        if entry.region.is_clear(entry.slot):
            self._submit(job)
        else:
            self._under_way[Kind.WRITE] += 1
            self._waiting_writes.append(job)
            self._wake()
        return True

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        entry = self._index.get(block_id)
        if entry is None or self._closed or self.hangs or self._under_way[Kind.READ] >= self._options.most_reads:
            return False
        buffers = buffers_of(self._pool, entry.block, offsets)
        entry.readers += 1
        self._submit(DiskJob(Kind.READ, entry.offset, buffers, self._clock(), deadline, entry, on_done))
        return True

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        self._index.touch(block_ids)

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        block_ids = list(block_ids)
        self._index.forget_writing(block_ids)
        entries = [entry for block_id in dict.fromkeys(block_ids) if (entry := self._index.get(block_id)) is not None]
        for entry in entries:
            self._index.drop(entry)
        # The device may still have a record of a block that was evicted a while ago.
        if entries or self._updates.may_differ:
            self._updates.note_removed()
        if entries:
            self._events.removed([entry.block.id for entry in entries])
        self._write_records()
        return len(entries)

    def remove_namespace(self, fingerprint: bytes) -> int:
        removed = self._index.remove_namespace(fingerprint)
        self._updates.forget_namespace(fingerprint)
        if removed:
            self._wake()
        self._write_records()
        return removed

    @property
    def full_bytes(self) -> int:
        used = self._index.regions.used_bytes
        return used if self._used_when_full and used >= FULL_PART * self._used_when_full else 0

    def removals_kept(self) -> Callable[[], bool]:
        removals = self._updates.removals
        return lambda: self._updates.kept_removals >= removals

    def tick(self) -> None:
        self.workers.end_late()
        self._check_hanging()
        if not self._index.removed_entries:
            self._updates.drop_floors()
        self._write_records(at_once=True)

    def stats(self) -> TierStats:
        load = self.workers.load()._asdict()
        del load["longest_s"]
        load["queued_writes"] += len(self._waiting_writes)
        return TierStats(
            size_bytes=self._file.size_bytes,
            used_bytes=self._index.regions.used_bytes,
            physical_bytes=self._executor.physical_bytes,
            blocks=self._index.blocks,
            **self._counts,
            **load,
            errors={kind.value: count for kind, count in self._events.errors.items()},
        )

    @property
    def lifetime_written_bytes(self) -> int:
        """Bytes written since the file was made, records included. A kill loses those of the last tick or two."""
        return self._file.head.written_bytes

    @property
    def oldest_seconds(self) -> float:
        """Time since the oldest block was written, to the hour; 0 without blocks."""
        return self._index.oldest_age_s(self._wall_clock())

    def close(self, deadline_s: float) -> bool:
        """See Tier. Where a call hangs, the file stays open and locked, and ``close`` may be called again later.

        For any thread, if no other method is called meanwhile.
        """
        with self._processing:
            closed = self._file.fd < 0 or self._close(time.monotonic() + deadline_s)
        if not closed:
            self._wake()  # calls that were posted meanwhile did nothing
        return closed

    def _close(self, until: float) -> bool:
        self._closed = True
        self._end_waiting_writes(TierResult.CANCELLED)
        self.workers.end_waiting(TierResult.CANCELLED)
        idle = self.workers.wait_idle(until)
        self._process_ended()
        if not idle or not self._record_writer.write_last(until, self.workers, self._process_ended):
            return False
        self.workers.stop(until)
        self._process_ended()
        self._file.close()
        self._pool = memoryview(b"")
        return True

    def _takes_write(self) -> bool:
        return not (
            self._closed
            or self.hangs
            or self._under_way[Kind.WRITE] >= self._options.most_writes
            or self._clock() < self._write_after
        )

    def _fits(self, block: TierBlock) -> bool:
        fits = (
            len(block.id.fingerprint) <= MAX_FINGERPRINT_BYTES
            and len(block.id.key) <= MAX_KEY_BYTES
            and 0 < len(block.shards) <= MAX_WORLD_SIZE
            and SlotShape.of(block).slots(self._index.regions.region_bytes) > 0
        )
        if not fits and not self._events.errors[DiskFault.TOO_LARGE]:  # reported once: there will be many such blocks
            self._events.error(
                DiskFault.TOO_LARGE,
                f"Blocks of {block.nbytes} bytes do not fit the regions of {self.name}, which have "
                f"{self._index.regions.region_bytes} bytes; remove its file and make the tier larger.",
            )
        return fits

    def _submit(self, job: DiskJob) -> None:
        self._under_way[job.kind] += 1
        self.workers.submit(job)

    def _wake(self) -> None:
        self._post(self._process_posted)

    def _process_posted(self) -> None:
        if self._processing.acquire(blocking=False):  # else another thread closes the tier, and processes what ends
            try:
                self._process_ended(ENDED_AT_ONCE)
                if self.workers.has_ended:
                    self._wake()
            finally:
                self._processing.release()

    def _process_ended(self, most: int = sys.maxsize) -> None:
        """Handles jobs that have ended, and sends the events that came of them."""
        self._events.deliver()
        for ended in self.workers.collect(most):
            self._end(ended)
        if self._index.removed_entries:
            self._events.removed(self._index.free_removed())
            self._updates.sync()
            self._wake()
        self._write_records()
        if self.hangs:
            self._end_waiting_writes(TierResult.DEADLINE)
        elif self._waiting_writes and not self._updates.is_running:
            self._write_after = self._clock() + _LEAST_PAUSE_S
            self._end_waiting_writes(TierResult.FAILED)
        self._events.deliver()

    def _begin_waiting_writes(self) -> None:
        """Submits those whose slots the file has no records of any more."""
        waiting, self._waiting_writes = self._waiting_writes, []
        for job in waiting:
            assert job.entry is not None
            if job.entry.region.is_clear(job.entry.slot):
                self.workers.submit(job)
            else:
                self._waiting_writes.append(job)

    def _end_waiting_writes(self, result: TierResult) -> None:
        waiting, self._waiting_writes = self._waiting_writes, []
        for job in waiting:
            assert job.entry is not None and job.on_done is not None  # noqa: PT018
            self._under_way[Kind.WRITE] -= 1
            self._index.not_written(job.entry, put_aside=False)
            _call_back(partial(job.on_done, result))

    def _end(self, ended: JobEnd) -> None:
        job, result = ended.job, ended.result
        self._under_way[job.kind] -= 1
        if ended.error_kind is not None:
            self._events.error(ended.error_kind, ended.sentence)
        if job.kind is Kind.UPDATE:
            self._record_writer.ended(result is TierResult.DONE, result is TierResult.FAILED)
            self._begin_waiting_writes()
            return
        assert job.entry is not None and job.on_done is not None  # noqa: PT018
        end = self._end_read if job.kind is Kind.READ else self._end_write
        result = end(job, job.entry, result)
        self._events.deliver()
        _call_back(partial(job.on_done, result))

    def _end_read(self, job: DiskJob, entry: Entry, result: TierResult) -> TierResult:
        is_there = self._index.read_done(entry)
        if result is TierResult.DONE:
            if not is_there:
                return TierResult.GONE
            entry.suspect = False
            self._counts["read_blocks"] += 1
            self._counts["read_bytes"] += entry.block.nbytes
        elif result in (TierResult.CORRUPT, TierResult.FAILED) and is_there:
            self._index.drop(entry)
            self._events.removed([entry.block.id])
        return result

    def _end_write(self, job: DiskJob, entry: Entry, result: TierResult) -> TierResult:
        if result is not TierResult.DONE:
            put_aside = result is TierResult.FAILED and self._may_put_aside(job.nbytes)
            self._index.not_written(entry, put_aside)
            if result is TierResult.FAILED:
                self._pause_s = min(_MOST_PAUSE_S, max(_LEAST_PAUSE_S, 2 * self._pause_s))
                self._write_after = self._clock() + self._pause_s
            return result
        self._pause_s = 0.0
        head = self._file.head
        head.written_bytes += job.nbytes
        head.written_blocks += 1
        self._counts["written_blocks"] += 1
        self._counts["written_bytes"] += entry.block.nbytes
        if not self._index.written(entry):
            return TierResult.GONE
        if self._index.forget_removed(entry.block.id):
            self._events.removed([entry.block.id])
        self._events.stored(entry.block)
        return result

    def _may_put_aside(self, nbytes: int) -> bool:
        """Whether the slot of a failed write may be kept from being used again: up to a hundredth of the tier may."""
        if (self._put_aside_bytes + nbytes) * _PUT_ASIDE_SHARE > self._file.size_bytes:
            return False
        self._put_aside_bytes += nbytes
        return True

    def _write_records(self, at_once: bool = False) -> None:
        if not self._closed and not self.hangs:
            self._record_writer.write(at_once or bool(self._waiting_writes))

    def _check_hanging(self) -> None:
        longest_s = self.workers.load().longest_s
        hangs = longest_s > HANG_TIMEOUT_S
        if hangs and not self.hangs:
            self._events.error(
                DiskFault.HUNG,
                f"A call of {self.name} has not returned for {longest_s:.0f} s; the tier takes no jobs until it does. "
                "See the kernel's log (dmesg).",
            )
        if self.hangs and not hangs:
            logger.info("%s answers again.", self.name)
        self.hangs = hangs
        if hangs:
            self.workers.end_waiting(TierResult.DEADLINE)
            self._wake()
