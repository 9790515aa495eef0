"""Limits of memory (the machine's and its cgroups') and of open files."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvoffd.errors import KvoffdError, PoolTooLarge
from kvoffd.system.files import held_bytes, open_directory, text_of
from kvoffd_proto.cuda import descriptor_limits
from kvoffd_proto.units import exact_size, format_size

logger = logging.getLogger(__name__)

MIN_DESCRIPTORS = 1024
"""Descriptors that the daemon requires: libzmq aborts the process if it cannot accept a connection."""
MAX_DESCRIPTORS = 65536
USABLE_SHARE = 7 / 8
"""Share of the limit of open files beyond which no further client may connect: libzmq aborts the process if it has no
descriptor for a connection."""
# cgroup v1 writes the largest page count, in bytes, for "no limit".
_NO_LIMIT = 2**62
RESERVED_FROM_BYTES = 1 << 30
"""Smallest memory that takes reserved huge pages: a small pool gains nothing, and they may be meant for others."""
START_BYTES = 24 << 20
"""Memory that the daemon takes from the end of its command line until it serves, without a pool (measured: 21 MiB)."""


class _CgroupFiles(NamedTuple):
    """Names of a cgroup's files in one version of cgroups."""

    usage: str
    limits: Sequence[str]
    stat_prefix: str
    """Beginning of the fields of memory.stat that include the cgroup's children."""


_VERSION_1 = _CgroupFiles("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_")
# Above memory.high the kernel throttles a process to a standstill, so it counts as a limit.
_VERSION_2 = _CgroupFiles("memory.current", ("memory.max", "memory.high"), "")


class MemoryLimit(NamedTuple):
    """``bytes`` of memory are available; ``source`` describes the limit, for messages."""

    bytes: int
    source: str


def memory_limit(
    proc: Path = Path("/proc"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    *,
    freed_bytes: int = 0,
    cache_fields: Sequence[str] = ("inactive_file",),
) -> MemoryLimit:
    """Return the least of MemAvailable and the memory left in each cgroup (v1 or v2) of this process.

    Files that are missing or unreadable are no limit.

    Args:
        freed_bytes: shared memory that will be freed first. A cgroup gets back only what it is charged for, and the
            memory may be charged to another cgroup, such as that of a container that was killed.
        cache_fields: fields of a cgroup's memory.stat with page cache that counts as free.
    """
    limits = [_machine_limit(proc, freed_bytes)]
    for controller, path in _cgroups(proc):
        if controller == "memory":
            limits.extend(_cgroup_limits(cgroup_root / "memory", path, _VERSION_1, freed_bytes, cache_fields))
        elif controller == "":
            # The hybrid mode of systemd mounts v2 below the v1 controllers.
            for root in (cgroup_root, cgroup_root / "unified"):
                limits.extend(_cgroup_limits(root, path, _VERSION_2, freed_bytes, cache_fields))
    return min(limits, key=lambda limit: limit.bytes)


def open_pool_directory(path: Path) -> int:
    """Return a descriptor of the directory of a pool file. Raises KvoffdError if there is none, or if the file itself
    is a directory."""
    if os.path.isdir(path):
        raise KvoffdError(f"The pool file {path} is a directory; name a file in it, such as {path}/kvoffd.pool.")
    try:
        return open_directory(path.parent)
    except OSError as error:
        raise KvoffdError(
            f"The directory {path.parent} of the pool file cannot be opened ({error.strerror}); "
            "mount a tmpfs there or name another file."
        ) from error


def lies_on_hugetlbfs(directory_fd: int, path: Path) -> bool:
    """Return whether a pool file in this directory would, not on tmpfs. Raises KvoffdError if on neither."""
    from kvoffd.system.mappings import HUGETLBFS_MAGIC, TMPFS_MAGIC, filesystem_magic  # with NumPy

    magic = filesystem_magic(directory_fd)
    if magic not in (TMPFS_MAGIC, HUGETLBFS_MAGIC):
        raise KvoffdError(
            f"The pool file {path} would lie on a disk: its file system is neither tmpfs nor hugetlbfs. "
            "Name a file on one of these, such as /dev/shm/kvoffd.pool."
        )
    return magic == HUGETLBFS_MAGIC


def tmpfs_limit(directory_fd: int, directory: Path, file_bytes: int) -> MemoryLimit:
    """Return the memory for a file on the tmpfs in which a directory is: the least of ``memory_limit`` and its free
    space, and the ``file_bytes`` that the file holds already."""
    space, limit = os.fstatvfs(directory_fd), memory_limit()
    free_bytes = space.f_bavail * space.f_frsize
    if space.f_blocks and free_bytes < limit.bytes:  # else mounted without a limit, or with a larger one
        limit = MemoryLimit(free_bytes, f"free space on {directory}; see df, and mount's option size")
    return MemoryLimit(limit.bytes + file_bytes, limit.source)


def default_huge_page_bytes() -> int:
    """Return the size of the kernel's usual huge pages; 0 if it has none."""
    return _meminfo("Hugepagesize:")


def machine_huge_bytes(*, shared: bool) -> int:
    """Return the bytes of all processes' private memory in huge pages, or of all ``shared`` memory in them."""
    return _meminfo("ShmemHugePages:" if shared else "AnonHugePages:")


def free_huge_pages(page_bytes: int) -> int:
    """Return the number of reserved huge pages of a size that are neither in use nor promised to a mapping."""
    pages = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB")
    return (_number(pages / "free_hugepages") or 0) - (_number(pages / "resv_hugepages") or 0)


def fits_reserved(size_bytes: int, freed_bytes: int = 0) -> bool:
    """Return whether this memory fits into free reserved huge pages, to which ``freed_bytes`` will be returned."""
    if size_bytes < RESERVED_FROM_BYTES:
        return False
    page_bytes = default_huge_page_bytes()
    if not page_bytes or size_bytes % page_bytes:
        return False
    return free_huge_pages(page_bytes) * page_bytes + freed_bytes >= size_bytes


def check_fits(wanted_bytes: int, limit: MemoryLimit) -> None:
    """Raise PoolTooLarge if ``wanted_bytes`` are more than the limit."""
    if wanted_bytes > limit.bytes:
        unit = 1 << (30 if limit.bytes >= 8 << 30 else 20)
        # Not all of it: the pool's tables and the daemon itself need memory too.
        fits = exact_size(max(1, limit.bytes * 3 // 4 // unit) * unit)
        raise PoolTooLarge(
            f"The pool needs {format_size(wanted_bytes)}, but only {format_size(limit.bytes)} are available "
            f"({limit.source}). Choose a smaller pool_size, such as {fits}, or give the daemon more memory."
        )


def check_start(pool_file: str) -> None:
    """Raise PoolTooLarge if the daemon would be killed for memory before it serves.

    A pool file of an earlier daemon, which was perhaps killed for memory, still uses memory.
    """
    # All page cache counts as free: the kernel takes back even active one before it kills a process.
    limit = memory_limit(cache_fields=("inactive_file", "active_file"))
    if limit.bytes < START_BYTES:
        held = held_bytes(os.stat(pool_file)) if pool_file and os.path.exists(pool_file) else 0
        cure = f", or remove the pool file {pool_file}, which holds {format_size(held)} of it" if held else ""
        raise PoolTooLarge(
            f"The daemon needs {format_size(START_BYTES)} to start, but only {format_size(limit.bytes)} are available "
            f"({limit.source}). Give it more memory{cure}."
        )


def _machine_limit(proc: Path, freed_bytes: int) -> MemoryLimit:
    for name, value in _pairs(proc / "meminfo"):
        if name == "MemAvailable:":
            return MemoryLimit(value * 1024 + freed_bytes, "MemAvailable")
    return MemoryLimit(2**63 - 1, "the address space; /proc/meminfo has no MemAvailable")


def _cgroups(proc: Path) -> Iterator[tuple[str, str]]:
    """Yield controller and path of each cgroup of this process; the controller of v2 is the empty string."""
    for line in text_of(proc / "self" / "cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                yield controller, fields[2]


def _cgroup_limits(
    root: Path, path: str, files: _CgroupFiles, freed_bytes: int, cache_fields: Sequence[str]
) -> Iterator[MemoryLimit]:
    """Yield the limits of the cgroup and of all its ancestors, all of which apply.

    In a container the path may be the host's and not exist below the mount; then the mount is the container's cgroup.
    """
    # The path of a cgroup outside this process's cgroup namespace has "..".
    own = root / path.lstrip("/")
    inside = [one for one in (own, *own.parents) if root in one.parents and ".." not in one.parts]
    return filter(None, (_cgroup_limit(one, files, freed_bytes, cache_fields) for one in (*inside, root)))


def _cgroup_limit(
    directory: Path, files: _CgroupFiles, freed_bytes: int, cache_fields: Sequence[str]
) -> MemoryLimit | None:
    """Return the memory left in one cgroup; None if it has no limit."""
    used = _number(directory / files.usage)
    limits = (_number(directory / name) for name in files.limits)
    limit = min((value for value in limits if value is not None), default=_NO_LIMIT)
    if used is None or limit >= _NO_LIMIT:
        return None
    stat = dict(_pairs(directory / "memory.stat"))
    freed = min(freed_bytes, stat.get(f"{files.stat_prefix}shmem", 0))
    cache = sum(stat.get(files.stat_prefix + name, 0) for name in cache_fields)
    needed = max(0, used - cache - freed)
    total, in_use = format_size(limit), format_size(needed)
    source = f"the memory cgroup {directory} is limited to {total}, of which {in_use} are in use"
    return MemoryLimit(max(0, limit - needed), source)


def _meminfo(name: str) -> int:
    """Return bytes that the kernel counts; 0 if it does not."""
    return 1024 * next((value for found, value in _pairs(Path("/proc/meminfo")) if found == name), 0)


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in text_of(path).splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[1].isdecimal():
            yield fields[0], int(fields[1])


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() else None


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files as far as possible. Raises KvoffdError if it is still too low."""
    soft, hard = descriptor_limits()
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # a seccomp filter
            logger.warning("The limit of open files stays at %d (%s).", soft, error)
    if soft < MIN_DESCRIPTORS:
        raise KvoffdError(
            f"The daemon may open {soft} files, but needs {MIN_DESCRIPTORS}: raise the limit (ulimit -n, LimitNOFILE=)."
        )


def open_descriptors() -> int:
    """Return the number of this process's descriptors; 0 without /proc."""
    try:
        # Since Linux 6.2 the directory's size is their number; listing it takes 12 us for each.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def few_descriptors_left() -> bool:
    """Return whether most descriptors that the process may open are in use, by the lowest free number."""
    try:
        fd = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(fd)
    return fd >= USABLE_SHARE * descriptor_limits()[0]


def check_loop_calls() -> None:
    """Raise KvoffdError if an event loop cannot be created: libuv would abort, or leave an incomplete loop."""
    calls: dict[str, Callable[[], object]] = {
        "epoll_create1": lambda: select.epoll().close(),
        "eventfd2": lambda: os.close(os.eventfd(0, os.EFD_CLOEXEC)),
        "pipe2": lambda: list(map(os.close, os.pipe())),
        "socketpair": lambda: list(map(socket.socket.close, socket.socketpair())),
    }
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            raise KvoffdError(
                f"The daemon cannot create an event loop: {name} failed ({error.strerror}). See the limit of open "
                "files (ulimit -n) and the container's seccomp filter."
            ) from error
