"""Blocks so small that to know them costs more memory than they hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd.cache.namespace import SLOT_BYTES, nbytes_of_block
from kvoffd_client import SharedMemory
from kvoffd_proto import messages as m
from tests.hostile.target import Target
from tests.kit.struct_wire import WireClient, ids, keys

SLOTS, BATCH = 682, 128


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    return {"index_size": str(SLOTS * (nbytes_of_block(len(keys(0)), 1) + SLOT_BYTES)), "eviction_policy": "lru"}


def test_small_blocks_fill_the_index_and_no_more(target: Target) -> None:
    """The pool has room for three times as many."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as worker, SharedMemory(BATCH * 8192, "hostile") as memory:
            memory.view[:] = 1
            worker.open_namespace()
            name = worker.register(memory, page_bytes=8192)
            for number in range(12):
                assert worker.store(
                    name, number, keys(*range(BATCH * number, BATCH * (number + 1))), ids(*range(BATCH))
                ).ok
                worker.ask(m.Heartbeat, 2**62, [])

    target.attack(attack)
    stats = target.stats()
    known, pool = {found.label: found for found in stats.namespaces}, stats.pool
    blocks = sum(found.ready_blocks + found.writing_blocks for found in known.values())
    assert SLOTS // 2 < blocks <= SLOTS
    assert pool.index_limit_bytes // 2 < pool.index_counted_bytes <= pool.index_limit_bytes
    assert 200 * blocks < pool.index_bytes < pool.index_counted_bytes
    assert pool.index_block_bytes == pytest.approx(pool.index_bytes / blocks)
    assert known["test"].evicted_blocks > BATCH
