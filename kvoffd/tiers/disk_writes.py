"""Writes of a disk tier, in its threads: neighbouring blocks in one call, headers and shards, then their records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvoffd.pool.allocator import page_up
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.system.files import aligned_buffer, write_all
from kvoffd.tiers.disk_file import RECORD, DiskFile
from kvoffd.tiers.disk_reads import End, SlotJob, failed_end
from kvoffd.tiers.header import HEADER_BYTES, encode_header
from kvoffd.tiers.tier import Result
from kvoffd_proto.stats import DiskFault

HOUR_S = 3600


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
        """Write neighbouring blocks, one by one if that fails, and then their records. Called in a thread."""
        file, buffers, headers = self._file, list[memoryview](), aligned_buffer(len(jobs) * HEADER_BYTES)
        for number, job in enumerate(jobs):
            assert job.block is not None
            header = headers[number * HEADER_BYTES : (number + 1) * HEADER_BYTES]
            header[:] = encode_header(job.block)
            shards = zip(job.shards, job.group.lengths, strict=True)
            buffers += [header, *(self._pool[offset : offset + page_up(length)] for offset, length in shards)]
        try:
            write_all(file.calls, file.fd, buffers, jobs[0].offset)
        except OSError as error:
            if len(jobs) > 1:
                return [end for job in jobs for end in self.write([job])]
            return [failed_end(file, jobs[0], "write", error)]
        ends = list[End]()
        for job in jobs:
            hour, key = int(self._wall_clock()) // HOUR_S, job.key.ljust(MAX_KEY_BYTES, b"\0")
            record = np.array([(job.group.tag, job.group.nbytes, hour, len(job.key), key, b"")], RECORD)
            end = End(Result.DONE)
            try:
                file.write_records(job.slot, record)
            except OSError as error:
                why = f"The disk tier could not add a block to the index of {file.path}: {error.strerror or error}."
                end = End(Result.DONE, None, DiskFault.RECORD_FAILED, why)
            ends.append(end)
        return ends
