"""A disk without bytes below the pool of a replay: the daemon's disk tier decides, nothing is copied."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, cast

from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.files import FileCalls
from kvoffd.system.threads import AbandonableThreads, Workers
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.disk_io import End, Reads, SlotJob
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import Result, TierListener

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
        self._threads = AbandonableThreads((), lambda: None)
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


def open_disk(
    blocks: int,
    block_bytes: int,
    clock: Callable[[], float],
    post: Callable[[Callable[[], None]], None],
    listener: TierListener,
) -> DiskTier:
    """Open a disk with space for this many blocks, as fast as needed. See ``DiskTier`` for the last three."""
    region_blocks = max(1, min(MAX_REGION_BLOCKS, blocks // REGIONS))
    regions, region_bytes = blocks // region_blocks, region_blocks * (PAGE_BYTES + block_bytes)
    return DiskTier(
        Path(gettempdir()),
        int(regions * region_bytes * OVERHEAD) + region_bytes // 2,
        pool=memoryview(bytearray(1)),
        clock=clock,
        post=post,
        listener=listener,
        generation=lambda fingerprint: 0,
        options=OPTIONS._replace(region_bytes=region_bytes),
        calls=_NoFiles(),
        wall_clock=clock,
        make_reads=_ReadAtOnce,
        make_workers=_DoneAtOnce,
    )
