"""Any order of stores, lookups, drops, failures of the tier and passing time: books, events and bytes stay right."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffd.cache.namespace import Namespace
from kvoffd.cache.states import READY, WRITING
from kvoffd.cache.tickets import StoreTicket
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.promotions import SETTLED, Fill, FillState
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import ABSENT, PENDING, SHARED
from tests.kit.amount import TIMES
from tests.kit.fake_tier import FakeTier, Job
from tests.kit.slot_cache import UNIT, keys_of
from tests.kit.tiering_harness import TieringHarness

chains = st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True)
faults = st.sampled_from([None, None, None, *Result])


class TieringMachine(RuleBasedStateMachine):
    """What is dropped never comes back, whatever is under way then; what is ready has the bytes of its name."""

    @initialize(
        mode=st.sampled_from(WriteMode),
        tier_blocks=st.sampled_from([3, 99]),
        jobs=st.sampled_from([1, 99]),
        disks=st.integers(1, 2),
        stores=st.integers(0, 2),
        per_day_blocks=st.sampled_from([0, 16]),
    )
    def begin(self, mode: WriteMode, tier_blocks: int, jobs: int, disks: int, stores: int, per_day_blocks: int) -> None:
        settings = TieringSettings(mode, per_day_blocks * UNIT)
        self.rig = TieringHarness(settings, tier_blocks=tier_blocks, most_jobs=jobs)
        self.tiers = [self.rig.tier, *(self.rig.add_disk(tier_blocks, jobs) for _ in range(1, disks))]
        self.stores_of_nodes = [self.rig.share(settings, f"redis://{number}") for number in range(stores)]
        self.tiers += self.stores_of_nodes
        self.generation = 0
        self.spaces = [self.rig.open("a"), self.rig.open("b", world_size=2)]
        self.stores: list[list[StoreTicket]] = []
        self.stored: set[tuple[bytes, bytes]] = set()
        """What was stored since it was dropped last: only that may be ready, or in a tier."""
        self.leases = 0
        self.spent = dict.fromkeys(map(id, self.rig.tiering.writers), 0)
        """By writer, bytes of writes that ended otherwise than with PRESENT."""
        self.unshared: dict[bytes, set[Job]] = {}
        """By fingerprint, the writes to stores that had begun by then."""

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
            self.rig.cache.stores.abort(ticket)
            return
        (part,), table = ticket, self.rig.cache.blocks
        sums = self.rig.fill(ticket)
        if not part.group.retired:
            written = part.blocks[table.state[part.blocks] == WRITING]
            self.note_stored(part.group.namespace, table.keys(written, 8))
        self.rig.cache.stores.commit(ticket, sums)

    def note_stored(self, namespace: Namespace, keys: bytes) -> None:
        self.stored |= {(namespace.fingerprint, key) for key in namespace.split(0, keys)}

    @rule(
        space=st.integers(0, 1),
        chain=chains | st.just(list(range(6))),
        again=st.booleans(),
        end=st.sampled_from(["keep", "end"]),
    )
    def look_up(self, space: int, chain: list[int], again: bool, end: str) -> None:
        self.leases += not again
        namespace, keys = self.spaces[space], keys_of(*chain)
        if again and (
            (lease := self.rig.cache.leases.by_id.get(self.leases)) is None or lease.namespace is not namespace
        ):
            return
        asked = [len(store.asked) for store in self.stores_of_nodes]
        ((states,), _) = self.rig.cache.lookup(namespace, 1, self.leases, [(0, keys)], again=again)
        if ABSENT in states:
            assert PENDING not in states[states.index(ABSENT) :], "behind a gap"
        if namespace.fingerprint in self.unshared:
            assert asked == [len(store.asked) for store in self.stores_of_nodes]
        self.rig.cache.prompts.report()
        if end != "keep":
            self.rig.cache.leases.end(1, [self.leases])
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
        self.rig.cache.life.evict(np.flatnonzero((table.state == READY) & (table.pins == 0)).astype(np.uint32))

    @rule()
    def pin_all(self) -> None:
        """Nothing comes up while all of the pool is in use."""
        namespace, keys = self.spaces[0], keys_of(*range(8, 8 + len(self.rig.slots.in_use)))
        self.rig.put(namespace, keys)
        self.note_stored(namespace, keys)
        self.leases += 1
        self.rig.cache.lookup(namespace, 1, self.leases, [(0, keys)])

    @rule(data=st.data(), hangs=st.booleans())
    def hang(self, data: st.DataObject, hangs: bool) -> None:
        data.draw(st.sampled_from(self.tiers)).hangs = hangs

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
        for fill in [fill for source in self.rig.tiering.sources for fill in source.reads.given_up]:
            assert fill.ticket is not None
            is_written = self.rig.cache.blocks.state[fill.ticket.blocks] == WRITING
            assert fill.ticket.group.retired or not is_written.any(), "its key is free"

    @property
    def coming(self) -> list[Fill]:
        return [fill for keys in self.rig.tiering.promotions.unsettled.values() for fill in keys.values()]

    @rule(
        space=st.integers(0, 1),
        chain=chains,
        fault=st.sampled_from([None, None, Result.EXISTED]),
        then=st.sampled_from(["", "ask", "ask twice", "ask for more", "store", "no answer", "no space"]),
    )
    def put_down(self, space: int, chain: list[int], fault: Result | None, then: str) -> None:
        """A quick way into the tier, out of the pool, and perhaps up again."""
        namespace = self.spaces[space]
        self.rig.put(namespace, keys_of(*chain))
        index, table = self.rig.index(namespace), self.rig.cache.blocks
        ready = {key: block for key, block in index.items() if table.state[block] == READY}
        self.note_stored(namespace, b"".join(ready))
        for writer in self.rig.tiering.writers:
            writer._enqueue(np.array(list(ready.values()), np.uint32))
            writer.pump()
        while self.jobs:
            self.end(*self.jobs[0], fault)
        self.evict_all()
        if then == "no space":
            self.pin_all()
        asked = list(range(6)) if then == "ask for more" else chain
        for _ in range({"": 0, "ask twice": 2}.get(then, 1)):
            self.look_up(space, asked, again=False, end="end")
        if then == "store":
            self.rig.put(namespace, keys_of(*chain))
            self.note_stored(namespace, keys_of(*chain))
            self.pump()
        if then == "no answer":
            self.tick(6.0)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fault=faults)
    def end_job(self, data: st.DataObject, fault: Result | None) -> None:
        tier, job = self.jobs[data.draw(st.integers(0, len(self.jobs) - 1))]
        self.end(tier, job, fault)

    def end(self, tier: FakeTier, job: Job, fault: Result | None) -> None:
        if job.block is not None and fault is not Result.EXISTED:
            (writer,) = [writer for writer in self.rig.tiering.writers if tier in writer._tiers]
            self.spent[id(writer)] += job.group.nbytes
        tier.end(job, fault=None if fault is Result.DONE else fault)

    @precondition(lambda self: self.rig.tier.blocks)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        blocks = [block for block, _ in self.rig.tier.blocks.values()]
        block = blocks[data.draw(st.integers(0, len(blocks) - 1))]
        self.rig.tier.spoil(block.group, block.key)

    @rule(space=st.integers(0, 1), chain=chains, coming=st.booleans())
    def invalidate(self, space: int, chain: list[int], coming: bool) -> None:
        if coming:
            self.put_down(space, chain, None, "ask")
        namespace = self.spaces[space]
        self.rig.cache.invalidate(namespace, [(0, keys_of(*chain))])
        assert not self.rig.tiering.promotions.unsettled.get(self.rig.group(namespace).tag, {}).keys() & set(
            map(keys_of, chain)
        )
        self.stored -= {(namespace.fingerprint, keys_of(key)) for key in chain}

    @rule(space=st.integers(0, 1), forgotten=st.booleans(), before=st.sampled_from(["", "to be written", "coming"]))
    def reset(self, space: int, forgotten: bool, before: str) -> None:
        namespace = self.spaces[space]
        if before == "to be written":
            self.rig.put(namespace, keys_of(0, 1))
        elif before:
            self.put_down(space, [0, 1], None, "ask")
        self.generation += 1
        self.rig.tiering.remove_all(namespace.fingerprint)
        self.rig.cache.reset(namespace, generation=self.generation)
        assert all(fill.queue.group.namespace is not namespace for fill in self.coming)
        self.stored = {name for name in self.stored if name[0] != namespace.fingerprint}
        self.rig.tier_events.index = {name for name in self.rig.tier_events.index if name[0] != namespace.fingerprint}
        if forgotten:
            self.rig.cache.namespaces.forget(namespace)
            self.rig.tiering.namespace_forgotten(namespace)
            self.spaces[space] = self.rig.open(namespace.label, namespace.world_size)
            self.spaces[space].generation = self.generation

    @rule(space=st.integers(0, 1), back=st.booleans())
    def share(self, space: int, back: bool) -> None:
        """An engine reset a namespace; or all nodes did."""
        fingerprint = self.spaces[space].fingerprint
        if back:
            self.rig.unshared.discard(fingerprint)
            self.unshared.pop(fingerprint, None)
        else:
            self.rig.unshared.add(fingerprint)
            self.unshared.setdefault(fingerprint, {job for store in self.stores_of_nodes for job in store.jobs})

    @invariant()
    def all_is_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.check()
        pool, table = self.rig.slots.pool_bytes, self.rig.cache.blocks
        for namespace in self.spaces:
            block_group = self.rig.group(namespace)
            assert block_group.generation == namespace.generation
            ready = {key for key, block in self.rig.index(namespace).items() if table.state[block] == READY}
            there = {key for tier in self.tiers for tag, key in tier.blocks if tag == block_group.tag}
            written = {job.key for _, job in self.jobs if job.block and not job.removed and job.group == block_group}
            assert {(namespace.fingerprint, key) for key in ready | there | written} <= self.stored
        for store in self.stores_of_nodes:
            for job in store.jobs:
                begun = self.unshared.get(job.group.fingerprint)
                assert begun is None or job.block is None or job in begun, "an engine reset it"
        reserved = [one for source in self.rig.tiering.sources for one in source.read_order.queues() if one.is_reserved]
        held = sum((len(one.fills) + one.under_way) * one.group.block_bytes for one in reserved)
        assert held == sum(one.read_order.reserved_bytes for one in self.rig.tiering.sources)
        given_up = [fill for source in self.rig.tiering.sources for fill in source.reads.given_up]
        held += sum(fill.queue.group.block_bytes for fill in given_up)
        assert self.rig.cache.leases.withheld_bytes == held
        for source in self.rig.tiering.sources:
            most = max(pool // 8, 2 * UNIT)
            assert source.reads.under_way_bytes <= most
            held = source.reads.under_way_bytes + source.reads.given_up_bytes
            assert held <= 2 * most, "what was given up and hangs may hold as much again"
            queued = [fill for queue in source.read_order.queues() for fill in queue.fills]
            assert sum(queue.under_way for queue in source.read_order.queues()) == len(source.reads.under_way)
            assert all(queue.fills or queue.under_way for queue in source.read_order.queues())
            assert all(queue.of_lookup.queues.count(queue) == 1 for queue in source.read_order.queues())
            unsettled = [fill for fill in [*source.reads.under_way, *queued] if fill.state not in SETTLED]
            names = [(fill.queue.block_group.tag, fill.key) for fill in unsettled]
            assert len(names) == len(set(names)), "two fills of one key"
            assert source.read_order.blocks == len(queued) == source.read_order.blocks_of.total()
            assert all(fill.leases for fill in queued), "nobody waits for it"
            assert {fill.state for fill in queued} <= {FillState.QUEUED}
            assert {fill.state for fill in source.reads.under_way} <= {FillState.READING, FillState.ABANDONED}
            assert {fill.state for fill in source.reads.given_up} <= {FillState.ABANDONED}
            assert all(fill.ticket is None for fill in queued)
        assert {fill.state for fill in self.coming} <= {FillState.QUEUED, FillState.READING}
        fills_of_lease = self.rig.tiering.promotions.fills_of_lease
        awaited = {(lease, fill) for lease, fills in fills_of_lease.items() for fill in fills}
        assert {(lease, fill) for lease, fill in awaited if fill.state not in SETTLED} == {
            (lease, fill) for fill in self.coming for lease in fill.leases
        }
        for writer in self.rig.tiering.writers:
            budget = writer.budget
            assert writer.under_way_bytes <= pool // 16 + 2 * UNIT
            spent = self.spent[id(writer)] + writer.under_way_bytes
            assert budget.spent_bytes <= spent, "what was not written is given back"
            assert not budget._bound or spent <= budget._bound + budget._rate * (self.rig.clock() - 1000.0) + 2 * UNIT

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for ticket in self.stores:
            rig.cache.stores.abort(ticket)
        rig.cache.end_session(1)
        for tier in self.tiers:
            tier.hangs = False
            tier.write = lambda block, offsets, on_end: False  # type: ignore[method-assign]
        for store in self.stores_of_nodes:
            store.answer()
        goes = 0
        while self.jobs or any(source.unended_blocks for source in rig.tiering.sources):
            assert (goes := goes + 1) < 100, "something waits for ever"
            rig.tiering.pump()
            for tier in self.tiers:
                tier.end_all()
            rig.clock.now += 10.0
            rig.tiering.tick()
        assert not rig.tiering.promotions.unsettled
        assert all(source.unended_blocks == source.reads.under_way_bytes == 0 for source in rig.tiering.sources)
        assert not any(
            source.read_order.blocks_of or source.reads.given_up or source.reads.given_up_bytes
            for source in rig.tiering.sources
        )
        rig.clock.now += 1000.0
        rig.cache.tick()
        rig.tiering.tick()
        while rig.cache.background():
            pass
        for counters in [namespace.counters for namespace in self.spaces]:
            found = counters.keys_ready + counters.found_disk + counters.found_shared
            assert counters.keys_asked == found + counters.misses.total(), "each key is counted once"
        usage = rig.cache.life.usage
        assert (usage.writing, usage.dropped, usage.pinned) == (0, 0, 0)
        rig.check()


TestTiering = TieringMachine.TestCase
TestTiering.settings = hypothesis_settings(
    max_examples=15 * TIMES**2, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
