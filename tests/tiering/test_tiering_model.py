"""Any order of stores, lookups, drops, failures of the tier and passing time: books, events and bytes stay right."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffd.cache.block_table import READY, WRITING
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.tickets import StoreTicket
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import PENDING, SHARED
from tests.kit.fake_tier import FakeTier, Job
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness

chains = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
faults = st.sampled_from([None, None, None, *Result])


class TieringMachine(RuleBasedStateMachine):
    """What is dropped never comes back, whatever is under way then; what is ready has the bytes of its name."""

    @initialize(
        mode=st.sampled_from(WriteMode),
        tier_blocks=st.sampled_from([3, 99]),
        jobs=st.sampled_from([2, 99]),
        disks=st.integers(1, 2),
        stores=st.integers(0, 2),
    )
    def begin(self, mode: WriteMode, tier_blocks: int, jobs: int, disks: int, stores: int) -> None:
        self.rig = TieringHarness(settings=TieringSettings(mode), tier_blocks=tier_blocks, most_jobs=jobs)
        self.tiers = [self.rig.tier, *(self.rig.add_disk(tier_blocks, jobs) for _ in range(1, disks))]
        self.stores_of_nodes = [self.rig.share(TieringSettings(mode), f"redis://{number}") for number in range(stores)]
        self.tiers += self.stores_of_nodes
        self.generation = 0
        self.spaces = [self.rig.open("a"), self.rig.open("b", world_size=2)]
        self.stores: list[StoreTicket] = []
        self.stored: set[tuple[bytes, bytes]] = set()
        """What was stored since it was dropped last: only that may be ready."""
        self.leases = 0

    @rule(space=st.integers(0, 1), chain=chains)
    def begin_store(self, space: int, chain: list[int]) -> None:
        namespace = self.spaces[space]
        for rank in range(namespace.world_size):
            self.stores.append(self.rig.begin(namespace, rank, 0, keys_of(*chain)))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data: st.DataObject, ok: bool) -> None:
        ticket = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        if not ok:
            self.rig.cache.abort_store(ticket)
            return
        (part,), table = ticket.parts, self.rig.cache.blocks
        sums = self.rig.fill(ticket)
        if not part.group.dead:
            written = part.blocks[table.state[part.blocks] == WRITING]
            self.note_stored(part.group.namespace, table.keys(written, 8))
        self.rig.cache.commit_store(ticket, sums)

    def note_stored(self, namespace: Namespace, keys: bytes) -> None:
        self.stored |= {(namespace.fingerprint, key) for key in namespace.split(0, keys)}

    @rule(space=st.integers(0, 1), chain=chains, keep=st.booleans())
    def look_up(self, space: int, chain: list[int], keep: bool) -> None:
        self.leases += 1
        namespace = self.spaces[space]
        ((states,), _) = self.rig.cache.lookup(namespace, 1, self.leases, [(0, keys_of(*chain))])
        for key, state in zip(chain, states, strict=True):
            assert state != READY or (namespace.fingerprint, keys_of(key)) in self.stored
        self.rig.cache.note_requests()
        if not keep:
            self.rig.cache.release(1, [self.leases])
        if PENDING in states or SHARED in states:
            self.rig.tiering.pump()

    @rule()
    def answer(self) -> None:
        for store in self.stores_of_nodes:
            store.answer()

    @rule()
    def release(self) -> None:
        self.rig.cache.end_session(1)

    @rule()
    def pump(self) -> None:
        self.rig.tiering.pump()

    @rule()
    def evict_all(self) -> None:
        table = self.rig.cache.blocks
        self.rig.cache._evict(np.flatnonzero((table.state == READY) & (table.pins == 0)).astype(np.uint32))

    @rule()
    def sweep(self) -> None:
        """Free some of what was reset."""
        self.rig.cache.background()

    @rule(data=st.data(), fault=faults)
    def end_all_jobs(self, data: st.DataObject, fault: Result | None) -> None:
        while self.jobs:
            self.end_job(data, fault)

    @property
    def jobs(self) -> list[tuple[FakeTier, Job]]:
        return [(tier, job) for tier in self.tiers for job in tier.jobs]

    @rule(seconds=st.sampled_from([0.1, 2.0, 6.0, 100.0]))
    def tick(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.rig.cache.tick()
        self.rig.tiering.tick()

    @rule(space=st.integers(0, 1), chain=chains, ask=st.booleans())
    def put_down(self, space: int, chain: list[int], ask: bool) -> None:
        """A quick way into the tier, out of the pool, and perhaps up again."""
        namespace = self.spaces[space]
        self.rig.put(namespace, keys_of(*chain))
        index, table = self.rig.index(namespace), self.rig.cache.blocks
        ready = {key: block for key, block in index.items() if table.state[block] == READY}
        self.note_stored(namespace, b"".join(ready))
        for level in self.rig.tiering.levels:
            level.writer._wait(np.array(list(ready.values()), np.uint32))
            level.writer.pump()
        for tier in self.tiers:
            tier.end_all(self.rig.clock())
        self.evict_all()
        if ask:
            self.look_up(space, chain, keep=False)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fault=faults)
    def end_job(self, data: st.DataObject, fault: Result | None) -> None:
        tier, job = self.jobs[data.draw(st.integers(0, len(self.jobs) - 1))]
        tier.end(job, self.rig.clock(), None if fault is Result.DONE else fault)

    @precondition(lambda self: self.rig.tier.blocks)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        blocks = [block for block, _ in self.rig.tier.blocks.values()]
        block = blocks[data.draw(st.integers(0, len(blocks) - 1))]
        self.rig.tier.spoil(block.space, block.key)

    @rule(space=st.integers(0, 1), chain=chains)
    def invalidate(self, space: int, chain: list[int]) -> None:
        namespace = self.spaces[space]
        self.rig.cache.invalidate(namespace, [(0, keys_of(*chain))])
        self.stored -= {(namespace.fingerprint, keys_of(key)) for key in chain}

    @rule(space=st.integers(0, 1), forgotten=st.booleans())
    def reset(self, space: int, forgotten: bool) -> None:
        namespace = self.spaces[space]
        self.generation += 1
        self.rig.cache.reset(namespace, generation=self.generation)
        self.stored = {name for name in self.stored if name[0] != namespace.fingerprint}
        self.rig.tier_events.index = {name for name in self.rig.tier_events.index if name[0] != namespace.fingerprint}
        if forgotten:
            self.rig.cache.forget_namespace(namespace)
            self.rig.tiering.namespace_forgotten(namespace)
            self.spaces[space] = self.rig.open(namespace.label, namespace.world_size)
            self.spaces[space].generation = self.generation

    @invariant()
    def all_is_right(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()
            most = max(self.rig.slots.pool_bytes // 8, 2 * UNIT)
            for promoter in [level.promoter for level in self.rig.tiering.levels]:
                assert promoter.under_way_bytes - promoter._given_up_bytes <= most
                assert promoter.under_way_bytes <= 2 * most, "what was given up and hangs may hold as much again"

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for ticket in self.stores:
            rig.cache.abort_store(ticket)
        rig.cache.end_session(1)
        for tier in self.tiers:
            tier.write = lambda block, offsets, on_end: False  # type: ignore[method-assign]
        while self.jobs or any(level.promoter.busy for level in rig.tiering.levels):
            rig.tiering.pump()
            for tier in self.tiers:
                tier.end_all(rig.clock())
            rig.clock.now += 10.0
            rig.tiering.tick()
        assert not rig.tiering._coming
        assert all(level.promoter.waiting_blocks == level.promoter.queued_bytes == 0 for level in rig.tiering.levels)
        assert not any(level.promoter._held or level.promoter._given_up_bytes for level in rig.tiering.levels)
        rig.clock.now += 1000.0
        rig.cache.tick()
        while rig.cache.background():
            pass
        usage = rig.cache.usage
        assert (usage.writing, usage.dropped, usage.pinned) == (0, 0, 0)
        rig.check()


TestTiering = TieringMachine.TestCase
TestTiering.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
