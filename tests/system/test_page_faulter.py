"""Engine memory is faulted in ahead of the copies, as far as it exists, and may be unmapped at any time."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd.system import mappings
from kvoffd.system.mappings import STEP_BYTES, MappedSegment, PageFaulter
from tests.kit.waiting import wait_until

MIB = 1 << 20


@contextmanager
def engine_memory(size: int, written: int) -> Iterator[int]:
    """A memfd of which the first ``written`` bytes exist, without a mapping of its own."""
    fd = os.memfd_create("engine", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        for begin in range(0, written, MIB):
            os.pwrite(fd, bytes(min(MIB, written - begin)), begin)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def faulter() -> Iterator[PageFaulter]:
    made = PageFaulter()
    yield made
    made.close()


def mapped_bytes(segment: MappedSegment) -> int:
    """What of the segment is in the page tables of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(f"{segment.address:x}-"))
    return 1024 * next(int(line.split()[1]) for line in lines[begin:] if line.startswith("Rss:"))


def test_all_that_the_engine_touched_gets_mapped_without_a_copy(faulter: PageFaulter) -> None:
    size = 3 * STEP_BYTES + 5 * 4096
    with engine_memory(size, written=size) as fd:
        segment = faulter.map_memfd(fd, size)
        wait_until(lambda: mapped_bytes(segment) == size)


def test_pages_that_do_not_exist_are_not_made() -> None:
    """They would be charged to the daemon."""
    with engine_memory(4 * MIB, written=MIB) as fd:
        segment, before = mappings.map_memfd(fd, 4 * MIB), os.fstat(fd).st_blocks
        assert mappings._fault_in(segment.address, 4 * MIB)
        assert (mapped_bytes(segment), os.fstat(fd).st_blocks) == (MIB, before)
        segment.close()


def test_a_segment_may_be_closed_while_it_is_worked_at(faulter: PageFaulter) -> None:
    size = 16 * STEP_BYTES
    with engine_memory(size, written=size) as fd:
        for number in range(20):
            segments, closed = [faulter.map_memfd(fd, size) for _ in range(2)], threading.Event()
            if number % 2:
                wait_until(lambda segments=segments: mapped_bytes(segments[0]) > 0)  # type: ignore[misc]
            faulter.close_segments(segments, closed.set)
            assert closed.wait(10.0)
            assert all(segment.closed for segment in segments)
