"""What a disk below the pool is written and what it brings: `python -m tests.bench.disk_writes TRACE --pool N --disk N`

A trace goes through the daemon's cache, tiering and disk tier, over slots without memory and a file without bytes:
first as if every block were worth a write, then as the policy judges. Sizes are in blocks of the trace.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import NamedTuple, cast

from kvoffd.cache.policies import make_policy
from kvoffd.pool.pool import Pool
from kvoffd.simulate.replay import BLOCK_BYTES, CountedSlots, Silence
from kvoffd.simulate.trace import KEY_BYTES, Trace, read_trace
from kvoffd.tiering import TieringSettings, WriteMode, demotion
from kvoffd.tiering.manager import TieringManager
from kvoffd.tiers.tier import CompositeTier
from kvoffd_proto.messages import PENDING, READY, GroupSpec
from tests.kit.held_disk import HeldDisk, PoolBytes
from tests.kit.memory_disk import MemoryDisk

LOOKUP = SESSION = 1
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
    slots, tier = cast(Pool, CountedSlots(pool)), CompositeTier()
    cache = BlockCache(slots, make_policy(policy, slots.pool_bytes), Silence(), lambda: now)
    tiering = TieringManager(cache, tier, Silence(), lambda: now, TieringSettings(mode, deadline_s=1e9))
    cache.attach(tiering)
    memory = PoolBytes(slots.pool_bytes)
    disk = HeldDisk(CountedFile(), memory, lambda: now, tiering, disk_blocks, BLOCK_BYTES, digest=lambda _: 1)
    tier.attach(disk.tier)
    groups = [GroupSpec("full", trace.tokens_per_block)]
    namespace, _ = cache.open_namespace(bytes(32), trace.name, 1, KEY_BYTES, groups, "{}")
    cache.set_shard_bytes(namespace, 0, [BLOCK_BYTES])
    hits = 0
    for keys in trace.requests:
        now += REQUEST_S
        states = cache.lookup(namespace, LOOKUP, SESSION, [(0, keys)]).states[0]
        cache.touch(LOOKUP)
        if PENDING in states:
            tiering.pump()
            while disk.end_all():
                tiering.pump()
            states = cache.lookup(namespace, LOOKUP, SESSION, [(0, keys)], again=True, extend=True).states[0]
        hits += len(states) - len(states.lstrip(bytes([READY])))
        lacking = list(compress(namespace.split(0, keys), [state != READY for state in states]))
        if lacking:
            ticket = cache.begin_stores(namespace, 0, 0, lacking, {})
            ticket.checksums = [1] * len(ticket.offsets)
            cache.commit_store(ticket)
        cache.release(SESSION, [LOOKUP])
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
