"""Only memory that cannot shrink is mapped, and it is faulted in ahead of the copies, as far as it exists."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvoffd.errors import UnsafeSegment
from kvoffd.system import mappings
from kvoffd.system.mappings import (
    STEP_BYTES,
    HostMapping,
    PageFaulter,
    check_descriptor,
    huge_page_bytes,
    map_memfd,
    map_private,
    view_of,
)
from tests.kit.waiting import wait_until

SIZE = 1 << 20


@contextmanager
def memfd(size: int = SIZE, written: int = 0, *, seals: int = fcntl.F_SEAL_SHRINK, flags: int = 0) -> Iterator[int]:
    """An engine's memory, of which the first ``written`` bytes exist, without a mapping of its own."""
    fd = os.memfd_create("engine", os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, size)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        for begin in range(0, written, SIZE):
            os.pwrite(fd, bytes(min(SIZE, written - begin)), begin)
        yield fd
    finally:
        os.close(fd)


def test_memory_for_which_there_are_no_addresses_is_refused_with_what_to_do() -> None:
    size = 1 << 47  # as large as the address space
    with memfd(size) as fd, pytest.raises(UnsafeSegment, match=r"Cannot allocate memory.*ulimit -v"):
        map_memfd(fd, size)


def test_memory_is_unmapped_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of it would keep other threads from mapping anything for tenths of a second."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(mappings, "_munmap", lambda *call: calls.append(call) or 0)  # type: ignore[func-returns-value]
    step, begin = 256 << 20, 1 << 40
    HostMapping(begin, 2 * step + 4096).close()
    assert calls == [(begin, step), (begin + step, step), (begin + 2 * step, 4096)]


def test_memory_in_huge_pages_larger_than_a_step_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of 1 GiB: the kernel unmaps no part of one."""
    monkeypatch.setattr(mappings, "UNMAP_BYTES", 1 << 20)
    with memfd(4 << 20, flags=os.MFD_HUGETLB) as fd:
        access = mmap.PROT_READ | mmap.PROT_WRITE  # mapped without a reservation: the machine may have no huge pages
        address = mappings._mmap(None, 4 << 20, access, mmap.MAP_SHARED | mappings.MAP_NORESERVE, fd, 0)
        HostMapping(address, 4 << 20).close()
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def field_of(mapping: HostMapping, name: str) -> list[str]:
    """What the kernel notes of a mapping, or its first part (proc_pid_smaps(5))."""
    _, _, of_mapping = Path("/proc/self/smaps").read_text().partition(f"{mapping.address:x}-")
    return next(line for line in of_mapping.splitlines() if line.startswith(name)).split()[1:]


def test_memory_is_in_no_core_dump_and_no_child() -> None:
    """Neither clients' nor the daemon's own."""
    with memfd() as fd, closing(map_memfd(fd, SIZE)) as shared, closing(map_private(SIZE)) as own:
        for mapping in (shared, own):
            assert {"dd", "dc"} <= {*field_of(mapping, "VmFlags:")}


def test_private_memory_begins_with_a_huge_page_and_takes_no_more_than_its_size() -> None:
    for size in (1, 4096, SIZE, (2 << 20) + 1):
        with closing(map_private(size)) as own:
            assert own.address % (2 << 20) == 0
            lines = Path("/proc/self/maps").read_text().splitlines()
            assert any(line.startswith(f"{own.address:x}-{own.address + -(-size // 4096) * 4096:x} ") for line in lines)
            view_of(own.address, size)[size - 1] = 7


def test_huge_pages_of_a_mapping_are_counted() -> None:
    """As many as the kernel counts, of a mapping that has them in its first half at most."""
    with closing(map_private(SIZE * 8)) as own:
        mappings.madvise(own.address, own.size_bytes // 2, mmap.MADV_HUGEPAGE)
        mappings.madvise(own.address + own.size_bytes // 2, own.size_bytes // 2, mmap.MADV_NOHUGEPAGE)
        mappings.madvise(own.address, own.size_bytes, mappings.MADV_POPULATE_WRITE)
        if (found := huge_page_bytes(own)) is None:
            pytest.skip("the kernel cannot tell (before 6.7)")
        assert found == 1024 * int(field_of(own, "AnonHugePages:")[0])
        half = HostMapping(own.address + own.size_bytes // 2, own.size_bytes // 2)
        assert huge_page_bytes(half) == 0


def test_of_a_large_mapping_some_pieces_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page table of a terabyte has 268 million entries, which takes the kernel seconds."""
    monkeypatch.setattr(mappings, "SCANNED_BYTES", 4 << 20)
    monkeypatch.setattr(mappings, "MAX_SCANS", 4)
    ranges: list[tuple[int, int]] = []

    def scan(fd: object, request: int, argument: array[int]) -> int:
        begin, end, regions = argument[2], argument[3], argument[5]
        (ctypes.c_uint64 * 3).from_address(regions)[:] = [begin, begin + (1 << 20), mappings.PAGE_IS_HUGE]
        ranges.append((begin, end))
        return 1

    monkeypatch.setattr(fcntl, "ioctl", scan)
    begin = 1 << 40
    assert huge_page_bytes(HostMapping(begin, 64 << 20)) == 16 << 20
    assert ranges == [(begin + at, begin + at + (4 << 20)) for at in range(0, 64 << 20, 16 << 20)]
    assert huge_page_bytes(HostMapping(begin, 6 << 20)) == 2 << 20
    assert ranges[-1] == (begin + (4 << 20), begin + (6 << 20))


def test_a_kernel_that_cannot_tell_the_huge_pages_of_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOTTY, "before 6.7")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert huge_page_bytes(HostMapping(1 << 40, 8 << 20)) is None


def test_size_is_read_behind_the_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that shrinks its file and seals it then, while the daemon looks, has a file that is too small."""
    look = fcntl.fcntl

    def shrink_first(fd: int, command: int, *argument: int) -> int:
        if command == fcntl.F_GET_SEALS:
            os.ftruncate(fd, 4096)
            look(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return look(fd, command, *argument)

    with memfd(seals=0) as fd, monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", shrink_first)
        with pytest.raises(UnsafeSegment, match="4096 bytes but was declared"):
            map_memfd(fd, SIZE)


def test_huge_pages_are_refused_since_they_can_run_out() -> None:
    try:
        with memfd(2 << 20, flags=os.MFD_HUGETLB) as fd, pytest.raises(UnsafeSegment, match="MFD_HUGETLB"):
            map_memfd(fd, SIZE)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")


def test_a_device_file_of_the_driver_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "rb") as device:
        monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
        check_descriptor(device.fileno())


# --- faulted in ahead of the copies ----------------------------------------------------------------


@pytest.fixture
def faulter() -> Iterator[PageFaulter]:
    made = PageFaulter()
    yield made
    made.close()


def mapped_bytes(segment: HostMapping) -> int:
    """What of the segment is in the page tables of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(f"{segment.address:x}-"))
    return 1024 * next(int(line.split()[1]) for line in lines[begin:] if line.startswith("Rss:"))


def test_all_that_the_engine_touched_gets_mapped_without_a_copy(faulter: PageFaulter) -> None:
    size = 3 * STEP_BYTES + 5 * 4096
    with memfd(size, written=size) as fd:
        segment = faulter.map_memfd(fd, size)
        wait_until(lambda: mapped_bytes(segment) == size)


def test_what_is_mapped_ahead_is_written_without_faults() -> None:
    """And 16 pages at a time: as if it were written, page by page, it takes three times as long."""
    size = 4096 * 4096
    with memfd(size, written=size) as fd:
        segment, before = map_memfd(fd, size), page_faults()
        assert mappings._fault_in(segment.address, size)
        mapped = page_faults()
        ctypes.memset(segment.address, 1, size)
        assert (mapped - before < 1000, page_faults() - mapped < 100) == (True, True)
        segment.close()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_pages_that_do_not_exist_are_not_made() -> None:
    """They would be charged to the daemon."""
    with memfd(4 * SIZE, written=SIZE) as fd:
        segment, before = map_memfd(fd, 4 * SIZE), os.fstat(fd).st_blocks
        assert mappings._fault_in(segment.address, 4 * SIZE)
        assert (mapped_bytes(segment), os.fstat(fd).st_blocks) == (SIZE, before)
        segment.close()


def test_a_segment_may_be_closed_while_it_is_worked_at(faulter: PageFaulter) -> None:
    size = 16 * STEP_BYTES
    with memfd(size, written=size) as fd:
        for number in range(20):
            segments, closed = [faulter.map_memfd(fd, size) for _ in range(2)], threading.Event()
            if number % 2:
                wait_until(lambda segments=segments: mapped_bytes(segments[0]) > 0)  # type: ignore[misc]
            faulter.close_segments(segments, closed.set)
            assert closed.wait(10.0)
            assert all(segment.closed for segment in segments)
