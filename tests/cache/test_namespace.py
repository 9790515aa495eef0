"""Namespaces: opening, joining, and the geometry that must agree."""

from __future__ import annotations

import pytest

from kvoffd.errors import BadGeometry, NamespaceMismatch, ShardTooLarge, UnknownNamespace
from kvoffd_proto.messages import GroupSpec
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness

GROUPS = [GroupSpec("full", 16), GroupSpec("sliding", 16, 256)]
FINGERPRINT = b"f" * 32


def test_a_second_engine_joins_the_namespace() -> None:
    cache = CacheHarness().cache
    namespace, created = cache.open_namespace(FINGERPRINT, "llama", 2, 32, GROUPS, "{}")
    assert created
    assert cache.open_namespace(FINGERPRINT, "another label", 2, 32, GROUPS, "{}") == (namespace, False)
    assert cache.namespace(FINGERPRINT) is namespace
    assert cache.namespaces == [namespace]
    assert namespace.label == "llama"


@pytest.mark.parametrize(
    ("world_size", "key_bytes", "groups"),
    [(1, 32, GROUPS), (2, 16, GROUPS), (2, 32, GROUPS[:1]), (2, 32, GROUPS[::-1])],
)
def test_another_geometry_is_refused(world_size: int, key_bytes: int, groups: list[GroupSpec]) -> None:
    cache = CacheHarness().cache
    cache.open_namespace(FINGERPRINT, "llama", 2, 32, GROUPS, "{}")
    with pytest.raises(NamespaceMismatch):
        cache.open_namespace(FINGERPRINT, "llama", world_size, key_bytes, groups, "{}")


def test_a_namespace_that_is_not_open_is_unknown() -> None:
    with pytest.raises(UnknownNamespace, match="666666"):
        CacheHarness().cache.namespace(FINGERPRINT)


def test_the_first_registration_of_a_rank_fixes_its_shards_and_ranks_may_differ() -> None:
    cache = CacheHarness().cache
    namespace, _ = cache.open_namespace(FINGERPRINT, "llama", 2, 32, GROUPS, "{}")
    cache.set_shard_bytes(namespace, 0, [100, 5000])
    cache.set_shard_bytes(namespace, 1, [200, 0])
    cache.set_shard_bytes(namespace, 0, [100, 5000])
    assert namespace.shard_bytes(0) == (100, 5000)
    assert namespace.slot_bytes(0, 1) == 2 * SLOT_UNIT
    assert namespace.slot_bytes(1, 1) == SLOT_UNIT
    with pytest.raises(BadGeometry, match=r"\[100, 5000\]"):
        cache.set_shard_bytes(namespace, 0, [100, 5001])


@pytest.mark.parametrize(("rank", "shard_bytes"), [(2, [1, 1]), (-1, [1, 1]), (0, [1]), (0, [1, 1, 1])])
def test_ranks_and_groups_that_are_not_there_are_refused(rank: int, shard_bytes: list[int]) -> None:
    cache = CacheHarness().cache
    namespace, _ = cache.open_namespace(FINGERPRINT, "llama", 2, 32, GROUPS, "{}")
    with pytest.raises(BadGeometry):
        cache.set_shard_bytes(namespace, rank, shard_bytes)


def test_a_shard_that_no_slot_could_hold_is_refused_and_fixes_nothing() -> None:
    cache = CacheHarness(region_bytes=4 * SLOT_UNIT).cache
    namespace, _ = cache.open_namespace(FINGERPRINT, "llama", 1, 32, GROUPS, "{}")
    with pytest.raises(ShardTooLarge):
        cache.set_shard_bytes(namespace, 0, [100, 5 * SLOT_UNIT])
    assert namespace.shard_bytes(0) is None
