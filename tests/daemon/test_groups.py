"""Blocks of two groups with the same keys, and blocks stored in part, wherever they go: no group takes the other's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvoffd_client import BlockClient, BlockFile, SharedMemory, export_blocks, import_blocks
from tests.kit.checked import flip
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES, Page, Segment, Tensor, WireClient, books, key, keys

SPACE = b"two groups".ljust(32)
BLOCKS = 8
"""Of each group; a key has two of them."""


class Engine:
    """A worker and a scheduler. The memory has the first group's blocks, then the second's."""

    def __init__(self, daemon: DaemonProcess, memory: SharedMemory, worker: WireClient, scheduler: WireClient) -> None:
        self.directory, self.worker, self.scheduler = daemon.directory, worker, scheduler
        self.pages = memory.view.reshape(2, BLOCKS, PAGE_BYTES)
        for client in (worker, scheduler):
            client.open_namespace(SPACE, groups=2)
        size = BLOCKS * PAGE_BYTES
        self.cache = worker.register_layout(
            [Segment(worker.attach(memory.fd), memory.size_bytes)],
            [Tensor(0, 0, PAGE_BYTES, BLOCKS), Tensor(0, size, PAGE_BYTES, BLOCKS)],
            [[Page(0, PAGE_BYTES)], [Page(1, PAGE_BYTES)]],
            blocks_per_key=2,
            namespace=SPACE,
        )
        self._lease = 0

    def fill(self, seed: int) -> None:
        self.pages[:] = np.random.default_rng(seed).integers(0, 256, self.pages.shape, dtype=np.uint8)

    def store(self, number: int, group: int, *, first_block: int = 0) -> bytes:
        """Store a key from the group's first blocks; the bytes."""
        ids = range(2 - first_block)
        assert self.worker.store(self.cache, keys(number), ids, group=group, first_block=first_block).ok
        return self.pages[group, : len(ids)].tobytes()

    def store_some(self) -> tuple[bytes, bytes, bytes]:
        """Store key 1 of both groups, and of the first one key 2 from its second block on; the bytes."""
        return self.store(1, 0), self.store(1, 1), self.store(2, 0, first_block=1)

    def load_some(self) -> tuple[object, ...]:
        assert self.load(2, 0) == "not_ready"
        return self.load(1, 0), self.load(1, 1), self.load(2, 0, first_block=1)

    def is_ready(self, number: int, group: int) -> bool:
        """Whether the key is ready; it is under a new lease then."""
        self._lease += 1
        return self.scheduler.lookup(self._lease, keys(number), SPACE, group=group).states == "R"

    def load(self, number: int, group: int, *, first_block: int = 0) -> bytes | str | None:
        """Wait for a key, from whatever tier; its bytes, or why it could not be loaded."""
        wait_until(lambda: self.is_ready(number, group))
        ids = range(4, 6 - first_block)
        self.pages[:] = 0
        lease = self.scheduler.lease(self._lease)
        result = self.worker.load(self.cache, lease, keys(number), ids, group=group, first_block=first_block)
        assert not self.pages[1 - group].any()
        return self.pages[group, 4 : 4 + len(ids)].tobytes() if result.ok else result.error


@contextmanager
def engine_on(daemon: DaemonProcess) -> Iterator[Engine]:
    with SharedMemory(2 * BLOCKS * PAGE_BYTES, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
            engine = Engine(daemon, memory, worker, scheduler)
            engine.fill(1)
            yield engine


# --- what moves ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["pool", "disk"])
def test_groups_and_parts_come_back_after_a_restart(tier: str, pool_file: Path, tmp_path: Path) -> None:
    """A block that was stored from its second engine block on is loaded from there on, and never whole."""
    flags = {"pool_file": str(pool_file)} if tier == "pool" else {"disk": f"{tmp_path}=64MiB", "disk_write": "always"}
    with DaemonProcess("8MiB", **flags) as daemon:
        if tier == "disk":
            wait_until(lambda: books(daemon.directory).disks[0].state == "serving")
        with engine_on(daemon) as engine:
            stored = engine.store_some()
            if tier == "disk":
                wait_until(lambda: books(daemon.directory).disks[0].blocks == 3)
        assert daemon.stop() == 0
        daemon.start()
        if tier == "disk":
            wait_until(lambda: books(daemon.directory).disks[0].state == "serving")
        with engine_on(daemon) as engine:
            assert engine.load_some() == stored


def test_groups_and_parts_come_from_another_node() -> None:
    with RedisServer() as server:
        with DaemonProcess("8MiB", shared=server.url, shared_write="always") as first:
            with DaemonProcess("8MiB", shared=server.url, shared_write="always") as second:
                for node in (first, second):
                    wait_until(lambda node=node: books(node.directory).shared[0].up)  # type: ignore[misc]
                with engine_on(first) as engine:
                    stored = engine.store_some()
                    wait_until(lambda: books(first.directory).shared[0].written_blocks == 3)
                with engine_on(second) as engine:
                    assert engine.load_some() == stored
                    assert books(second.directory).shared[0].mismatches == 0


def test_groups_and_parts_are_exported(tmp_path: Path) -> None:
    file = tmp_path / "all.safetensors"
    with DaemonProcess("8MiB") as first, DaemonProcess("8MiB") as second:
        with engine_on(first) as engine, BlockClient(first.directory) as client:
            stored = engine.store_some()
            assert export_blocks(client, SPACE, file).blocks == 3
        with BlockClient(second.directory) as client, BlockFile(file) as source:
            assert import_blocks(client, source).blocks == 3
        with engine_on(second) as engine:
            assert engine.load_some() == stored


def test_a_part_that_changed_in_memory_is_not_exported(pool_file: Path, tmp_path: Path) -> None:
    """Its reader has not all that the checksum covers: the daemon compares it."""
    with DaemonProcess("8MiB", pool_file=str(pool_file)) as daemon, engine_on(daemon) as engine:
        part = engine.store(2, 0, first_block=1)
        flip(pool_file, zlib.crc32(part), len(part))
        with BlockClient(daemon.directory) as client:
            done = export_blocks(client, SPACE, tmp_path / "all.safetensors")
        assert (done.blocks, done.damaged) == (0, [key(2)])
