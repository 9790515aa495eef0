"""Dropping: invalidate, reset, clear, while leases, loads and stores hold what is dropped."""

from __future__ import annotations

import pytest

from kvoffd.cache import cache as cache_module
from kvoffd.cache import lookup as lookup_module
from kvoffd.cache.namespace import BlockState
from kvoffd.errors import BadKeys, KvoffdError, UnknownLease
from kvoffd_proto.errors import ErrorCode
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of, made
from tests.kit.invariants import check_invariants

A, W, R = BlockState.ABSENT, BlockState.WRITING, BlockState.READY


def test_a_dropped_block_that_nobody_holds_is_gone_at_once() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    assert made(rig.cache.invalidate(namespace, [(0, keys_of(1, 1, 7))])) == 1
    assert rig.states(namespace, keys_of(1, 2)) == [A, R]
    assert rig.cache.pool_usage().ready_bytes == SLOT_UNIT
    assert rig.events.log[-1] == ("removed", 0, [keys_of(1)])
    assert namespace.counters.invalidated_blocks == 1
    check_invariants(rig.cache)


def test_a_pinned_block_leaves_the_index_at_once_and_its_bytes_later() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    made(rig.cache.invalidate(namespace, [(0, keys_of(1))]))
    assert rig.states(namespace, keys_of(1)) == [A]
    usage = rig.cache.pool_usage()
    assert (usage.ready_bytes, usage.leaving_bytes, usage.pinned_bytes) == (0, SLOT_UNIT, SLOT_UNIT)
    check_invariants(rig.cache)
    # The lease was a promise: it still serves.
    ticket = rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))
    rig.cache.release(1, [5])
    assert rig.cache.pool_usage().leaving_bytes == SLOT_UNIT
    rig.cache.end_load([ticket], ok=True)
    assert rig.cache.pool_usage().free_bytes == rig.slots.pool_bytes
    check_invariants(rig.cache)


def test_a_key_can_be_stored_again_while_its_old_block_is_leaving() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    old = rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))
    made(rig.cache.invalidate(namespace, [(0, keys_of(1))]))
    rig.put(namespace, keys_of(1))
    check_invariants(rig.cache)
    rig.cache.lookup(namespace, 6, 1, [(0, keys_of(1))])
    new = rig.cache.begin_load(namespace, 0, 6, 0, keys_of(1))
    assert new.offsets != old.offsets
    rig.cache.end_load([old], ok=True)
    assert rig.states(namespace, keys_of(1)) == [R]
    assert rig.cache.pool_usage().ready_bytes == SLOT_UNIT
    check_invariants(rig.cache)


@pytest.mark.parametrize("commit", [True, False])
def test_a_block_dropped_while_it_is_written_never_becomes_ready(commit: bool) -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    running = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    made(rig.cache.reset(namespace))
    usage = rig.cache.pool_usage()
    assert (usage.writing_bytes, usage.leaving_bytes) == (0, SLOT_UNIT)
    check_invariants(rig.cache)
    # The same key begins anew while the old write still runs into its own slot.
    anew = begin_store(rig.cache, namespace, 1, 0, keys_of(1))
    assert anew.copy == [0]
    assert anew.offsets != running.offsets
    if commit:
        assert rig.cache.commit_store(running) == 0
    else:
        rig.cache.abort_store(running)
    assert rig.cache.pool_usage().leaving_bytes == 0
    assert rig.states(namespace, keys_of(1)) == [W]
    rig.cache.commit_store(anew)
    check_invariants(rig.cache)


def test_reset_takes_leases_back_so_that_nothing_stale_is_loaded() -> None:
    rig = CacheHarness()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1, 2))
    rig.put(other, keys_of(1))
    rig.cache.lookup(namespace, 5, 1, [(0, keys_of(1))])
    rig.cache.lookup(other, 6, 1, [(0, keys_of(1))])
    assert made(rig.cache.reset(namespace)) == 2
    with pytest.raises(UnknownLease):
        rig.cache.begin_load(namespace, 0, 5, 0, keys_of(1))
    rig.cache.begin_load(other, 0, 6, 0, keys_of(1))
    assert rig.events.index == {(other.fingerprint, 0, keys_of(1))}
    check_invariants(rig.cache)


def test_clear_takes_one_namespace_or_all_and_leases_keep_what_they_hold() -> None:
    rig = CacheHarness()
    one, two = rig.open("a"), rig.open("b")
    rig.put(one, keys_of(1))
    rig.put(two, keys_of(1, 2))
    rig.cache.lookup(two, 5, 1, [(0, keys_of(1))])
    assert made(rig.cache.clear(one)) == 1
    assert rig.states(two, keys_of(1, 2)) == [R, R]
    assert made(rig.cache.clear_all()) == 2
    assert rig.cache.pool_usage().leaving_bytes == SLOT_UNIT
    assert rig.events.index == set()
    check_invariants(rig.cache)
    rig.cache.begin_load(two, 0, 5, 0, keys_of(1))


def test_a_bad_invalidate_is_refused_whole() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1))
    with pytest.raises(BadKeys):
        made(rig.cache.invalidate(namespace, [(0, keys_of(1)), (0, b"x")]))
    assert rig.states(namespace, keys_of(1)) == [R]


def test_no_event_is_told_of_a_block_that_never_was_readable() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    assert made(rig.cache.invalidate(namespace, [(0, keys_of(1))])) == 1
    assert rig.events.log == []


def test_a_large_namespace_is_cleared_in_steps_and_looks_empty_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "CLEARED_AT_ONCE", 2)
    rig = CacheHarness()
    namespace, other = rig.open("a"), rig.open("b")
    rig.put(namespace, keys_of(1, 2, 3, 4, 5))
    rig.put(other, keys_of(1))
    running = begin_store(rig.cache, namespace, 0, 0, keys_of(6))
    steps = rig.cache.clear(namespace)
    for _ in range(2):
        next(steps)
        check_invariants(rig.cache)
        assert rig.states(namespace, keys_of(1, 5, 6)) == [A, A, A]
        refused = begin_store(rig.cache, namespace, 0, 0, keys_of(5, 7))
        assert (refused.copy, refused.dropped) == ([], [0, 1])
        rig.cache.abort_store(refused)
        assert rig.states(other, keys_of(1)) == [R]
        with pytest.raises(KvoffdError, match="is running; ask again") as raised:
            rig.cache.reset(namespace)
        assert raised.value.code is ErrorCode.NOT_READY
    assert namespace.ready_blocks == 1
    assert rig.cache.commit_store(running) == 1  # its turn to be cleared is the last
    assert made(rig.cache.clear_all()) == 1  # the other one; this is being cleared
    assert made(steps) == 6
    assert (namespace.held_blocks, rig.events.index) == (0, set())
    check_invariants(rig.cache)
    assert rig.put(namespace, keys_of(1)) == 0
    assert rig.states(namespace, keys_of(1)) == [R]


def test_many_ended_pins_are_taken_back_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "UNPINNED_AT_ONCE", 2)
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2, 3, 4, 5))
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1, 2, 3, 4, 5))])
    rig.cache.lookup(namespace, 2, 1, [(0, keys_of(1))])
    assert rig.cache.end_owner(1) == 2
    pinned = []
    while rig.cache.ended:
        pinned.append(rig.cache.blocks.pinned_blocks)
        check_invariants(rig.cache)
        rig.cache.unpin_some()
    assert pinned == sorted(pinned, reverse=True)
    assert len(set(pinned)) >= 2
    assert rig.cache.blocks.pinned_blocks == 0
