"""Only memory that cannot shrink under the daemon is mapped."""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd.errors import UnsafeSegment
from kvoffd.system.mappings import check_descriptor, map_memfd
from kvoffd_proto.errors import ErrorCode

SIZE = 1 << 20


@contextmanager
def memfd(size: int = SIZE, seals: int = fcntl.F_SEAL_SHRINK, flags: int = os.MFD_ALLOW_SEALING) -> Iterator[int]:
    fd = os.memfd_create("engine", flags)
    try:
        os.ftruncate(fd, size)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def test_the_mapping_is_shared_and_outlives_the_descriptor() -> None:
    with memfd() as fd:
        other = os.dup(fd)
        segment = map_memfd(fd, SIZE)
    os.pwrite(other, b"theirs", 100)
    assert ctypes.string_at(segment.address + 100, 6) == b"theirs"
    ctypes.memmove(segment.address + SIZE - 4, b"ours", 4)
    assert os.pread(other, 4, SIZE - 4) == b"ours"
    os.close(other)
    segment.close()


def test_the_descriptor_stays_the_callers() -> None:
    with memfd() as fd:
        before = len(os.listdir("/proc/self/fd"))
        segment = map_memfd(fd, SIZE)
        assert len(os.listdir("/proc/self/fd")) == before
        os.fstat(fd)
        segment.close()


def test_a_closed_segment_is_unmapped_and_has_no_address() -> None:
    with memfd() as fd:
        segment = map_memfd(fd, SIZE)
        assert segment._address
        address = segment.address
        assert f"{address:x}-" in Path("/proc/self/maps").read_text()
        segment.close()
        segment.close()
        assert not segment._address
        assert f"{address:x}-{address + SIZE:x}" not in Path("/proc/self/maps").read_text()
        with pytest.raises(ValueError, match="unmapped"):
            _ = segment.address


def test_a_part_of_a_larger_file_may_be_mapped() -> None:
    with memfd(size=4 * SIZE) as fd:
        segment = map_memfd(fd, SIZE)
        assert segment.size_bytes == SIZE
        segment.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_a_file_that_could_shrink_is_refused(seals: int) -> None:
    with memfd(seals=seals) as fd, pytest.raises(UnsafeSegment, match="F_SEAL_SHRINK") as caught:
        map_memfd(fd, SIZE)
    assert caught.value.code is ErrorCode.UNSAFE_SEGMENT


def test_a_file_smaller_than_it_was_said_to_be_is_refused() -> None:
    with memfd(size=SIZE - 1) as fd, pytest.raises(UnsafeSegment, match=f"has {SIZE - 1} bytes .* with {SIZE}"):
        map_memfd(fd, SIZE)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_are_none_are_refused(size: int) -> None:
    with memfd() as fd, pytest.raises(UnsafeSegment, match="at least one byte"):
        map_memfd(fd, size)


def test_memory_that_may_not_be_written_is_refused() -> None:
    with memfd(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE) as fd, pytest.raises(UnsafeSegment, match="writing"):
        map_memfd(fd, SIZE)
    with memfd() as fd:
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            with pytest.raises(UnsafeSegment, match="opened for both"):
                map_memfd(readable, SIZE)
        finally:
            os.close(readable)


@pytest.mark.parametrize("make", [lambda: os.open("/dev/zero", os.O_RDWR), lambda: os.eventfd(0)])
def test_what_is_no_memfd_is_refused(make: Callable[[], int]) -> None:
    fd = make()
    try:
        with pytest.raises(UnsafeSegment, match="not a memfd"):
            map_memfd(fd, SIZE)
    finally:
        os.close(fd)
    with pytest.raises(UnsafeSegment, match="Bad file descriptor"):
        map_memfd(1_000_000, SIZE)


def test_a_file_on_disk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, pytest.raises(UnsafeSegment):
        map_memfd(file.fileno(), 8192)


def test_huge_pages_are_refused_since_they_can_run_out() -> None:
    try:
        with memfd(size=2 << 20, flags=os.MFD_ALLOW_SEALING | os.MFD_HUGETLB) as fd:
            with pytest.raises(UnsafeSegment, match="MFD_HUGETLB"):
                map_memfd(fd, SIZE)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")


@pytest.mark.parametrize("name", ["/dev/nvidiactl", "/dmabuf:", "anon_inode:[dmabuf]"])
def test_a_file_that_only_has_the_name_of_a_drivers_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with open(__file__, "rb") as file:
        monkeypatch.setattr(os, "readlink", lambda _: name)
        with pytest.raises(UnsafeSegment):
            check_descriptor(file.fileno())


def test_a_device_file_of_the_driver_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "rb") as device:
        monkeypatch.setattr(os, "readlink", lambda _: "/dev/nvidiactl")
        check_descriptor(device.fileno())
