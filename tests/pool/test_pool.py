"""The pool as a whole: its memory, which outlives a daemon, and the table that describes it."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvoffd.errors import PoolTooLarge
from kvoffd.pool import backing as backing_module
from kvoffd.pool import memory as memory_module
from kvoffd.pool import pool as pool_module
from kvoffd.pool.allocator import PoolSegment, cut_pool
from kvoffd.pool.backing import FileBacking, MemfdBacking, NewBacking
from kvoffd.pool.pool import MemoryKind, Pool
from kvoffd.pool.slot_table import CRC, FREE_RECORD, HEADER, READY_RECORD, RECORD, RECORD_BYTES, TableGeometry
from kvoffd.system import limits
from kvoffd.system.files import FileCalls
from kvoffd.system.limits import MemoryLimit, default_huge_page_bytes, free_huge_pages
from kvoffd.system.mappings import HUGETLBFS_MAGIC, HostMapping
from kvoffd.system.numa import Locality

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(64 * MIB, backing=MemfdBacking())
    yield pool
    pool.close()


def kept(pool: Pool) -> tuple[int, int]:
    """Descriptors of a pool's memory that outlive it."""
    memory, table = map(os.dup, pool.memory_fds)
    return memory, table


def successor(
    fds: tuple[int, int],
    size: int = 8 * MIB,
    on_discard: Callable[[], None] | None = None,
    *,
    takes_reserved: bool = True,
) -> Pool:
    backing = MemfdBacking(fds, on_discard, takes_reserved=takes_reserved)
    try:
        return Pool(size, region_bytes=4 * MIB if size == 8 * MIB else None, backing=backing)
    finally:
        backing.close()


def test_a_table_that_cannot_be_trusted_is_not_taken_over() -> None:
    spoiled: list[tuple[int, bytes, bool, str]] = [
        (16, bytes(16), True, "last boot"),
        (8, b"\x63", True, "format"),
        (0, b"precious", False, "not a slot table"),
        *((at, b"\xaa", False, "damaged") for at in range(HEADER.size + CRC.size)),
    ]
    for at, bytes_, sums, sentence in spoiled:
        first = Pool(8 * MIB, region_bytes=4 * MIB, backing=MemfdBacking())
        fds = kept(first)
        first.close()
        assert os.pread(fds[1], len(bytes_), at) != bytes_
        os.pwrite(fds[1], bytes_, at)
        if sums:
            os.pwrite(fds[1], CRC.pack(zlib.crc32(os.pread(fds[1], HEADER.size, 0))), HEADER.size)
        second = successor(fds)
        assert sentence in second.cold_reason
        assert not second.recovered
        second.close()


def test_descriptors_that_are_no_pool_are_refused_with_a_reason() -> None:
    pool = successor(os.pipe(), 4 * MIB)
    assert "cannot be read" in pool.cold_reason
    pool.close()
    first = Pool(4 * MIB, backing=MemfdBacking())
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4 * MIB)
    fds = loose, os.dup(first.memory_fds[1])
    first.close()
    second = successor(fds, 4 * MIB)
    assert "not a pool of kvoffd" in second.cold_reason, "it has no seals"
    second.close()


# --- pages ------------------------------------------------------------------------------------


def test_memory_that_nobody_else_needs_is_private() -> None:
    """The kernel gives it huge pages, without a setting."""
    with closing(Pool(4 * MIB)) as pool:
        assert (pool.kind, pool.at_the_end) == (MemoryKind.PRIVATE, "ends with this process")
        assert not pool.resident
        pool.touch(1, lambda _: None)
        pool.buffer[4 * MIB - 1] = 7


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """24 MiB of reserved huge pages that nobody has, and a daemon whose pool counts as large."""
    monkeypatch.setattr(limits, "RESERVED_FROM_BYTES", 0)
    pages = Path("/proc/sys/vm/nr_hugepages")
    before = pages.read_text()
    try:
        pages.write_text(f"{int(before) + 12}")
    except OSError as error:
        pytest.skip(f"no huge pages can be reserved here: {error}")
    try:
        if free_huge_pages(default_huge_page_bytes()) < 12:
            pytest.skip("the machine has no 12 huge pages left")
        yield pages
    finally:
        pages.write_text(before)


@pytest.mark.parametrize("backing", [NewBacking, MemfdBacking])
def test_reserved_huge_pages_are_taken_if_all_of_the_pool_fits(
    reserved: Path, backing: Callable[[], MemfdBacking | NewBacking]
) -> None:
    free = free_huge_pages(default_huge_page_bytes())
    with closing(Pool(16 * MIB, backing=backing())) as pool:
        assert pool.kind is MemoryKind.RESERVED
        assert free_huge_pages(default_huge_page_bytes()) == free - 8
        pool.touch(1, lambda _: None)
        pool.measure_pages()
        assert pool.pages == (16 * MIB, 0.0)
        with closing(Pool(16 * MIB, backing=backing())) as second:
            assert second.kind is not MemoryKind.RESERVED, "only a part of it would fit"
    assert free_huge_pages(default_huge_page_bytes()) == free


@pytest.mark.parametrize("backing", [NewBacking, MemfdBacking])
def test_reserved_huge_pages_are_left_to_others(
    reserved: Path, backing: type[NewBacking | MemfdBacking], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_huge_pages(default_huge_page_bytes())
    with closing(Pool(16 * MIB, backing=backing(takes_reserved=False))) as pool:
        assert pool.kind is not MemoryKind.RESERVED
        assert free_huge_pages(default_huge_page_bytes()) == free
    monkeypatch.setattr(backing_module, "memory_limit", lambda: MemoryLimit(1000, "other memory"))
    with pytest.raises(PoolTooLarge, match="other memory"):
        Pool(16 * MIB, backing=backing(takes_reserved=False))


def test_a_pool_that_is_kept_in_reserved_huge_pages_stays_there(
    reserved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next daemon takes no new ones. It reuses the pool though there is no other memory for it."""
    with closing(Pool(16 * MIB, backing=MemfdBacking())) as first:
        fds, again = kept(first), kept(first)
    monkeypatch.setattr(backing_module, "memory_limit", lambda freed_bytes=0: MemoryLimit(1000, "other memory"))
    with closing(successor(fds, 16 * MIB, takes_reserved=False)) as second:
        assert (second.kind, second.recovered) == (MemoryKind.RESERVED, True)
    with pytest.raises(PoolTooLarge, match="other memory"):
        successor(again, 12 * MIB, takes_reserved=False)


def test_a_pool_in_reserved_huge_pages_is_the_next_daemons(reserved: Path) -> None:
    with closing(Pool(8 * MIB, region_bytes=4 * MIB, backing=MemfdBacking())) as first:
        first.buffer[:4] = b"kept"
        fds = kept(first)
    with closing(successor(fds)) as second:
        assert (second.cold_reason, second.kind, second.resident) == ("", MemoryKind.RESERVED, True)
        assert bytes(second.buffer[:4]) == b"kept"


def test_a_limit_of_reserved_huge_pages_leaves_other_memory(reserved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cgroup's: the kernel refuses them when they are allocated."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(FileCalls, "allocate", refuse)
    with closing(Pool(16 * MIB)) as pool:
        assert pool.kind is MemoryKind.PRIVATE
    monkeypatch.setattr(backing_module, "memory_limit", lambda: MemoryLimit(1000, "what is free"))
    with pytest.raises(PoolTooLarge, match="what is free"):
        Pool(16 * MIB)


@pytest.mark.parametrize("backing", [NewBacking, MemfdBacking])
def test_reserved_huge_pages_that_are_gone_leave_other_memory(
    backing: Callable[[], MemfdBacking | NewBacking], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process took them after the pool's size was checked."""
    answers = iter((True, False))
    monkeypatch.setattr(backing_module, "fits_reserved", lambda *_, **__: next(answers))
    monkeypatch.setattr(backing_module, "memory_limit", lambda freed_bytes=0: MemoryLimit(1000, "other memory"))
    with pytest.raises(PoolTooLarge, match="other memory"):
        Pool(16 * MIB, backing=backing())
    assert next(answers, None) is None


def test_a_pool_file_on_a_hugetlbfs_is_in_reserved_huge_pages(pool_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "filesystem_magic", lambda _: HUGETLBFS_MAGIC)
    with closing(FileBacking(pool_file)) as backing, closing(Pool(4 * MIB, backing=backing)) as pool:
        assert pool.kind is MemoryKind.RESERVED


def test_reserved_pages_of_an_earlier_daemon_are_free_for_reserved_pages_alone(
    reserved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is resized is refused where they do not help, and takes them where they do."""

    def other_memory(size_bytes: int) -> None:
        def limit(freed_bytes: int = 0) -> MemoryLimit:
            return MemoryLimit(size_bytes + freed_bytes, "other memory")

        monkeypatch.setattr(backing_module, "memory_limit", limit)

    with closing(Pool(16 * MIB, backing=MemfdBacking())) as first:
        fds, again = kept(first), kept(first)
    other_memory(36 * MIB)
    with pytest.raises(PoolTooLarge, match="other memory"):
        successor(fds, 48 * MIB)
    other_memory(1 * MIB)
    with closing(successor(again, 24 * MIB)) as second:
        assert (second.kind, second.recovered) == (MemoryKind.RESERVED, False)


def test_small_pages_are_measured_beside_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its own memory and of the other once in a turn; nothing where the kernel has none to compare with."""
    with closing(Pool(64 * MIB, backing=MemfdBacking())) as pool:
        pool.touch(1, lambda _: None)
        walks: list[int] = []

        def huge(mapping: HostMapping) -> int:
            walks.append(mapping.address)
            return 0 if mapping is pool.mapping else mapping.size_bytes

        for module in (memory_module, pool_module):
            monkeypatch.setattr(module, "huge_page_bytes", huge)
        pool.measure_pages()
        assert pool.pages.slowdown > 0
        assert walks.count(pool.mapping.address) == 1, "of a large pool it takes seconds, while nothing can be mapped"
        monkeypatch.setattr(memory_module, "huge_page_bytes", lambda one: 0)
        pool.measure_pages()
        assert pool.pages.slowdown == 0


def test_before_linux_6_7_the_machine_s_huge_pages_are_named_and_small_ones_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have some of them."""
    for module in (memory_module, pool_module):
        monkeypatch.setattr(module, "huge_page_bytes", lambda _: None)
    huge_bytes = {True: 6 * MIB, False: 100 * MIB}
    monkeypatch.setattr(pool_module, "machine_huge_bytes", lambda *, shared: huge_bytes[shared])
    for backing, expected in ((MemfdBacking(), 6 * MIB), (NewBacking(), 64 * MIB)):
        with closing(Pool(64 * MIB, backing=backing)) as pool:
            pool.touch(1, lambda _: None)
            pool.measure_pages()
            assert pool.pages.huge_bytes == expected
            assert pool.pages.slowdown > 0


def test_a_measurement_for_which_there_is_no_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse the start, or have the kernel kill a daemon whose pool nearly fills its cgroup."""

    def refuse(size_bytes: int) -> None:
        raise PoolTooLarge("no memory")

    monkeypatch.setattr(memory_module, "huge_page_bytes", lambda _: 0)
    with closing(Pool(64 * MIB, backing=MemfdBacking())) as pool:
        pool.touch(1, lambda _: None)
        monkeypatch.setattr(memory_module.PoolMemory, "create_private", refuse)
        pool.measure_pages()
        assert pool.pages.slowdown == 0
        monkeypatch.setattr(memory_module, "memory_limit", lambda: MemoryLimit(100 * MIB, "a cgroup"), raising=False)
        monkeypatch.setattr(memory_module.PoolMemory, "create_private", lambda _: pytest.fail("it took the rest"))
        pool.measure_pages()
        assert pool.pages.slowdown == 0


def test_a_measurement_for_which_there_is_no_thread_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool_module, "huge_page_bytes", lambda _: 0)
    with closing(Pool(64 * MIB)) as pool:
        pool.touch(1, lambda _: None)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        pool.measure_pages()
        assert pool.pages.slowdown == 0


# --- the table's format ------------------------------------------------------------------------


def test_memory_that_a_pool_has_already_is_there_for_it(pool_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a daemon that starts again would be refused on a machine that its pool nearly fills."""
    for module in (backing_module, limits):
        monkeypatch.setattr(module, "memory_limit", lambda: MemoryLimit(1000, "what is free"))

    def limit(backing: MemfdBacking | FileBacking) -> int:
        with closing(backing):
            return backing.limit(MIB).bytes

    with closing(FileBacking(pool_file)) as backing:
        assert backing.limit(MIB).bytes == 1000
        made = Pool(MIB, limit=MemoryLimit(2 * MIB, "the test"), backing=backing)
        made.touch(1, lambda _: None)
        backing.publish()
        made.close()
    assert limit(FileBacking(pool_file)) == 1000 + pool_file.stat().st_blocks * 512 > MIB
    fds = os.memfd_create("pool"), os.memfd_create("table")
    for fd in fds:
        os.pwrite(fd, bytes(8192), 0)
    assert limit(MemfdBacking(fds)) == 1000 + 2 * 8192


def test_the_table_is_at_most_two_percent_of_the_pool() -> None:
    for pool_bytes in (4 * MIB, 64 * MIB, 1 << 30, 2 << 40):
        assert TableGeometry(pool_bytes, max(4 * MIB, pool_bytes // 64)).size_bytes <= pool_bytes * 0.02


def test_what_is_never_written_is_never_in_memory(pool: Pool) -> None:
    fd = pool.memory_fds[1]
    pool.table.records["checksum"][100] = 1
    assert os.fstat(fd).st_blocks * 512 < pool.table_bytes // 10
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


def test_no_flipped_bit_makes_a_record_ready() -> None:
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


# --- NUMA nodes ----------------------------------------------------------------------------------

NODES = [Locality(0, frozenset({0})), Locality(1, frozenset({1}))]


def test_segments_cover_the_pool_in_whole_regions() -> None:
    nodes = [Locality(number, frozenset()) for number in (0, 1, 3)]
    assert cut_pool(10 * MIB + 5, MIB, nodes) == [
        PoolSegment(0, 3 * MIB, nodes[0]),
        PoolSegment(3 * MIB, 7 * MIB, nodes[1]),
        PoolSegment(7 * MIB, 10 * MIB + 5, nodes[2]),
    ]
    assert [part.end - part.begin for part in cut_pool(2 * MIB, MIB, nodes)] == [MIB, MIB]
    assert cut_pool(2 * MIB, MIB, []) == []


def test_each_segment_is_touched_by_threads_near_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    place_of: dict[int, frozenset[int]] = {}
    touched: dict[frozenset[int], list[tuple[int, int]]] = defaultdict(list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cpus: place_of.update({threading.get_ident(): frozenset(cpus)})
    )
    monkeypatch.setattr(
        "kvoffd.pool.memory._populate",
        lambda address, length: touched[place_of[threading.get_ident()]].append((address, length)),
    )
    pool = Pool(96 * MIB, region_bytes=4 * MIB, limit=MemoryLimit(1 << 60, "a test"), nodes=NODES)
    try:
        seen: list[int] = []
        assert pool.touch(2, seen.append) == 96 * MIB
        assert seen[-1] == 96 * MIB
        for node, begin in zip(NODES, (0, 48 * MIB), strict=True):
            pieces = sorted(touched[node.cpus])
            assert pieces == [
                (pool.mapping.address + begin, 32 * MIB),
                (pool.mapping.address + begin + 32 * MIB, 16 * MIB),
            ]
    finally:
        pool.close()


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> dict[int, frozenset[int]]:
    """CPUs of the thread that allocated memory of a file, by the beginning; a machine with the CPUs 0 and 1."""
    near = threading.local()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: setattr(near, "cpus", frozenset(cpus)))
    found: dict[int, frozenset[int]] = {}
    allocate = FileCalls.allocate

    def record(calls: FileCalls, fd: int, offset: int, length: int) -> None:
        found[offset] = getattr(near, "cpus", frozenset())
        allocate(calls, fd, offset, length)

    monkeypatch.setattr(FileCalls, "allocate", record)
    return found


def test_a_pool_file_is_allocated_near_the_nodes_of_its_parts(
    pool_file: Path, placed: dict[int, frozenset[int]]
) -> None:
    """Touched later, its pages stay where they are."""
    with (
        closing(FileBacking(pool_file)) as backing,
        closing(Pool(16 * MIB, region_bytes=4 * MIB, backing=backing, nodes=NODES)) as pool,
    ):
        _, begin, _ = pool.place
        assert placed == {0: frozenset(), begin: frozenset({0}), begin + 8 * MIB: frozenset({1})}
        assert os.fstat(pool.memory_fds[0]).st_blocks * 512 == begin + 16 * MIB


def test_a_daemon_that_is_to_stop_allocates_no_more(
    pool_file: Path, reserved: Path, placed: dict[int, frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large pool takes minutes. Its file has no path, so no later daemon finds a part of it."""
    monkeypatch.setattr(memory_module, "ALLOCATE_STEP_BYTES", 4 * MIB)

    def stops() -> bool:
        return len(placed) >= 2

    with (
        closing(FileBacking(pool_file, should_stop=stops)) as backing,
        closing(Pool(16 * MIB, backing=backing, nodes=NODES)) as pool,
    ):
        assert len(placed) == 2
        backing.publish()
        assert pool.removed
        assert not pool_file.exists()
    for backing_of in (NewBacking, MemfdBacking):
        placed.clear()
        with closing(Pool(16 * MIB, backing=backing_of(should_stop=stops), nodes=NODES)) as pool:
            assert (pool.kind, len(placed)) == (MemoryKind.RESERVED, 2)


def test_reserved_huge_pages_are_taken_near_the_nodes_of_the_pool(
    reserved: Path, placed: dict[int, frozenset[int]]
) -> None:
    with closing(Pool(16 * MIB, region_bytes=4 * MIB, nodes=NODES)) as pool:
        assert pool.kind is MemoryKind.RESERVED
        assert placed == {0: frozenset({0}), 8 * MIB: frozenset({1})}
