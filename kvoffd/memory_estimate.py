"""An estimate of the memory that the daemon needs, part by part: for its first log line and ``kvoffd config``."""

from __future__ import annotations

from kvoffd.cache.policy import GHOST_PART
from kvoffd.config import Config
from kvoffd.pool.allocator import MIN_SLOT_BYTES
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiering.promotions import FILL_BYTES, MOST_QUEUED
from kvoffd.tiering.writer import MAX_WAITING, WAITING_BYTES
from kvoffd.tiers.disk import index_bytes
from kvoffd_proto.units import format_size

SLOT_BYTES = 112
"""What is known of a slot beside its record at most: the arrays, the index and the order of eviction, of which the last
two are never full (``tests/bench/scale.py``: up to 92 of blocks with one slot)."""
PROCESS_BYTES = 256 << 20
"""What an idle process has, namespaces, sessions, queues, the hit-ratio curve, why keys left."""
IDLE_BYTES = 34 << 20
"""Of the process without clients, as README.md and ``stats`` have it: what it shares with nobody."""
SHARED_BYTES = 96 << 20
"""Answers of a shared store, and what is being asked and moved."""
QUEUES_BYTES = MOST_QUEUED * FILL_BYTES + MAX_WAITING * WAITING_BYTES
"""Blocks that wait to be read from or written to the disks, or to one store."""
IN_USE_AT_START = ("pool", "slot table and page tables", "process and clients")
"""What a daemon whose pool is touched has already: what its cgroup has left is without it."""


def memory_estimate(config: Config) -> dict[str, int]:
    """Bytes by what they are for, the pool first."""
    return {
        "pool": config.pool_bytes,
        "slot table and page tables": config.pool_bytes * 21 // 1000,
        "what is known of the blocks": config.pool_bytes // MIN_SLOT_BYTES * SLOT_BYTES,
        "keys without blocks": 0 if config.eviction_policy == "lru" else config.pool_bytes // GHOST_PART,
        "indices of disks": sum(index_bytes(one.size_bytes) for one in config.disk),
        "shared stores": SHARED_BYTES * len(config.shared),
        "queues of disks and stores": QUEUES_BYTES * (bool(config.disk) + len(config.shared)),
        "process and clients": PROCESS_BYTES,
    }


def memory_summary(config: Config) -> str:
    """What an idle daemon takes, and the limit to set and why."""
    parts = memory_estimate(config)
    idle = parts["pool"] + parts["slot table and page tables"] + IDLE_BYTES
    later = ", ".join(f"{name} {format_size(n)}" for name, n in parts.items() if n and name not in IN_USE_AT_START[:2])
    return (
        f"An idle daemon takes {format_size(idle)} of memory (pool {format_size(parts['pool'])}, its tables "
        f"{format_size(parts['slot table and page tables'])}, the process about {format_size(IDLE_BYTES)}); set the "
        f"memory limit to {format_size(sum(parts.values()))}, since a busy one may take at most: {later}."
    )


def memory_shortage(config: Config, limit: MemoryLimit) -> str:
    """What may happen where less is left than may still be taken, once the pool and its table are; else nothing."""
    parts = memory_estimate(config)
    to_come = sum(parts.values()) - sum(parts[part] for part in IN_USE_AT_START)
    if to_come <= limit.bytes:
        return ""
    return (
        f"Beside what it has the daemon may come to need {format_size(to_come)}, and {format_size(limit.bytes)} are "
        f"left ({limit.source}): it may be ended for want of memory. Give it more, or choose a smaller pool_size."
    )
