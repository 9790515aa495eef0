"""What engines feel of a daemon that is started again.

A real daemon process gets a pool and a slot table from its service manager, full of blocks, as systemd keeps them.
"""

from __future__ import annotations

import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from kvoffd.cache.namespace import Namespace
from kvoffd.pool.checksums import digest
from kvoffd_client import SchedulerClient
from kvoffd_client.namespace import NamespaceSpec
from kvoffd_proto.messages import READY, GroupKeys
from tests.bench.scale.fill import LOOKUP_KEYS, SLOT_BYTES, STORE_KEYS, Books, Part, keys_of, private_bytes
from tests.kit.daemon import DaemonProcess
from tests.kit.service_manager import ServiceManager

MAIN = Path(__file__).parent / "sparse_main.py"
PAUSE_S = 0.005
DEADLINE_S = 300.0


class SparseDaemon(DaemonProcess):
    """A daemon whose pool has no pages."""

    @property
    def program(self) -> list[str]:
        return [sys.executable, str(MAIN)]


class Engine:
    """A scheduler that looks keys of the pool up."""

    def __init__(self, directory: Path, known: Namespace) -> None:
        spec = NamespaceSpec(
            known.fingerprint, known.label, known.world_size, known.key_bytes, known.groups, known.description
        )
        self._client = SchedulerClient(directory, spec)
        self._client.wait_ready(DEADLINE_S)

    def look_up(self, first: int, count: int) -> tuple[int, float]:
        """How many of the blocks from ``first`` on are ready, and the seconds until the answer."""
        keys = keys_of(first, count)
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


def left_behind(blocks: int, shards: int) -> tuple[Books, int, int]:
    """The books of a pool that is full of so many blocks of zeros, and descriptors of it and its table."""
    books, zeros = Books(blocks, shards, "lru"), digest(memoryview(bytes(SLOT_BYTES)))
    for first in range(0, blocks, STORE_KEYS):
        books.store(Part(first, min(STORE_KEYS, blocks - first)), zeros)
    assert books.namespace.ready_blocks == blocks
    pool_fd, table_fd = map(os.dup, books.pool.memory_fds)
    return books, pool_fd, table_fd


def restart(blocks: int, shards: int, policy: str, samples: int) -> dict[str, object]:
    """Start a daemon over a pool that is full of so many blocks; look blocks up from the first moment on."""
    with ExitStack() as stack:
        manager = ServiceManager()
        stack.callback(manager.close)
        books, pool_fd, table_fd = left_behind(blocks, shards)
        manager.stored_fds += [("kvoffd-pool", pool_fd), ("kvoffd-slot-table", table_fd)]
        started = time.perf_counter()
        flags = {"eviction_policy": policy}
        daemon = stack.enter_context(SparseDaemon(str(books.pool.pool_bytes), manager=manager, **flags))
        opened = time.perf_counter() - started
        engine = Engine(daemon.directory, books.namespace)
        stack.callback(engine.close)
        count = min(LOOKUP_KEYS, blocks // 2)  # leases may not hold all of a pool
        while engine.look_up(blocks - count, count)[0] < count:
            assert time.perf_counter() - started < DEADLINE_S, daemon.log
            time.sleep(PAUSE_S)
        first_hit, places = time.perf_counter() - started, random.Random(1)
        answers = []
        for _ in range(samples):
            ready, seconds = engine.look_up(places.randrange(blocks - count + 1), count)
            assert ready == count
            answers.append(seconds)
        return {
            "blocks": blocks,
            "shards": shards,
            "open_seconds": opened,
            "first_hit_seconds": first_hit,
            "answer_seconds": answers,
            "private_bytes": private_bytes(daemon.pid),
        }
