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
from kvoffd.tiers.disk_file import usable_bytes
from kvoffd.tiers.disk_io import End, Reads, SlotJob
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.tier import Result, TierListener

REGIONS, MAX_REGION_BLOCKS = 64, 256
"""Regions of a small pool or disk, and blocks of a large one's regions: about as in a daemon."""
OPTIONS = DiskOptions()


def region_blocks(blocks: int) -> int:
    """Return the blocks of a region of a pool or disk. No region has a rest in which no block fits, as real ones do."""
    return max(1, min(MAX_REGION_BLOCKS, blocks // REGIONS))


def whole_block(group: BlockGroup, key: bytes) -> Block:
    """Return what a read of a whole block finds, with any checksums: there are no bytes to compare them with."""
    ranks = len(group.lengths)
    return Block(group, key, first_blocks=(0,) * ranks, checksums=(1,) * ranks)


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
    """Workers without threads: ``put`` does at once what threads do in ``Workers._run``."""

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
        self._post(lambda: self._finish(job, End(Result.DONE, whole_block(job.group, job.key))))

    def _stop(self, until: float) -> bool:
        return True


def _size_for(regions_bytes: int) -> int:
    """Return the size of a disk that has these bytes for its regions."""
    size_bytes = regions_bytes
    while (missing := regions_bytes - usable_bytes(size_bytes)) > 0:
        size_bytes += missing
    return size_bytes


def open_disk(
    blocks: int,
    block_bytes: int,
    clock: Callable[[], float],
    post: Callable[[Callable[[], None]], None],
    listener: TierListener,
) -> DiskTier:
    """Open a disk with space for this many blocks in whole regions, as fast as needed. See ``DiskTier`` for the last
    three."""
    per_region = region_blocks(blocks)
    regions, region_bytes = blocks // per_region, per_region * (PAGE_BYTES + block_bytes)
    return DiskTier(
        Path(gettempdir()),  # nothing is in it: _NoFiles
        _size_for(regions * region_bytes) + region_bytes // 2,  # for the files' heads; no other region fits in
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
