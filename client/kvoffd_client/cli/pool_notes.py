"""Lines about the pool for the page of statistics: each a sentence and its style."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffd_client.cli.console import count_blocks, percent
from kvoffd_proto.stats import PoolStats
from kvoffd_proto.units import format_count, format_size

FULL_INDEX = 0.98
"""From this share of its limit on the index makes blocks go, and not the pool."""


def index_is_full(pool: PoolStats) -> bool:
    """Whether blocks go for want of room in the index."""
    return pool.index_counted_bytes >= FULL_INDEX * pool.index_limit_bytes > 0


def pool_notes(pool: PoolStats) -> Iterator[tuple[str, str]]:
    if pool.index_counted_bytes:
        taken, counted, limit = map(format_size, (pool.index_bytes, pool.index_counted_bytes, pool.index_limit_bytes))
        yield f"index {taken}; counted as {counted} of {limit}", "dim"
        if index_is_full(pool):
            yield "blocks are evicted since the index is full: raise index_size", "yellow"
    if pool.recovering_blocks:
        left = f"{count_blocks(pool.recovering_blocks)} ({format_size(pool.of('recovering'))})"
        yield f"{left} of an earlier daemon are still to be taken over", "yellow"
    if pool.numa_remote_slots:
        yield f"{format_count(pool.numa_remote_slots)} slots so far lie on another NUMA node than their GPU", "yellow"
    if 0 < pool.pinned_for_gpu_bytes < pool.size_bytes:
        locked = format_size(pool.pinned_for_gpu_bytes)
        yield f"{locked} are page-locked for GPUs so far; the rest is copied slowly", "yellow"
    if pool.pinning_gpu_bytes:
        yield f"page-locking it takes {format_size(pool.pinning_gpu_bytes)} of a GPU's memory", "dim"
    if pool.of("quarantined"):
        lost = format_size(pool.of("quarantined"))
        yield f"{lost} in quarantine: not as they were stored; see kvoffd-cli health", "red"
    touched = pool.usable_bytes + pool.of("quarantined")
    if touched < pool.size_bytes:
        yield f"starting: {percent(touched, pool.size_bytes)} of the pool's memory is touched", "yellow"
