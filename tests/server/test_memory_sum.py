"""What the daemon says it needs is the sum of the bounds that hold where memory is taken."""

from __future__ import annotations

from kvoffd.config import Config
from kvoffd.memory_needs import memory_needs, memory_shortage, memory_summary
from kvoffd.system.limits import MemoryLimit

GIB = 1 << 30


def test_it_says_what_each_part_is_for_and_from_which_size_of_blocks_on_it_is_enough() -> None:
    config = Config(pool_bytes=64 * GIB)
    assert memory_summary(config) == (
        "The daemon needs 69.7 GiB of memory: pool 64.0 GiB, slot table and page tables 1.34 GiB, index of the blocks "
        "1.00 GiB, keys without blocks 1.28 GiB, the policy's file 1.60 GiB, clients 457 MiB, process 64.0 MiB. The "
        "index has room for 1,789,569 blocks of one shard; if they have less than 37.5 KiB, it is full before the pool "
        "is: raise index_size then."
    )
    for policy, lacks in (("lru", "keys without blocks"), ("lru", "policy's file"), ("arc", "policy's file")):
        assert lacks not in memory_summary(Config(eviction_policy=policy))
    assert memory_summary(Config(pool_bytes=GIB)).endswith("of one shard; the pool can hold no more than that.")


def test_a_shortage_beside_what_is_taken_is_told_with_both_numbers() -> None:
    config = Config(pool_bytes=64 * GIB)
    needs = memory_needs(config)
    to_come = sum(needs.values()) - needs["pool"] - needs["slot table and page tables"] - needs["process"]
    assert memory_shortage(config, MemoryLimit(to_come, "the machine")) == ""
    assert memory_shortage(config, MemoryLimit(to_come - 1, "the machine")).startswith(
        "Beside what it has the daemon may come to need 4.33 GiB, and 4.33 GiB are left (the machine): "
    )


def test_a_container_with_the_memory_that_the_daemon_asks_for_is_not_warned_of() -> None:
    """What its cgroup had in use once the pool of 1 GiB was touched was measured: 1,081 MiB in podman."""
    config = Config(pool_bytes=GIB)
    limit = sum(memory_needs(config).values())
    assert memory_shortage(config, MemoryLimit(limit - (1081 << 20), "the memory cgroup")) == ""
