"""What the daemon needs of memory, part by part: told by its first log line and ``kvoffd config``.

Each part is a bound that holds whatever clients do. What of it is in use, ``kvoffd-cli stats`` tells.
"""

from __future__ import annotations

from kvoffd.cache.namespace import SLOT_BYTES, nbytes_of_block
from kvoffd.cache.policies import GHOST_PART, keeps_record, remembers_keys
from kvoffd.config import Config
from kvoffd.pool.slots import MIN_SLOT_BYTES
from kvoffd.system.limits import MemoryLimit
from kvoffd.tiers.disk import index
from kvoffd_proto.units import format_count, format_size

LEAST_INDEX_BYTES, INDEX_PART = 128 << 20, 64
POLICY_FILES_PART = 40
"""What a policy knows is kept on tmpfs, twice while it is written: 56 bytes of a key (``learned/records.c``) that takes
116 in memory, or has a block of ``MIN_SLOT_BYTES`` at least."""
KEY_BYTES = 32
"""Of vLLM's block hashes."""
PROCESS_BYTES = 64 << 20
"""Interpreter and libraries (31 MiB, measured), why keys left (4 MiB: ``misses.ENTRIES``), the curve's sample (8 MiB:
``curve.c``), a recording (8 MiB: ``recorder``), threads, the connections of HTTP."""
SHARED_BYTES = 96 << 20
"""Answers of a shared store (``tiers.shared.answers.MOST_ANSWERS``), and what is being asked and moved."""
FRAMES_AT_A_TIME = 6
"""Those that wait in libzmq, and one that is decoded, twice."""
CONNECTIONS_BYTES = 160 << 10
"""Two connections of a client: libzmq's queues, as full as they become in use. Their bound is one of messages."""
OUTPUT_BYTES = 104 << 20
"""What stopped clients leave unread, and KV events that are kept for a replay (``publisher.MAX_KEPT_BYTES``)."""
IN_USE_AT_START = ("pool", "slot table and page tables", "process")
"""What a daemon whose pool is touched has already: what its cgroup has left is without it."""


def memory_needs(config: Config) -> dict[str, int]:
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
        "clients": clients_bytes(config),
        "process": PROCESS_BYTES,
    }


def max_index_bytes(config: Config) -> int:
    """Memory for what is known of the blocks in the pool."""
    return config.index_bytes or max(LEAST_INDEX_BYTES, config.pool_bytes // INDEX_PART)


def clients_bytes(config: Config) -> int:
    """What clients can make the daemon keep, whatever they do: the sum of all bounds."""
    frames = FRAMES_AT_A_TIME * config.max_frame_bytes
    input_bytes = (2 * config.max_sessions + 32) * CONNECTIONS_BYTES
    return config.namespaces_bytes + config.sessions_bytes + frames + input_bytes + OUTPUT_BYTES


def memory_summary(config: Config) -> str:
    """The sum, its parts, and the size of blocks that it is enough for."""
    needs = memory_needs(config)
    parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in needs.items() if nbytes)
    blocks = max(1, max_index_bytes(config) // (nbytes_of_block(KEY_BYTES, 1) + SLOT_BYTES))
    text = (
        f"The daemon needs {format_size(sum(needs.values()))} of memory: {parts}. The index has room for "
        f"{format_count(blocks)} blocks of one shard"
    )
    if config.pool_bytes <= blocks * MIN_SLOT_BYTES:
        return f"{text}; the pool can hold no more than that."
    each = format_size(config.pool_bytes / blocks)
    return f"{text}; if they have less than {each}, it is full before the pool is: raise index_size then."


def memory_shortage(config: Config, limit: MemoryLimit) -> str:
    """What may happen where less is left than may still be taken, once the pool and its table are; else nothing."""
    needs = memory_needs(config)
    to_come = sum(needs.values()) - sum(needs[part] for part in IN_USE_AT_START)
    if to_come <= limit.bytes:
        return ""
    return (
        f"Beside what it has the daemon may come to need {format_size(to_come)}, and {format_size(limit.bytes)} are "
        f"left ({limit.source}): it may be ended for want of memory. Give it more, or choose a smaller "
        f"{'index_size or ' if config.index_bytes else ''}pool_size."
    )
