"""Blocks of two groups with the same keys, and blocks stored in part, in a file: no group takes the other's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvoffd_client import SharedMemory
from tests.kit.checked import flip
from tests.kit.daemon import DaemonProcess
from tests.kit.wire import PAGE_BYTES, Page, Segment, Tensor, WireClient, keys

SPACE = b"two groups".ljust(32)
BLOCKS = 8
"""Of each group; a key has two of them."""
Stored = tuple[int, int, int]
"""A key's number, its group, and the first of its blocks that is stored."""
PART: Stored = (2, 0, 1)
STORED: tuple[Stored, ...] = ((1, 0, 0), (1, 1, 0), PART)


class Engine:
    """A worker and a scheduler. The memory has the first group's blocks, then the second's."""

    def __init__(self, memory: SharedMemory, worker: WireClient, scheduler: WireClient) -> None:
        self.worker, self.scheduler = worker, scheduler
        self.pages = memory.view.reshape(2, BLOCKS, PAGE_BYTES)
        self.pages[:] = np.random.default_rng(1).integers(0, 256, self.pages.shape, dtype=np.uint8)
        for client in (worker, scheduler):
            client.open_namespace(SPACE, groups=2)
        self.cache = worker.register_layout(
            [Segment(worker.attach(memory.fd), memory.size_bytes)],
            [Tensor(0, group * BLOCKS * PAGE_BYTES, PAGE_BYTES, BLOCKS) for group in range(2)],
            [[Page(0, PAGE_BYTES)], [Page(1, PAGE_BYTES)]],
            blocks_per_key=2,
            namespace=SPACE,
        )

    def store(self, number: int, group: int, first_block: int) -> bytes:
        """Store a key from blocks of its own; the bytes."""
        ids = range(2 * number, 2 * number + 2 - first_block)
        assert self.worker.store(self.cache, keys(number), ids, group=group, first_block=first_block).ok
        return self.pages[group, ids].tobytes()

    def load(self, number: int, group: int, first_block: int) -> bytes | str | None:
        """The bytes of a key, or why it could not be loaded."""
        assert self.scheduler.lookup(1, keys(number), SPACE, group=group).states == "R"
        ids, lease = range(6, 8 - first_block), self.scheduler.lease(1)
        self.pages[:] = 0
        result = self.worker.load(self.cache, lease, keys(number), ids, group=group, first_block=first_block)
        self.scheduler.release(1)
        assert not self.pages[1 - group].any()
        return self.pages[group, ids].tobytes() if result.ok else result.error


@contextmanager
def engine_on(daemon: DaemonProcess) -> Iterator[Engine]:
    with SharedMemory(2 * BLOCKS * PAGE_BYTES, "test") as memory:
        with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
            yield Engine(memory, worker, scheduler)


def test_groups_and_parts_are_read_unless_they_changed_in_memory(pool_file: Path) -> None:
    """The reader of a part has not all that its checksum covers: the daemon compares it."""
    with DaemonProcess("8MiB", pool_file=str(pool_file), verify_share="1") as daemon, engine_on(daemon) as engine:
        stored = {one: engine.store(*one) for one in STORED}
        for one in STORED:
            assert engine.load(*one) == stored[one]
        flip(pool_file, zlib.crc32(stored[PART]), len(stored[PART]))
        assert engine.load(*PART) == "checksum"
