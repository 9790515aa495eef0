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


V2, V1, USED, NO_LIMIT = "memory.max", "memory.limit_in_bytes", "memory.usage_in_bytes", 9223372036854771712
POD, UNIT = "kubepods/pod1", "system.slice/kvoffd.service"
CASES: list[tuple[str, dict[str, int | str], int, str]] = [
    # /proc/self/cgroup, files of cgroups, the bound in GiB, and what is named as its source
    ("", {}, 64, "MemAvailable"),
    (
        f"0::/{POD}\n",
        {f"{POD}/{V2}": 8 * GIB, f"{POD}/memory.current": 3 * GIB, f"{POD}/memory.stat": f"inactive_file {GIB}"},
        6,
        POD,
    ),
    ("0::/\n", {V2: "max", "memory.high": 4 * GIB, "memory.current": GIB}, 3, ""),
    (
        f"0::/{UNIT}\n",
        {f"{UNIT}/{V2}": "max", f"system.slice/{V2}": 2 * GIB, "system.slice/memory.current": GIB},
        1,
        "system.slice is limited",
    ),
    (
        "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n",
        {f"memory/a/{V1}": 4 * GIB, f"memory/a/{USED}": GIB, f"memory/{V1}": NO_LIMIT, f"memory/{USED}": GIB},
        3,
        "",
    ),
    ("4:memory:/a\n", {f"memory/a/{V1}": NO_LIMIT, f"memory/a/{USED}": 0}, 64, "MemAvailable"),
    # In a container that sees the host's path the mount itself bounds.
    ("4:memory:/docker/not-mounted-here\n", {f"memory/{V1}": 2 * GIB, f"memory/{USED}": 0}, 2, ""),
]


def test_the_tightest_cgroup_or_the_machine_bounds(tmp_path: Path) -> None:
    for number, (cgroup, files, gib, source) in enumerate(CASES):
        proc, root = machine(tmp_path / str(number), 64 * 2**20, cgroup)
        for name, value in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{value}\n")
        limit = memory_limit(proc, root)
        assert limit.bytes == gib * GIB, cgroup
        assert source in limit.source


@pytest.mark.parametrize(("shmem_gib", "left_gib"), [(0, 2), (1, 3), (5, 6)])
def test_a_cgroup_gets_back_what_it_is_charged_for(tmp_path: Path, shmem_gib: int, left_gib: int) -> None:
    """A pool of 4 GiB that an earlier container left is charged to its pod, and not to the next container."""
    proc, root = machine(tmp_path, 64 * 2**20, f"0::/{POD}\n")
    (root / POD).mkdir(parents=True)
    (root / POD / V2).write_text(str(8 * GIB))
    (root / POD / "memory.current").write_text(str(6 * GIB))
    (root / POD / "memory.stat").write_text(f"shmem {shmem_gib * GIB}\nactive_file {GIB}\n")
    assert memory_limit(proc, root, freed_bytes=4 * GIB).bytes == left_gib * GIB
    everything = memory_limit(proc, root, freed_bytes=4 * GIB, cache_fields=("active_file", "inactive_file"))
    assert everything.bytes == (left_gib + 1) * GIB
    assert memory_limit(proc, root).bytes == 2 * GIB


def test_where_there_is_no_proc_nothing_bounds(tmp_path: Path) -> None:
    """As in a sandbox: the pool is refused by the kernel or not at all."""
    assert memory_limit(tmp_path / "proc", tmp_path / "cgroup").bytes > 2**60


def test_a_pool_that_does_not_fit_is_refused_with_both_numbers() -> None:
    limit = MemoryLimit(5 * GIB, "the memory cgroup /x")
    check_fits(5 * GIB, limit)
    sentence = r"needs 5.00 GiB, but only 5.00 GiB are available \(the memory cgroup /x\).* such as 3840MiB"
    with pytest.raises(PoolTooLarge, match=sentence) as caught:
        check_fits(5 * GIB + 1, limit)
    assert caught.value.code is ErrorCode.NO_SPACE
