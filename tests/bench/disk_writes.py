"""What a disk below the pool is written and what it brings: `python -m tests.bench.disk_writes TRACE --pool N --disk N`

A trace goes through the daemon's cache, tiering and disk tier, over slots without memory and a file without bytes:
first as if every block were worth a write, then as the policy judges. Sizes are in blocks of the trace.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from kvoffd.simulate.replay import BLOCK_BYTES, Silence, open_cache, open_namespace, store_lacking
from kvoffd.simulate.trace import Trace, read_trace
from kvoffd.tiering import TieringSettings, WriteMode, writer
from kvoffd.tiering.tiering import Tiering
from kvoffd.tiers import disk
from kvoffd.tiers.block_format import HEADER_BYTES
from kvoffd_proto.messages import PENDING, READY
from tests.kit.fake_tier import PoolBytes
from tests.kit.memory_disk import MemoryDisk, WorkersWithoutThreads

LEASE = SESSION = 1
REGIONS = 16
REQUEST_S = 0.3
"""From one request to the next, as in Mooncake's hour of chat; the daemon looks at the cold end as often."""


class Written(NamedTuple):
    """In % of the blocks that were asked for."""

    hits: float
    pool_hits: float
    written: float
    spared: float


class Headers(MemoryDisk):
    """Files that keep nothing but the headers of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[tuple[int, int], bytes] = {}
        self.sizes: dict[int, int] = {}

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        buffers[0][:] = self.kept.get((fd, offset), bytes(len(buffers[0])))
        return sum(map(len, buffers))

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) == HEADER_BYTES:
            self.kept[fd, offset] = bytes(buffers[0])
        return sum(map(len, buffers))

    def stat(self, fd: int) -> os.stat_result:
        status = SimpleNamespace(
            st_mode=stat.S_IFREG | 0o600, st_nlink=1, st_uid=os.geteuid(), st_size=self.sizes.get(fd, 0), st_blocks=0
        )
        return cast(os.stat_result, status)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.sizes[fd] = max(self.sizes.get(fd, 0), offset + length)

    def truncate(self, fd: int, size: int) -> None:
        self.sizes[fd] = size


def replay(trace: Trace, policy: str, pool: int, disk_blocks: int, mode: WriteMode = WriteMode.REUSE) -> Written:
    compared = disk.digest
    disk.digest = lambda view: 1  # as the blocks' checksums say, of bytes that nobody keeps
    try:
        return _replay(trace, policy, pool, disk_blocks, mode)
    finally:
        disk.digest = compared


def _replay(trace: Trace, policy: str, pool: int, disk_blocks: int, mode: WriteMode) -> Written:
    now = 0.0
    cache = open_cache(policy, pool, lambda: now)
    tiering = Tiering(cache, Silence(), lambda: now, TieringSettings(mode, deadline_s=1e9))
    cache.tiers = tiering
    posted: deque[Callable[[], None]] = deque()
    region_bytes = -(-disk_blocks // REGIONS) * (HEADER_BYTES + BLOCK_BYTES)
    tier = disk.open_disk(
        Path("/"),
        REGIONS * region_bytes * 1025 // 1000 + (1 << 16),
        pool=PoolBytes(cache.slots.pool_bytes).view,
        clock=lambda: now,
        post=posted.append,
        listener=tiering.reports,
        generation=lambda fingerprint: 0,
        options=disk.DiskOptions(readers=1, writers=1, merge_bytes=1, region_bytes=region_bytes),
        calls=Headers(),
        wall_clock=lambda: now,
        make_workers=WorkersWithoutThreads,
    )
    tiering.disks.tiers.append(tier)

    def work() -> None:
        """Do all that the disk has to do."""
        workers: list[Any] = [tier._reads, tier._writes, tier._notes]
        while posted or any(one.waiting for one in workers):
            for one in workers:
                one.work()
            while posted:
                posted.popleft()()

    namespace = open_namespace(cache, trace)
    hits = 0
    for keys in trace.requests:
        now += REQUEST_S
        (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)])
        cache.note_requests()
        if PENDING in states:
            while tiering.disks.promoter.busy:
                tiering.pump()
                work()
            (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], again=True)
        hits += len(states) - len(states.lstrip(bytes([READY])))
        store_lacking(cache, namespace, keys, states)
        cache.release(SESSION, [LEASE])
        tiering.tick()
        work()
    written = tiering.disks.writer
    found = hits, namespace.counters.prefix_keys_ready, written.written_blocks, written.spared_blocks
    return Written(*(100 * count / trace.accesses for count in found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.disk_writes", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of a trace")
    for name in ("--pool", "--disk"):
        parser.add_argument(name, type=int, required=True, metavar="N", help="size in blocks")
    given = parser.parse_args(arguments)
    trace, judged = read_trace(given.trace), writer.LEAST_CHANCE
    print("| trace | pool | disk | policy | found % | in the pool % | written % | spared % |")
    print("|---" * 8 + "|")
    for name, least in (("lru", judged), ("learned", 0.0), ("learned", judged)):
        writer.LEAST_CHANCE = least
        figures = " | ".join(f"{one:.1f}" for one in replay(trace, name, given.pool, given.disk))
        judges = ", all is written" if not least else ""
        print(f"| {trace.name} | {given.pool:,} | {given.disk:,} | {name}{judges} | {figures} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
