"""What blocks cost by their number: memory, on disks too, and the first hit after a restart.

``python -m tests.bench.scale``.

Each size is measured in processes of its own, over a pool whose pages are never touched: slots of 8 KiB, the smallest
there are. It needs 10 GB of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
from numpy.random import PCG64  # before memory is measured: numpy imports it late

from kvoffd.cache import DEFAULT_POLICY
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.states import WITH_SLOTS
from kvoffd.cache.tickets import StorePart
from kvoffd.memory_estimate import SLOT_BYTES
from kvoffd.pool.allocator import PAGE_BYTES as PAGE
from kvoffd.pool.backing import MemfdBacking
from kvoffd.pool.checksums import digest
from kvoffd.pool.pool import Pool
from kvoffd.pool.slot_table import MAX_KEY_BYTES
from kvoffd.simulate.replay import Silence
from kvoffd.system.files import aligned_buffer, write_all
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiers.disk import BLOCK_MEMORY_BYTES, DiskTier
from kvoffd.tiers.disk_file import RECORD, DiskFile
from kvoffd.tiers.header import HEADER_BYTES, Block, encode_header, make_block_group
from kvoffd.tiers.tier import TierListener
from kvoffd_client import SchedulerClient
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_proto.messages import READY, GroupKeys, GroupSpec
from tests.bench.report_file import in_child, markdown_table, number, print_report, run_facts
from tests.kit.daemon import DaemonProcess
from tests.kit.service_manager import ServiceManager

CASES = "10000x1,100000x1,1000000x1,5000000x1,10000x8,100000x8,1000000x8"
KEY_BYTES, KEY_WORDS = 32, 4
"""As vLLM's sha256 hashes."""
PAGE_BYTES = 8192
MIN_CHAIN, MAX_CHAIN = 16, 64
CONTINUED = 0.3
"""Share of the requests that begin with all keys of a recent one."""
RECENT = 1024
SHARD_BYTES = 48
"""What each further shard of a block may take; the first is ``memory_estimate``'s."""
SESSION = LEASE = 1
LOOKUP_KEYS, STORE_KEYS, LOOKUPS = 1000, 64, 300
DEADLINE_S = 300.0
SPARSE_DAEMON = """
import sys
from kvoffd.cli import main
from kvoffd.pool import pool
from kvoffd.server.scrubber import Scrubber
pool.check_fits = lambda wanted_bytes, limit: None
pool.Pool.touch = lambda *arguments: 0
Scrubber.has_work = property(lambda scrubber: False)
sys.exit(main())
"""
"""A daemon whose pool is larger than the machine's memory: it neither touches it at the start nor reads its slots. No
block may be loaded."""
TABLES = {
    "memory": (
        "Private memory of the daemon's cache over what it had before the first block; *again* is after as many blocks "
        "more, for which others were evicted. The slot table's 128 bytes a shard and keys without blocks are left out.",
        {"filled, bytes of a block": "filled", "again": "churned", "allowed": "allowed"},
    ),
    "restart": (
        "A daemon process that gets a full pool from its service manager: until a lookup finds the 1,000 blocks that "
        "were stored last, and lookups of 1,000 afterwards. Touching the pool and reading it for its checksums is left "
        "out.",
        {
            "serves, s": "open_s",
            "first hit, s": "first_hit_s",
            "lookup p50, µs": "p50_us",
            "p99": "p99_us",
            "memory, MiB": "private_mib",
        },
    ),
    "disk": (
        "A full disk is opened: private memory over what the process had before.",
        {"opened, s": "seconds", "CPU, s": "cpu_seconds", "bytes of a block": "bytes", "allowed": "allowed"},
    ),
}
"""By part, what it measures, and the table's columns: which figure is in each."""
Result = dict[str, Any]


def keys_of(first: int, count: int) -> bytes:
    """The keys from number ``first`` on, end to end: always the same random words, four each."""
    words = PCG64(1).advance(KEY_WORDS * first).random_raw(KEY_WORDS * count)
    return bytes(words.tobytes())


class Books:
    """The daemon's own cache over a pool whose pages are never touched."""

    def __init__(self, blocks: int, shards: int, policy: str = DEFAULT_POLICY) -> None:
        self.shards = shards
        self._random, self._recent, self._next_key = random.Random(1), [(0, 0)], 0
        gc.collect()
        self._base_bytes = private_bytes()
        # A little more than so many blocks take: the last region may be too short for a slot.
        pool_bytes = blocks * shards * 33 // 32 * PAGE_BYTES
        limit = MemoryLimit(2**62, "nothing: no page is touched")
        self.pool = Pool(pool_bytes, limit=limit, backing=MemfdBacking())
        made = make_policy(policy, pool_bytes, self.pool.table.geometry.slots)
        self.cache = Cache(self.pool.slots, self.pool.table, made, Silence(), time.monotonic)
        groups = [GroupSpec("full_attention", 16)]
        made_namespace = Namespace(b"scale".ljust(32), "scale", shards, KEY_BYTES, groups, "{}")
        self.namespace, _ = self.cache.namespaces.open(made_namespace)
        for rank in range(shards):
            self.cache.namespaces.register_rank(made_namespace, rank, [PAGE_BYTES], None)
        # Tables of a fixed size, which PROCESS_BYTES includes.
        lacked, asked = self.cache.prompts._computing._lacked, self.cache.order._askers._entries
        for table in (self.cache.blocks.misses, lacked, asked):
            table.fill(0)
            self._base_bytes += table.nbytes

    def store(self, first: int, count: int, checksum: int = 0) -> None:
        """Store keys as each rank does, with random checksums if none is given."""
        keys = keys_of(first, count)
        for rank in range(self.shards):
            ticket = self.cache.stores.begin(self.namespace, rank, [StorePart(0, keys)])
            sums = [checksum or self._random.getrandbits(64) | 1 for _ in ticket[0].copy]
            self.cache.stores.commit(ticket, [sums])

    def fill(self, keys: int) -> None:
        """Requests of 16 to 64 new keys, of which some continue a recent one: looked up, and stored."""
        until = self._next_key + keys
        while (left := until - self._next_key) > 0:
            new = self._next_key, left if left < MAX_CHAIN else self._random.randint(MIN_CHAIN, MAX_CHAIN)
            before = self._random.choice(self._recent) if self._random.random() < CONTINUED else (0, 0)
            self._recent = [*self._recent[-RECENT + 1 :], new]
            self._next_key += new[1]
            self.cache.lookup(self.namespace, SESSION, LEASE, [(0, keys_of(*before) + keys_of(*new))])
            self.cache.prompts.report()
            self.cache.leases.end(SESSION, [LEASE])
            self.store(*new)

    def block_bytes(self) -> float:
        """Private memory of a block, without that of ghosts: keys that have none."""
        held, policy = sum(self.namespace.by_state.blocks[state] for state in WITH_SLOTS), self.cache.policy
        ghosts = policy.nbytes * policy.ghosts // max(1, policy.ghosts + held)
        return (private_bytes() - self._base_bytes - ghosts) / held


def private_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is not shared: neither the pool nor its slot table."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))


def memory(blocks: int, shards: int) -> Result:
    """Fill a pool, and store as much again, for which others are evicted."""
    books = Books(blocks, shards)
    books.fill(blocks)
    filled = books.block_bytes()
    books.fill(blocks)
    counters = books.namespace.counters
    left_out = counters.evicted_blocks + counters.rejected_keys
    allowed = SLOT_BYTES + SHARD_BYTES * (shards - 1)
    return {"filled": filled, "churned": books.block_bytes(), "left_out": left_out, "allowed": allowed}


def restart(blocks: int, shards: int) -> Result:
    """Start a daemon that gets a full pool from its service manager, as systemd keeps it; look blocks up at once."""
    books, zeros = Books(blocks, shards, "lru"), digest(memoryview(bytes(PAGE_BYTES)))
    for first in range(0, blocks, STORE_KEYS):
        books.store(first, min(STORE_KEYS, blocks - first), zeros)
    assert books.namespace.ready_blocks == blocks
    known, count = books.namespace, min(LOOKUP_KEYS, blocks // 2)  # leases may not hold all of a pool
    spec = NamespaceSpec(
        known.fingerprint, known.label, known.world_size, known.key_bytes, known.specs, known.description
    )
    with ExitStack() as stack:
        manager = ServiceManager()
        stack.callback(manager.close)
        pool_fd, table_fd = map(os.dup, books.pool.memory_fds)
        manager.stored_fds += [("kvoffd-pool", pool_fd), ("kvoffd-slot-table", table_fd)]
        started = time.perf_counter()
        size = str(books.pool.pool_bytes)
        daemon = stack.enter_context(
            DaemonProcess(size, manager=manager, program=[sys.executable, "-c", SPARSE_DAEMON])
        )
        opened = time.perf_counter() - started
        client = stack.enter_context(SchedulerClient(daemon.directory, spec))
        client.wait_ready(DEADLINE_S)

        def look_up(first: int) -> tuple[int, float]:
            """How many of the blocks from ``first`` on are ready, and the seconds until the answer."""
            groups, began = [GroupKeys(0, keys_of(first, count))], time.perf_counter()
            answer = client.lookup(groups)
            answer.wait(DEADLINE_S)
            seconds = time.perf_counter() - began
            if answer.failed:
                return 0, seconds
            client.release(answer.lease_id)
            return answer.states[0].count(READY), seconds

        while look_up(blocks - count)[0] < count:
            assert time.perf_counter() - started < DEADLINE_S, daemon.log
            time.sleep(0.005)
        first_hit, places = time.perf_counter() - started, random.Random(1)
        answers = [look_up(places.randrange(blocks - count + 1)) for _ in range(LOOKUPS)]
        assert all(ready == count for ready, _ in answers)
        p50, p99 = np.percentile([1e6 * seconds for _, seconds in answers], [50, 99]).tolist()
        return {
            "open_s": opened,
            "first_hit_s": first_hit,
            "p50_us": p50,
            "p99_us": p99,
            "private_mib": private_bytes(daemon.pid) / 2**20,
        }


def disk(blocks: int, shards: int) -> Result:
    """Open a disk that is full of blocks. Their headers are not there but for one: nothing reads a block."""
    slot_bytes = (1 + shards) * PAGE_BYTES // 2
    size_bytes = blocks * slot_bytes * 33 // 32 + (64 << 20)
    block_group = make_block_group(b"scale".ljust(32), 0, 0, (PAGE_BYTES // 2,) * shards)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        file, left, region = DiskFile(Path(made), size_bytes), blocks, 0
        while left:
            records = np.zeros(min(left, file.head.region_bytes // slot_bytes), RECORD)
            keys = np.zeros((len(records), MAX_KEY_BYTES), np.uint8)
            keys[:, :KEY_BYTES] = np.frombuffer(keys_of(blocks - left, len(records)), np.uint8).reshape(-1, KEY_BYTES)
            records["tag"], records["nbytes"], records["key_bytes"] = block_group.tag, block_group.nbytes, KEY_BYTES
            records["key"] = keys.view(f"V{MAX_KEY_BYTES}").ravel()
            file.write_slot_pages(region, slot_bytes // PAGE)
            file.write_records(region * file.slots_per_region, records)
            left, region = left - len(records), region + 1
        header = aligned_buffer(HEADER_BYTES)
        header[:] = encode_header(Block(block_group, keys_of(0, 1), (0,) * shards, (1,) * shards))
        write_all(file.calls, file.fd, [header], PAGE)
        file.sync()
        file.close()
        del records, keys
        gc.collect()
        before, began, busy = private_bytes(), time.perf_counter(), time.process_time()
        tier = DiskTier(
            *(Path(made), size_bytes),
            pool=aligned_buffer(PAGE),
            clock=time.monotonic,
            post=lambda call: None,
            listener=Mock(TierListener),
            generation=lambda fingerprint: 0,
        )
        seconds, cpu = time.perf_counter() - began, time.process_time() - busy
        gc.collect()
        assert tier.found_blocks == blocks
        nbytes = (private_bytes() - before) / blocks
        found = {"seconds": seconds, "cpu_seconds": cpu, "bytes": nbytes, "allowed": BLOCK_MEMORY_BYTES}
        assert tier.close(DEADLINE_S)
    return found


PARTS = {"memory": memory, "restart": restart, "disk": disk}


def child(part: str, case: str) -> Result:
    """What a part finds in a process of its own."""
    print(f"measuring: {part} {case}", file=sys.stderr, flush=True)
    return {"case": case, **in_child("scale", "--inside", part, "--cases", case)}


def page(results: dict[str, list[Result]]) -> str:
    parts = []
    for part, (text, columns) in TABLES.items():
        rows = [[one["case"], *(number(one[name]) for name in columns.values())] for one in results[part]]
        parts += [text, markdown_table([["blocks x shards", *columns], *rows])]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale", description=__doc__)
    parser.add_argument("--cases", default=CASES, help=f"BLOCKSxSHARDS, with commas (default {CASES})")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        blocks, shards = map(int, given.cases.split("x"))
        print(json.dumps(PARTS[given.inside](blocks, shards)))
        return 0
    found = {part: [child(part, case) for case in given.cases.split(",")] for part in PARTS}
    facts = run_facts(f"python -m tests.bench.scale {' '.join(sys.argv[1:])}")
    print_report("What blocks cost by their number", facts, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
