"""Loads: what may be read under a lease, and that its bytes stay until the copy has ended."""

from __future__ import annotations

import pytest

from kvoffd.errors import BadGeometry, BadKeys, NotReady, UnknownLease
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of, made
from tests.kit.invariants import check_invariants


def test_a_load_names_the_slot_of_its_rank_for_every_key() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1, 2))])
    ticket = rig.cache.begin_load(namespace, 1, 5, 0, keys_of(2, 1))
    owners = [rig.slots.records[offset][1] for offset in ticket.offsets]
    assert [(owner.key, owner.rank) for owner in owners if owner] == [(keys_of(2), 1), (keys_of(1), 1)]
    check_invariants(rig.cache)


def test_keys_outside_the_lease_are_named_and_nothing_is_pinned_for_them() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2, 3))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(2))])
    with pytest.raises(NotReady) as caught:
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1, 2, 3))
    assert caught.value.missing == [0, 2]
    check_invariants(rig.cache)
    assert rig.cache.blocks.pinned_blocks == 1


def test_a_load_may_not_begin_before_the_written_range() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2), first_block=2)
    rig.put(namespace, keys_of(0))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(0, 1, 2))])
    with pytest.raises(NotReady) as caught:
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1, 2), first_block=1)
    assert caught.value.missing == [0]
    with pytest.raises(NotReady) as caught:
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(0, 1, 2), first_block=2)
    assert caught.value.missing == [1]
    rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1, 2), first_block=2)
    rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1), first_block=3)
    check_invariants(rig.cache)


@pytest.mark.parametrize(
    ("lease_id", "rank", "group", "keys", "error"),
    [
        (6, 0, 0, keys_of(1), UnknownLease),
        (5, 1, 0, keys_of(1), BadGeometry),
        (5, 0, 3, keys_of(1), BadGeometry),
        (5, 0, 0, b"bad", BadKeys),
    ],
)
def test_a_bad_load_is_refused(lease_id: int, rank: int, group: int, keys: bytes, error: type[Exception]) -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    with pytest.raises(error):
        rig.cache.begin_load(namespace, rank, lease_id, group, keys)
    check_invariants(rig.cache)


def test_a_lease_serves_only_its_own_namespace() -> None:
    rig = CacheHarness()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    with pytest.raises(UnknownLease):
        rig.cache.begin_load(other, 0, 5, 0, keys_of(1))


def test_the_lease_ends_when_the_last_rank_has_loaded() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2, shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    rig.put(namespace, keys_of(1))
    rig.put(namespace, keys_of(1), group=1)
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1)), (1, keys_of(1))])
    for rank, alive in ((0, 1), (0, 1), (1, 0)):
        tickets = [rig.cache.begin_load(namespace, rank, 5, group, keys_of(1)) for group in (0, 1)]
        rig.cache.end_load(tickets, ok=True)
        assert len(rig.cache.leases) == alive
        check_invariants(rig.cache)
    assert rig.cache.blocks.pinned_blocks == 0


def test_a_failed_load_does_not_end_the_lease() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    rig.cache.end_load([rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))], ok=False)
    assert len(rig.cache.leases) == 1
    rig.cache.end_load([rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))], ok=True)
    assert len(rig.cache.leases) == 0


@pytest.mark.parametrize("end", ["expire", "end_owner", "release", "reset"])
def test_bytes_of_a_running_load_outlive_the_end_of_the_lease(end: str) -> None:
    rig = CacheHarness(regions=1, region_bytes=2 * SLOT_UNIT)
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    ticket = rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))
    rig.clock.now += 31
    {
        "expire": rig.cache.expire,
        "end_owner": lambda: rig.cache.end_owner(1),
        "release": lambda: rig.cache.release(1, [5]),
        "reset": lambda: made(rig.cache.reset(namespace)),
    }[end]()
    assert len(rig.cache.leases) == 0
    check_invariants(rig.cache)
    # Two new blocks want room: only the slot nobody reads may be used.
    store = begin_store(rig.cache, namespace, 0, 0, keys_of(3, 4))
    assert len(store.offsets) == 1
    assert ticket.offsets[0] not in store.offsets
    rig.cache.end_load([ticket], ok=True)
    rig.cache.abort_store(store)
    check_invariants(rig.cache)
    assert rig.cache.blocks.pinned_blocks == 0


def test_ending_a_job_without_groups_is_harmless() -> None:
    rig = CacheHarness()
    rig.cache.end_load([], ok=True)
    check_invariants(rig.cache)
