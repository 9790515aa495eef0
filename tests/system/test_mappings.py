"""Only memory that cannot shrink under the daemon is mapped."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffd.errors import UnsafeSegment
from kvoffd.system import mappings
from kvoffd.system.mappings import MappedSegment, check_descriptor, map_memfd

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


def test_memory_is_unmapped_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all of it would keep other threads from mapping anything for tenths of a second."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(mappings, "_munmap", lambda *call: calls.append(call) or 0)  # type: ignore[func-returns-value]
    step, begin = 256 << 20, 1 << 40
    MappedSegment(begin, 2 * step + 4096).close()
    assert calls == [(begin, step), (begin + step, step), (begin + 2 * step, 4096)]


def test_memory_of_clients_is_in_no_core_dump() -> None:
    with memfd() as fd:
        segment = map_memfd(fd, SIZE)
        _, _, of_segment = Path("/proc/self/smaps").read_text().partition(f"{segment.address:x}-")
        flags = next(line for line in of_segment.splitlines() if line.startswith("VmFlags:"))
        assert "dd" in flags.split()
        segment.close()


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
