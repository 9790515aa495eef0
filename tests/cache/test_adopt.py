"""What a new daemon takes over of the blocks that an earlier one left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_harness import SLOT_UNIT, CacheHarness, Clock, FoldedEvents, keys_of, made
from support.invariants import check_invariants
from support.plain_adoption import plain_plan
from support.slot_table import left_slots

from kvoffd.cache.adopt import Adoption, Plan
from kvoffd.cache.cache import BlockCache
from kvoffd.cache.policies import make_policy
from kvoffd.pool.records import NamespaceRecord, SlotRecord
from kvoffd_proto.messages import GroupSpec


class Heir:
    """A cache that took over what ``rig`` left, or the given part of it."""

    def __init__(
        self,
        rig: CacheHarness,
        records: Sequence[SlotRecord] | None = None,
        facts: Sequence[NamespaceRecord] | None = None,
    ) -> None:
        records = rig.slots.ready_records() if records is None else records
        self.slots = rig.slots.successor(records)
        self.events = FoldedEvents()
        self.cache = BlockCache(self.slots, make_policy("lru", self.slots.pool_bytes), self.events, Clock())
        self.adoption = self.cache.adopt(
            list(rig.slots.namespaces.values()) if facts is None else facts, left_slots(records)
        )
        check_invariants(self.cache)

    def ready(self) -> set[tuple[bytes, int, bytes]]:
        return {
            (namespace.fingerprint, group, key)
            for namespace in self.cache.namespaces
            for group, index in enumerate(self.cache.blocks.index[namespace])
            for key in index
        }


def test_blocks_are_ready_at_once_and_told_of() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.put(namespace, keys_of(1, 2, 3))
    heir = Heir(rig)
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
    cache = Heir(rig).cache
    again, created = cache.open_namespace(
        namespace.fingerprint, "a", 2, 8, [GroupSpec("full", 16), GroupSpec("full", 16)], "{}"
    )
    assert not created
    assert (again.label, again.description) == ("a", "{}")
    cache.set_shard_bytes(again, 0, (SLOT_UNIT, 100))


def test_adopted_blocks_are_not_verified_and_new_ones_need_not_be() -> None:
    rig = CacheHarness()
    rig.put(rig.open(), keys_of(1))
    cache = Heir(rig).cache
    (namespace,) = cache.namespaces
    cache.commit_store(cache.begin_store(namespace, 0, 0, keys_of(2)))
    index = cache.blocks.index[namespace][0]
    assert [index[keys_of(number)].shards[0].verified for number in (1, 2)] == [False, True]


def test_what_was_stored_first_is_evicted_first_and_leaves_before_roots() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    for chain in ((1, 2, 3), (4, 5)):
        rig.put(namespace, keys_of(*chain))
    order = [int.from_bytes(block.key, "big") for block in Heir(rig).cache.policy.candidates()]
    assert order == [3, 2, 1, 5, 4]
    assert [int.from_bytes(block.key, "big") for block in rig.cache.policy.candidates()] == order


def test_a_block_that_lacks_a_shard_is_freed() -> None:
    rig = CacheHarness()
    namespace = rig.open(world_size=2)
    rig.cache.commit_store(rig.cache.begin_store(namespace, 0, 0, keys_of(1)))
    heir = Heir(rig)
    assert heir.adoption == Adoption(0, 0, 0, 1)
    assert heir.slots.free_bytes == heir.slots.pool_bytes


def test_a_dropped_block_does_not_come_back_though_a_lease_still_holds_it() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    rig.put(namespace, keys_of(1, 2))
    rig.cache.lookup(namespace, 1, 1, [(0, keys_of(1))])
    made(rig.cache.invalidate(namespace, [(0, keys_of(1))]))
    assert {key for _, _, key in Heir(rig).ready()} == {keys_of(2)}


def test_of_two_slots_for_one_shard_neither_is_believed() -> None:
    rig = CacheHarness()
    rig.put(rig.open(), keys_of(1, 2, 3))
    first, second, third = rig.slots.ready_records()
    heir = Heir(rig, [first, second._replace(key=first.key), third])
    assert {key for _, _, key in heir.ready()} == {keys_of(3)}
    assert heir.adoption.refused_slots == 2


def test_slots_without_the_facts_of_their_namespace_are_freed() -> None:
    rig = CacheHarness()
    rig.put(rig.open("a"), keys_of(1))
    known = list(rig.slots.namespaces.values())
    rig.put(rig.open("b"), keys_of(1))
    heir = Heir(rig, facts=known)
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
        assert Heir(rig, facts=[wrong]).adoption.blocks == 0


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
            rig.cache.commit_store(rig.cache.begin_store(namespace, rank, group, keys_of(*chain)))
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
    plan = Plan(known, left_slots(records), rig.slots.slot_bytes)
    blocks, refused = plain_plan(known, records, rig.slots.slot_bytes)
    assert plan.refused.tolist() == [slot.offset for slot in refused]
    assert len(plan) == len(blocks)
    taken = [plan.take(data.draw(st.integers(1, 3))) for _ in range(len(blocks))]
    owners = [plan.owners[number] for part in taken for number in part.owner_of]
    assert owners == [(shards[0].fingerprint, shards[0].group) for shards in blocks]
    offsets = [slot.offset for shards in blocks for slot in shards]
    assert [offset for part in taken for offset in part.offsets] == offsets
    heir = Heir(rig, records, known)  # checks the books
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
        assert sorted(r.rank for r in fitting) == list(range(shape.world_size))
    for namespace in heir.cache.namespaces:
        for index in heir.cache.blocks.index[namespace]:
            for block in index.values():
                assert not block.missing
                assert not any(shard.verified for shard in block.shards.values())
    assert heir.events.index == heir.ready()
    untouched = [r for r in rig.slots.ready_records() if r in records and r.fingerprint in shapes]
    for record in untouched:
        name = (record.fingerprint, record.group, record.key)
        if shapes[record.fingerprint].world_size == 1 and claims[name] == 1:
            assert name in heir.ready(), "a whole block was lost"
