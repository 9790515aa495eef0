"""A disk without bytes below the pool of a replay: the daemon's tiering and disk tier decide, nothing is copied."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, cast

from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.files import FileCalls
from kvoffd.system.threads import DaemonThreads, Workers
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.disk_io import End, Reads, SlotJob
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import Result

REGIONS, MAX_REGION_BLOCKS = 64, 256
"""Division of pool and disk into regions as real ones, except that no region has a rest smaller than a block."""
OVERHEAD = 1 + 1 / 64
"""Upper limit of a disk's files relative to its blocks."""
OPTIONS = DiskOptions()


class _NoFiles(FileCalls):
    """Files in memory of a given size that hold only what identifies them."""

    def open(self, path: str, directory_fd: int, create: bool) -> int:
        return os.memfd_create(path)

    def lock(self, fd: int) -> bool:
        return True

    def set_direct(self, fd: int, direct: bool) -> None:
        """Nothing is cached."""

    def stat(self, fd: int) -> os.stat_result:
        size = os.fstat(fd).st_size
        status = {"mode": stat.S_IFREG | 0o600, "nlink": 1, "uid": os.geteuid(), "size": size, "blocks": size // 512}
        return cast(os.stat_result, SimpleNamespace(**{f"st_{name}": value for name, value in status.items()}))

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + length))


class _DoneAtOnce(Workers[Any, Any]):
    """Workers without threads: a task is done when it is put."""

    def _start(self) -> None:
        self._threads = DaemonThreads((), lambda: None)
        self._works = [lambda tasks: [End(Result.DONE)] * len(tasks)]

    def put(self, task: Any) -> None:
        super().put(task)
        while tasks := self._begin(0):
            self._do(0, tasks)


class _ReadAtOnce(Reads):
    """Reads that always find the requested block, and intact."""

    def _open(self) -> None:
        """There is nothing to read."""

    def put(self, job: SlotJob) -> None:
        ones = (1,) * len(job.group.lengths)
        block = Block(job.group, job.key, tuple(0 for _ in ones), ones)
        self._post(lambda: self._finish(job, End(Result.DONE, block)))

    def _stop(self, until: float) -> bool:
        return True


class SimulatedDisk:
    """A disk with a number of blocks below a cache, as fast as needed.

    Args:
        block_bytes: bytes of the cache's blocks.
        per_day_blocks: limit of writes once the disk was filled; 0 for none.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        block_bytes: int,
        blocks: int,
        mode: WriteMode,
        per_day_blocks: int,
    ) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self._tiering = Tiering(cache, events, clock, TieringSettings(mode, per_day_blocks * block_bytes))
        region_blocks = max(1, min(MAX_REGION_BLOCKS, blocks // REGIONS))
        regions, region_bytes = blocks // region_blocks, region_blocks * (PAGE_BYTES + block_bytes)
        self.tier = DiskTier(
            Path(gettempdir()),
            int(regions * region_bytes * OVERHEAD) + region_bytes // 2,
            pool=memoryview(bytearray(1)),
            clock=clock,
            post=self._posted.append,
            listener=self._tiering,
            generation=lambda fingerprint: 0,
            options=OPTIONS._replace(region_bytes=region_bytes),
            calls=_NoFiles(),
            wall_clock=clock,
            make_reads=_ReadAtOnce,
            make_workers=_DoneAtOnce,
        )
        self._tiering.disk_writer.budget.first_filling_bytes = blocks * block_bytes
        self._source = self._tiering.add_disk(self.tier)
        cache.life.tiers = self._tiering

    def settle(self) -> None:
        """Run all pending reads and writes."""
        self._tiering.pump()
        while self._posted:
            self._posted.popleft()()
            self._tiering.pump()

    def tick(self) -> None:
        self._tiering.tick()
        self.settle()

    @property
    def promoted(self) -> int:
        return self._source.promoted_blocks

    @property
    def written(self) -> int:
        return self._tiering.disk_writer.written_blocks

    def close(self) -> None:
        self.tier.close(0.0)
