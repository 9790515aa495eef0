"""The cache against a model of dicts: any order of stores, loads, leases, drops and deaths, all policies."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffd.cache.namespace import BlockState, Namespace
from kvoffd.cache.pins import LoadTicket, StoreTicket
from kvoffd.cache.policies import make_policy
from kvoffd.errors import BadKeys, NotReady, UnknownLease
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, FoldedEvents, begin_store, keys_of, made
from tests.kit.invariants import check_invariants
from tests.kit.quota_oracle import QuotaOracle, held
from tests.kit.slot_table import inherited_slots

Name = tuple[int, int, int]
"""Namespace, group, key."""

NAMESPACES = [(1, (SLOT_UNIT,)), (2, (2 * SLOT_UNIT, SLOT_UNIT)), (1, (3 * SLOT_UNIT,))]
"""World size and shard bytes by group."""

spaces = st.integers(0, len(NAMESPACES) - 1)
ranks = st.integers(0, 1)
groups = st.integers(0, 1)
owners = st.integers(1, 3)
chains = st.lists(st.integers(0, 11), max_size=7)
distinct_chains = st.lists(st.integers(0, 11), max_size=7, unique=True)
first_blocks = st.sampled_from([0, 0, 0, 1, 2])


@dataclass(eq=False)
class Model:
    """One life of a block as the model sees it."""

    name: Name
    world_size: int
    first_block: dict[int, int] = field(default_factory=dict)
    """By rank, what its shard's written range begins with."""
    writing: set[int] = field(default_factory=set)
    """Ranks that are writing now."""
    idle_since: float = 0.0
    pins: int = 0
    ready: bool = False
    slot_bytes: int = 0
    """Once it is ready."""

    @property
    def complete(self) -> bool:
        return len(self.first_block) == self.world_size and not self.writing


@dataclass(eq=False)
class ModelLease:
    owner: int
    space: int
    deadline: float
    blocks: dict[Name, Model]
    pinned: list[Model]
    loaded: set[int] = field(default_factory=set)


class CacheMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.rig = CacheHarness(
            regions=5, region_bytes=6 * SLOT_UNIT, policy=self.policy, last_region_bytes=2 * SLOT_UNIT
        )
        self.cache = self.rig.cache
        QuotaOracle(self.cache)
        self.spaces: list[Namespace] = [
            self.rig.open(f"n{number}", world_size, sizes) for number, (world_size, sizes) in enumerate(NAMESPACES)
        ]
        self.index: dict[Name, Model] = {}
        self.leases: dict[int, ModelLease] = {}
        self.stores: list[tuple[StoreTicket, dict[Model, int]]] = []
        self.loads: list[tuple[LoadTicket, list[Model], dict[int, object]]] = []
        self.next_lease = 1
        """Blocks that an operator has pinned."""

    def geometry(self, space: int, rank: int, group: int) -> tuple[Namespace, int, int]:
        world_size, sizes = NAMESPACES[space]
        return self.spaces[space], rank % world_size, group % len(sizes)

    # --- stores ----------------------------------------------------------------------------------

    @rule(space=spaces, rank=ranks, group=groups, chain=distinct_chains, first_block=first_blocks)
    def begin_store(self, space: int, rank: int, group: int, chain: list[int], first_block: int) -> None:
        namespace, rank, group = self.geometry(space, rank, group)
        ticket = begin_store(self.cache, namespace, rank, group, keys_of(*chain), first_block)
        self.notice_evictions({(space, group, key) for key in chain})
        expected: list[int] = []
        for number, key in enumerate(chain):
            begin = 0 if number else first_block
            model = self.index.get((space, group, key))
            if model is None or (rank not in model.first_block and rank not in model.writing):
                expected.append(number)
            elif rank not in model.writing and model.first_block[rank] > begin and not model.pins:
                expected.append(number)
                assert number in ticket.copy
        assert sorted(ticket.copy + ticket.dropped + ticket.declined) == expected
        if ticket.dropped:
            job = {(space, group, key) for key in chain}
            self.assert_there_was_no_room(namespace, namespace.slot_bytes(rank, group), group, job)
        starts: dict[Model, int] = {}
        for number in ticket.copy:
            name = (space, group, chain[number])
            model = self.index.setdefault(name, Model(name, namespace.world_size))
            model.first_block.pop(rank, None)
            model.ready = False
            model.writing.add(rank)
            starts[model] = 0 if number else first_block
        self.stores.append((ticket, starts))

    def notice_evictions(self, job: set[Name]) -> None:
        for name, model in list(self.index.items()):
            space, group, key = name
            if model.ready and self.real_state(name) is not BlockState.READY and name not in job:
                assert not model.pins, "a pinned block was evicted"
                del self.index[name]
            elif not model.ready and self.real_state(name) is BlockState.ABSENT and name not in job:
                assert not model.writing, "a block was dropped that somebody writes"
                del self.index[name]
            elif name in job:
                assert keys_of(key) in self.spaces[space].index[group], "a job evicted its own key"

    def assert_there_was_no_room(self, taker: Namespace, slot_bytes: int, group: int, job: set[Name]) -> None:
        slots = self.rig.slots
        if (most := self.cache.blocks.quotas.of(taker.fingerprint)) is not None:
            full = held(taker) + taker.block_bytes(group) > most
            own = [block for block in self.cache.policy.candidates() if block.namespace is taker and not block.pins]
            assert not full or all(
                (self.spaces.index(taker), block.group, int.from_bytes(block.key, "big")) in job for block in own
            ), "keys were dropped beside a block of their namespace"
            return
        for length, size in zip(slots.length, slots.size_of, strict=True):
            assert size or length < slot_bytes, "keys were dropped beside an empty region"
        for space, namespace in enumerate(self.spaces):
            for part, index in enumerate(namespace.index):
                for key, block in index.items():
                    if (
                        (space, part, int.from_bytes(key, "big")) in job
                        or block.pins
                        or block.state is BlockState.WRITING
                    ):
                        continue
                    sizes = {shard.slot_bytes for shard in block.shards.values()}
                    assert slot_bytes not in sizes, "keys were dropped beside a block that could go"

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def commit_store(self, data: st.DataObject) -> None:
        ticket, starts = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        became_ready = 0
        for model, first_block in starts.items():
            model.writing.remove(ticket.rank)
            model.first_block[ticket.rank] = first_block
            model.idle_since = self.rig.clock.now
            if model.complete and self.index.get(model.name) is model:
                model.ready = True
                space, group, key = model.name
                model.slot_bytes = self.spaces[space].index[group][keys_of(key)].slot_bytes
                became_ready += 1
        assert self.cache.commit_store(ticket) == became_ready

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def abort_store(self, data: st.DataObject) -> None:
        ticket, starts = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.cache.abort_store(ticket)
        for model in starts:
            model.writing.remove(ticket.rank)
            model.idle_since = self.rig.clock.now
            if not model.writing and not model.first_block and self.index.get(model.name) is model:
                del self.index[model.name]

    # --- look-ups and loads ----------------------------------------------------------------------

    @rule(space=spaces, group=groups, owner=owners, chain=chains, more=chains, touch=st.booleans())
    def lookup(self, space: int, group: int, owner: int, chain: list[int], more: list[int], touch: bool) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        request = [(group, keys_of(*chain)), (0, keys_of(*more))]
        answer = self.cache.lookup(namespace, lease_id, owner, request)
        names = [[(space, group, key) for key in chain], [(space, 0, key) for key in more]]
        assert answer.states == [bytes(self.model_state(name) for name in part) for part in names]
        ready = [name for name in names[0] + names[1] if self.model_state(name) is BlockState.READY]
        found = {name: self.index[name] for name in ready}
        pinned = [found[name] for name in ready]  # one pin for each time a key was asked for
        assert answer.pinned == len(pinned)
        for model in pinned:
            model.pins += 1
        if found:
            self.leases[lease_id] = ModelLease(owner, space, self.rig.clock.now + 30.0, found, pinned)
        if touch:
            self.cache.touch(lease_id)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), owner=owners, chain=chains)
    def look_up_again(self, data: st.DataObject, owner: int, chain: list[int]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[lease_id]
        request = [(0, keys_of(*chain))]
        if owner != lease.owner:
            with pytest.raises(UnknownLease):
                self.cache.lookup(self.spaces[lease.space], lease_id, owner, request)
            return
        answer = self.cache.lookup(self.spaces[lease.space], lease_id, owner, request)
        for key, state in zip(chain, answer.states[0], strict=True):
            name = (lease.space, 0, key)
            assert (state == BlockState.READY) == (name in lease.blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=ranks, group=groups, chain=chains, first_block=first_blocks, leased=st.booleans())
    def begin_load(
        self, data: st.DataObject, rank: int, group: int, chain: list[int], first_block: int, leased: bool
    ) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[lease_id]
        namespace, rank, group = self.geometry(lease.space, rank, group)
        if leased:
            chain = [key for space, held_group, key in lease.blocks if held_group == group]
        found = [lease.blocks.get((lease.space, group, key)) for key in chain]
        missing = [
            number
            for number, model in enumerate(found)
            if model is None or model.first_block[rank] > (0 if number else first_block)
        ]
        if missing:
            with pytest.raises(NotReady) as caught:
                self.cache.begin_load(namespace, rank, lease_id, group, keys_of(*chain), first_block)
            assert caught.value.missing == missing
            return
        ticket = self.cache.begin_load(namespace, rank, lease_id, group, keys_of(*chain), first_block)
        models = [model for model in found if model is not None]
        for model in models:
            model.pins += 1
        records: dict[int, object] = {offset: self.rig.slots.records[offset] for offset in ticket.offsets}
        self.loads.append((ticket, models, records))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), ok=st.booleans())
    def end_load(self, data: st.DataObject, ok: bool) -> None:
        ticket, models, _ = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.cache.end_load([ticket], ok)
        for model in models:
            model.pins -= 1
        lease = self.leases.get(ticket.lease_id)
        if ok and lease is not None:
            lease.loaded.add(ticket.rank)
            if len(lease.loaded) == NAMESPACES[lease.space][0]:
                self.end_leases([ticket.lease_id])

    # --- operators -------------------------------------------------------------------------------

    @rule(space=spaces, most=st.sampled_from([None, None, 4, 8, 16]))
    def limit(self, space: int, most: int | None) -> None:
        quotas, name = self.cache.blocks.quotas, self.spaces[space].fingerprint
        quota_bytes = None if most is None else most * SLOT_UNIT
        quotas.set(name, quota_bytes)
        assert quotas.of(name) == quota_bytes

    # --- ends ------------------------------------------------------------------------------------

    @rule(owner=owners, data=st.data())
    def release(self, owner: int, data: st.DataObject) -> None:
        asked = data.draw(st.lists(st.integers(1, self.next_lease), max_size=3))
        own = [number for number in set(asked) if number in self.leases and self.leases[number].owner == owner]
        assert self.cache.release(owner, asked) == len(own)
        self.end_leases(own)

    @rule(owner=owners)
    def owner_dies(self, owner: int) -> None:
        own = [number for number, lease in self.leases.items() if lease.owner == owner]
        assert self.cache.end_owner(owner) == len(own)
        self.end_leases(own)

    @rule(seconds=st.sampled_from([0.0, 10.0, 29.0, 45.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        now = self.rig.clock.now
        overdue = [number for number, lease in self.leases.items() if lease.deadline <= now]
        half = [model for model in self.index.values() if not model.ready and not model.writing]
        stale = [model.name for model in half if model.idle_since + 60.0 <= now]
        assert self.cache.expire() == len(overdue) + len(stale)
        self.end_leases(overdue)
        for name in stale:
            del self.index[name]

    @rule(space=spaces, group=groups, chain=chains)
    def invalidate(self, space: int, group: int, chain: list[int]) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        there = {(space, group, key) for key in chain} & set(self.index)
        assert made(self.cache.invalidate(namespace, [(group, keys_of(*chain))])) == len(there)
        for name in there:
            del self.index[name]

    @rule(space=spaces, weights_changed=st.booleans())
    def clear(self, space: int, weights_changed: bool) -> None:
        if weights_changed:
            made(self.cache.reset(self.spaces[space]))
            self.end_leases([number for number, lease in self.leases.items() if lease.space == space])
        else:
            made(self.cache.clear(self.spaces[space]))
        self.index = {name: model for name, model in self.index.items() if name[0] != space}

    @rule(space=spaces, chain=chains)
    def send_bad_keys(self, space: int, chain: list[int]) -> None:
        before = self.cache.pool_usage()
        with pytest.raises(BadKeys):
            begin_store(self.cache, self.spaces[space], 0, 0, keys_of(*chain) + b"x")
        with pytest.raises(BadKeys):
            begin_store(self.cache, self.spaces[space], 0, 0, keys_of(*chain, 1, 1))
        with pytest.raises(BadKeys):
            self.cache.lookup(self.spaces[space], self.next_lease, 1, [(0, keys_of(*chain)), (0, b"x")])
        assert self.cache.pool_usage() == before

    def end_leases(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            for model in self.leases.pop(lease_id).pinned:
                model.pins -= 1

    # --- what always holds -----------------------------------------------------------------------

    def model_state(self, name: Name) -> BlockState:
        model = self.index.get(name)
        if model is None:
            return BlockState.ABSENT
        return BlockState.READY if model.ready else BlockState.WRITING

    def real_state(self, name: Name) -> BlockState:
        space, group, key = name
        block = self.spaces[space].index[group].get(keys_of(key))
        return BlockState.ABSENT if block is None else block.state

    @invariant()
    def books_balance(self) -> None:
        check_invariants(self.cache)

    @invariant()
    def the_index_is_the_model_s(self) -> None:
        real = {
            (space, group, int.from_bytes(key, "big")): block.state
            for space, namespace in enumerate(self.spaces)
            for group, index in enumerate(namespace.index)
            for key, block in index.items()
        }
        assert real == {name: self.model_state(name) for name in self.index}

    @invariant()
    def folding_the_events_gives_the_index(self) -> None:
        ready = {name for name in self.index if self.index[name].ready}
        folded = {(self.spaces[space].fingerprint, group, keys_of(key)) for space, group, key in ready}
        assert self.rig.events.index == folded

    @invariant()
    def slots_under_a_load_keep_what_they_held(self) -> None:
        for _, _, records in self.loads:
            for offset, record in records.items():
                assert self.rig.slots.records[offset] == record

    @invariant()
    def leases_are_the_model_s(self) -> None:
        assert {lease.lease_id for lease in self.cache.leases} == set(self.leases)

    @invariant()
    def a_successor_would_find_every_readable_block_and_no_other(self) -> None:
        records = self.rig.slots.ready_records()
        events = FoldedEvents()
        slots = self.rig.slots.successor(records)
        heir = BlockCache(slots, make_policy(self.policy, slots.pool_bytes), events, self.rig.clock)
        heir.adopt(self.rig.slots.namespaces.values(), inherited_slots(records), slots_at_once=5)
        while heir.adopt_some():
            pass
        check_invariants(heir)
        assert events.index == self.rig.events.index

    def teardown(self) -> None:
        for ticket, _ in self.stores:
            self.cache.abort_store(ticket)
        for load, _, _ in self.loads:
            self.cache.end_load([load], ok=False)
        for owner in (1, 2, 3):
            self.cache.end_owner(owner)
        assert not self.cache.blocks.pinned_blocks
        made(self.cache.clear_all())
        assert self.cache.blocks.pinned_blocks == 0
        assert self.cache.pool_usage().free_bytes == self.rig.slots.pool_bytes
        check_invariants(self.cache)


class ArcCacheMachine(CacheMachine):
    policy = "arc"


class GateCacheMachine(CacheMachine):
    policy = "gate"


class LearnedCacheMachine(CacheMachine):
    policy = "learned"


_settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLruCache = CacheMachine.TestCase
TestLruCache.settings = _settings
TestArcCache = ArcCacheMachine.TestCase
TestArcCache.settings = _settings
TestGateCache = GateCacheMachine.TestCase
TestGateCache.settings = _settings
TestLearnedCache = LearnedCacheMachine.TestCase
TestLearnedCache.settings = _settings
