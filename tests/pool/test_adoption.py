"""A pool that another process left: what a new one believes of it, wherever the old one was killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvoffd.pool import namespace_log as log_module
from kvoffd.pool import table as table_module
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.backing import MemfdBacking
from kvoffd.pool.memory import PoolMemory
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import NamespaceRecord
from kvoffd.pool.table import SlotTable
from kvoffd.pool.table_format import BadTable, Geometry, SlotState
from kvoffd_proto.messages import GroupSpec
from tests.kit.slot_table import (
    SlotOwner,
    SlotRecord,
    in_use,
    make_table,
    mark_ready,
    mark_writing,
    records_of,
    scan_table,
)

MIB = 1 << 20
POOL = 2 * MIB
REGION = MIB // 2
NAMES = (b"a" * 32, b"b" * 32)


def facts_of(name: bytes, ranks: int = 1) -> NamespaceRecord:
    return NamespaceRecord(name, "label", 1, 8, (GroupSpec("full", 16),), "{}" * 50, ((8192,),) * ranks)


def copy_of(fd: int) -> PoolMemory:
    """The table as a process finds it that comes after the writer's death."""
    size = os.fstat(fd).st_size
    memory = PoolMemory.create(size, "test")
    os.pwrite(memory.fd, os.pread(fd, size, 0), 0)
    return memory


def adopted(fd: int) -> tuple[list[SlotRecord], list[NamespaceRecord]]:
    memory = copy_of(fd)
    try:
        table, recovered = SlotTable.adopt(memory, Geometry.of(POOL, REGION))
    except BaseException:
        memory.close()
        raise
    try:
        slots = records_of(table.fd, Geometry.of(POOL, REGION), recovered.slots)
        assert scan_table(table.fd) == slots, "the successor's successor finds the same"
        return slots, recovered.namespaces
    finally:
        table.close()


@pytest.fixture
def table() -> Iterator[SlotTable]:
    table = make_table(POOL, REGION)
    yield table
    table.close()


def store(table: SlotTable, offset: int, name: bytes = NAMES[0], key: bytes = b"k" * 8) -> None:
    mark_writing(table, offset, name, 0, key, 0, 1)
    mark_ready(table, offset, 0, 8192)


def test_a_table_is_gone_on_with(table: SlotTable) -> None:
    table.set_region(0, 8192)
    table.namespace_log.note(facts_of(NAMES[0]))
    store(table, 0)
    store(table, 8192, key=b"l" * 8)
    next_table, recovered = SlotTable.adopt(copy_of(table.fd), Geometry.of(POOL, REGION))
    assert recovered.slots.offsets.tolist() == [0, 8192]
    assert recovered.namespaces == [facts_of(NAMES[0])]
    next_table.free([0])
    store(next_table, 16384, NAMES[1])
    store(next_table, 8192, NAMES[1])  # the last slot of the first namespace
    found = scan_table(next_table.fd)
    assert [(record.offset, record.fingerprint) for record in found] == [(8192, NAMES[1]), (16384, NAMES[1])]
    assert min(record.generation for record in found) > max(recovered.slots.generations)
    next_table.close()


def test_facts_of_namespaces_without_slots_are_forgotten(table: SlotTable) -> None:
    table.set_region(0, 8192)
    for name in NAMES:
        table.namespace_log.note(facts_of(name))
    store(table, 0, NAMES[1])
    assert adopted(table.fd)[1] == [facts_of(NAMES[1])]


def test_slots_that_were_being_written_are_struck_out(table: SlotTable) -> None:
    table.set_region(0, 8192)
    store(table, 0)
    mark_writing(table, 8192, NAMES[0], 0, b"k" * 8, 0, 1)
    heir, recovered = SlotTable.adopt(copy_of(table.fd), Geometry.of(POOL, REGION))
    assert recovered.discarded == 1
    mark_writing(heir, 8192, NAMES[0], 0, b"k" * 8, 0, 1)  # refused if it were still WRITING
    heir.close()


@pytest.mark.parametrize(
    ("pool_bytes", "region_bytes", "sentence"),
    [(2 * POOL, REGION, "2.00 MiB .* and 4.00 MiB"), (POOL, 2 * REGION, "cut into regions")],
)
def test_a_table_of_another_geometry_is_refused(
    table: SlotTable, pool_bytes: int, region_bytes: int, sentence: str
) -> None:
    memory = copy_of(table.fd)
    with pytest.raises(BadTable, match=sentence):
        SlotTable.adopt(memory, Geometry.of(pool_bytes, region_bytes))
    memory.close()


def test_a_table_that_is_cut_off_is_refused(table: SlotTable) -> None:
    fd = os.memfd_create("cut")
    for size in (50, 200, 4096, 5000, 8192, 12288):
        os.ftruncate(fd, 0)
        os.pwrite(fd, os.pread(table.fd, size, 0), 0)
        memory = PoolMemory.of_file(fd, table.size_bytes, 0)
        with pytest.raises(BadTable, match=f"cut off: {size} of" if size > 64 else "cut off in its header"):
            SlotTable.adopt(memory, Geometry.of(POOL, REGION))
        memory.close()
    os.close(fd)


# --- killed anywhere -----------------------------------------------------------------------------


def at_every_line(act: Callable[[], object], look: Callable[[], None]) -> int:
    """Run ``act``, calling ``look`` before every line of the modules that write the table. Returns how often."""
    files = {str(Path(str(module.__file__))) for module in (table_module, log_module)}
    looks = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal looks
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            looks += 1
            sys.settrace(None)
            look()
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return looks


def test_killed_at_any_line_it_leaves_whole_bytes_only(table: SlotTable) -> None:
    """Slots are written, written over, freed, given to another namespace and size; ``whole`` keeps the truth."""
    whole: dict[int, bytes] = {}
    before: dict[int, bytes] = {}

    def look() -> None:
        slots, namespaces = adopted(table.fd)
        found = {record.offset: record.fingerprint + record.key for record in slots}
        assert found.items() <= whole.items(), "bytes are served that are not whole"
        # What was ready before and is not being touched is still there.
        assert before.items() <= found.items()
        assert {facts.fingerprint for facts in namespaces} >= {name[:32] for name in before.values()}

    def write(offset: int, name: bytes, key: bytes) -> None:
        before.pop(offset, None)
        # Until mark_writing has returned, nobody writes bytes: the old ones are whole.
        at_every_line(lambda: mark_writing(table, offset, name, 0, key, 0, 1), look)
        whole[offset] = name + key
        assert at_every_line(lambda: mark_ready(table, offset, 0, 8192), look) > 3
        before[offset] = name + key

    def free(offset: int) -> None:
        before.pop(offset, None)
        at_every_line(lambda: table.free([offset]), look)

    for name in NAMES:
        at_every_line(lambda name=name: table.namespace_log.note(facts_of(name)), look)  # type: ignore[misc]
    at_every_line(lambda: table.set_region(0, 8192), look)
    write(0, NAMES[0], b"1" * 8)
    write(8192, NAMES[1], b"2" * 8)
    write(0, NAMES[1], b"3" * 8)
    write(8192, NAMES[1], b"4" * 8)
    free(0)
    for number in range(40):  # until the log of facts is rewritten, and on
        changed = facts_of(NAMES[1])
        changed = NamespaceRecord(
            NAMES[1], str(number), 1, 8, changed.groups, os.urandom(40).hex(), changed.shard_bytes
        )
        at_every_line(lambda facts=changed: table.namespace_log.note(facts), look)  # type: ignore[misc]
    free(8192)
    at_every_line(lambda: table.set_region(0, 12288), look)
    write(12288, NAMES[0], b"5" * 8)


def test_killed_while_it_takes_over_it_leaves_the_same(table: SlotTable) -> None:
    for name in NAMES:
        table.namespace_log.note(facts_of(name))
    table.set_region(0, 8192)
    store(table, 0)
    store(table, 8192, NAMES[1])
    mark_writing(table, 16384, NAMES[1], 0, b"k" * 8, 0, 1)
    expected = adopted(table.fd)
    memory = copy_of(table.fd)
    heirs: list[SlotTable] = []

    def look() -> None:
        assert adopted(memory.fd) == expected

    assert at_every_line(lambda: heirs.append(SlotTable.adopt(memory, Geometry.of(POOL, REGION))[0]), look) > 20
    heirs[0].close()


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
@example(flips=[(0.0173845964487771, 64)])  # the size of a region's slots: its first block lies in a larger one then
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_bring_nothing_to_life(flips: list[tuple[float, int]]) -> None:
    table = make_table(POOL, REGION)
    try:
        table.set_region(0, 8192)
        table.set_region(1, 12288)
        for name in NAMES:
            table.namespace_log.note(facts_of(name))
        offsets = [0, 8192, 40960, REGION, REGION + 12288]
        for number, offset in enumerate(offsets):
            store(table, offset, NAMES[number % 2], bytes([number]) * 8)
        true = scan_table(table.fd)
        table.free([8192])
        mark_writing(table, REGION, NAMES[0], 0, b"k" * 8, 0, 1)
        ready = [record for record in true if record.offset not in (8192, REGION)]
        geometry = Geometry.of(POOL, REGION)
        # Only a part of the table is in use; flips elsewhere show nothing.
        spans = [(0, 200), (geometry.regions_at, 32), (geometry.fingerprints_at, 128)]
        spans += [(geometry.namespaces_at, 1000), (geometry.records_at, 128 * 80)]
        total = sum(length for _, length in spans)
        for place, mask in flips:
            at = int(place * total)
            for start, length in spans:
                if at < length:
                    (value,) = os.pread(table.fd, 1, start + at)
                    os.pwrite(table.fd, bytes([value ^ mask]), start + at)
                    break
                at -= length
        try:
            slots, namespaces = adopted(table.fd)
        except BadTable:
            return
        for record in slots:
            # A region's size of slots may be another; each slot lies in its region, and no two of them share bytes.
            assert record._replace(slot_bytes=8192) in [one._replace(slot_bytes=8192) for one in ready]
            assert record.length <= record.slot_bytes
            assert record.offset // REGION == (record.offset + record.slot_bytes - 1) // REGION
        by_offset = sorted((record.offset, record.slot_bytes) for record in slots)
        assert all(offset + slot_bytes <= following for (offset, slot_bytes), (following, _) in pairwise(by_offset))
        assert all(facts in (facts_of(NAMES[0]), facts_of(NAMES[1])) for facts in namespaces)
    finally:
        table.close()


# --- the facts of namespaces ---------------------------------------------------------------------


def test_the_last_facts_of_a_namespace_count(table: SlotTable) -> None:
    table.set_region(0, 8192)
    store(table, 0)
    for number in range(300):  # far more than the log holds
        facts = facts_of(NAMES[0])
        assert table.namespace_log.note(NamespaceRecord(NAMES[0], str(number), 1, 8, facts.groups, "", ((8192,),)))
        assert [facts.label for facts in adopted(table.fd)[1]] == [str(number)]


def test_facts_without_room_are_refused_and_harm_no_others(table: SlotTable) -> None:
    table.set_region(0, 8192)
    store(table, 0)
    assert table.namespace_log.note(facts_of(NAMES[0]))
    groups = facts_of(NAMES[0]).groups
    huge = NamespaceRecord(NAMES[1], os.urandom(5000).hex(), 1, 8, groups, "", ((8192,),))
    assert not table.namespace_log.note(huge)
    assert not table.namespace_log.note(NamespaceRecord(NAMES[0], os.urandom(5000).hex(), 1, 8, groups, "", ((8192,),)))
    assert adopted(table.fd)[1] == [facts_of(NAMES[0])]


# --- the pool ------------------------------------------------------------------------------------


def test_a_pool_goes_on_with_the_memory_it_is_given() -> None:
    first = Pool(8 * MIB, region_bytes=4 * MIB)
    first.note_namespace(facts_of(NAMES[0]))
    offsets = first.take(MIB, 3)
    for offset in offsets[:2]:
        mark_writing(first, offset, *SlotOwner(NAMES[0], 0, offset.to_bytes(8, "little"), 0, 1))
        mark_ready(first, offset, 0, MIB)
    first.touch(1, lambda _: None)
    kept = (os.dup(first.memory_fds[0]), os.dup(first.memory_fds[1]))
    first.close()
    backing = MemfdBacking(kept)
    second = Pool(8 * MIB, region_bytes=4 * MIB, backing=backing)
    backing.close()
    assert second.adopted
    assert second.resident
    assert second.cold_reason == ""
    assert second.take_recovered().slots.offsets.tolist() == offsets[:2]
    assert second.free_bytes == 6 * MIB
    assert offsets[2] in second.take(MIB, 6)
    assert second.take(MIB, 1) == []
    assert second.touched_bytes == 0
    second.map_pages(lambda: False)
    assert second.touched_bytes == second.pool_bytes
    second.close()


@pytest.mark.parametrize("size", [4 * MIB, 16 * MIB])
def test_a_pool_of_another_size_is_let_go_and_made_anew(size: int) -> None:
    first = Pool(8 * MIB)
    kept = (os.dup(first.memory_fds[0]), os.dup(first.memory_fds[1]))
    first.close()
    discarded: list[int] = []
    backing = MemfdBacking(kept, lambda: discarded.append(1))
    second = Pool(size, backing=backing)
    backing.close()
    assert not second.adopted
    assert "8.00 MiB" in second.cold_reason
    assert discarded == [1]
    assert second.free_bytes == size
    second.close()


def test_descriptors_that_are_no_pool_are_refused_with_a_reason() -> None:
    read_end, write_end = os.pipe()
    backing = MemfdBacking((read_end, write_end))
    pool = Pool(4 * MIB, backing=backing)
    assert "cannot be read" in pool.cold_reason
    pool.close()


def test_a_pool_without_seals_is_refused() -> None:
    first = Pool(4 * MIB)
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4 * MIB)
    backing = MemfdBacking((loose, os.dup(first.memory_fds[1])))
    first.close()
    second = Pool(4 * MIB, backing=backing)
    assert "no memory of kvoffd's" in second.cold_reason
    second.close()


# --- the allocator -------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([8192, 12288, 65536]), st.integers(1, 20)), max_size=6), st.data())
@settings(max_examples=100, deadline=None)
def test_restored_slots_are_as_if_they_had_been_taken(takes: list[tuple[int, int]], data: st.DataObject) -> None:
    size_of: dict[int, int] = {}
    first = SlotAllocator(POOL, REGION)
    for slot_bytes, count in takes:
        size_of.update(dict.fromkeys(first.take(slot_bytes, count), slot_bytes))
    for offset in data.draw(st.lists(st.sampled_from(sorted(size_of)), unique=True)) if size_of else []:
        first.give_back([offset])
        del size_of[offset]
    second = SlotAllocator(POOL, REGION)
    second.restore(in_use(size_of.items()))
    assert second.free_bytes == first.free_bytes
    for offset in size_of:
        assert second.neighbours(offset) == first.neighbours(offset)
    for slot_bytes in (8192, 12288, 65536):
        taken = second.take(slot_bytes, 10_000)
        assert len(taken) == len(first.take(slot_bytes, 10_000))
        spans = sorted([(o, o + slot_bytes) for o in taken] + [(o, o + n) for o, n in size_of.items()])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        size_of.update(dict.fromkeys(taken, slot_bytes))
    for offset in size_of:
        second.give_back([offset])
    assert second.free_bytes == POOL


def test_slots_that_contradict_each_other_are_not_restored() -> None:
    wrong = [
        [(0, 8192), (0, 8192)],
        [(0, 8192), (12288, 12288)],
        [(4096, 8192)],
        [(POOL, 8192)],
        [(0, 4096)],
        [(-8192, 8192)],
    ]
    for slots in wrong:
        with pytest.raises(ValueError, match=r"contradicts|held twice|outside"):
            SlotAllocator(POOL, REGION).restore(in_use(slots))


def test_ready_is_no_flipped_bit_of_another_state() -> None:
    for other in (SlotState.FREE, SlotState.WRITING):
        assert (SlotState.READY ^ other).bit_count() > 16
