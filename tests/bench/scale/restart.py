"""What engines feel of a daemon that is started again: `python -m tests.bench.scale.restart --help`. Prints JSON.

A real daemon process gets a pool and a slot table from its service manager, full of blocks, as systemd keeps them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvoffd.cache.policies import DEFAULT_POLICY
from kvoffd_client import AdminClient, SchedulerClient
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_proto.messages import READY, GroupKeys
from tests.bench.scale.fill import LOOKUP_KEYS, SAMPLES, pool_bytes_of, private_bytes
from tests.bench.scale.load import SLOT_BYTES
from tests.kit.daemon import DaemonProcess
from tests.kit.filled_table import key_of, left_behind, namespace_record
from tests.kit.service_manager import ServiceManager

MAIN = Path(__file__).parent / "sparse_main.py"
PAUSE_S = 0.02
"""Between two lookups while blocks are read."""
STATS_EVERY_S = 0.25
INDEX_BYTES_PER_SLOT = 4096
"""More than enough, so that no block is evicted for want of it."""
DEADLINE_S = 300.0


class SparseDaemon(DaemonProcess):
    """A daemon whose pool has no pages."""

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(MAIN)]


class Engine:
    """A scheduler that looks keys of the pool up."""

    def __init__(self, directory: Path, shards: int) -> None:
        known = namespace_record(shards, SLOT_BYTES)
        spec = NamespaceSpec(
            known.fingerprint, known.label, known.world_size, known.key_bytes, known.groups, known.description
        )
        self._client = SchedulerClient(directory, spec)
        self._client.wait_ready(DEADLINE_S)

    def look_up(self, first: int, count: int) -> tuple[int, float]:
        """How many of the blocks from ``first`` on are ready, and the seconds until the answer."""
        keys = b"".join(map(key_of, range(first, first + count)))
        started = time.perf_counter()
        future = self._client.lookup([GroupKeys(0, keys)])
        future.wait(DEADLINE_S)
        seconds = time.perf_counter() - started
        if future.failed:
            return 0, seconds
        self._client.release(future.lease_id)
        return future.states[0].count(READY), seconds

    def close(self) -> None:
        self._client.close()


def restart(blocks: int, shards: int, policy: str, samples: int) -> dict[str, object]:
    """Start a daemon over a pool that is full of so many blocks; look blocks up from the first moment on."""
    pool_bytes, index_bytes = pool_bytes_of(blocks, shards), max(1 << 27, blocks * shards * INDEX_BYTES_PER_SLOT)
    with ExitStack() as stack:
        manager = ServiceManager()
        stack.callback(manager.close)
        made = time.perf_counter()
        pool_fd, table_fd = left_behind(pool_bytes, blocks, shards, SLOT_BYTES)
        manager.stored_fds += [("kvoffd-pool", pool_fd), ("kvoffd-slot-table", table_fd)]
        made = time.perf_counter() - made
        started = time.perf_counter()
        flags = {"index_size": str(index_bytes), "eviction_policy": policy}
        daemon = stack.enter_context(SparseDaemon(str(pool_bytes), manager=manager, **flags))
        opened = time.perf_counter() - started
        engine = Engine(daemon.directory, shards)
        stack.callback(engine.close)
        admin = stack.enter_context(AdminClient(daemon.directory))
        count = min(LOOKUP_KEYS, blocks // 2)  # leases may not hold all of a pool
        while engine.look_up(blocks - count, count)[0] < count:
            assert time.perf_counter() - started < DEADLINE_S, daemon.log
            time.sleep(PAUSE_S / 4)
        first_hit = time.perf_counter() - started
        meanwhile, places, asked = [], random.Random(1), 0.0
        while True:
            if time.perf_counter() - asked > STATS_EVERY_S:
                asked = time.perf_counter()
                if sum(one.ready_blocks for one in admin.stats().namespaces) == blocks:
                    break
            assert time.perf_counter() - started < DEADLINE_S, daemon.log
            meanwhile.append(engine.look_up(places.randrange(blocks - count + 1), count)[1])
            time.sleep(PAUSE_S)
        every = time.perf_counter() - started
        answers = []
        for _ in range(samples):
            ready, seconds = engine.look_up(places.randrange(blocks - count + 1), count)
            assert ready == count
            answers.append(seconds)
        return {
            "blocks": blocks,
            "shards": shards,
            "made_seconds": made,
            "open_seconds": opened,
            "first_hit_seconds": first_hit,
            "all_seconds": every,
            "meanwhile_seconds": meanwhile,
            "answer_seconds": answers,
            "private_bytes": private_bytes(daemon.pid),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale.restart", description=__doc__)
    parser.add_argument("case", metavar="BLOCKSxSHARDS")
    parser.add_argument("--policy", default=DEFAULT_POLICY)
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"lookups (default {SAMPLES})")
    given = parser.parse_args(arguments)
    blocks, _, shards = given.case.partition("x")
    print(json.dumps([restart(int(blocks), int(shards), given.policy, given.samples)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
