"""Making room: who is evicted, who never is, and how different slot sizes share the pool."""

from __future__ import annotations

import pytest

from kvoffd.cache.namespace import SLOT_BYTES, BlockState, Namespace, nbytes_of_block
from kvoffd.cache.policies.arc import Policy as ArcPolicy
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of, made
from tests.kit.invariants import check_invariants

A, W, R = BlockState.ABSENT, BlockState.WRITING, BlockState.READY


def full_rig(policy: str = "lru") -> CacheHarness:
    """Two regions of four small slots."""
    return CacheHarness(regions=2, region_bytes=4 * SLOT_UNIT, policy=policy)


def use(rig: CacheHarness, namespace: Namespace, keys: bytes) -> None:
    """Look keys up, touch them, let them go."""
    rig.cache.lookup(namespace, 77, 7, [(0, keys)])
    rig.cache.touch(77)
    rig.cache.release(7, [77])


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_only_as_many_blocks_go_as_are_needed_the_oldest_first(policy: str) -> None:
    rig = full_rig(policy)
    namespace = rig.open()
    for number in range(8):
        rig.put(namespace, keys_of(number))
    assert rig.put(namespace, keys_of(100, 101)) == 0
    assert rig.states(namespace, keys_of(0, 1, 2, 7, 100, 101)) == [A, A, R, R, R, R]
    assert namespace.counters.evicted_blocks == 2
    assert ("removed", 0, [keys_of(0), keys_of(1)]) in rig.events.log
    check_invariants(rig.cache)


def test_pinned_and_half_written_blocks_are_never_evicted() -> None:
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(6)))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(*range(6)))])
    writing = begin_store(rig.cache, namespace, 0, 0, keys_of(6, 7))
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(8, 9))
    assert (ticket.copy, ticket.dropped) == ([], [0, 1])
    assert namespace.counters.dropped_keys == 2
    rig.cache.commit_store(ticket)
    rig.cache.commit_store(writing)
    assert rig.states(namespace, keys_of(*range(10))) == [R] * 8 + [A] * 2
    check_invariants(rig.cache)


def test_very_many_pinned_blocks_are_not_passed_over_for_each_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.cache.policies.lru.MAX_HELD", 2)
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(4)))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(*range(4)))])
    rig.cache.touch(5)
    rig.put(namespace, keys_of(4, 5, 6, 7))
    for number in (8, 9):
        rig.put(namespace, keys_of(number))
        order = [int.from_bytes(block.key, "big") for block in rig.cache.policy.candidates()]
        assert set(order[:2]) <= {4, 5, 6, 7, 8}, "the pinned ones are behind"
    assert rig.states(namespace, keys_of(*range(4), 8, 9)) == [R] * 6
    check_invariants(rig.cache)


def test_a_job_larger_than_the_pool_keeps_its_head_and_drops_its_tail() -> None:
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(90, 91))
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(*range(10)))
    assert (ticket.copy, ticket.dropped) == ([*range(8)], [8, 9])
    rig.cache.commit_store(ticket)
    check_invariants(rig.cache)


def test_a_job_never_evicts_its_own_keys() -> None:
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(8)))
    order = [int.from_bytes(block.key, "big") for block in rig.cache.policy.candidates()]
    oldest = order[:2]
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(100, *oldest, 101))
    assert (ticket.copy, ticket.dropped) == ([0, 3], [])
    assert rig.states(namespace, keys_of(*order)) == [R, R, A, A, R, R, R, R]


def test_a_job_never_evicts_the_keys_of_its_other_groups() -> None:
    rig = full_rig()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    rig.put(namespace, keys_of(*range(8)))
    first = begin_store(rig.cache, namespace, 0, 0, keys_of(*range(7)))
    second = begin_store(rig.cache, namespace, 0, 1, keys_of(1, 2), same_job=[first])
    assert (second.copy, second.dropped) == ([0], [1])
    assert rig.states(namespace, keys_of(*range(8))) == [R] * 7 + [A]


def test_new_blocks_of_a_chain_go_tail_first() -> None:
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(8)))
    rig.put(namespace, keys_of(100))
    assert rig.states(namespace, keys_of(0, 6, 7)) == [R, R, A]


def test_slots_come_in_ascending_order() -> None:
    rig = full_rig()
    namespace = rig.open()
    rig.put(namespace, keys_of(*range(8)))
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(*range(20, 26)))
    assert ticket.offsets == sorted(ticket.offsets)
    assert len(set(ticket.offsets)) == 6


def test_a_block_goes_with_the_slots_of_all_its_ranks() -> None:
    rig = full_rig()
    namespace = rig.open(world_size=2)
    for number in range(4):
        rig.put(namespace, keys_of(number))
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(10, 11))
    assert len(ticket.copy) == 2
    # One block of two slots was enough for two shards.
    assert namespace.counters.evicted_blocks == 1
    check_invariants(rig.cache)


def test_a_new_size_takes_over_the_coldest_region_when_the_pool_is_full() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", shard_bytes=(2 * SLOT_UNIT,))
    for number in range(8):
        rig.put(small, keys_of(number))
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(small, keys_of(*range(8))) == [A] * 4 + [R] * 4
    # The rest of the region serves its new size without another eviction.
    assert rig.put(large, keys_of(2)) == 0
    assert small.counters.evicted_blocks == 4
    check_invariants(rig.cache)


def test_a_region_with_a_pinned_block_is_not_taken_over() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))
    for number in range(8):
        rig.put(small, keys_of(number))
    rig.cache.lookup(small, 5, 1, [(0, keys_of(1))])
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4
    rig.cache.lookup(small, 6, 1, [(0, keys_of(3))])
    rig.cache.lookup(large, 7, 1, [(0, keys_of(1))])
    # Nothing can make room now, so nothing is evicted in vain.
    assert rig.put(large, keys_of(2)) == 1
    assert rig.states(small, keys_of(*range(4))) == [R] * 4
    check_invariants(rig.cache)


def test_of_two_regions_the_one_with_more_old_blocks_is_taken_over() -> None:
    rig = full_rig()
    small, large = rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))
    for number in (*range(8), 1, 2, 3, 7):
        rig.put(small, keys_of(number))
        use(rig, small, keys_of(number))
    # The oldest is 0, alone in its region; then come three of the other.
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(small, keys_of(*range(8))) == [R] * 4 + [A] * 4


def test_regions_that_can_not_be_taken_over_do_not_end_the_search() -> None:
    rig = CacheHarness(regions=3, region_bytes=4 * SLOT_UNIT)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))
    for number in range(12):
        rig.put(small, keys_of(number))
    rig.cache.lookup(small, 5, 1, [(0, keys_of(3, 7))])
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(small, keys_of(*range(12))) == [R] * 8 + [A] * 4


def test_a_region_with_a_key_of_the_same_job_is_not_taken_over() -> None:
    rig = full_rig()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, 4 * SLOT_UNIT))
    for number in range(8):
        rig.put(namespace, keys_of(number))
    first = begin_store(rig.cache, namespace, 0, 0, keys_of(2))
    second = begin_store(rig.cache, namespace, 0, 1, keys_of(1, 2), same_job=[first])
    assert (second.copy, second.dropped) == ([0], [1])
    assert rig.states(namespace, keys_of(*range(8))) == [R] * 4 + [A] * 4


def test_the_policy_is_told_what_was_evicted_and_what_was_only_dropped() -> None:
    rig = full_rig("arc")
    namespace = rig.open()
    assert isinstance(rig.cache.policy, ArcPolicy)
    rig.put(namespace, keys_of(*range(8)))
    use(rig, namespace, keys_of(0, 1, 2, 3))
    made(rig.cache.invalidate(namespace, [(0, keys_of(7))]))
    rig.put(namespace, keys_of(8))
    assert rig.cache.policy.ghosts == 0
    rig.put(namespace, keys_of(9))
    assert rig.cache.policy.ghosts == 1


def test_a_region_too_short_for_the_wanted_size_does_not_end_the_search() -> None:
    rig = CacheHarness(regions=1, region_bytes=4 * SLOT_UNIT, last_region_bytes=2 * SLOT_UNIT)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))
    rig.put(small, keys_of(*range(6)))
    in_short_region = [key for key, block in small.index[0].items() if block.shards[0].offset >= 4 * SLOT_UNIT]
    others = [key for key in small.index[0] if key not in in_short_region]
    use(rig, small, b"".join(others))
    assert rig.put(large, keys_of(1)) == 0
    assert rig.states(large, keys_of(1)) == [R]
    check_invariants(rig.cache)


def test_one_old_block_of_another_size_does_not_cost_a_region_in_use() -> None:
    rig = CacheHarness(regions=2, region_bytes=8 * SLOT_UNIT)
    small, large = rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))
    rig.put(small, keys_of(0))
    rig.put(large, keys_of(1, 2))
    rig.put(small, keys_of(*range(1, 8)))
    assert rig.put(large, keys_of(3)) == 0
    assert rig.states(small, keys_of(*range(8))) == [R] * 8
    assert large.counters.evicted_blocks == 1


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_busy_namespace_grows_at_the_cost_of_an_idle_one(policy: str) -> None:
    rig = CacheHarness(regions=8, region_bytes=8 * SLOT_UNIT, policy=policy)
    idle, busy = rig.open("idle"), rig.open("busy", shard_bytes=(2 * SLOT_UNIT,))
    rig.put(idle, keys_of(*range(64)))
    for number in range(200):
        assert rig.put(busy, keys_of(number)) == 0
    check_invariants(rig.cache)
    assert busy.ready_blocks >= 28


def test_two_busy_namespaces_share_the_pool_and_neither_starves() -> None:
    rig = CacheHarness(regions=16, region_bytes=8 * SLOT_UNIT)
    spaces = [rig.open("small"), rig.open("large", shard_bytes=(4 * SLOT_UNIT,))]
    for number in range(600):
        # The small ones bring four blocks for each large one: the same bytes.
        assert rig.put(spaces[0], keys_of(*range(4 * number, 4 * number + 4))) == 0
        assert rig.put(spaces[1], keys_of(number)) == 0
        if number > 100:
            assert min(space.ready_bytes for space in spaces) >= rig.slots.pool_bytes // 4
    check_invariants(rig.cache)
    stored = sum(space.counters.stored_blocks * space.slot_bytes(0, 0) for space in spaces)
    evicted = sum(space.counters.evicted_blocks * space.slot_bytes(0, 0) for space in spaces)
    # Beyond what had to go, hardly anything went: at most what two regions hold.
    assert stored - evicted >= rig.slots.pool_bytes - 3 * rig.slots.region_bytes


def test_ranks_with_slots_of_different_sizes_evict_whole_blocks() -> None:
    rig = CacheHarness(regions=4, region_bytes=4 * SLOT_UNIT)
    namespace, _ = rig.cache.open_namespace(b"u" * 32, "uneven", 2, 8, rig.open().groups, "")
    rig.cache.set_shard_bytes(namespace, 0, [SLOT_UNIT])
    rig.cache.set_shard_bytes(namespace, 1, [2 * SLOT_UNIT])
    for number in range(40):
        assert rig.put(namespace, keys_of(number)) == 0
        check_invariants(rig.cache)
    assert namespace.ready_blocks >= 4


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_no_more_slots_are_in_use_than_the_index_may_have(policy: str) -> None:
    most = 10 * (nbytes_of_block(8, 1) + SLOT_BYTES)
    rig = CacheHarness(regions=8, region_bytes=8 * SLOT_UNIT, policy=policy, max_index_bytes=most)
    namespace = rig.open()
    for number in range(0, 40, 2):
        assert rig.put(namespace, keys_of(number, number + 1)) == 0
        assert rig.cache.blocks.index_bytes <= most
    assert namespace.ready_blocks == 10
    assert rig.states(namespace, keys_of(29, 30, 39)) == [A, R, R]
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(*range(30, 40)))])
    assert rig.put(namespace, keys_of(50, 51)) == 2, "what is leased stays"
    assert rig.states(namespace, keys_of(*range(30, 40))) == [R] * 10
    check_invariants(rig.cache)


def test_the_ranks_of_a_world_count_before_they_store() -> None:
    """Each block has room for what is known of all ranks' shards from its first one on."""
    most = 10 * (nbytes_of_block(8, 4096) + SLOT_BYTES)
    rig = CacheHarness(regions=8, region_bytes=8 * SLOT_UNIT, max_index_bytes=most)
    namespace, _ = rig.cache.open_namespace(b"w" * 32, "wide", 4096, 8, rig.open().groups, "")
    rig.cache.set_shard_bytes(namespace, 4095, [SLOT_UNIT])
    ticket = begin_store(rig.cache, namespace, 4095, 0, keys_of(*range(12)))
    assert (len(ticket.copy), len(ticket.dropped)) == (10, 2)
    rig.cache.abort_store(ticket)
    check_invariants(rig.cache)
    assert rig.cache.blocks.index_bytes == 0
