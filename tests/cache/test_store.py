"""Stores: who brings which shard, what a block is made of, what happens when a writer fails."""

from __future__ import annotations

import pytest

from kvoffd.cache.namespace import SLOT_BYTES, BlockState, nbytes_of_block
from kvoffd.errors import BadGeometry, BadKeys
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of
from tests.kit.invariants import check_invariants

A, W, R = BlockState.ABSENT, BlockState.WRITING, BlockState.READY


def test_a_block_is_ready_when_every_rank_has_committed() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    first = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2))
    second = begin_store(rig.cache, namespace, 1, 0, keys_of(1, 2))
    assert rig.states(namespace, keys_of(1, 2)) == [W, W]
    assert rig.cache.commit_store(first) == 0
    assert rig.states(namespace, keys_of(1, 2)) == [W, W]
    assert rig.cache.commit_store(second) == 2
    assert rig.states(namespace, keys_of(1, 2)) == [R, R]
    assert rig.events.log == [("stored", 0, [keys_of(1), keys_of(2)])]
    check_invariants(rig.cache)


def test_shards_of_one_block_may_come_from_any_engine_and_job() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    one_engine = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2, 3))
    rig.cache.commit_store(one_engine)
    other_engine = begin_store(rig.cache, namespace, 1, 0, keys_of(3, 1))
    assert rig.cache.commit_store(other_engine) == 2
    assert rig.states(namespace, keys_of(1, 2, 3)) == [R, W, R]


def test_a_shard_that_another_job_writes_is_skipped() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    running = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2))
    same_rank = begin_store(rig.cache, namespace, 0, 0, keys_of(2, 3))
    assert (same_rank.copy, same_rank.dropped) == ([1], [])
    check_invariants(rig.cache)
    rig.cache.commit_store(same_rank)
    rig.cache.commit_store(running)
    check_invariants(rig.cache)


def test_a_shard_that_is_written_is_skipped_in_a_writing_and_in_a_ready_block() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1))
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(2)))
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2, 3))
    assert (ticket.copy, ticket.dropped) == ([2], [])


def test_an_empty_store_is_harmless() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    ticket = begin_store(rig.cache, namespace, 0, 0, b"")
    assert rig.cache.commit_store(ticket) == 0
    assert rig.events.log == []
    check_invariants(rig.cache)


def test_a_shard_lies_in_its_own_slot_and_the_record_says_whose_it_is() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2, shard_bytes=(SLOT_UNIT, 100))
    ticket = begin_store(rig.cache, namespace, 1, 1, keys_of(7, 8), first_block=3)
    assert len(set(ticket.offsets)) == 2
    state, owner, _, _ = rig.slots.records[ticket.offsets[0]]
    assert state == "writing"
    assert owner == (namespace.fingerprint, 1, keys_of(7), 1, 2)
    rig.cache.commit_store(ticket)
    assert rig.slots.records[ticket.offsets[0]] == ("ready", owner, 3, 100)
    assert rig.slots.records[ticket.offsets[1]][2:] == (0, 100)


def test_an_aborted_store_leaves_nothing_behind() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2))
    rig.cache.abort_store(ticket)
    assert rig.states(namespace, keys_of(1, 2)) == [A, A]
    assert rig.cache.pool_usage().free_bytes == rig.slots.pool_bytes
    assert rig.events.log == []
    check_invariants(rig.cache)


def test_what_another_rank_committed_survives_an_abort_and_can_be_completed() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    dying = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    rig.cache.abort_store(dying)
    check_invariants(rig.cache)
    assert rig.states(namespace, keys_of(1)) == [W]
    assert begin_store(rig.cache, namespace, 0, 0, keys_of(1)).copy == []
    again = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    assert again.copy == [0]
    assert rig.cache.commit_store(again) == 1
    check_invariants(rig.cache)


def test_an_abort_while_another_rank_writes_leaves_that_rank_alone() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    dying = begin_store(rig.cache, namespace, 0, 0, keys_of(1))
    living = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    rig.cache.abort_store(dying)
    check_invariants(rig.cache)
    assert rig.cache.commit_store(living) == 0
    check_invariants(rig.cache)
    assert rig.put(namespace, keys_of(1)) == 0
    assert rig.states(namespace, keys_of(1)) == [R]


def test_a_half_stored_block_is_dropped_after_its_time() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    rig.clock.now += 59.9
    assert rig.cache.expire() == 0
    rig.clock.now += 0.2
    assert rig.cache.expire() == 1
    assert rig.states(namespace, keys_of(1)) == [A]
    assert rig.cache.pool_usage().free_bytes == rig.slots.pool_bytes
    assert namespace.counters.invalidated_blocks == namespace.counters.half_stored_blocks == 1
    assert rig.events.log == []
    check_invariants(rig.cache)


def test_blocks_that_lack_a_shard_leave_three_quarters_of_the_pool_to_others() -> None:
    rig = CacheHarness(regions=10)  # 40 slots
    lame, other = rig.open("lame", world_size=2), rig.open("other")
    for first in range(100, 200, 5):
        rig.cache.commit_store(begin_store(rig.cache, lame, 0, 0, keys_of(*range(first, first + 5))))
        assert rig.put(other, keys_of(*range(10))) == 0
        assert rig.states(other, keys_of(*range(10))) == [R] * 10
        check_invariants(rig.cache)
    assert rig.put(other, keys_of(*range(30))) == 0
    assert rig.states(other, keys_of(*range(30))) == [R] * 30
    assert lame.counters.half_stored_blocks == 90
    assert rig.states(lame, keys_of(*range(190, 200))) == [W] * 10


def test_blocks_that_lack_a_shard_leave_three_quarters_of_the_index_to_others() -> None:
    most = 16 * (nbytes_of_block(8, 2) + SLOT_BYTES)
    rig = CacheHarness(regions=10, max_index_bytes=most)
    lame, other = rig.open("lame", world_size=2), rig.open("other")
    for first in range(100, 200, 5):
        rig.cache.commit_store(begin_store(rig.cache, lame, 0, 0, keys_of(*range(first, first + 5))))
        assert rig.put(other, keys_of(*range(5))) == 0
        assert rig.states(other, keys_of(*range(5))) == [R] * 5
        assert rig.cache.blocks.index_bytes <= most
        check_invariants(rig.cache)
    assert rig.put(other, keys_of(*range(12))) == 0
    assert rig.states(other, keys_of(*range(12))) == [R] * 12


def test_what_a_rank_completes_is_not_dropped_for_it() -> None:
    rig = CacheHarness(regions=5)  # 20 slots
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(*range(12))))
    ticket = begin_store(rig.cache, namespace, 1, 0, keys_of(*range(12)))
    assert len(ticket.dropped) == 4
    assert rig.cache.commit_store(ticket) == 8
    check_invariants(rig.cache)


def test_a_half_stored_block_does_not_time_out_while_somebody_writes_it() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    slow = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    rig.clock.now += 1000
    assert rig.cache.expire() == 0
    assert rig.cache.commit_store(slow) == 1
    check_invariants(rig.cache)


def test_the_time_of_a_half_stored_block_begins_with_the_end_of_the_last_write() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    rig.clock.now += 50
    rig.cache.abort_store(begin_store(rig.cache, namespace, 1, 0, keys_of(1)))
    rig.clock.now += 50
    assert rig.cache.expire() == 0
    rig.clock.now += 11
    assert rig.cache.expire() == 1


@pytest.mark.parametrize(
    ("keys", "error"), [(b"1234567", BadKeys), (keys_of(1, 2, 1), BadKeys), (keys_of(1) + b"x", BadKeys)]
)
def test_bad_keys_are_refused_before_anything_changes(keys: bytes, error: type[Exception]) -> None:
    rig = CacheHarness()
    namespace = rig.open()
    with pytest.raises(error):
        begin_store(rig.cache, namespace, 0, 0, keys)
    assert rig.cache.pool_usage().free_bytes == rig.slots.pool_bytes
    assert sum(map(len, namespace.index)) == 0
    check_invariants(rig.cache)


@pytest.mark.parametrize(("rank", "group"), [(0, 1), (0, -1), (2, 0), (-1, 0)])
def test_a_rank_or_group_that_is_not_there_is_refused(rank: int, group: int) -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    with pytest.raises(BadGeometry):
        begin_store(rig.cache, namespace, rank, group, keys_of(1))
    check_invariants(rig.cache)


def test_a_rank_that_has_not_registered_can_not_store() -> None:
    rig = CacheHarness()
    namespace, _ = rig.cache.open_namespace(b"x" * 32, "x", 2, 8, rig.open().groups, "")
    rig.cache.set_shard_bytes(namespace, 0, [SLOT_UNIT])
    with pytest.raises(BadGeometry, match="register it first"):
        begin_store(rig.cache, namespace, 1, 0, keys_of(1))


def test_a_ticket_ends_once() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1))
    rig.cache.commit_store(ticket)
    with pytest.raises(KeyError):
        rig.cache.abort_store(ticket)
    assert rig.states(namespace, keys_of(1)) == [R]
    check_invariants(rig.cache)


def test_a_wider_shard_replaces_a_narrow_one_that_nobody_reads() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2), first_block=2)
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2), first_block=1)
    assert ticket.copy == [0]
    # While it is written anew, what was there is not to be read.
    assert rig.states(namespace, keys_of(1, 2)) == [W, R]
    check_invariants(rig.cache)
    assert rig.cache.commit_store(ticket) == 1
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2))])
    rig.cache.begin_load(namespace, 0, 1, 0, keys_of(1, 2), first_block=1)
    check_invariants(rig.cache)


def test_a_narrow_shard_in_the_middle_of_a_chain_is_replaced_by_a_whole_one() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(2), first_block=2)
    ticket = begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2, 3), first_block=3)
    assert ticket.copy == [0, 1, 2]
    assert len(set(ticket.offsets)) == 3
    rig.cache.commit_store(ticket)
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(2, 3))])
    rig.cache.begin_load(namespace, 0, 1, 0, keys_of(2, 3), first_block=0)
    check_invariants(rig.cache)


def test_a_narrow_shard_under_a_lease_is_left_alone() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1), first_block=2)
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1))])
    assert begin_store(rig.cache, namespace, 0, 0, keys_of(1)).copy == []
    rig.cache.begin_load(namespace, 0, 1, 0, keys_of(1), first_block=2)
    check_invariants(rig.cache)


def test_a_narrower_shard_than_the_one_there_is_skipped() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1), first_block=1)
    assert begin_store(rig.cache, namespace, 0, 0, keys_of(1), first_block=2).copy == []


def test_a_replacement_that_fails_takes_the_torn_shard_with_it_but_no_other_rank_s() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1), first_block=2)
    torn = begin_store(rig.cache, namespace, 0, 0, keys_of(1))
    rig.cache.abort_store(torn)
    check_invariants(rig.cache)
    assert rig.states(namespace, keys_of(1)) == [W]
    assert rig.cache.pool_usage().writing_bytes == SLOT_UNIT
    rig.clock.now += 61
    assert rig.cache.expire() == 1
    check_invariants(rig.cache)


def test_both_ranks_may_widen_a_block_at_once() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1), first_block=2)
    tickets = [begin_store(rig.cache, namespace, rank, 0, keys_of(1)) for rank in (0, 1)]
    assert [ticket.copy for ticket in tickets] == [[0], [0]]
    check_invariants(rig.cache)
    assert [rig.cache.commit_store(ticket) for ticket in tickets] == [0, 1]
    assert rig.events.log[-1] == ("stored", 0, [keys_of(1)])
    check_invariants(rig.cache)


def test_stored_blocks_are_counted() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1, 2, 3))
    rig.put(namespace, keys_of(3, 4))
    assert namespace.counters.stored_blocks == 4
    assert (namespace.ready_blocks, namespace.ready_bytes) == (4, 8 * SLOT_UNIT)
    begin_store(rig.cache, namespace, 0, 0, keys_of(5))
    assert namespace.writing_blocks == 1


def test_a_pool_that_fails_to_hand_out_slots_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(slot_bytes: int, count: int, node: int | None) -> list[int]:
        raise MemoryError

    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1), first_block=2)
    monkeypatch.setattr(rig.slots, "take", fail)
    with pytest.raises(MemoryError):
        begin_store(rig.cache, namespace, 0, 0, keys_of(1, 2), first_block=1)
    check_invariants(rig.cache)
    assert rig.states(namespace, keys_of(1, 2)) == [R, A]


def test_slots_are_asked_for_on_the_node_of_the_store() -> None:
    rig = CacheHarness(regions=2)
    namespace = rig.open()
    asked: list[int | None] = []
    take = rig.slots.take

    def watched(slot_bytes: int, count: int, node: int | None = None) -> list[int]:
        asked.append(node)
        return take(slot_bytes, count, node)

    rig.slots.take = watched  # type: ignore[method-assign]
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(*range(8)), node=1))
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(9), node=0))
    assert asked == [1, 0, 0], "the last one again, after an eviction"
