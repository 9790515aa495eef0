"""What a machine and its cgroups can give."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd.errors import PoolTooLarge
from kvoffd.system.limits import MemoryLimit, check_fits, memory_limit
from kvoffd_proto.errors import ErrorCode

GIB = 2**30


def machine(tmp_path: Path, available_kib: int, cgroup: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup of our own."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    root.mkdir()
    (proc / "meminfo").write_text(f"MemTotal:  99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc, root


def write(directory: Path, **files: int | str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_cgroups_the_machine_bounds(tmp_path: Path) -> None:
    limit = memory_limit(*machine(tmp_path, 1024, ""))
    assert limit.bytes == 1 << 20
    assert "MemAvailable" in limit.source


def test_a_version_2_cgroup_bounds_by_limit_less_use(tmp_path: Path) -> None:
    proc, root = machine(tmp_path, 64 * 2**20, "0::/kubepods/pod1\n")
    write(root / "kubepods/pod1", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"inactive_file {GIB}")
    limit = memory_limit(proc, root)
    assert limit.bytes == 6 * GIB
    assert "kubepods/pod1" in limit.source


def test_memory_high_bounds_as_memory_max_does(tmp_path: Path) -> None:
    proc, root = machine(tmp_path, 64 * 2**20, "0::/\n")
    write(root, memory__max="max", memory__high=4 * GIB, memory__current=GIB)
    assert memory_limit(proc, root).bytes == 3 * GIB


def test_a_cgroup_above_bounds_too(tmp_path: Path) -> None:
    proc, root = machine(tmp_path, 64 * 2**20, "0::/system.slice/kvoffd.service\n")
    write(root / "system.slice/kvoffd.service", memory__max="max", memory__current=0)
    write(root / "system.slice", memory__max=2 * GIB, memory__current=GIB)
    limit = memory_limit(proc, root)
    assert limit.bytes == GIB
    assert "system.slice is limited" in limit.source


def test_a_version_1_cgroup_bounds_and_its_no_limit_does_not(tmp_path: Path) -> None:
    proc, root = machine(tmp_path, 64 * 2**20, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    write(root / "memory/docker/abc", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    write(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert memory_limit(proc, root).bytes == 3 * GIB
    write(root / "memory/docker/abc", memory__limit_in_bytes=9223372036854771712)
    assert "MemAvailable" in memory_limit(proc, root).source


def test_in_a_container_that_sees_the_hosts_path_the_mount_itself_bounds(tmp_path: Path) -> None:
    proc, root = machine(tmp_path, 64 * 2**20, "4:memory:/docker/not-mounted-here\n")
    write(root / "memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=0)
    assert memory_limit(proc, root).bytes == 2 * GIB


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers() -> None:
    limit = MemoryLimit(5 * GIB, "the memory cgroup /x")
    check_fits(5 * GIB, limit)
    with pytest.raises(PoolTooLarge, match=rf"{5 * GIB + 1} bytes.*{5 * GIB} bytes.*the memory cgroup /x") as caught:
        check_fits(5 * GIB + 1, limit)
    assert caught.value.code is ErrorCode.NO_ROOM
