"""What doctor sees of the machine: over files as Linux writes them, and over this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffd_client.cli.machine import Machine, look_at

GIB = 2**30
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              unlimited            bytes
Max open files            1024                 524288               files
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, some in the swap, an NVIDIA driver, and the daemon as process 7."""
    files = {
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 1048576 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\n",
        "proc/7/limits": LIMITS,
        "proc/7/smaps_rollup": "00400000-7ffc [rollup]\nRss: 9000 kB\nSwap: 512 kB\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu\nGCC: 12\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def put(directory: Path, **texts: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_what_linux_shows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("kvoffd_client.cli.machine.ctypes.CDLL", absent)
    seen = look_at(7, [], root)
    assert (seen.memory_bytes, seen.available_bytes, seen.swapped_bytes) == (64 * GIB, GIB, 512 * 1024)
    assert (seen.memlock_bytes, seen.huge_pages, seen.driver) == (8388608, "never", "570.86.10")
    assert seen.cuda_problem == "libcuda.so.1: cannot open shared object file"
    (root / "proc/7/limits").write_text(LIMITS.replace("8388608  ", "unlimited"))
    assert look_at(7, [], root).memlock_bytes is None
    (root / "proc/meminfo").write_text("SwapTotal: 9 kB\nSwapFree: 9 kB\n")
    assert look_at(0, [], root / "nothing") == Machine()
    assert look_at(7, [], root).swapped_bytes == 0, "the kernel walks all of a pool to count what of it is swapped"


def test_the_tightest_limit_of_the_cgroups_counts_without_file_cache(root: Path) -> None:
    (root / "proc/7/cgroup").write_text("0::/system.slice/kvoffd.service\n")
    mount = root / "sys/fs/cgroup"
    put(mount / "system.slice/kvoffd.service", memory__max="max\n", memory__current="900\n")
    put(
        mount / "system.slice", memory__max="4000\n", memory__high="2000\n", memory__current="1500\n",
        memory__stat="anon 5\ninactive_file 400\n", memory__events="low 0\noom_kill 3\n",
    )  # fmt: skip
    seen = look_at(7, [], root)
    assert (seen.memory_limit_bytes, seen.memory_used_bytes, seen.oom_kills) == (2000, 1100, 3)
    assert seen.memory_cgroup == str(mount / "system.slice")
    assert seen.unit == "kvoffd.service"
    put(mount, memory__max="1000\n", memory__current="1000\n")
    assert look_at(7, [], root).memory_limit_bytes == 1000, "in a container the mount is its own"
