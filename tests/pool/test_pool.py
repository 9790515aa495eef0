"""The pool as a whole, as the cache uses it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from kvoffd.errors import BadGeometry, PoolTooLarge
from kvoffd.pool.pool import Pool
from kvoffd.system.limits import MemoryLimit
from tests.kit.slot_table import SlotOwner, mark_ready, mark_writing, scan_table

MIB = 1 << 20
OWNER = SlotOwner(b"f" * 32, 1, b"k" * 32, 0, 2)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(64 * MIB)
    yield pool
    pool.close()


def test_the_pool_is_a_slot_store(pool: Pool) -> None:
    store = pool
    (offset,) = store.take(store.slot_bytes(50_000), 1)
    assert store.neighbours(offset) == [offset]
    assert store.free_bytes == 64 * MIB - 53248
    mark_writing(store, offset, *OWNER)
    mark_ready(store, offset, 0, 50_000)
    (record,) = scan_table(pool.memory_fds[1])
    assert (record.offset, record.slot_bytes, record.key, record.world_size) == (offset, 53248, OWNER.key, 2)
    store.free([offset])
    assert store.free_bytes == store.pool_bytes
    assert list(scan_table(pool.memory_fds[1])) == []


def test_a_region_that_changed_its_slot_size_describes_itself(pool: Pool) -> None:
    for nbytes in (MIB, 8192):
        offsets = pool.take(nbytes, 3)
        for offset in offsets:
            mark_writing(pool, offset, *OWNER)
            mark_ready(pool, offset, 0, nbytes)
        assert [(r.offset, r.slot_bytes) for r in scan_table(pool.memory_fds[1])] == [(o, nbytes) for o in offsets]
        for offset in offsets:
            pool.free([offset])


def test_slots_taken_but_never_written_can_be_freed(pool: Pool) -> None:
    for offset in pool.take(8192, 10):
        pool.free([offset])
    assert pool.free_bytes == pool.pool_bytes


def test_all_of_the_pool_can_be_written(pool: Pool) -> None:
    assert pool.touch(2, lambda _: None) == 64 * MIB
    offsets = pool.take(MIB, 64)
    assert len(offsets) == 64
    for offset in offsets:
        ctypes.memset(pool.address + offset, 1, MIB)


def test_a_pool_with_its_table_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PoolTooLarge, match=r"needs .* are available"):
        Pool(64 * MIB, limit=MemoryLimit(64 * MIB, "test"))
    Pool(64 * MIB, limit=MemoryLimit(66 * MIB, "test")).close()
    with pytest.raises(PoolTooLarge):
        Pool(1 << 60)


def test_a_pool_too_small_for_a_slot_is_refused() -> None:
    with pytest.raises(BadGeometry, match="holds no slot"):
        Pool(4096)


def test_closing_twice_is_harmless() -> None:
    pool = Pool(MIB)
    pool.close()
    pool.close()
