"""What this machine gives the daemon: memory, limits, GPUs and disks, as Linux shows them to any user."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Sizes are bytes; what cannot be seen from here is None, 0 or empty.

    Attributes:
        unit: of systemd, such as kvoffd.service; empty for a daemon that was started otherwise.
        swapped_bytes: of the daemon's memory, the pool included.
        memory_limit_bytes: of the tightest memory cgroup of the daemon; None without one.
        memory_used_bytes: in that cgroup, without file cache that the kernel would drop.
        oom_kills: processes of that cgroup that were killed for want of memory.
        memlock_bytes: most memory that the daemon may lock; None for no limit.
        huge_pages: what ``shmem_enabled`` says: ``never``, ``advise``, ...
        driver: release of the NVIDIA driver; empty without one.
        cuda_problem: why the CUDA driver's library cannot be loaded here; empty where it can, or without a GPU.
    """

    unit: str = ""
    memory_bytes: int = 0
    available_bytes: int = 0
    swapped_bytes: int = 0
    memory_limit_bytes: int | None = None
    memory_used_bytes: int = 0
    memory_cgroup: str = ""
    oom_kills: int = 0
    memlock_bytes: int | None = None
    huge_pages: str = ""
    driver: str = ""
    cuda_problem: str = ""
    shm_free_bytes: int | None = None
    disks_free_bytes: Mapping[str, int] = field(default_factory=dict)


def look_at(pid: int, disks: Sequence[str] = (), root: Path = Path("/")) -> Machine:
    """What is to be seen of this machine, of the process ``pid``, 0 where that is in another pid namespace, and of the
    ``disks``, which are directories."""
    proc, sys = root / "proc", root / "sys"
    memory = dict(_pairs(proc / "meminfo"))
    own = proc / str(pid or "self")
    locked = _text(own / "limits").partition("Max locked memory")[2].split()[:1] if pid else []
    limit = used = None
    cgroup, kills = "", 0
    for directory in _memory_cgroups(_text(own / "cgroup"), sys / "fs/cgroup") if pid else ():
        most, holds = _cgroup_memory(directory)
        if most is not None and (limit is None or most < limit):
            limit, used, cgroup = most, holds, str(directory)
            kills = dict(_pairs(directory / "memory.events")).get("oom_kill", 0)
    driver = _text(proc / "driver/nvidia/version")
    huge_pages = _text(sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    groups = [line.rpartition("/")[2] for line in _text(own / "cgroup").splitlines()] if pid else []
    return Machine(
        unit=next((name for name in groups if name.endswith(".service")), ""),
        memory_bytes=memory.get("MemTotal:", 0) * 1024,
        available_bytes=memory.get("MemAvailable:", 0) * 1024,
        swapped_bytes=_swapped(own, memory) if pid else 0,
        memory_limit_bytes=limit,
        memory_used_bytes=used or 0,
        memory_cgroup=cgroup,
        oom_kills=kills,
        memlock_bytes=int(locked[0]) if locked and locked[0].isdecimal() else None,
        huge_pages=huge_pages.partition("[")[2].partition("]")[0],  # the one in brackets is chosen
        driver=next((word for word in driver.split() if word[:1].isdigit() and "." in word), "") if driver else "",
        cuda_problem=_cuda_problem() if driver else "",
        shm_free_bytes=_free_bytes(root / "dev/shm"),
        disks_free_bytes={name: free for name in disks if (free := _free_bytes(Path(name))) is not None},
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0], int(words[1])


def _swapped(process: Path, memory: Mapping[str, int]) -> int:
    """Of the process. To count a pool's swapped pages the kernel walks all of it, so only where anything is swapped."""
    if memory.get("SwapTotal:", 0) == memory.get("SwapFree:", 0):
        return 0
    return dict(_pairs(process / "smaps_rollup")).get("Swap:", 0) * 1024


def _memory_cgroups(lines: str, mount: Path) -> Iterator[Path]:
    """The process's cgroup (version 2) and all its ancestors: all their limits apply.

    In a container the path may be the host's, and not exist below the mount; the mount itself is the container's then.
    """
    own = next((line.removeprefix("0::") for line in lines.splitlines() if line.startswith("0::")), None)
    if own is not None:
        directory = mount / own.lstrip("/")
        yield from (one for one in (directory, *directory.parents) if one == mount or mount in one.parents)


def _cgroup_memory(directory: Path) -> tuple[int | None, int]:
    """Its limit and what it holds. Above memory.high the kernel throttles: a limit in all but name."""
    texts = [_text(directory / name).strip() for name in ("memory.max", "memory.high")]
    cache = dict(_pairs(directory / "memory.stat")).get("inactive_file", 0)
    used = int(_text(directory / "memory.current") or 0)
    return min((int(text) for text in texts if text.isdecimal()), default=None), max(0, used - cache)


def _free_bytes(directory: Path) -> int | None:
    try:
        seen = os.statvfs(directory)
    except OSError:
        return None
    return seen.f_bavail * seen.f_frsize


def _cuda_problem() -> str:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    return ""
