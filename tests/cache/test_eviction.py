"""Making space in odd cases; ``test_cache`` has the plain ones."""

from __future__ import annotations

import pytest

from kvoffd.cache.block_table import FREE as A
from kvoffd.cache.block_table import READY as R
from kvoffd.cache.namespace import Namespace
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of


def full_rig(policy: str = "lru") -> CacheRig:
    """Two regions of four small slots."""
    return CacheRig(units=8, region_units=4, policy=policy)


def order(rig: CacheRig) -> list[int]:
    """Keys of 8 bytes in the order in which they would go."""
    every = [block for batch in rig.cache.policy.candidates() for block in batch.tolist()]
    return [int.from_bytes(rig.cache.block(block).key, "big") for block in every]


def test_very_many_pinned_blocks_are_not_passed_over_for_each_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.victims.MAX_SKIPPED_PINNED", 2)
    rig = full_rig()
    namespace = rig.open("a")
    rig.put(namespace, keys_of(*range(4)))
    rig.cache.lookup(namespace, 1, 5, [(0, keys_of(*range(4)))])
    rig.cache.note_requests()
    rig.put(namespace, keys_of(4, 5, 6, 7))
    for number in (8, 9):
        rig.put(namespace, keys_of(number))
        assert set(order(rig)[:2]) <= {4, 5, 6, 7, 8}, "the pinned ones are behind"
    assert rig.states(namespace, keys_of(*range(4), 8, 9)) == [R] * 6
    check_invariants(rig.cache)


def test_ranks_with_slots_of_different_sizes_evict_whole_blocks() -> None:
    rig = CacheRig(units=16, region_units=4)
    namespace = rig.open_uneven("u", [UNIT, 2 * UNIT])
    for number in range(40):
        assert rig.put(namespace, keys_of(number)) == 0
        check_invariants(rig.cache)
    assert namespace.ready_blocks >= 4


def sizes(rig: CacheRig, large: int) -> tuple[Namespace, Namespace]:
    return rig.open("small"), rig.open("large", sizes=(large * UNIT,))


def test_of_two_regions_the_one_with_more_old_blocks_is_taken_over() -> None:
    rig = full_rig()
    small, large = sizes(rig, 4)
    for number in (*range(8), 1, 2, 3, 7):
        rig.put(small, keys_of(number))
        rig.use(small, keys_of(number))
    # The oldest is 0, alone in its region; then come three of the other.
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4


def test_a_region_too_short_for_the_wanted_size_does_not_end_the_search() -> None:
    rig = CacheRig(units=6, region_units=4)
    small, large = sizes(rig, 4)
    rig.put(small, keys_of(*range(6)))
    in_full_region = [number for number in range(6) if rig.blocks(small, keys_of(number))[0] < 4]
    rig.use(small, keys_of(*in_full_region))
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(large, keys_of(1)) == [R]
    check_invariants(rig.cache)


@pytest.mark.parametrize("policy", ["lru", "arc", "learned"])
def test_a_busy_namespace_grows_at_the_cost_of_an_idle_one(policy: str) -> None:
    rig = CacheRig(units=64, region_units=8, policy=policy)
    idle, busy = sizes(rig, 2)
    rig.put(idle, keys_of(*range(64)))
    for number in range(200):
        assert rig.put(busy, keys_of(number)) == 0
    check_invariants(rig.cache)
    assert busy.ready_blocks >= 28
