"""What a new daemon takes over of the blocks that an earlier one left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffd.cache import inherited as inherited_module
from kvoffd.cache import room
from kvoffd.cache.adopt import Adoption
from kvoffd.cache.inherited import InheritedBlocks
from kvoffd.cache.namespace import Block
from kvoffd.cache.policies import POLICY_NAMES, make_policy
from kvoffd.pool.records import NamespaceRecord
from kvoffd_proto.messages import GroupSpec
from tests.kit.cache_harness import (
    SLOT_UNIT,
    CacheHarness,
    Clock,
    FakeSlots,
    FoldedEvents,
    begin_store,
    keys_of,
    made,
)
from tests.kit.invariants import check_invariants
from tests.kit.plain_adoption import plain_plan
from tests.kit.slot_table import SlotRecord, inherited_slots


class Heir:
    """A cache that took over what ``slots`` has, or the given part of it."""

    def __init__(
        self,
        slots: FakeSlots,
        records: Sequence[SlotRecord] | None = None,
        facts: Sequence[NamespaceRecord] | None = None,
        *,
        slots_at_once: int = 3,
        all_at_once: bool = True,
        policy: str = "lru",
        max_index_bytes: int = 2**62,
    ) -> None:
        records = slots.ready_records() if records is None else records
        facts = list(slots.namespaces.values()) if facts is None else facts
        self.slots = slots.successor(records)
        self.events = FoldedEvents()
        made = make_policy(policy, self.slots.pool_bytes)
        self.cache = BlockCache(self.slots, made, self.events, Clock(), max_index_bytes=max_index_bytes)
        self.adoption = self.cache.adopt(facts, inherited_slots(records), slots_at_once)
        check_invariants(self.cache)
        if all_at_once:
            self.finish()

    def step(self) -> bool:
        more = self.cache.adopt_some()
        check_invariants(self.cache)
        assert more == bool(self.cache.inherited_blocks)
        return more

    def finish(self) -> None:
        while self.step():
            pass

    def keys(self) -> list[int]:
        return sorted(int.from_bytes(key, "big") for _, _, key in self.ready())

    def ready(self) -> set[tuple[bytes, int, bytes]]:
        return {
            (namespace.fingerprint, group, key)
            for namespace in self.cache.namespaces
            for group, index in enumerate(namespace.index)
            for key in index
        }


def test_blocks_are_ready_at_once_and_told_of() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1, 2, 3))
    heir = Heir(rig.slots)
    assert heir.adoption == Adoption(3, 6 * SLOT_UNIT, 1, 0)
    assert heir.events.log[0] == ("cleared", 0, [])
    assert heir.events.index == rig.events.index
    again = heir.cache.namespace(namespace.fingerprint)
    answer = heir.cache.lookup(again, 1, 1, [(0, keys_of(1, 2, 3, 4))])
    assert answer.states == [bytes([2, 2, 2, 0])]
    assert len(heir.cache.begin_load(again, 1, 1, 0, keys_of(2)).offsets) == 1


def test_an_engine_that_comes_back_joins_its_namespace() -> None:
    rig = CacheHarness()
    namespace = rig.open("a", 2, (SLOT_UNIT, 100))
    rig.put(namespace, keys_of(1))
    cache = Heir(rig.slots).cache
    again, created = cache.open_namespace(
        namespace.fingerprint, "a", 2, 8, [GroupSpec("full", 16), GroupSpec("full", 16)], "{}"
    )
    assert not created
    assert (again.label, again.description) == ("a", "{}")
    cache.set_shard_bytes(again, 0, (SLOT_UNIT, 100))


def test_adopted_blocks_are_not_verified_and_new_ones_need_not_be() -> None:
    rig = CacheHarness()
    rig.put(rig.open(), keys_of(1))
    cache = Heir(rig.slots).cache
    (namespace,) = cache.namespaces
    cache.commit_store(begin_store(cache, namespace, 0, 0, keys_of(2)))
    index = namespace.index[0]
    assert [index[keys_of(number)].shards[0].verified for number in (1, 2)] == [False, True]


def test_what_was_stored_first_is_evicted_first_and_leaves_before_roots() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    for chain in ((1, 2, 3), (4, 5)):
        rig.put(namespace, keys_of(*chain))
    order = [int.from_bytes(block.key, "big") for block in Heir(rig.slots).cache.policy.candidates()]
    assert order == [3, 2, 1, 5, 4]
    assert [int.from_bytes(block.key, "big") for block in rig.cache.policy.candidates()] == order


def test_a_block_that_lacks_a_shard_is_freed() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    heir = Heir(rig.slots)
    assert heir.adoption == Adoption(0, 0, 0, 1)
    assert heir.slots.free_bytes == heir.slots.pool_bytes


def test_a_dropped_block_does_not_come_back_though_a_lease_still_holds_it() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1))])
    made(rig.cache.invalidate(namespace, [(0, keys_of(1))]))
    assert {key for _, _, key in Heir(rig.slots).ready()} == {keys_of(2)}


def test_of_two_slots_for_one_shard_the_last_one_counts() -> None:
    """A daemon stores anew what it has not taken over yet, and dies."""
    rig = CacheHarness()
    rig.put(rig.open(), keys_of(1, 2, 3))
    first, second, third = sorted(rig.slots.ready_records(), key=lambda record: record.generation)
    heir = Heir(rig.slots, [third._replace(key=second.key), first, second])
    assert {key for _, _, key in heir.ready()} == {first.key, second.key}
    (namespace,) = heir.cache.namespaces
    assert namespace.index[0][second.key].shard(0).offset == third.offset
    assert heir.adoption.refused_slots == 1


def test_slots_without_the_facts_of_their_namespace_are_freed() -> None:
    rig = CacheHarness()
    rig.put(rig.open("a"), keys_of(1))
    known = list(rig.slots.namespaces.values())
    rig.put(rig.open("b"), keys_of(1))
    heir = Heir(rig.slots, facts=known)
    assert [namespace.label for namespace in heir.cache.namespaces] == ["a"]
    assert heir.adoption.refused_slots == 1


def test_facts_that_this_pool_cannot_have_are_refused() -> None:
    rig = CacheHarness()
    rig.put(rig.open(), keys_of(1))
    (facts,) = rig.slots.namespaces.values()
    for wrong in (
        NamespaceRecord(facts.fingerprint, "", 0, 8, facts.groups, "", ()),
        NamespaceRecord(facts.fingerprint, "", 1, 8, (), "", ((),)),
        NamespaceRecord(facts.fingerprint, "", 1, 200, facts.groups, "", facts.shard_bytes),
        NamespaceRecord(facts.fingerprint, "", 2, 8, facts.groups, "", facts.shard_bytes),
        NamespaceRecord(facts.fingerprint, "", 1, 8, facts.groups, "", ((1 << 40,),)),
        NamespaceRecord(facts.fingerprint, "", 1, 8, facts.groups, "", ((-1,),)),
        NamespaceRecord(facts.fingerprint, "", 1, 8, facts.groups, "", (None,)),
        NamespaceRecord(facts.fingerprint, "", 1, 8, facts.groups, "", ((SLOT_UNIT - 1,),)),
    ):
        assert Heir(rig.slots, facts=[wrong]).adoption.blocks == 0


# --- step by step --------------------------------------------------------------------------------


def left_behind(count: int = 12, world_size: int = 1) -> CacheHarness:
    """Blocks 1 to ``count``, stored in this order; the pool has room for 16 slots."""
    rig = CacheHarness()
    namespace = rig.open(world_size=world_size)
    for number in range(1, count + 1):
        rig.put(namespace, keys_of(number))
    return rig


def put(heir: Heir, *numbers: int, name: str = "a", shard_bytes: int = SLOT_UNIT) -> int:
    """Store keys; returns for how many there was no room."""
    namespace, _ = heir.cache.open_namespace(name.encode().ljust(32), name, 1, 8, [GroupSpec("full", 16)], "{}")
    heir.cache.set_shard_bytes(namespace, 0, (shard_bytes,))
    ticket = begin_store(heir.cache, namespace, 0, 0, keys_of(*numbers))
    heir.cache.commit_store(ticket)
    check_invariants(heir.cache)
    return len(ticket.dropped)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_the_newest_blocks_are_ready_first_and_go_last(policy: str) -> None:
    heir = Heir(left_behind().slots, all_at_once=False, policy=policy)
    assert (heir.adoption.blocks, heir.keys(), heir.cache.inherited_blocks) == (12, [10, 11, 12], 9)
    assert [what for what, *_ in heir.events.log] == ["cleared", "stored"]
    (namespace,) = heir.cache.namespaces
    assert heir.cache.lookup(namespace, 1, 1, [(0, keys_of(12, 9))]).states == [bytes([2, 0])]
    heir.cache.release(1, [1])
    heir.step()
    assert heir.keys() == [7, 8, 9, 10, 11, 12]
    heir.finish()
    assert heir.keys() == [*range(1, 13)]
    assert heir.events.index == heir.ready()
    order = [int.from_bytes(block.key, "big") for block in heir.cache.policy.candidates()]
    assert order == [*range(1, 13)]


def test_a_key_that_is_stored_anew_is_not_taken_over() -> None:
    heir = Heir(left_behind().slots, all_at_once=False)
    assert put(heir, 1, 2) == 0
    assert heir.keys() == [1, 2, 10, 11, 12]
    heir.finish()
    assert heir.keys() == [*range(1, 13)]
    assert heir.cache.pool_usage().ready_bytes == 12 * SLOT_UNIT
    order = [int.from_bytes(block.key, "big") for block in heir.cache.policy.candidates()]
    assert order == [*range(3, 13), 2, 1]


def test_the_next_daemon_takes_over_what_this_one_had_and_what_it_had_not_yet() -> None:
    heir = Heir(left_behind().slots, all_at_once=False)
    put(heir, 1, 20)
    (namespace,) = heir.cache.namespaces
    made_anew = namespace.index[0][keys_of(1)].shard(0).offset
    second = Heir(heir.slots)
    assert second.keys() == [*range(1, 13), 20]
    (namespace,) = second.cache.namespaces
    assert namespace.index[0][keys_of(1)].shard(0).offset == made_anew
    order = [int.from_bytes(block.key, "big") for block in second.cache.policy.candidates()]
    assert order == [*range(2, 13), 20, 1]


def test_what_needs_room_takes_that_of_the_oldest_blocks_that_are_left() -> None:
    heir = Heir(left_behind(16).slots, all_at_once=False)
    assert heir.slots.free_bytes == 0
    assert put(heir, *range(20, 25)) == 0
    assert heir.cache.inherited_blocks == 8
    (namespace,) = heir.cache.namespaces
    assert namespace.counters.evicted_blocks == 5
    heir.finish()
    assert heir.keys() == [*range(6, 17), *range(20, 25)]
    assert not any(what == "removed" for what, *_ in heir.events.log), "nobody was told of what was given up"


def test_another_size_finds_room_once_blocks_are_taken_over() -> None:
    heir = Heir(left_behind(16).slots, all_at_once=False)
    assert put(heir, 30, name="b", shard_bytes=2 * SLOT_UNIT) == 1
    heir.finish()
    assert put(heir, 30, name="b", shard_bytes=2 * SLOT_UNIT) == 0


def test_the_search_for_another_size_is_short_while_each_region_has_blocks_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = left_behind(16)
    in_region = rig.slots.region_bytes // SLOT_UNIT
    records = [
        record._replace(generation=record.offset // SLOT_UNIT % in_region * 16 + record.offset // SLOT_UNIT + 1)
        for record in rig.slots.ready_records()
    ]
    heir = Heir(rig.slots, records, all_at_once=False)
    while heir.cache.inherited_blocks > 16 // in_region:
        heir.step()
    candidates, seen = heir.cache.policy.candidates, []

    def noted(worth: float = inf) -> Iterator[Block]:
        for block in candidates(worth):
            seen.append(block)
            yield block

    monkeypatch.setattr(heir.cache.policy, "candidates", noted)
    namespace, _ = heir.cache.open_namespace(b"b".ljust(32), "b", 1, 8, [GroupSpec("full", 16)], "{}")
    assert heir.cache.blocks.take_slots(namespace, 2 * SLOT_UNIT, 1, set()) == []
    assert 0 < len(seen) <= in_region, "all blocks were gone through, though none of their regions can be taken over"
    heir.finish()
    assert put(heir, 30, name="b", shard_bytes=2 * SLOT_UNIT) == 0


def test_shards_of_several_ranks_are_taken_over_and_given_up_together() -> None:
    rig = left_behind(8, world_size=2)
    heir = Heir(rig.slots, all_at_once=False, slots_at_once=4)
    assert heir.keys() == [7, 8]
    (namespace,) = heir.cache.namespaces
    for rank in range(2):
        heir.cache.commit_store(begin_store(heir.cache, namespace, rank, 0, keys_of(9)))
        check_invariants(heir.cache)
    heir.finish()
    assert heir.keys() == [*range(2, 10)]


@pytest.mark.parametrize("how", ["clear", "reset", "clear_all"])
def test_what_is_cleared_does_not_come_back(how: str) -> None:
    rig = left_behind(10)
    rig.put(rig.open("b"), keys_of(30, 31))
    heir = Heir(rig.slots, all_at_once=False)
    namespace = heir.cache.namespace(b"a".ljust(32))
    arguments = [] if how == "clear_all" else [namespace]
    steps = getattr(heir.cache, how)(*arguments)
    next(steps)
    heir.step()  # others are served meanwhile
    assert made(steps) == (12 if how == "clear_all" else 10)
    check_invariants(heir.cache)
    assert (namespace.held_blocks, namespace.inherited_blocks) == (0, 0)
    heir.finish()
    put(heir, 5)
    others = [] if how == "clear_all" else [30, 31]
    assert heir.keys() == Heir(heir.slots).keys() == [5, *others]
    assert heir.events.index == heir.ready()


def test_the_books_balance_between_the_steps_that_clear_several_groups() -> None:
    rig = CacheHarness()
    namespace = rig.open(shard_bytes=(SLOT_UNIT, SLOT_UNIT))
    for number in range(1, 13):
        rig.put(namespace, keys_of(number), group=number % 2)
    heir = Heir(rig.slots, all_at_once=False)
    steps = heir.cache.clear(heir.cache.namespaces[0])
    for _ in range(4):
        next(steps)
        check_invariants(heir.cache)
    assert made(steps) == 12


def test_what_is_invalidated_does_not_come_back() -> None:
    heir = Heir(left_behind().slots, all_at_once=False)
    (namespace,) = heir.cache.namespaces
    assert made(heir.cache.invalidate(namespace, [(0, keys_of(1, 2, 12, 99))])) == 3
    assert (heir.keys(), namespace.inherited_blocks) == ([10, 11], 7)
    heir.finish()
    check_invariants(heir.cache)
    assert heir.keys() == Heir(heir.slots).keys() == [*range(3, 12)]


def test_what_is_taken_over_while_keys_are_invalidated_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inherited_module, "NAMED_AT_ONCE", 2)
    heir = Heir(left_behind().slots, all_at_once=False)
    (namespace,) = heir.cache.namespaces
    steps = heir.cache.invalidate(namespace, [(0, keys_of(1, 4, 5, 8, 9, 12))])
    while namespace.inherited_blocks == 9:
        next(steps)
    heir.finish()
    assert made(steps) == 6
    assert heir.keys() == Heir(heir.slots).keys() == [2, 3, 6, 7, 10, 11]
    check_invariants(heir.cache)


def test_a_step_of_an_invalidation_frees_few_slots_and_all_groups_are_looked_for_at_once() -> None:
    rig = left_behind(8, world_size=2)
    heir = Heir(rig.slots, all_at_once=False, slots_at_once=4)
    (namespace,) = heir.cache.namespaces
    free = [heir.slots.free_bytes]
    for _ in heir.cache.invalidate(namespace, [(0, keys_of(number)) for number in range(1, 7)]):
        free.append(heir.slots.free_bytes)
        check_invariants(heir.cache)
    freed = [(after - before) // SLOT_UNIT for before, after in pairwise(free)]
    assert freed == [0] * 6 + [4] * 3 + [0] * 5
    assert heir.keys() == [7, 8]


def test_a_step_of_an_invalidation_leaves_alone_what_was_taken_out_since_its_keys_were_found() -> None:
    heir = Heir(left_behind().slots, all_at_once=False)
    (namespace,) = heir.cache.namespaces
    steps = heir.cache.invalidate(namespace, [(0, keys_of(*range(1, 10)))])
    while namespace.inherited_blocks == 9:
        next(steps)
    assert put(heir, *range(20, 29)) == 0
    heir.step()
    check_invariants(heir.cache)
    assert heir.keys() == [*range(7, 13), *range(20, 29)]
    assert namespace.inherited_blocks == 1
    assert made(steps) == 3 + 1 + 3
    check_invariants(heir.cache)
    assert heir.keys() == Heir(heir.slots).keys() == [10, 11, 12, *range(20, 29)]


def test_what_was_stored_anew_and_is_still_left_counts_as_one_block_when_it_is_invalidated() -> None:
    heir = Heir(left_behind().slots, all_at_once=False)
    (namespace,) = heir.cache.namespaces
    put(heir, 2, 3)
    assert made(heir.cache.invalidate(namespace, [(0, keys_of(1, 2, 2, 99))])) == 2
    heir.finish()
    check_invariants(heir.cache)
    assert heir.keys() == Heir(heir.slots).keys() == [*range(3, 13)]


def test_a_place_that_is_long_gone_is_not_passed_one_by_one() -> None:
    """A step that lets the oldest block go took 0.1 s where a million behind it were gone before."""

    class Counted(np.ndarray[tuple[int], np.dtype[np.intp]]):
        reads = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(place)

    rig = CacheHarness(regions=1, region_bytes=1000 * SLOT_UNIT)
    rig.put(rig.open(), keys_of(*range(1000)))
    left = InheritedBlocks(
        rig.slots.namespaces.values(), inherited_slots(rig.slots.ready_records()), rig.slots.slot_bytes, 1000
    )
    left._order = left._order.view(Counted)
    for first, count in ((1, 998), (0, 1)):
        Counted.reads = 0
        places = np.arange(first, first + count)
        assert sum(len(some.offsets) for some in left._out_of_order(places)) == count
        assert Counted.reads < 20
    assert (left._begin, len(left)) == (999, 1)


def test_a_namespace_is_held_while_its_blocks_are_left() -> None:
    rig = left_behind(6)
    rig.put(rig.open("b"), keys_of(1, 2, 3))
    heir = Heir(rig.slots, all_at_once=False)
    oldest = heir.cache.namespace(b"a".ljust(32))
    assert (oldest.ready_blocks, oldest.inherited_blocks, oldest.held_blocks) == (0, 6, 6)
    assert heir.cache.pool_usage().inherited_bytes == 6 * SLOT_UNIT == oldest.held_bytes
    heir.finish()
    assert (oldest.ready_blocks, oldest.inherited_blocks, oldest.held_blocks) == (6, 0, 6)


def test_no_more_is_taken_over_than_there_is_memory_to_know_it() -> None:
    rig = left_behind(12)
    known = Heir(rig.slots).cache.blocks.index_bytes
    heir = Heir(rig.slots, max_index_bytes=known // 2)
    assert heir.keys() == [*range(7, 13)]
    assert heir.slots.free_bytes == heir.slots.pool_bytes - 6 * SLOT_UNIT


def test_the_quota_of_a_namespace_holds_for_what_is_left() -> None:
    rig = left_behind(8)
    rig.put(rig.open("b"), keys_of(*range(30, 38)))
    heir = Heir(rig.slots, all_at_once=False)
    heir.cache.blocks.quotas.set(b"b".ljust(32), 9 * SLOT_UNIT)
    assert put(heir, *range(40, 44), name="b") == 0
    heir.finish()
    held = {namespace.label: namespace.held_blocks for namespace in heir.cache.namespaces}
    assert held == {"a": 7, "b": 9}
    assert {40, 41, 42, 43} <= set(heir.keys())


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_quota_that_is_far_below_what_is_there_is_reached_in_several_stores(
    all_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "GIVEN_UP_AT_ONCE", 2)
    heir = Heir(left_behind(12).slots, all_at_once=all_at_once)
    (namespace,) = heir.cache.namespaces
    heir.cache.blocks.quotas.set(namespace.fingerprint, 2 * SLOT_UNIT)
    assert [(put(heir, 20 + turn), namespace.held_blocks) for turn in range(4)] == [(1, 9), (1, 6), (1, 3), (0, 2)]
    heir.finish()
    assert heir.keys() == [12, 23]


def test_keys_of_one_identity_are_told_apart() -> None:
    """Two blocks of two ranks, each half stored, whose keys have one hash."""
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(begin_store(rig.cache, namespace, 0, 0, keys_of(1)))
    rig.cache.commit_store(begin_store(rig.cache, namespace, 1, 0, keys_of(2)))
    records = rig.slots.ready_records()
    left = inherited_slots(records)
    left.identities[:] = 7
    slots = rig.slots.successor(records)
    cache = BlockCache(slots, make_policy("lru", slots.pool_bytes), FoldedEvents(), Clock())
    cache.adopt(list(rig.slots.namespaces.values()), left)
    check_invariants(cache)
    assert slots.free_bytes == slots.pool_bytes
    assert [space.ready_blocks for space in cache.namespaces] == [0]


_numbers = st.integers(0, 3)


@st.composite
def _tables(draw: st.DrawFn) -> tuple[CacheHarness, list[SlotRecord]]:
    """A rig with blocks of three geometries, and what is left of its records after losses and lies."""
    rig = CacheHarness(regions=6, region_bytes=6 * SLOT_UNIT)
    spaces = [rig.open("a"), rig.open("b", 2, (2 * SLOT_UNIT, SLOT_UNIT)), rig.open("c", 3, (3000,))]
    for _ in range(draw(st.integers(0, 6))):
        namespace = spaces[draw(st.integers(0, 2))]
        group = draw(st.integers(0, len(namespace.groups) - 1))
        rank = draw(st.integers(0, namespace.world_size - 1))
        chain = draw(st.lists(_numbers, max_size=4, unique=True))
        if draw(st.booleans()):
            rig.put(namespace, keys_of(*chain), group)
        else:
            rig.cache.commit_store(begin_store(rig.cache, namespace, rank, group, keys_of(*chain)))
    records = []
    for record in rig.slots.ready_records():
        change = draw(st.sampled_from(["none"] * 6 + ["lost", "group", "rank", "world_size", "length", "key", "name"]))
        if change == "lost":
            continue
        if change in ("group", "rank", "world_size", "length"):
            record = record._replace(**{change: draw(_numbers)})
        elif change == "key":
            record = record._replace(key=draw(st.sampled_from([keys_of(0), keys_of(1), b"", b"short", bytes(64)])))
        elif change == "name":
            record = record._replace(fingerprint=draw(st.sampled_from([b"a".ljust(32), b"b".ljust(32), bytes(32)])))
        records.append(record)
    return rig, records


@given(_tables(), st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_the_records_say_only_whole_blocks_are_served(
    table: tuple[CacheHarness, list[SlotRecord]], data: st.DataObject
) -> None:
    rig, records = table
    facts = list(rig.slots.namespaces.values())
    known = data.draw(st.permutations(facts))[: data.draw(st.integers(0, len(facts)))]
    at_once = data.draw(st.integers(1, 8))
    plan = InheritedBlocks(known, inherited_slots(records), rig.slots.slot_bytes, at_once)
    blocks, refused = plain_plan(known, records, rig.slots.slot_bytes)
    assert plan.refused.tolist() == [slot.offset for slot in refused]
    assert len(plan) == len(blocks)
    taken = []
    while plan:
        taken += [(plan.groups[some.number], offsets) for some in plan.take() for offsets in some.offsets.tolist()]
    assert [group[:2] for group, _ in taken] == [(shards[0].fingerprint, shards[0].group) for shards in blocks]
    assert [offsets for _, offsets in taken] == [[slot.offset for slot in shards] for shards in blocks]
    heir = Heir(rig.slots, records, known)  # checks the books
    shapes = {fact.fingerprint: fact for fact in known}
    claims = Counter((r.fingerprint, r.group, r.key) for r in records)
    for fingerprint, group, key in heir.ready():
        mine = [r for r in records if (r.fingerprint, r.group, r.key) == (fingerprint, group, key)]
        shape = shapes[fingerprint]
        fitting = [
            r
            for r in mine
            if r.world_size == shape.world_size
            and r.rank < shape.world_size
            and r.length == (shape.shard_bytes[r.rank] or ())[group]
            and r.slot_bytes == rig.slots.slot_bytes(r.length)
        ]
        assert sorted({r.rank for r in fitting}) == list(range(shape.world_size))
    for namespace in heir.cache.namespaces:
        for index in namespace.index:
            for block in index.values():
                assert not block.missing
                assert not any(shard.verified for shard in block.shards.values())
    assert heir.events.index == heir.ready()
    untouched = [r for r in rig.slots.ready_records() if r in records and r.fingerprint in shapes]
    for record in untouched:
        name = (record.fingerprint, record.group, record.key)
        if shapes[record.fingerprint].world_size == 1 and claims[name] == 1:
            assert name in heir.ready(), "a whole block was lost"
