"""An estimate of the memory that the daemon needs, part by part: for its first log line and ``kvoffd config``."""

from __future__ import annotations

from kvoffd.cache.namespace import SLOT_BYTES, nbytes_of_block
from kvoffd.cache.policies import GHOST_PART, keeps_record, remembers_keys
from kvoffd.config import Config
from kvoffd.pool.allocator import MIN_SLOT_BYTES
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiers.disk import index
from kvoffd_proto.units import format_count, format_size

LEAST_INDEX_BYTES, INDEX_PART = 128 << 20, 64
POLICY_FILES_PART = 40
"""A policy's file lies on tmpfs, twice while it is written: 56 bytes of a key that takes 116 in memory."""
KEY_BYTES = 32
"""Of vLLM's block hashes."""
PROCESS_BYTES = 256 << 20
"""Interpreter and libraries (31 MiB measured), namespaces, sessions, queues, the hit-ratio curve, why keys left."""
IDLE_BYTES = 52 << 20
"""Of the process without clients, as README.md has it."""
SHARED_BYTES = 96 << 20
"""Answers of a shared store, and what is being asked and moved."""
IN_USE_AT_START = ("pool", "slot table and page tables", "process and clients")
"""What a daemon whose pool is touched has already: what its cgroup has left is without it."""


def memory_estimate(config: Config) -> dict[str, int]:
    """Bytes by what they are for, the pool first."""
    policy = config.eviction_policy
    return {
        "pool": config.pool_bytes,
        "slot table and page tables": config.pool_bytes * 21 // 1000,
        "index of the blocks": max_index_bytes(config),
        "keys without blocks": config.pool_bytes // GHOST_PART if remembers_keys(policy) else 0,
        "the policy's file": config.pool_bytes // POLICY_FILES_PART if keeps_record(policy) else 0,
        "indices of disks": sum(index.index_bytes(one.size_bytes) for one in config.disk),
        "shared stores": SHARED_BYTES * len(config.shared),
        "process and clients": PROCESS_BYTES,
    }


def max_index_bytes(config: Config) -> int:
    """Memory for what is known of the blocks in the pool."""
    return config.index_bytes or max(LEAST_INDEX_BYTES, config.pool_bytes // INDEX_PART)


def memory_summary(config: Config) -> str:
    """What an idle daemon takes, the limit to set and why, and the size of blocks that the index has room for."""
    parts = memory_estimate(config)
    idle = parts["pool"] + parts["slot table and page tables"] + IDLE_BYTES
    later = ", ".join(f"{name} {format_size(n)}" for name, n in parts.items() if n and name not in IN_USE_AT_START[:2])
    blocks = max(1, max_index_bytes(config) // (nbytes_of_block(KEY_BYTES, 1) + SLOT_BYTES))
    text = (
        f"An idle daemon takes {format_size(idle)} of memory (pool {format_size(parts['pool'])}, its tables "
        f"{format_size(parts['slot table and page tables'])}, the process about {format_size(IDLE_BYTES)}); set the "
        f"memory limit to {format_size(sum(parts.values()))}, since a busy one may take at most: {later}."
    )
    if config.pool_bytes <= blocks * MIN_SLOT_BYTES:
        return text
    each = format_size(config.pool_bytes / blocks)
    return (
        f"{text} The index has room for {format_count(blocks)} blocks of one shard: raise index_size if blocks have "
        f"less than {each}."
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
