"""Many blocks that go at once: a namespace that is reset, leases on all of it that end with their session."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd_client import SharedMemory
from kvoffd_proto import messages as m
from tests.hostile.target import Target
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys

BLOCKS, BATCH, SLOT_BYTES = 65_536, 256, 8192


@pytest.fixture(scope="module")
def pool_size() -> str:
    return "640MiB"


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    return {"index_size": str(2 * BLOCKS * 600)}


def fill(worker: WireClient, memory: SharedMemory) -> None:
    memory.view[:] = 1
    worker.open_namespace()
    name = worker.register(memory, page_bytes=SLOT_BYTES)
    for first in range(0, BLOCKS, BATCH):
        assert worker.store(name, first, keys(*range(first, first + BATCH)), ids(*range(BATCH))).ok
        worker.ask(m.Heartbeat, 2**62, [])


def test_neither_a_reset_nor_the_end_of_many_leases_keeps_others_waiting(target: Target) -> None:
    def attack(directory: Path) -> None:
        with WireClient(directory) as worker, SharedMemory(BATCH * SLOT_BYTES, "hostile") as memory:
            fill(worker, memory)
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace()
                every = [m.GroupKeys(0, keys(*range(BLOCKS)))]
                for number in range(4):
                    scheduler.ask(m.Lookup, NAMESPACE, 2**32 + number, every)
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace()
                reset = scheduler.ask(m.Reset, NAMESPACE)
                assert reset.count >= BLOCKS // 2

    target.attack(attack)
