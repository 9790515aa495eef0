"""What the daemon says of the memory that it needs."""

from __future__ import annotations

from kvoffd.config import Config
from kvoffd.memory_estimate import memory_estimate, memory_shortage, memory_summary
from kvoffd.system.limits import MemoryLimit

GIB = 1 << 30


def test_it_says_what_each_part_is_for() -> None:
    config = Config(pool_bytes=64 * GIB)
    assert memory_summary(config) == (
        "An idle daemon takes 65.4 GiB of memory (pool 64.0 GiB, its tables 1.34 GiB, the process about 34.0 MiB); set "
        "the memory limit to 67.7 GiB, since a busy one may take at most: what is known of the blocks "
        "896 MiB, keys without blocks 1.28 GiB, process and clients 256 MiB."
    )
    assert "keys without blocks" not in memory_summary(Config(eviction_policy="lru"))


def test_a_shortage_beside_what_is_taken_is_reported_with_both_numbers() -> None:
    config = Config(pool_bytes=64 * GIB)
    parts = memory_estimate(config)
    to_come = sum(parts.values()) - sum(
        parts[part] for part in ("pool", "slot table and page tables", "process and clients")
    )
    assert memory_shortage(config, MemoryLimit(to_come, "the machine")) == ""
    assert memory_shortage(config, MemoryLimit(to_come - 1, "the machine")).startswith(
        "Beside what it has the daemon may come to need 2.15 GiB, and 2.15 GiB are left (the machine): "
    )
