"""Estimates the daemon's memory, part by part, for its first log line and ``kvoffd config``."""

from __future__ import annotations

from kvoffd.cache.policy import GHOST_DIVISOR
from kvoffd.config import Config, peer_addresses
from kvoffd.pool.allocator import MIN_SLOT_BYTES
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiering.promotions import FILL_BYTES, MAX_QUEUED
from kvoffd.tiering.writer import MAX_WAITING, WAITING_BYTES
from kvoffd.tiers.disk import index_bytes
from kvoffd_proto.units import exact_size, format_size

SLOT_BYTES = 112
"""Largest metadata of a slot besides its record: arrays, index and eviction order. Index and order are never full, so
``tests/bench/scale.py`` measures up to 92 for blocks of one slot."""
PROCESS_BYTES = 256 << 20
"""The process with namespaces, sessions, queues, hit-ratio curve and the reasons of misses."""
IDLE_BYTES = 34 << 20
"""Private memory of the process without clients, as in README.md and ``stats``."""
SHARED_BYTES = 96 << 20
"""Cached answers of a shared store, and its requests and transfers in progress."""
HELPER_BYTES = 336 << 20
"""The process with NIXL (95 MiB measured at rest), and the memory into which peers' blocks come."""
READS_BYTES, WRITES_BYTES = MAX_QUEUED * FILL_BYTES, MAX_WAITING * WAITING_BYTES
"""Queued reads of a disk or store, and queued writes of all disks, or of one store."""
POOL, TABLES, PROCESS = "pool", "slot table and page tables", "process and clients"
"""Parts that are allocated once the pool is touched, so the cgroup's free memory does not include them."""


def memory_estimate(config: Config) -> dict[str, int]:
    """Return the bytes of each part, the pool first."""
    stores = len(config.shared) + len(peer_addresses(config.peers))
    return {
        POOL: config.pool_bytes,
        TABLES: config.pool_bytes * 21 // 1000,  # 1.9 % and 0.2 %
        "block metadata": config.pool_bytes // MIN_SLOT_BYTES * SLOT_BYTES,
        "keys without blocks": 0 if config.eviction_policy == "lru" else config.pool_bytes // GHOST_DIVISOR,
        "indices of disks": sum(index_bytes(one.size_bytes) for one in config.disk),
        "shared stores": SHARED_BYTES * stores,
        "helper process for peers": HELPER_BYTES if config.peers or config.peer_listen else 0,
        "queues of disks and stores": READS_BYTES * (len(config.disk) + stores)
        + WRITES_BYTES * (bool(config.disk) + stores),
        PROCESS: PROCESS_BYTES,
    }


def memory_summary(config: Config) -> str:
    """Return sentences with an idle daemon's memory, the limit to set, and its parts."""
    parts = memory_estimate(config)
    idle = parts[POOL] + parts[TABLES] + IDLE_BYTES
    later = ", ".join(f"{name} {format_size(n)}" for name, n in parts.items() if n and name not in (POOL, TABLES))
    return (
        f"An idle daemon takes {format_size(idle)} of memory (pool {format_size(parts[POOL])}, its tables "
        f"{format_size(parts[TABLES])}, the process about {format_size(IDLE_BYTES)}); set the "
        f"memory limit to {_whole_units(sum(parts.values()))}, since a busy one may take up to: {later}."
    )


def _whole_units(nbytes: int) -> str:
    """Return a size for a limit, rounded up to whole GiB, or MiB below ten GiB, as the daemon's settings take it."""
    unit = 1 << 30 if nbytes > 10 << 30 else 1 << 20
    return exact_size(-(-nbytes // unit) * unit)


def memory_shortage(config: Config, limit: MemoryLimit) -> str:
    """Return a warning if a touched pool leaves less memory than the daemon may still need; else an empty string."""
    parts = memory_estimate(config)
    to_come = sum(parts.values()) - parts[POOL] - parts[TABLES] - parts[PROCESS]
    if to_come <= limit.bytes:
        return ""
    smaller = "pool_size"
    if to_come - parts["indices of disks"] <= limit.bytes:
        smaller = "disk: its index takes 0.2 % of it"
    return (
        f"The daemon may need {format_size(to_come)} more memory, but only {format_size(limit.bytes)} are left "
        f"({limit.source}): it may be killed when memory runs out. Give it more, or choose a smaller {smaller}."
    )
