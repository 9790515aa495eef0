"""What a disk below the pool is written and what it brings: `python -m tests.bench.disk_writes TRACE --pool N --disk N`

A trace goes through the daemon's cache, tiering and disk tier, over slots without memory and a file without bytes:
first as if every block were worth a write, then as the policy judges. Sizes are in blocks of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvoffd.simulate.replay import BLOCK_BYTES, Silence, open_cache, open_namespace, store_lacking
from kvoffd.simulate.trace import Trace, read_trace
from kvoffd.tiering import TieringSettings, WriteMode, demotion
from kvoffd.tiering.manager import TieringManager
from kvoffd.tiers.tier import CompositeTier
from kvoffd_proto.messages import PENDING, READY
from tests.kit.held_disk import HeldDisk, PoolBytes
from tests.kit.memory_disk import MemoryDisk

LEASE = SESSION = 1
REQUEST_S = 0.3
"""From one request to the next, as in Mooncake's hour of chat; the daemon looks at the cold end as often."""


class Written(NamedTuple):
    """In % of the blocks that were asked for."""

    hits: float
    pool_hits: float
    written: float
    spared: float


class CountedFile(MemoryDisk):
    """A file without bytes."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return sum(map(len, buffers))

    write = read

    def _resize(self, size: int) -> None:
        self.data = range(size)  # type: ignore[assignment]  # it has a length


def replay(trace: Trace, policy: str, pool: int, disk_blocks: int, mode: WriteMode = WriteMode.REUSE) -> Written:
    now = 0.0
    tier, cache = CompositeTier(), open_cache(policy, pool, lambda: now)
    tiering = TieringManager(cache, tier, Silence(), lambda: now, TieringSettings(mode, deadline_s=1e9))
    cache.tiers = tiering
    memory = PoolBytes(cache.slots.pool_bytes)
    disk = HeldDisk(CountedFile(), memory, lambda: now, tiering, disk_blocks, BLOCK_BYTES, digest=lambda _: 1)
    tier.attach(disk.tier)
    namespace = open_namespace(cache, trace)
    hits = 0
    for keys in trace.requests:
        now += REQUEST_S
        (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)])
        cache.note_requests()
        if PENDING in states:
            tiering.pump()
            while disk.end_all():
                tiering.pump()
            (states,), _ = cache.lookup(namespace, SESSION, LEASE, [(0, keys)], again=True)
        hits += len(states) - len(states.lstrip(bytes([READY])))
        store_lacking(cache, namespace, keys, states)
        cache.release(SESSION, [LEASE])
        tiering.tick()
        while disk.end_all():
            pass
    found = hits, namespace.counters.prefix_keys_ready, tiering.demoter.written_blocks, tiering.demoter.spared_blocks
    return Written(*(100 * count / trace.accesses for count in found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.disk_writes", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="file of a trace")
    for name in ("--pool", "--disk"):
        parser.add_argument(name, type=int, required=True, metavar="N", help="size in blocks")
    given = parser.parse_args(arguments)
    trace, judged = read_trace(given.trace), demotion.LEAST_CHANCE
    print("| trace | pool | disk | policy | found % | in the pool % | written % | spared % |")
    print("|---" * 8 + "|")
    for name, least in (("lru", judged), ("learned", 0.0), ("learned", judged)):
        demotion.LEAST_CHANCE = least
        figures = " | ".join(f"{one:.1f}" for one in replay(trace, name, given.pool, given.disk))
        judges = ", all is written" if not least else ""
        print(f"| {trace.name} | {given.pool:,} | {given.disk:,} | {name}{judges} | {figures} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
