"""The cache by slots against a model of dicts: any order of stores, fills, loads, leases, checks, drops and deaths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffd.cache.asked_keys import PromptUse
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import MissReason, Namespace, NamespaceSnapshot
from kvoffd.cache.states import CORRUPT, FREE, READY, SHARD_STATE, WRITING, WRITTEN
from kvoffd.cache.tickets import FillTicket, LoadTicket, StoreTicket
from kvoffd.errors import BadKeys, NotReady, UnknownLease
from tests.kit.amount import TIMES
from tests.kit.slot_cache import UNIT, CacheRig, check_invariants, keys_of

Name = tuple[int, int, int]
"""Namespace, group, key."""
NAMESPACES = [(1, (UNIT,)), (2, (2 * UNIT, UNIT)), (1, (3 * UNIT,))]
"""World size and shard bytes by group."""

spaces = st.integers(0, len(NAMESPACES) - 1)
ranks = st.integers(0, 1)
groups = st.integers(0, 1)
sessions = st.integers(1, 3)
chains = st.lists(st.integers(0, 11), max_size=7)
first_blocks = st.sampled_from([0, 0, 0, 1, 2])


@dataclass(eq=False)
class Model:
    """One life of a block as the model sees it."""

    name: Name
    world_size: int
    first_block: dict[int, int] = field(default_factory=dict)
    """By rank that is written, what its shard's range begins with."""
    writing: set[int] = field(default_factory=set)
    idle_since: float = 0.0
    pins: int = 0

    @property
    def ready(self) -> bool:
        return len(self.first_block) == self.world_size


@dataclass(eq=False)
class ModelLease:
    session: int
    space: int
    deadline: float
    pinned: list[Model] = field(default_factory=list)
    loaded: set[int] = field(default_factory=set)
    counted: dict[tuple[int, int], int] = field(default_factory=dict)
    """Tokens by group and first key of each load that was counted."""
    part_ranks: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    reported: bool = False


Asked = list[tuple[int, list[bool]]]
"""By group: which keys a lookup found."""


class CacheMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.rig = CacheRig(units=32, region_units=6, policy=self.policy)
        self.cache = self.rig.cache
        self.spaces: list[Namespace] = [
            self.rig.open(f"n{number}", world_size, sizes) for number, (world_size, sizes) in enumerate(NAMESPACES)
        ]
        self.index: dict[Name, Model] = {}
        self.leases: dict[int, ModelLease] = {}
        self.stores: list[tuple[list[StoreTicket], int, list[tuple[Model, int]]]] = []
        self.fills: list[tuple[FillTicket, Model]] = []
        self.loads: list[tuple[LoadTicket, list[Model], list[bytes], ModelLease]] = []
        self.writes: list[tuple[BlockIds, list[Model], list[bytes]]] = []
        """Blocks that are pinned for a write to a tier."""
        self.loaded: dict[Namespace, list[int]] = {namespace: [0, 0] for namespace in self.spaces}
        """Keys and tokens that were loaded."""
        self.covered: Counter[Namespace] = Counter()
        """Keys that count as loaded or not needed."""
        self.missed: Counter[Namespace] = Counter()
        self.unreported: dict[tuple[int, int], tuple[Namespace, Asked]] = {}
        """What lookups of a session under a lease found, until its outcome is reported."""
        self.next_lease = self.next_generation = 1

    def geometry(self, space: int, rank: int, group: int) -> tuple[Namespace, int, int]:
        world_size, sizes = NAMESPACES[space]
        return self.spaces[space], rank % world_size, group % len(sizes)

    def names(self, space: int, group: int, chain: list[int]) -> list[Name]:
        return [(space, group, key) for key in chain]

    def state(self, name: Name) -> int:
        model = self.index.get(name)
        return FREE if model is None else READY if model.ready else WRITING

    def notice_what_went(self, job: set[Name]) -> list[Name]:
        went = []
        partial = [name for name in self.index if self.state(name) == WRITING and self.peek(name) == FREE]
        writing_bytes = sum(self.spaces[space].group(group).block_bytes for space, group, _ in partial)
        crowded = 4 * (self.rig.cache.life.usage.writing + writing_bytes) > self.rig.slots.pool_bytes
        for name, model in list(self.index.items()):
            if name in job:
                continue
            before, now = self.state(name), self.peek(name)
            if now != before:
                assert now == FREE
                assert not model.pins, "a pinned block went"
                assert not model.writing, "a block went that somebody writes"
                if before == WRITING:
                    early = model.idle_since + 2.0 > self.rig.clock.now
                    assert crowded or not early, "a partial block went too early"
                del self.index[name]
                went.append(name)
        return went

    def peek(self, name: Name) -> int:
        """The state of a block, without a lookup."""
        space, number, key = name
        group = self.spaces[space].group(number)
        return self.cache.blocks.find(group, keys_of(key))[0][0]

    # --- stores and fills -----------------------------------------------------------------------

    @rule(space=spaces, rank=ranks, group=groups, chain=chains, first_block=first_blocks)
    def begin_store(self, space: int, rank: int, group: int, chain: list[int], first_block: int) -> None:
        namespace, rank, group = self.geometry(space, rank, group)
        firsts = {0: first_block} if first_block and chain else {}
        names = self.names(space, group, chain)
        expected, seen = [], set()
        for number, name in enumerate(names):
            model = self.index.get(name)
            begin = first_block if number == 0 else 0
            narrow = (
                model is not None
                and not model.pins
                and not model.writing
                and model.first_block.get(rank, -1) > begin
                and name not in seen
            )
            lacking = model is None or narrow or (rank not in model.first_block and rank not in model.writing)
            if lacking and name not in seen:
                expected.append(number)
                seen.add(name)
                if narrow:
                    del self.index[name]
        present = set(names) - seen
        ticket = self.rig.begin(namespace, rank, group, keys_of(*chain), firsts)
        (part,) = ticket
        went = self.notice_what_went(set(names))
        assert all(self.peek(name) == self.state(name) for name in present), "a store evicted its own keys"
        assert sorted(part.copy + part.no_space + part.rejected) == expected
        assert part.no_space == sorted(part.no_space)
        assert part.duplicates == [at for at, name in enumerate(names) if name in seen and at not in expected]
        fresh = [number for number in part.copy if names[number] not in self.index]
        assert not fresh or not part.no_space or max(fresh) < min(part.no_space), "a tail was stored without its head"
        if part.no_space:
            room = sum(namespace.group(other).block_bytes for owner, other, _ in went if owner == space)
            self.assert_there_was_no_space(namespace, group, set(names), room)
        taken = []
        for number in part.copy:
            model = self.index.setdefault(names[number], Model(names[number], namespace.world_size))
            model.writing.add(rank)
            taken.append((model, first_block if number == 0 else 0))
        for number in part.no_space:
            assert self.peek(names[number]) == FREE
        quota = self.cache.quotas.get(namespace.fingerprint)
        assert quota is None or namespace.held_bytes <= quota or not fresh, "blocks were taken beyond the quota"
        self.stores.append((ticket, rank, taken))

    def assert_there_was_no_space(self, taker: Namespace, group: int, job: set[Name], room: int) -> None:
        """``room``: bytes of the taker's own blocks that went for this: its quota was reckoned before."""
        sizes = set(taker.group(group).sizes)
        quota = self.cache.quotas.get(taker.fingerprint)
        if quota is not None and taker.held_bytes + room + taker.group(group).block_bytes > quota:
            return
        slots = self.rig.slots
        for size in sizes:
            has_size = slots.slot_bytes == size
            room = [
                min(slots.region_bytes, slots.pool_bytes - at * slots.region_bytes) // size
                for at in range(slots.regions)
            ]
            used = np.add.reduceat(slots.in_use, range(0, len(slots.in_use), slots.slots_per_region), dtype=int)
            free = sum((room[at] - used[at]) for at in range(slots.regions) if has_size[at] or not slots.slot_bytes[at])
            assert free < taker.world_size, "keys found no space beside free slots"
        for name, model in self.index.items():
            if name in job or model.pins or not model.ready:
                continue
            other = self.spaces[name[0]].group(name[1]).sizes
            assert not sizes <= set(other) or len(sizes) > 1, "keys found no space beside a block that could go"

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), checksum=st.sampled_from([7, 7, 0]))
    def commit_store(self, data: st.DataObject, checksum: int) -> None:
        self.commit(data.draw(st.integers(0, len(self.stores) - 1)), checksum)

    def commit(self, number: int, checksum: int = 7) -> None:
        ticket, rank, taken = self.stores.pop(number)
        ready = 0
        for model, first_block in taken:
            model.writing.remove(rank)
            model.first_block[rank] = first_block
            model.idle_since = self.rig.clock.now
            ready += model.ready and self.index.get(model.name) is model
        assert self.rig.commit(ticket, checksum) == ready

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def abort_store(self, data: st.DataObject) -> None:
        ticket, rank, taken = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        self.cache.stores.abort(ticket)
        for model, _ in taken:
            model.writing.remove(rank)
            model.idle_since = self.rig.clock.now
            if not model.writing and not model.first_block and self.index.get(model.name) is model:
                del self.index[model.name]

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def store_is_overdue(self, data: st.DataObject) -> None:
        ticket, _, taken = data.draw(st.sampled_from(self.stores))
        self.cache.stores.drop_unfinished(ticket)
        for model, _ in taken:
            if not model.ready and self.index.get(model.name) is model:
                del self.index[model.name]

    @rule(space=spaces, group=groups, chain=chains)
    def begin_fills(self, space: int, group: int, chain: list[int]) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        names = self.names(space, group, chain)
        lacking = [n for n, name in enumerate(names) if self.state(name) == FREE and name not in names[:n]]
        keys = namespace.split(group, keys_of(*chain))
        tickets = self.cache.stores.begin_fills(namespace.group(group), [keys[number] for number in lacking])
        self.notice_what_went({names[number] for number in lacking})
        assert len(tickets) <= len(lacking)
        for number, ticket in zip(lacking, tickets, strict=False):  # the first ones get the space
            model = self.index[names[number]] = Model(names[number], namespace.world_size)
            model.writing = set(range(namespace.world_size))
            self.fills.append((ticket, model))

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), whole=st.booleans())
    def end_fill(self, data: st.DataObject, whole: bool) -> None:
        ticket, model = self.fills.pop(data.draw(st.integers(0, len(self.fills) - 1)))
        model.first_block = dict.fromkeys(model.writing, 0) if whole else {}
        model.writing = set()
        living = self.index.get(model.name) is model
        if not whole and living:
            del self.index[model.name]
        if not whole:
            self.cache.stores.abort_fill(ticket)
            return
        ranks = len(ticket.slots)
        assert self.cache.stores.commit_fill(ticket, [0] * ranks, [7] * ranks) == living

    @rule(space=spaces, group=groups, chain=chains, session=sessions)
    def request_as_engines_do(self, space: int, group: int, chain: list[int], session: int) -> None:
        for rank in range(NAMESPACES[space][0]):
            self.begin_store(space, rank, group, chain, 0)
            self.commit(-1)
        self.lookup(space, group, session, chain, [], True)

    # --- lookups and loads ----------------------------------------------------------------------

    @rule(
        space=spaces,
        group=groups,
        session=sessions,
        chain=chains,
        more=chains,
        note=st.booleans(),
        reported=st.booleans(),
    )
    def lookup(
        self,
        space: int,
        group: int,
        session: int,
        chain: list[int],
        more: list[int],
        note: bool,
        reported: bool = False,
    ) -> None:
        lease_id, self.next_lease = self.next_lease, self.next_lease + 1
        self.ask(space, group, session, lease_id, chain, more, reported=reported)
        if note:
            self.cache.prompts.report()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), group=groups, chain=chains)
    def look_up_again(self, data: st.DataObject, group: int, chain: list[int]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[lease_id]
        self.ask(lease.space, group, lease.session, lease_id, chain, [], reported=lease.reported)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), space=spaces, session=sessions, chain=chains)
    def use_a_lease_of_others(self, data: st.DataObject, space: int, session: int, chain: list[int]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease, namespace, keys = self.leases[lease_id], self.spaces[space], keys_of(*chain)
        if (space, session) != (lease.space, lease.session):
            with pytest.raises(UnknownLease):
                self.cache.lookup(namespace, session, lease_id, [(0, keys)])
        if space != lease.space:
            with pytest.raises(UnknownLease):
                self.cache.begin_load(namespace, 0, lease_id, 0, keys)

    def ask(
        self,
        space: int,
        group: int,
        session: int,
        lease_id: int,
        chain: list[int],
        more: list[int],
        *,
        reported: bool,
    ) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        request = [(group, keys_of(*chain)), (0, keys_of(*more))]
        states, given = self.cache.lookup(namespace, session, lease_id, request, reported=reported)
        if reported:
            asked = self.unreported.setdefault((session, lease_id), (namespace, []))[1]
            found = [[state == READY for state in answer] for answer in states]
            asked += [(part, answer) for (part, _), answer in zip(request, found, strict=True)]
        else:
            self.missed[namespace] += sum(state != READY for answer in states for state in answer)
        names = [self.names(space, group, chain), self.names(space, 0, more)]
        cut = 0
        for part, answer in zip(names, states, strict=True):
            for name, state in zip(part, answer, strict=True):
                cut += state != self.state(name)
                assert state == self.state(name) or (state, self.state(name)) == (FREE, READY)
        lease = self.leases.get(lease_id) or ModelLease(session, space, self.rig.clock.now + 30.0, reported=reported)
        told_ready = [
            self.index[name]
            for part, answer in zip(names, states, strict=True)
            for name, state in zip(part, answer, strict=True)
            if state == READY
        ]
        held = list(lease.pinned)
        fresh = [model for model in told_ready if model not in held]
        for model in fresh:
            model.pins += 1
        lease.pinned += fresh
        if lease.pinned:
            self.leases[lease_id] = lease
        assert (len(given.blocks) if given is not None else 0) == len(lease.pinned)
        if cut:  # leases, and running loads, also of a namespace that was forgotten, have what they may
            assert self.cache.blocks.pinned_bytes > 32 * UNIT // 8

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rank=ranks, group=groups, chain=chains, first_block=first_blocks, ready=st.booleans())
    def begin_load(
        self, data: st.DataObject, rank: int, group: int, chain: list[int], first_block: int, ready: bool
    ) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[lease_id]
        namespace, rank, group = self.geometry(lease.space, rank, group)
        if ready:
            chain = [key for key in range(12) if self.state((lease.space, group, key)) == READY]
        found = [self.index.get(name) for name in self.names(lease.space, group, chain)]
        unready = [number for number, model in enumerate(found) if model is None or not model.ready]
        late = [
            number
            for number, model in enumerate(found)
            if not unready and model and model.first_block[rank] > (0 if number else first_block)
        ]
        if unready or late:
            with pytest.raises(NotReady) as caught:
                self.cache.begin_load(namespace, rank, lease_id, group, keys_of(*chain), first_block)
            assert caught.value.missing == unready or late
            return
        of_group = group, keys_of(*chain), first_block
        ticket = self.cache.begin_load(namespace, rank, lease_id, *of_group, tokens=16 * len(chain))
        models = [model for model in found if model is not None]
        for model in models:
            model.pins += 1
        self.loads.append((ticket, models, self.records(ticket), lease))

    def records(self, ticket: LoadTicket) -> list[bytes]:
        """Whose bytes lie in the load's slots."""
        return [self.rig.table.records[slot].tobytes()[8:96] for slot in ticket.slots]

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), ok=st.booleans())
    def end_load(self, data: st.DataObject, ok: bool) -> None:
        ticket, models, _, lease = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        if ok:
            self.count_load(ticket, models, lease)
        self.cache.end_load([ticket], is_success=ok, ends_lease=ok)
        for model in models:
            model.pins -= 1
        if ok and self.leases.get(ticket.lease.lease_id) is lease:
            lease.loaded.add(ticket.rank)
            if len(lease.loaded) == NAMESPACES[lease.space][0]:
                self.end_leases([ticket.lease.lease_id])

    def count_load(self, ticket: LoadTicket, models: list[Model], lease: ModelLease) -> None:
        before = self.tokens_loaded(lease)
        ranks = lease.part_ranks.setdefault(models[0].name[1:], set()) if models else set()
        if models and ticket.rank not in ranks:
            ranks.add(ticket.rank)
            if len(ranks) < NAMESPACES[lease.space][0]:
                return
            part = models[0].name[1:]
            lease.counted[part] = 16 * len(models)
            loaded = self.loaded[ticket.lease.namespace]
            loaded[0] += len(models)
            loaded[1] += self.tokens_loaded(lease) - before

    def tokens_loaded(self, lease: ModelLease) -> int:
        by_group = [0, 0]
        for (group, _), tokens in lease.counted.items():
            by_group[group] += tokens
        return max(by_group)

    @rule(space=spaces, group=groups, chain=chains)
    def write_to_a_tier(self, space: int, group: int, chain: list[int]) -> None:
        _, _, group = self.geometry(space, 0, group)
        models = [self.index[name] for name in self.names(space, group, chain) if self.state(name) == READY]
        if not models:
            return
        keys = keys_of(*(model.name[2] for model in models))
        known = self.spaces[space].group(group)
        _, blocks = self.cache.blocks.find(known, keys)
        self.cache.blocks.pin(blocks)
        for model in models:
            model.pins += 1
        self.writes.append((blocks, models, [self.rig.table.records[block].tobytes()[8:96] for block in blocks]))

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def end_a_write(self, data: st.DataObject) -> None:
        blocks, models, records = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        assert [self.rig.table.records[block].tobytes()[8:96] for block in blocks] == records
        self.cache.life.unpin(blocks)
        for model in models:
            model.pins -= 1

    # --- ends -----------------------------------------------------------------------------------

    @rule(space=spaces, most=st.sampled_from([None, None, 4, 8, 16]))
    def limit(self, space: int, most: int | None) -> None:
        fingerprint = self.spaces[space].fingerprint
        if most is None:
            self.cache.quotas.pop(fingerprint, None)
        else:
            self.cache.quotas[fingerprint] = most * UNIT

    @rule(session=sessions, data=st.data())
    def release(self, session: int, data: st.DataObject) -> None:
        asked = data.draw(st.lists(st.integers(1, self.next_lease), max_size=3))
        own = [number for number in set(asked) if number in self.leases and self.leases[number].session == session]
        assert self.cache.leases.end(session, asked) == len(own)
        self.end_leases(own)

    @precondition(lambda self: self.unreported)
    @rule(data=st.data(), covered=st.lists(st.integers(0, 8), max_size=3))
    def report(self, data: st.DataObject, covered: list[int]) -> None:
        session, lease_id = data.draw(st.sampled_from(sorted(self.unreported)))
        own = [count // 2 for count in covered]
        self.cache.prompts.count(session, lease_id, PromptUse(own, covered, MissReason.LATE))
        namespace, asked = self.unreported.pop((session, lease_id))
        left = Counter(dict(enumerate(covered)))
        for group, found in asked:
            self.covered[namespace] += min(len(found), left[group])
            self.missed[namespace] += max(0, len(found) - left[group])
            left[group] = max(0, left[group] - len(found))

    @rule(session=sessions)
    def session_dies(self, session: int) -> None:
        own = [number for number, lease in self.leases.items() if lease.session == session]
        assert self.cache.end_session(session) == len(own)
        self.end_leases(own)
        while self.cache.prompts.uncounted.has_ended:
            for prompt in self.cache.prompts.uncounted.take_some():
                self.cache.prompts._settle(prompt, None)
        for name in [name for name in self.unreported if name[0] == session]:
            namespace, asked = self.unreported.pop(name)
            found = [there for _, part in asked for there in part]
            self.covered[namespace] += found.count(True)
            self.missed[namespace] += found.count(False)

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0, 29.0, 45.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        now = self.rig.clock.now
        overdue = [number for number, lease in self.leases.items() if lease.deadline <= now]
        stale = [
            model.name
            for model in self.index.values()
            if not model.ready and not model.writing and model.idle_since + 60.0 <= now
        ]
        ended = list(iter(self.cache.tick, 0))
        while self.cache.leases.has_to_unpin:  # a tick looks at as many leases, these among them
            self.cache.leases.unpin_some()
            ended += iter(self.cache.tick, 0)
        assert sum(ended) == len(overdue) + len(stale)
        assert max(ended, default=0) <= max(self.cache.leases.ended_at_once, len(stale))
        self.end_leases(overdue)
        for name in stale:
            del self.index[name]

    @rule(space=spaces, group=groups, chain=chains)
    def invalidate(self, space: int, group: int, chain: list[int]) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        there = {(space, group, key) for key in chain} & set(self.index)
        assert self.cache.invalidate(namespace, [(group, keys_of(*chain))]) == len(there)
        for name in there:
            del self.index[name]

    @rule(space=spaces, rank=ranks, group=groups, chain=chains)
    def invalidate_what_is_being_written(self, space: int, rank: int, group: int, chain: list[int]) -> None:
        self.begin_store(space, rank, group, chain, 0)
        self.invalidate(space, group, chain)
        self.commit(-1)

    @rule(space=spaces, chain=chains, session=sessions)
    def a_namespace_has_more_than_its_quota(self, space: int, chain: list[int], session: int) -> None:
        self.request_as_engines_do(space, 0, list(range(6)), session)
        self.limit(space, 8)
        self.request_as_engines_do(space, 0, chain, session)

    @rule(space=spaces)
    def reset(self, space: int) -> None:
        there = [name for name in self.index if name[0] == space]
        generation, self.next_generation = self.next_generation, self.next_generation + 1
        assert self.cache.reset(self.spaces[space], generation=generation) == len(there)
        assert self.spaces[space].generation == generation
        self.end_leases([number for number, lease in self.leases.items() if lease.space == space])
        for name in there:
            del self.index[name]

    @rule(space=spaces)
    def forget_the_namespace(self, space: int) -> None:
        self.reset(space)
        self.cache.namespaces.forget(self.spaces[space])
        self.spaces[space] = self.rig.open(f"n{space}", *NAMESPACES[space])
        self.loaded[self.spaces[space]] = [0, 0]

    @rule(slots=st.integers(1, 8), leases=st.integers(1, 4))
    def steps_are_small(self, slots: int, leases: int) -> None:
        self.cache.swept_at_once, self.cache.leases.ended_at_once = slots, leases

    @rule()
    def background(self) -> None:
        self.cache.background()

    @rule(data=st.data(), wrong=st.booleans())
    def check_bytes(self, data: st.DataObject, wrong: bool) -> None:
        blocks, records = self.cache.blocks, self.rig.table.records
        living = [slot for slot in np.flatnonzero(records["state"]).tolist() if self.rig.slots.in_use[slot]]
        written = [slot for slot in living if blocks.shard[slot] & SHARD_STATE == WRITTEN]
        if not written:
            return
        slot = data.draw(st.sampled_from(written))
        checksum, generation = int(records["checksum"][slot]), int(records["sequence"][slot])
        assert self.cache.integrity.check(slot, generation - 1, 99), "another's bytes are judged"
        judged = not blocks.shard[slot] & CORRUPT
        (check,) = self.cache.integrity.checks(np.array([slot], np.uint32)) if judged else [None]
        assert check is None or (check.slot, check.sequence, check.checksum) == (slot, generation, checksum)
        counts = self.cache.integrity.checked_slots, self.cache.integrity.mismatches
        wrong &= checksum != 0 and self.rig.cache.life.quarantined_bytes < 8 * UNIT
        group = self.cache.life.group_of(slot)
        key = int.from_bytes(blocks.keys(np.array([slot], np.uint32), 8), "big")
        name = -1 if group.retired else self.spaces.index(group.namespace), group.index, key
        assert self.cache.integrity.check(slot, generation, checksum + 1 if wrong else checksum or 5) is (
            judged and not wrong
        )
        counted = self.cache.integrity.checked_slots - counts[0], self.cache.integrity.mismatches - counts[1]
        assert counted == (checksum != 0, wrong and judged)
        if wrong and judged and not group.retired:
            self.index.pop(name, None)

    @rule(space=spaces, chain=chains)
    def send_bad_keys(self, space: int, chain: list[int]) -> None:
        before = self.cache.life.usage
        with pytest.raises(BadKeys):
            self.cache.lookup(self.spaces[space], 1, self.next_lease, [(0, keys_of(*chain)), (0, b"x")])
        assert self.cache.life.usage == before

    def end_leases(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            lease = self.leases.pop(lease_id)
            self.covered[self.spaces[lease.space]] += 0 if lease.reported else len(lease.pinned)
            for model in lease.pinned:
                model.pins -= 1

    # --- what always holds ----------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        check_invariants(self.cache)

    @invariant()
    def the_index_is_the_model_s(self) -> None:
        for space, (_, sizes) in enumerate(NAMESPACES):
            for group in range(len(sizes)):
                for key in range(12):
                    assert self.peek((space, group, key)) == self.state((space, group, key)), (space, group, key)

    @invariant()
    def folding_the_events_gives_the_index(self) -> None:
        ready = {name for name in self.index if self.index[name].ready}
        folded = {(self.spaces[space].fingerprint, group, keys_of(key)) for space, group, key in ready}
        assert self.rig.events.index == folded

    @invariant()
    def slots_under_a_load_keep_what_they_held(self) -> None:
        for ticket, _, records, _ in self.loads:
            assert self.records(ticket) == records

    @invariant()
    def what_was_asked_for_was_found_or_counted_as_missed(self) -> None:
        for namespace in self.spaces:
            counters = namespace.counters
            ended = [lease for some in self.cache.leases._to_unpin for lease in some if lease.namespace is namespace]
            ending = sum(len(lease.blocks) for lease in ended if lease.covers_at_end)
            assert (counters.covered_keys + ending, counters.misses.total()) == (
                self.covered[namespace],
                self.missed[namespace],
            )
            assert [counters.loaded_keys, counters.loaded_tokens] == self.loaded[namespace]

    @rule(space=spaces, group=groups, key=st.integers(0, 11))
    def find_block(self, space: int, group: int, key: int) -> None:
        namespace, _, group = self.geometry(space, 0, group)
        state, *_ = self.cache.describe_block(namespace, group, keys_of(key))
        assert bool(state) == ((space, group, key) in self.index)

    @invariant()
    def leases_are_the_model_s(self) -> None:
        assert {number for number, lease in self.cache.leases.by_id.items() if lease.active} == set(self.leases)

    @rule()
    def a_successor_finds_every_readable_block_with_a_checksum_and_no_other(self) -> None:
        successor, _ = self.rig.successor()
        saved = successor.cache.table.load_namespaces(NamespaceSnapshot)
        assert {record.fingerprint: (record.number, record.generation) for record in saved.namespaces} == {
            namespace.fingerprint: (namespace.number, namespace.generation) for namespace in self.spaces
        }
        found = successor.index()
        assert found <= self.rig.events.index
        for space, group, key in self.index:
            name = self.spaces[space].fingerprint, group, keys_of(key)
            if self.index[space, group, key].ready and name not in found:
                known = self.spaces[space].group(group)
                _, blocks = self.cache.blocks.find(known, keys_of(key))
                slots = self.cache.blocks.slots(blocks, len(known.sizes))
                assert not self.rig.table.records["checksum"][slots].all(), "a whole block is lost"

    def teardown(self) -> None:
        for ticket, *_ in self.stores:
            self.cache.stores.abort(ticket)
        for fill, _ in self.fills:
            self.cache.stores.abort_fill(fill)
        for load, _, _, _ in self.loads:
            self.cache.end_load([load])
        for blocks, _, _ in self.writes:
            self.cache.life.unpin(blocks)
        for session in (1, 2, 3):
            self.cache.end_session(session)
        while self.cache.background():
            pass
        assert not self.cache.blocks.pinned_bytes
        for namespace in self.spaces:
            self.cache.reset(namespace)
        while self.cache.background():
            pass
        check_invariants(self.cache)
        assert self.cache.life.usage.free + self.cache.life.usage.quarantined == self.rig.slots.pool_bytes


class LearnedMachine(CacheMachine):
    policy = "learned"


class ArcMachine(CacheMachine):
    policy = "arc"


_SETTINGS = settings(
    max_examples=12 * TIMES**2,
    derandomize=True,  # a red build is the change's fault
    stateful_step_count=50,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink what fails takes minutes
)
TestCache, TestLearned, TestArc = CacheMachine.TestCase, LearnedMachine.TestCase, ArcMachine.TestCase
TestCache.settings = _SETTINGS
TestLearned.settings = TestArc.settings = settings(_SETTINGS, max_examples=5 * TIMES**2)
