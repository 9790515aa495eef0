"""What taking a pool over costs: python tests/tools/restart_cost.py [GiB ...]

Records only, no bytes: the pools are memfds that nobody touches, so that one larger than the machine can be measured.
The last line is the cost of mapping a pool that is in memory, which the daemon does behind its back once it serves.
"""

from __future__ import annotations

import gc
import os
import sys
import time

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.policies import make_policy
from kvoffd.pool.backing import MemfdBacking
from kvoffd.pool.pool import Pool
from kvoffd.server.daemon import GC_THRESHOLDS
from kvoffd.server.publisher import EventPublisher
from kvoffd.system.limits import MemoryLimit
from kvoffd_proto.units import format_size
from tests.support.filled_table import left_behind

NO_LIMIT = MemoryLimit(2**62, "nothing")
MAPPED_BYTES = 2 << 30


def measure(gib: float, block_bytes: int) -> str:
    pool_bytes = int(gib * 2**30)
    backing = MemfdBacking(left_behind(pool_bytes, pool_bytes // block_bytes, shard_bytes=block_bytes))
    started = time.perf_counter()
    pool = Pool(pool_bytes, backing=backing, limit=NO_LIMIT)
    backing.close()
    scanned = time.perf_counter()
    publisher = EventPublisher(10_000)
    cache = BlockCache(pool, make_policy("lru", pool.pool_bytes), publisher, time.monotonic)
    recovered = pool.take_recovered()
    adoption = cache.adopt(recovered.namespaces, recovered.left)
    publisher.flush()
    first_s = time.perf_counter() - started
    while cache.adopt_some():
        publisher.flush()
    seconds, scan_s = time.perf_counter() - started, scanned - started
    pool.close()
    return (
        f"{gib:6g} GiB in blocks of {format_size(block_bytes):>8}: {adoption.blocks:7} blocks in {seconds:6.3f} s "
        f"(table {scan_s:.3f} s, first ones {first_s:.3f} s), {seconds / adoption.blocks * 1e6:.2f} ms per 1,000 "
        f"blocks, {seconds / gib * 1e3:.2f} ms per GiB"
    )


def mapping() -> str:
    pool = Pool(MAPPED_BYTES)
    pool.touch(0, lambda _: None)
    kept = os.dup(pool.memory_fds[0]), os.dup(pool.memory_fds[1])
    pool.close()
    backing = MemfdBacking(kept)
    pool = Pool(MAPPED_BYTES, backing=backing)
    backing.close()
    assert pool.resident
    started = time.perf_counter()
    pool.map_pages(lambda: False)
    seconds = time.perf_counter() - started
    pool.close()
    per_gib = seconds / (MAPPED_BYTES / 2**30)
    return f"pages of a resident pool: {per_gib * 1e3:.1f} ms per GiB, behind the serving daemon"


if __name__ == "__main__":
    gc.set_threshold(*GC_THRESHOLDS)  # as in the daemon
    for size in [float(text) for text in sys.argv[1:]] or [4.0, 16.0, 64.0, 128.0]:
        for block in (256 << 10, 1 << 20):
            print(measure(size, block))
    print(mapping())
