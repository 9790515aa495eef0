"""The slot table: what is found by whoever reads it after the daemon is gone."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest

from kvoffd.pool.table import SlotTable
from kvoffd.pool.table_format import FORMAT_VERSION, BadTable, Geometry, SlotState
from tests.kit.slot_table import make_table, mark_ready, mark_writing, scan_table

MIB = 1 << 20
POOL = 64 * MIB
REGION = 4 * MIB


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = make_table(POOL, REGION)
    for region in range(POOL // REGION):
        table.set_region(region, 65536)
    yield table
    table.close()


def store(table: SlotTable, offset: int, name: bytes = b"a", key: bytes = b"k" * 32, length: int = 1000) -> None:
    mark_writing(table, offset, name * 32, 3, key, 5, 8)
    mark_ready(table, offset, 2, length)


def found(table: SlotTable) -> list[int]:
    return [record.offset for record in scan_table(table.fd)]


def record_at(table: SlotTable, offset: int) -> int:
    """File position of a record: they are the table's end."""
    records = POOL // 8192 * 128
    return table.size_bytes - records + offset // 8192 * 128


def test_what_was_written_is_found_again(table: SlotTable) -> None:
    store(table, 65536, key=bytes(range(64)), length=65536)
    store(table, POOL - 65536, name=b"b", key=b"12345678")
    first, second = scan_table(table.fd)
    assert (first.offset, first.slot_bytes, first.fingerprint) == (65536, 65536, b"a" * 32)
    assert (first.group, first.rank, first.world_size) == (3, 5, 8)
    assert (first.key, first.first_block, first.length, first.checksum) == (bytes(range(64)), 2, 65536, 0)
    assert (second.offset, second.fingerprint, second.key) == (POOL - 65536, b"b" * 32, b"12345678")
    assert second.generation > first.generation


def test_slots_at_odd_pages_are_told_apart(table: SlotTable) -> None:
    table.set_region(0, 12288)
    offsets = [i * 12288 for i in range(9)]
    for offset in offsets:
        store(table, offset)
    assert found(table) == offsets


def test_a_successor_reads_the_table_by_its_descriptor_alone(table: SlotTable) -> None:
    store(table, 0)
    kept = os.dup(table.fd)
    table.close()
    assert [record.offset for record in scan_table(kept)] == [0]
    os.close(kept)


def test_a_slot_being_written_is_not_ready(table: SlotTable) -> None:
    mark_writing(table, 0, b"a" * 32, 0, b"key", 0, 1)
    assert found(table) == []
    mark_ready(table, 0, 0, 10)
    assert found(table) == [0]


def test_a_writer_that_died_before_its_first_field_left_nothing_ready(table: SlotTable) -> None:
    """The old fields and their checksum are still there; the state says that the bytes may not be."""
    store(table, 0)
    os.pwrite(table.fd, SlotState.WRITING.to_bytes(8, "little"), record_at(table, 0))
    assert found(table) == []


def test_records_of_a_namespace_that_holds_no_slot_any_more_are_dropped(table: SlotTable) -> None:
    store(table, 0)
    before = os.pread(table.fd, 128, record_at(table, 0))
    table.free([0])
    os.pwrite(table.fd, before, record_at(table, 0))
    assert found(table) == []


def test_a_freed_slot_is_gone_and_can_be_written_again(table: SlotTable) -> None:
    store(table, 0)
    table.free([0])
    table.free([0])
    assert found(table) == []
    store(table, 0, name=b"b")
    assert [record.fingerprint for record in scan_table(table.fd)] == [b"b" * 32]


@pytest.mark.parametrize("byte", range(8, 124))
def test_a_torn_record_is_dropped(table: SlotTable, byte: int) -> None:
    store(table, 0)
    store(table, 65536)
    position = record_at(table, 0) + byte
    (value,) = os.pread(table.fd, 1, position)
    os.pwrite(table.fd, bytes([value ^ 0x41]), position)
    assert found(table) == [65536]


def test_ready_over_the_fields_of_a_writer_that_died_is_dropped(table: SlotTable) -> None:
    """The state alone is not believed: fields of a WRITING record have no right checksum."""
    store(table, 0)
    table.free([0])
    mark_writing(table, 0, b"b" * 32, 0, b"other", 0, 1)
    os.pwrite(table.fd, SlotState.READY.to_bytes(8, "little"), record_at(table, 0))
    assert found(table) == []


def test_a_namespace_place_used_again_does_not_adopt_old_records(table: SlotTable) -> None:
    store(table, 0, name=b"a")
    before = os.pread(table.fd, 128, record_at(table, 0))
    table.free([0])
    store(table, 65536, name=b"b")  # takes the place that a had
    os.pwrite(table.fd, before, record_at(table, 0))
    assert [(record.offset, record.fingerprint) for record in scan_table(table.fd)] == [(65536, b"b" * 32)]


def test_more_namespaces_than_the_table_names_are_served_but_not_found() -> None:
    with_few = make_table(MIB, MIB)
    with_few.set_region(0, 8192)
    try:
        for index in range(100):
            mark_writing(with_few, index * 8192, index.to_bytes(32, "little"), 0, b"k", 0, 1)
            mark_ready(with_few, index * 8192, 0, 1)
        assert found(with_few) == [index * 8192 for index in range(64)]
        for index in range(100):
            with_few.free([index * 8192])
        store(with_few, 0)
        assert found(with_few) == [0]
    finally:
        with_few.close()


def test_records_at_odds_with_their_region_are_dropped(table: SlotTable) -> None:
    store(table, 8 * 65536)
    store(table, 9 * 65536)
    table.set_region(0, 131072)
    assert found(table) == [8 * 65536]
    table.set_region(0, 0)
    assert found(table) == []


def test_misuse_is_refused(table: SlotTable) -> None:
    with pytest.raises(ValueError, match="is not being written"):
        mark_ready(table, 0, 0, 1)
    store(table, 0)
    mark_writing(table, 2 * 65536, b"a" * 32, 0, b"k", 0, 1)
    with pytest.raises(ValueError, match="being written"):
        mark_writing(table, 2 * 65536, b"a" * 32, 0, b"k", 0, 1)
    for offset in (-8192, 1000, POOL, POOL - 4096):
        with pytest.raises(ValueError, match="No slot begins"):
            table.free([offset])
    with pytest.raises(ValueError, match="at most 64"):
        mark_writing(table, 65536, b"a" * 32, 0, b"k" * 65, 0, 1)
    with pytest.raises(ValueError, match="32 bytes"):
        mark_writing(table, 65536, b"short", 0, b"k", 0, 1)
    assert found(table) == [0]


def test_a_batch_with_a_wrong_slot_in_it_changes_nothing(table: SlotTable) -> None:
    store(table, 0)
    mark_writing(table, 65536, b"a" * 32, 0, b"k", 0, 1)
    with pytest.raises(ValueError, match="65536 is being written"):
        table.mark_all_writing([0, 65536], b"a" * 32, 0, [b"x", b"y"], 0, 1)
    with pytest.raises(ValueError, match="offset 0 is not being written"):
        table.mark_all_ready([65536, 0], [0, 0], 10, [1, 2])
    assert found(table) == [0]


def test_a_checksum_may_come_after_the_bytes(table: SlotTable) -> None:
    mark_writing(table, 0, b"a" * 32, 0, b"late", 0, 1)
    table.set_checksum(0, 5)
    mark_ready(table, 0, 3, 10, 0)
    assert [record.checksum for record in scan_table(table.fd)] == [0]
    table.set_checksum(0, 77)
    (record,) = scan_table(table.fd)
    assert (record.key, record.first_block, record.checksum) == (b"late", 3, 77)
    table.free([0])
    table.set_checksum(0, 78)
    assert found(table) == []


def test_a_ready_slot_that_is_written_again_is_not_ready_until_it_is_whole(table: SlotTable) -> None:
    store(table, 0)
    mark_writing(table, 0, b"b" * 32, 0, b"other", 0, 1)
    assert found(table) == []
    mark_ready(table, 0, 0, 1)
    assert [record.key for record in scan_table(table.fd)] == [b"other"]


@pytest.mark.parametrize(("position", "sentence"), [(0, "no slot table"), (8, "format"), (16, "boot"), (40, "damaged")])
def test_a_header_that_does_not_fit_is_refused(table: SlotTable, position: int, sentence: str) -> None:
    (value,) = os.pread(table.fd, 1, position)
    os.pwrite(table.fd, bytes([value ^ 0xFF]), position)
    with pytest.raises(BadTable, match=sentence):
        list(scan_table(table.fd))


def test_an_empty_file_is_no_table() -> None:
    fd = os.memfd_create("empty")
    try:
        with pytest.raises(BadTable, match="no slot table"):
            list(scan_table(fd))
    finally:
        os.close(fd)


def test_the_table_of_another_boot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.pool.table.read_boot_id", lambda: bytes(16))
    old = make_table(POOL, REGION)
    try:
        with pytest.raises(BadTable, match="last boot"):
            list(scan_table(old.fd))
    finally:
        old.close()


def test_the_table_is_sealed_and_scanning_fills_no_holes(table: SlotTable) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(table.fd, 0)
    store(table, POOL // 2)
    before = os.fstat(table.fd).st_blocks
    assert found(table) == [POOL // 2]
    assert os.fstat(table.fd).st_blocks == before
    assert before * 512 < table.size_bytes // 10


@pytest.mark.parametrize("pool_bytes", [4 * MIB, 64 * MIB, 1 << 30, 2 << 40])
def test_the_table_is_at_most_two_percent_of_the_pool(pool_bytes: int) -> None:
    assert Geometry.of(pool_bytes, max(4 * MIB, pool_bytes // 64)).size_bytes <= pool_bytes * 0.02


def test_the_state_is_the_first_aligned_word_of_a_record(table: SlotTable) -> None:
    """The promise of the format that a store of READY cannot tear rests on this."""
    store(table, 65536)
    position = record_at(table, 65536)
    assert position % 64 == 0
    assert os.pread(table.fd, 8, position) == ctypes.c_uint64(SlotState.READY).value.to_bytes(8, "little")
    assert FORMAT_VERSION == 3
