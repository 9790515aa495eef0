"""Reads and writes of a disk tier, directly from and to the pool.

Many blocks are read at once, and checked against their headers and checksums. Neighbouring blocks are written in one
call, headers and shards, then their records.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from kvoffd.pool.checksums import digest
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.files import OnError, ShortRead, address_of, aligned_buffer, write_all
from kvoffd.system.native import COUNT, INT, ITEMS, NUMBER, VOID_P, declare, native
from kvoffd.system.threads import ENDED_AT_ONCE, AbandonableThreads
from kvoffd.tiers.disk_file import HOUR_S, RECORD, DiskFile
from kvoffd.tiers.header import HEADER_BYTES, Block, BlockGroup, decode_header, encode_header
from kvoffd.tiers.tier import READERS_NICE, Result
from kvoffd_proto.stats import DiskFault

declare(keep_gil=False, reader_work=(INT, VOID_P))
declare(
    reader_open=(VOID_P, NUMBER, NUMBER),
    reader_stop=(None, VOID_P),
    reader_close=(None, VOID_P),
    reader_add=(None, VOID_P, VOID_P),
    reader_ended=(COUNT, VOID_P, *ITEMS),
)

logger = logging.getLogger(__name__)

READERS = 16
"""Threads used if the kernel cannot read several blocks for one thread."""
MAX_READ_BYTES = 64 << 20
"""Limit for the blocks that are read concurrently, unless it is one: a read can be given up only before it begins."""


@dataclass(slots=True, eq=False)
class SlotJob:
    """A read or write of a block in a slot."""

    group: BlockGroup
    key: bytes
    slot: int
    offset: int
    """Offset of the slot's header in the file."""
    nbytes: int
    """Bytes in the file."""
    padded: Sequence[int]
    """Bytes of the shards in the file, by rank."""
    pool_offsets: Sequence[int]
    """Offsets of the shards in the pool, by rank."""
    on_end: Callable[..., None]
    patience_s: float = inf
    """Patience of a read."""
    is_awaited: Callable[[], bool] = lambda: True
    """Whether somebody waits for a read: see ``Tier.read``."""
    block: Block | None = None
    """Block to write."""


class End(NamedTuple):
    """Result of a job, and the disk's fault if there was one."""

    result: Result
    block: Block | None = None
    fault: DiskFault | None = None
    sentence: str = ""


def failed_end(file: DiskFile, job: SlotJob, verb: str, error: OSError) -> End:
    if isinstance(error, ShortRead):
        kind = DiskFault.SHORT_READ
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = DiskFault.NO_SPACE
    else:
        kind = DiskFault(f"{verb}_failed")
    what = f"{job.nbytes} bytes at offset {job.offset}"
    why = error.strerror or str(error)
    return End(Result.FAILED, None, kind, f"The disk tier could not {verb} {what} of {file.path}: {why}.")


class BlockRead(NamedTuple):
    """Block that a thread is to read. A part is the header, or a shard with its padding.

    Attributes:
        number: number among the running reads.
        offset: offset in the file.
        parts: address and bytes of each part.
        summed: bytes of each part to checksum.
    """

    number: int
    offset: int
    parts: Sequence[tuple[int, int]]
    summed: Sequence[int]


class EndedRead(NamedTuple):
    """Result of a ``BlockRead``.

    Attributes:
        found: bytes read, or the negative errno.
        checksums: checksum of each part; meaningless unless all of it was read.
    """

    number: int
    found: int
    checksums: Sequence[int]


class Reads:
    """Running and waiting reads. For the daemon's thread.

    One thread (``kvoffd_reader_work``) requests many blocks from the kernel and computes their checksums, without the
    GIL. If the kernel does not accept that, as without O_DIRECT, ``READERS`` threads read one block each. Tests without
    threads replace the four methods that call C: ``_open``, ``_add``, ``_take_ended`` and ``_stop``.

    Args:
        name: prefix of the threads' names.
        most: concurrent reads; at most 128 (MAX_READS of disk_reads.c).
        on_end: called once for each read.

    Raises NoMoreThreads; then no thread runs.
    """

    def __init__(
        self,
        name: str,
        file: DiskFile,
        pool: memoryview,
        most: int,
        on_end: Callable[[SlotJob, End], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        assert 0 < most <= 128, "disk_reads.c has space for 128"
        self._name, self._file, self._pool = name, file, pool
        self._on_end, self._post, self._clock = on_end, post, clock
        self._waiting: deque[SlotJob] = deque()
        self._reading: dict[int, SlotJob] = {}
        """Running reads by number."""
        self._words: dict[int, array[int]] = {}
        """``struct block_read`` of each, of which C has the address until the read is taken."""
        self._nbytes = 0
        """Bytes of the running reads."""
        self._free = list(range(most))
        """Unused numbers."""
        self._headers = aligned_buffer(most * HEADER_BYTES)
        """Headers by number."""
        self._pool_at, self._headers_at = address_of(pool), address_of(self._headers)
        self._progress_at = 0.0
        """Time when the last read ended, or the first began."""
        self._open()

    def _open(self) -> None:
        self._native, fd = native(), self._file.fd
        self._reader = self._native.reader_open(fd, True) if self._file.direct else None
        threads = 1
        if not self._reader:  # each thread reads one block; the other reads wait here, and can be ended
            threads, self._reader = READERS, self._native.reader_open(fd, False)
            del self._free[READERS:]
        if not self._reader:
            raise MemoryError
        works = ((f"{self._name}-{number}", self._work) for number in range(threads))
        with OnError(partial(self._native.reader_close, self._reader)):
            self._threads = AbandonableThreads(works, partial(self._native.reader_stop, self._reader), READERS_NICE)

    def _work(self) -> None:
        """The code of each thread: a call of C returns after some reads have ended, and 0 once it is stopped."""
        while self._native.reader_work(self._reader):
            self._post(self._deliver)

    def put(self, job: SlotJob) -> None:
        self._waiting.append(job)
        self._begin()

    def _begin(self) -> None:
        """Begin waiting reads, up to one that nobody waits for. ``_deliver`` ends that one later, and begins the
        others: ``put`` must not call an ``on_end``."""
        while self._waiting and self._free:
            if not self._waiting[0].is_awaited():
                self._post(self._deliver)
                return
            if self._reading and self._nbytes + self._waiting[0].nbytes > MAX_READ_BYTES:
                return
            job, number = self._waiting.popleft(), self._free.pop()
            parts = [(self._headers_at + number * HEADER_BYTES, HEADER_BYTES)]
            parts += [(self._pool_at + at, nbytes) for at, nbytes in zip(job.pool_offsets, job.padded, strict=True)]
            if not self._reading:
                self._progress_at = self._clock()
            self._reading[number] = job
            self._nbytes += job.nbytes
            # The header's checksum is not needed.
            self._add(BlockRead(number, job.offset, parts, (0, *job.group.lengths)))

    def _add(self, read: BlockRead) -> None:
        """Have a thread read. Words of ``struct block_read``: number, offset, the result, the number of parts, and then
        for each part its address and bytes, for each the bytes to checksum, and for each the checksum."""
        parts, no_sums = [word for part in read.parts for word in part], [0] * len(read.parts)
        words = array("Q", [read.number, read.offset, 0, len(read.parts), *parts, *read.summed, *no_sums])
        self._words[read.number] = words
        self._native.reader_add(self._reader, words.buffer_info()[0])

    def _take_ended(self) -> Sequence[EndedRead]:
        """Return some reads that have ended."""
        numbers = array("Q", bytes(8 * ENDED_AT_ONCE))
        count = self._native.reader_ended(self._reader, numbers.buffer_info()[0], ENDED_AT_ONCE)
        ended = list[EndedRead]()
        for number in numbers[:count]:
            words = self._words.pop(number)
            ended.append(EndedRead(number, ctypes.c_int64(words[2]).value, words[4 + 3 * words[3] :]))  # see ``_add``
        return ended

    def _deliver(self) -> None:
        """Handle the ends of some reads, and end some waiting ones that nobody waits for; then begin others. Posted
        again if more have ended."""
        ended = self._take_ended() if self._reading else ()
        if len(ended) == ENDED_AT_ONCE:  # there may be more
            self._post(self._deliver)
        if ended:
            self._progress_at = self._clock()
        for read in ended:
            job = self._reading.pop(read.number)
            self._nbytes -= job.nbytes
            end = self._compared(job, read)
            self._free.append(read.number)
            self._finish(job, end)
        for _ in range(ENDED_AT_ONCE):
            if not self._waiting or self._waiting[0].is_awaited():
                self._begin()
                return
            self._finish(self._waiting.popleft(), End(Result.UNWANTED))
        self._post(self._deliver)

    def _compared(self, job: SlotJob, read: EndedRead) -> End:
        """Return how a read ended: DONE if its bytes are the requested block, as it was written."""
        found = read.found
        if found < 0:
            return failed_end(self._file, job, "read", OSError(-found, os.strerror(-found)))
        if found < job.nbytes:
            ends = f"nothing is left to read at offset {job.offset + found}"
            return failed_end(self._file, job, "read", ShortRead(0, ends))
        block = decode_header(self._headers[read.number * HEADER_BYTES : (read.number + 1) * HEADER_BYTES])
        if block is not None and (block.group, block.key) != (job.group, job.key):
            return End(Result.GONE)  # the index belongs to another copy of the file, or is older than a power cut
        if block is not None:
            shards = zip(block.checksums, read.checksums[1:], job.pool_offsets, job.group.lengths, strict=True)
            if all(right == (taken or digest(self._pool[at : at + length])) for right, taken, at, length in shards):
                return End(Result.DONE, block)
        sentence = (
            f"The block {job.key.hex()} at offset {job.offset} of {self._file.path} is not what was written there; it "
            "is dropped and will be recomputed."
        )
        return End(Result.CORRUPT, None, DiskFault.CORRUPT, sentence)

    def _finish(self, job: SlotJob, end: End) -> None:
        try:
            self._on_end(job, end)
        except Exception:
            logger.exception("The end of a read of %s raised: a bug; the others continue.", self._file.path)

    def end_overdue(self) -> None:
        """End waiting reads whose patience is over: no read has ended for longer than that."""
        self.end(Result.DEADLINE, self.longest_s)

    def end(self, result: Result, waited_s: float = inf) -> None:
        """End waiting reads whose patience is at most ``waited_s``; all without it."""
        ended = [job for job in self._waiting if job.patience_s <= waited_s]
        self._waiting = deque(job for job in self._waiting if job.patience_s > waited_s)
        for job in ended:
            self._finish(job, End(result))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def longest_s(self) -> float:
        """Time since a read last ended while others are running. Not since the oldest began, as in ``Workers``: many
        concurrent reads are slow without hanging."""
        return self._clock() - self._progress_at if self._reading else 0.0

    def close(self, until: float) -> bool:
        """See ``Workers.close``."""
        while self._reading:
            self._deliver()
            if self._reading and time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return self._stop(until)

    def _stop(self, until: float) -> bool:
        if self._reader:  # else an earlier call has closed it
            self._native.reader_stop(self._reader)
            if not self._threads.join(until):
                return False
            self._native.reader_close(self._reader)
            self._reader = None
        return True


class BlockWriter:
    """Code of the threads that write. ``merge_bytes``: limit for the neighbouring blocks of one call."""

    def __init__(self, file: DiskFile, pool: memoryview, merge_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._file, self._pool, self._merge_bytes, self._wall_clock = file, pool, merge_bytes, wall_clock

    def next(self, waiting: deque[SlotJob]) -> list[SlotJob]:
        """Take the blocks for one call: neighbours in the file."""
        jobs = [waiting.popleft()]
        end, left = jobs[0].offset + jobs[0].nbytes, self._merge_bytes - jobs[0].nbytes
        while waiting and waiting[0].offset == end and (left := left - waiting[0].nbytes) >= 0:
            jobs.append(waiting.popleft())
            end = jobs[-1].offset + jobs[-1].nbytes
        return jobs

    def write(self, jobs: list[SlotJob]) -> list[End]:
        """Write neighbouring blocks, one by one if that fails, and then their records: a record must not name a block
        that is not there. Called in a thread."""
        file, buffers, headers = self._file, list[memoryview](), aligned_buffer(len(jobs) * HEADER_BYTES)
        for number, job in enumerate(jobs):
            assert job.block is not None
            header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            header[:] = encode_header(job.block)
            shards = zip(job.pool_offsets, job.padded, strict=True)
            buffers += [header, *(self._pool[offset : offset + nbytes] for offset, nbytes in shards)]
        try:
            write_all(file.calls, file.fd, buffers, jobs[0].offset)
        except OSError as error:
            if len(jobs) > 1:
                return [end for job in jobs for end in self.write([job])]
            return [failed_end(file, jobs[0], "write", error)]
        ends = list[End]()
        for job in jobs:
            hour, second = divmod(int(self._wall_clock()), HOUR_S)
            key = job.key.ljust(MAX_KEY_BYTES, b"\0")
            record = np.array([(job.group.tag, job.group.nbytes, hour, len(job.key), key, second, b"")], RECORD)
            end = End(Result.DONE)
            try:
                file.write_records(job.slot, record)
            except OSError as error:  # the block is served all the same, but a later daemon does not find it
                why = f"The disk tier could not add a block to the index of {file.path}: {error.strerror or error}."
                end = End(Result.DONE, None, DiskFault.RECORD_FAILED, why)
            ends.append(end)
        return ends
