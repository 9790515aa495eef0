"""The pool as a whole: its memory, which outlives a daemon, and the table that describes it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import xxhash

from kvoffd.errors import PoolTooLarge
from kvoffd.pool.backing import MemfdBacking
from kvoffd.pool.pool import Pool
from kvoffd.pool.slot_table import FREE_RECORD, READY_RECORD, RECORD, RECORD_BYTES, TableGeometry
from kvoffd.system.limits import MemoryLimit

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(64 * MIB)
    yield pool
    pool.close()


def kept(pool: Pool) -> tuple[int, int]:
    """Descriptors of a pool's memory that outlive it."""
    memory, table = map(os.dup, pool.memory_fds)
    return memory, table


def successor(fds: tuple[int, int], size: int = 8 * MIB, on_discard: Callable[[], None] | None = None) -> Pool:
    backing = MemfdBacking(fds, on_discard)
    try:
        return Pool(size, region_bytes=4 * MIB if size == 8 * MIB else None, backing=backing)
    finally:
        backing.close()


def test_all_of_the_pool_can_be_written(pool: Pool) -> None:
    assert pool.touch(2, lambda _: None) == 64 * MIB
    slots = pool.slots.take(MIB, 64)
    assert len(slots) == 64
    for offset in pool.slots.offsets(slots).tolist():
        ctypes.memset(pool.mapping.address + offset, 1, MIB)
    assert pool.digests([(0, MIB)]) == pool.digests([(63 * MIB, MIB)])
    assert pool.buffer[-1] == 1


def test_a_successor_goes_on_with_the_memory_it_is_given() -> None:
    first = Pool(8 * MIB, region_bytes=4 * MIB)
    first.touch(1, lambda _: None)
    first.table.records["checksum"][3] = 5
    fds = kept(first)
    first.close()
    second = successor(fds)
    try:
        assert (second.recovered, second.resident, second.cold_reason) == (True, True, "")
        assert second.table.records["checksum"][3] == 5
        assert second.touched_bytes == 0
        second.map_pages(lambda: False)
        assert second.touched_bytes == second.pool_bytes
    finally:
        second.close()


def test_a_table_that_cannot_be_trusted_is_not_taken_over() -> None:
    spoiled = (
        (16, bytes(16), "last boot"),
        (0, b"x", "no slot table"),
        (8, b"\x63", "format"),
        (40, b"\xff", "damaged"),
    )
    for at, bytes_, sentence in spoiled:
        first = Pool(8 * MIB, region_bytes=4 * MIB)
        fds = kept(first)
        first.close()
        assert os.pread(fds[1], len(bytes_), at) != bytes_
        os.pwrite(fds[1], bytes_, at)
        second = successor(fds)
        assert sentence in second.cold_reason
        assert not second.recovered
        second.close()


def test_descriptors_that_are_no_pool_are_refused_with_a_reason() -> None:
    pool = successor(os.pipe(), 4 * MIB)
    assert "cannot be read" in pool.cold_reason
    pool.close()
    first = Pool(4 * MIB)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4 * MIB)
    fds = loose, os.dup(first.memory_fds[1])
    first.close()
    second = successor(fds, 4 * MIB)
    assert "no memory of kvoffd's" in second.cold_reason, "it has no seals"
    second.close()


def test_a_pool_with_its_table_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PoolTooLarge, match=r"needs .* are available"):
        Pool(64 * MIB, limit=MemoryLimit(64 * MIB, "test"))
    Pool(64 * MIB, limit=MemoryLimit(66 * MIB, "test")).close()
    with pytest.raises(PoolTooLarge):
        Pool(1 << 60)


# --- the table's format ------------------------------------------------------------------------


def test_the_table_is_at_most_two_percent_of_the_pool() -> None:
    for pool_bytes in (4 * MIB, 64 * MIB, 1 << 30, 2 << 40):
        assert TableGeometry(pool_bytes, max(4 * MIB, pool_bytes // 64)).size_bytes <= pool_bytes * 0.02


def test_what_is_never_written_is_never_in_memory(pool: Pool) -> None:
    fd = pool.memory_fds[1]
    pool.table.records["checksum"][100] = 1
    assert os.fstat(fd).st_blocks * 512 < pool.table_bytes // 10
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


def test_no_flipped_bit_makes_a_record_ready_and_its_state_cannot_tear() -> None:
    states = (FREE_RECORD, READY_RECORD, int.from_bytes(b"!kvBAD!!", "little"))
    assert all((one ^ other).bit_count() >= 16 for one in states for other in states if one is not other)
    assert (RECORD.fields["state"][1], RECORD.fields["state"][0]) == (0, np.dtype("=u8"))  # type: ignore[index]
    assert RECORD_BYTES % 64 == TableGeometry(64 * MIB, 4 * MIB).records_at % 64 == 0


def test_checksums_are_those_of_the_library(pool: Pool) -> None:
    pool.buffer[: 1 << 18] = np.random.default_rng(1).bytes(1 << 18)
    places = [(3 * length, length) for length in (*range(1, 300), 1024, 4095, 65537)]
    assert pool.digests(places) == [xxhash.xxh3_64_intdigest(pool.buffer[at : at + size]) for at, size in places]
    assert pool.digests([]) == []
    with pytest.raises(AssertionError):
        pool.digests([(64 * MIB - 64, 65)])
