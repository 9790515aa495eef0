"""The pool's memory: sealed, and as large in memory as it was asked to be."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from itertools import count
from pathlib import Path

import pytest

from kvoffd.errors import PoolTooLarge
from kvoffd.pool import memory
from kvoffd.pool.memory import PoolMemory

MIB = 1 << 20
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def resident_bytes(fd: int) -> int:
    """Pages of a memfd are its blocks."""
    return os.fstat(fd).st_blocks * 512


def test_nobody_can_change_the_size_of_the_memory() -> None:
    pool = PoolMemory.create(MIB, "test")
    try:
        for size in (MIB - 4096, MIB + 4096, 0):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(pool.fd, size)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(pool.fd).st_size == MIB
        assert not os.get_inheritable(pool.fd)
    finally:
        pool.close()


@pytest.mark.parametrize("size_bytes", [4096, 100_000, 70 * MIB])
def test_touching_makes_the_asked_size_resident_and_no_more(size_bytes: int) -> None:
    pool = PoolMemory.create(size_bytes, "test")
    progress: list[int] = []
    try:
        assert resident_bytes(pool.fd) == 0
        assert pool.touch(2, progress.append) == size_bytes
        # The last page is a huge one where the machine gives such to shared memory.
        huge = SHMEM_ENABLED.exists() and "[never]" not in SHMEM_ENABLED.read_text()
        page_bytes = 2 * MIB if huge else 4096
        assert size_bytes <= resident_bytes(pool.fd) <= -(-size_bytes // page_bytes) * page_bytes
        assert progress == sorted(progress)
        assert progress[-1] == size_bytes
    finally:
        pool.close()


def test_touching_keeps_what_is_in_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolMemory.create(MIB, "test")
    try:
        ctypes.memmove(pool.segment.address + 8192, b"kept", 4)
        pool.touch(1, lambda _: None)
        monkeypatch.setattr(memory, "MADV_POPULATE_WRITE", 12345)  # as a kernel before 5.14 sees it: EINVAL
        pool.touch(1, lambda _: None)
        assert ctypes.string_at(pool.segment.address + 8192, 4) == b"kept"
    finally:
        pool.close()


def test_touching_stops_when_told_to() -> None:
    pool = PoolMemory.create(8 * memory.TOUCH_CHUNK_BYTES, "test")
    asked = count()
    try:
        assert pool.touch(1, lambda _: None, lambda: next(asked) > 0) == memory.TOUCH_CHUNK_BYTES
        assert resident_bytes(pool.fd) == memory.TOUCH_CHUNK_BYTES
    finally:
        pool.close()


def test_memory_that_runs_out_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(address: int, length: int, advice: int) -> int:
        return errno.ENOMEM

    pool = PoolMemory.create(4 * memory.TOUCH_CHUNK_BYTES, "test")
    monkeypatch.setattr(memory, "madvise", no_memory)
    try:
        with pytest.raises(PoolTooLarge, match=r"ran out of memory.*choose a smaller pool"):
            pool.touch(2, lambda _: None)
    finally:
        pool.close()


def flags_of(address: int) -> list[str]:
    """What the kernel notes of the mapping that begins there (proc_pid_smaps(5))."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            inside = True
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


def test_core_dumps_leave_the_memory_out() -> None:
    pool = PoolMemory.create(MIB, "test")
    try:
        assert "dd" in flags_of(pool.segment.address)
    finally:
        pool.close()


@pytest.mark.skipif(not SHMEM_ENABLED.exists(), reason="this kernel has no huge pages")
def test_huge_pages_are_asked_for_with_the_first_touch() -> None:
    pool = PoolMemory.create(4 * MIB, "test")
    try:
        assert "hg" not in flags_of(pool.segment.address), "a slot table is sparse, and never touched as a whole"
        pool.touch(1, lambda _: None)
        assert "hg" in flags_of(pool.segment.address)
    finally:
        pool.close()
