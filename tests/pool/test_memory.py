"""The pool's memory: sealed, and as large in memory as it was asked to be."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvoffd.errors import NoMoreThreads, PoolTooLarge
from kvoffd.pool import memory
from kvoffd.pool.allocator import PoolSegment
from kvoffd.pool.memory import PoolMemory
from kvoffd.system.files import FileCalls
from kvoffd.system.numa import NOWHERE

SIZE = 2 * memory.TOUCH_CHUNK_BYTES
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    pool = PoolMemory.create(SIZE, "test")
    yield pool
    pool.close()


def test_nobody_can_change_the_size_of_the_memory(pool: PoolMemory) -> None:
    for size in (SIZE - 4096, SIZE + 4096, 0):
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(pool.fd, size)
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(pool.fd).st_size == SIZE
    assert not os.get_inheritable(pool.fd)


def test_touching_keeps_what_is_in_the_memory(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.memmove(pool.mapping.address + 8192, b"kept", 4)
    pool.touch(1, lambda _: None)
    monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", 12345)  # as a kernel before 5.14 sees it: EINVAL
    pool.touch(1, lambda _: None)
    assert ctypes.string_at(pool.mapping.address + 8192, 4) == b"kept"


def test_touching_stops_when_told_to(pool: PoolMemory) -> None:
    asked = count()
    assert pool.touch(1, lambda _: None, lambda: next(asked) > 0) == memory.TOUCH_CHUNK_BYTES
    assert os.fstat(pool.fd).st_blocks * 512 == memory.TOUCH_CHUNK_BYTES


def test_memory_that_runs_out_is_a_sentence(pool: PoolMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(address: int, length: int, advice: int) -> int:
        return errno.ENOMEM

    monkeypatch.setattr(memory, "madvise", no_memory)
    with pytest.raises(PoolTooLarge, match=r"ran out of memory.*choose a smaller pool"):
        pool.touch(2, lambda _: None)


@pytest.mark.parametrize("started", range(2))
def test_memory_for_which_a_thread_does_not_start_is_not_touched_to_its_end(
    pool: PoolMemory, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        if next(numbers) == started:
            raise RuntimeError("can't start new thread")
        real_start(thread)

    numbers, real_start = count(), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    before = {*threading.enumerate()}
    parts = [PoolSegment(at, at + memory.TOUCH_CHUNK_BYTES, NOWHERE) for at in (0, memory.TOUCH_CHUNK_BYTES)]
    with pytest.raises(NoMoreThreads):
        pool.touch(2, lambda _: None, segments=parts)
    assert os.fstat(pool.fd).st_blocks * 512 <= started * memory.TOUCH_CHUNK_BYTES
    numbers = count()
    with pytest.raises(NoMoreThreads):
        list(memory.allocate_near(FileCalls(), pool.fd, parts, lambda: False))
    assert {*threading.enumerate()} <= before


def flags_of(address: int) -> list[str]:
    """What the kernel notes of the mapping that begins there (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            inside = True
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not SHMEM_ENABLED.exists(), reason="this kernel has no huge pages")
def test_huge_pages_are_asked_for_with_the_first_touch(pool: PoolMemory) -> None:
    assert "hg" not in flags_of(pool.mapping.address), "a slot table is sparse, and never touched as a whole"
    pool.touch(1, lambda _: None)
    assert "hg" in flags_of(pool.mapping.address)
