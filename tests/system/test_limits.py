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


MACHINE = "MemAvailable"
NO_LIMIT = 9223372036854771712
CASES: list[tuple[str, dict[str, dict[str, int | str]], int, str]] = [
    # /proc/self/cgroup, files of cgroups, the bound in GiB, and what is named as its source
    ("", {}, 64, MACHINE),
    (
        "0::/kubepods/pod1\n",
        {"kubepods/pod1": {"memory__max": 8 * GIB, "memory__current": 3 * GIB, "memory__stat": f"inactive_file {GIB}"}},
        6,
        "kubepods/pod1",
    ),
    ("0::/\n", {".": {"memory__max": "max", "memory__high": 4 * GIB, "memory__current": GIB}}, 3, ""),
    (
        "0::/system.slice/kvoffd.service\n",
        {
            "system.slice/kvoffd.service": {"memory__max": "max", "memory__current": 0},
            "system.slice": {"memory__max": 2 * GIB, "memory__current": GIB},
        },
        1,
        "system.slice is limited",
    ),
    (
        "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        {
            "memory/docker/abc": {"memory__limit_in_bytes": 4 * GIB, "memory__usage_in_bytes": GIB},
            "memory": {"memory__limit_in_bytes": NO_LIMIT, "memory__usage_in_bytes": GIB},
        },
        3,
        "",
    ),
    ("4:memory:/abc\n", {"memory/abc": {"memory__limit_in_bytes": NO_LIMIT, "memory__usage_in_bytes": 0}}, 64, MACHINE),
    # In a container that sees the host's path the mount itself bounds.
    (
        "4:memory:/docker/not-mounted-here\n",
        {"memory": {"memory__limit_in_bytes": 2 * GIB, "memory__usage_in_bytes": 0}},
        2,
        "",
    ),
]


def test_the_tightest_cgroup_or_the_machine_bounds(tmp_path: Path) -> None:
    for number, (cgroup, files, gib, source) in enumerate(CASES):
        proc, root = machine(tmp_path / str(number), 64 * 2**20, cgroup)
        for directory, values in files.items():
            write(root / directory, **values)
        limit = memory_limit(proc, root)
        assert limit.bytes == gib * GIB, cgroup
        assert source in limit.source


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers() -> None:
    limit = MemoryLimit(5 * GIB, "the memory cgroup /x")
    check_fits(5 * GIB, limit)
    with pytest.raises(PoolTooLarge, match=rf"{5 * GIB + 1} bytes.*{5 * GIB} bytes.*the memory cgroup /x") as caught:
        check_fits(5 * GIB + 1, limit)
    assert caught.value.code is ErrorCode.NO_ROOM
