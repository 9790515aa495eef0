"""A cache by slots for tests, over a real allocator and slot table, with a clock to set; and its invariants."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.lru import Lru
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policies import make_policy
from kvoffd.cache.recovery import RecoveredBlocks, recover
from kvoffd.cache.states import (
    CORRUPT,
    DROPPED,
    FREE,
    NO_BLOCK,
    NOT_FIRST,
    READY,
    SHARD_STATE,
    UNVERIFIED,
    UNWRITTEN,
    WRITING,
    WRITING_SHARD,
    WRITTEN,
)
from kvoffd.cache.tickets import SessionLeases, StorePart, StoreTicket
from kvoffd.pool.allocator import SlotAllocator
from kvoffd.pool.slot_table import BAD_RECORD, READY_RECORD, SlotTable, TableGeometry
from kvoffd.system.numa import Locality
from kvoffd_proto.events import MEDIUM_CPU
from kvoffd_proto.messages import GroupSpec
from tests.kit.clock import Clock

UNIT = 8192


class FoldedEvents:
    """Folds the events of a cache, or of the tiers below it, into the index they describe; refuses impossible ones."""

    def __init__(self, medium: str = MEDIUM_CPU) -> None:
        self._medium = medium
        self.index: set[tuple[bytes, int, bytes]] = set()

    def stored(
        self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU, *, tokens: object = None
    ) -> None:
        names = self._names(namespace, group, keys, medium)
        assert not names & self.index
        self.index |= names

    def removed(self, namespace: Namespace, group: int, keys: list[bytes], medium: str = MEDIUM_CPU) -> None:
        names = self._names(namespace, group, keys, medium)
        assert names <= self.index
        self.index -= names

    def _names(self, namespace: Namespace, group: int, keys: list[bytes], medium: str) -> set[tuple[bytes, int, bytes]]:
        names = {(namespace.fingerprint, group, key) for key in keys}
        assert (len(names), medium) == (len(keys), self._medium)
        return names

    def cleared(self, namespace: Namespace) -> None:
        self.index = {name for name in self.index if name[0] != namespace.fingerprint}


def keys_of(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


class CacheRig:
    """The cache and what is under it."""

    def __init__(
        self,
        units: int,
        region_units: int,
        policy: str = "lru",
        unit: int = UNIT,
        leased_share: float = 0.875,
        nodes: int = 0,
    ) -> None:
        """A pool of so many units of bytes, a block's unless sizes are given."""
        self.unit = unit
        self.geometry = TableGeometry(units * unit, region_units * unit)
        self.fd = os.memfd_create("table")
        os.ftruncate(self.fd, self.geometry.size_bytes)
        weakref.finalize(self, os.close, self.fd)
        self.slots = SlotAllocator(
            units * unit, region_units * unit, [Locality(at, frozenset()) for at in range(nodes)]
        )
        memory = memoryview(mmap.mmap(self.fd, self.geometry.size_bytes))
        self.table = SlotTable(memory, self.geometry, new=True)
        self.clock = Clock()
        self.events = FoldedEvents()
        self.policy = make_policy(policy, self.slots.pool_bytes, self.geometry.slots)
        self.cache = Cache(self.slots, self.table, self.policy, self.events, self.clock, leased_share=leased_share)

    def open(
        self, name: str = "a", world_size: int = 1, sizes: Sequence[int] | None = None, key_bytes: int = 8
    ) -> Namespace:
        """A namespace whose ranks are all registered. ``sizes``: of their shards by group."""
        sizes = sizes or (self.unit,)
        namespace = self.join(name, world_size, [GroupSpec("full", 16)] * len(sizes), key_bytes)
        for rank in range(world_size):
            self.cache.namespaces.register_rank(namespace, rank, sizes, None)
        return namespace

    def open_uneven(self, name: str, sizes: Sequence[int]) -> Namespace:
        """A namespace of one group. ``sizes``: of a shard by rank."""
        namespace = self.join(name, len(sizes))
        for rank, size in enumerate(sizes):
            self.cache.namespaces.register_rank(namespace, rank, [size], None)
        return namespace

    def join(
        self, name: str, world_size: int = 1, groups: Sequence[GroupSpec] = (GroupSpec("full", 16),), key_bytes: int = 8
    ) -> Namespace:
        """A namespace in which no rank need have registered."""
        namespace = Namespace(name.encode().ljust(32), name, world_size, key_bytes, groups, "{}")
        return self.cache.namespaces.open(namespace)[0]

    def blocks(self, namespace: Namespace, keys: bytes, group: int = 0) -> BlockIds:
        """The blocks of keys that have one."""
        known = namespace.group(group)
        states, blocks = self.cache.blocks.find(known, keys)
        return blocks[np.frombuffer(states, np.uint8) != FREE]

    def begin(
        self,
        namespace: Namespace,
        rank: int,
        group: int,
        keys: bytes,
        first_blocks: Mapping[int, int] | None = None,
        starts: Sequence[int] = (0,),
    ) -> list[StoreTicket]:
        return self.cache.stores.begin(namespace, rank, [StorePart(group, keys, first_blocks or {}, starts)])

    def commit(self, stored: list[StoreTicket], checksum: int = 7) -> int:
        return self.cache.stores.commit(stored, [[checksum] * len(part.copy) for part in stored])

    def store(self, namespace: Namespace, keys: bytes, group: int = 0) -> int:
        """Store all ranks of keys. Returns how many became ready."""
        return sum(self.commit(self.begin(namespace, rank, group, keys)) for rank in range(namespace.world_size))

    def look(self, namespace: Namespace, keys: bytes, group: int = 0, giver: int = 0) -> bytes:
        """A request's lookup and all that follows its reply. Returns the states."""
        (states,), _ = self.cache.lookup(namespace, 9, 2**62, [(group, keys)], giver=giver)
        self.cache.prompts.report()
        self.cache.leases.end(9, [2**62])
        return states

    def ask(self, namespace: Namespace, keys: bytes, group: int = 0, giver: int = 0) -> bytes:
        """A request: its lookup, and the store of its keys. Returns the states that it found."""
        states = self.look(namespace, keys, group, giver)
        self.store(namespace, keys, group)
        return states

    def states(self, namespace: Namespace, keys: bytes, group: int = 0) -> list[int]:
        """What a lookup would find in the pool."""
        return list(self.cache.blocks.find(namespace.group(group), keys)[0])

    def successor(self) -> tuple[BlockFinder, RecoveredBlocks]:
        """What one would find that comes after this process's death."""
        fd = os.memfd_create("copy")
        os.ftruncate(fd, self.geometry.size_bytes)
        os.pwrite(fd, os.pread(self.fd, self.geometry.size_bytes, 0), 0)
        table = SlotTable(memoryview(mmap.mmap(fd, self.geometry.size_bytes)), self.geometry, new=False)
        slots, cache = SlotAllocator(self.geometry.pool_bytes, self.geometry.region_bytes), self.cache
        successor = Cache(slots, table, Lru(self.geometry.slots), FoldedEvents(), self.clock)
        numbers: dict[int, tuple[bytes, int]] = {}
        groups = []
        for namespace in cache.namespaces.values():
            for group, current in enumerate(namespace.groups):
                numbers[len(numbers) + 1] = namespace.fingerprint, group
                groups.append(Group(len(numbers), namespace, group))
                groups[-1].set_sizes(current.lengths, current.sizes)
        recovered = recover(fd, table, slots, successor.blocks, groups, 2**32 - 1)
        os.close(fd)
        return BlockFinder(successor, numbers), recovered


@dataclass
class BlockFinder:
    """What a successor recovered."""

    cache: Cache
    numbers: dict[int, tuple[bytes, int]]

    def index(self) -> set[tuple[bytes, int, bytes]]:
        blocks = self.cache.blocks
        heads = np.flatnonzero(blocks.state == READY).astype(np.uint32)
        return {(*self.numbers[int(blocks.group[head])], blocks.keys(head[None], 8)) for head in heads}


def check_invariants(cache: Cache) -> None:
    """Any two accounts of the same thing agree. Slow: every slot is looked at."""
    blocks, slots, table = cache.blocks, cache.slots, cache.table
    heads = np.flatnonzero(np.isin(blocks.state, (WRITING, READY, DROPPED))).astype(np.uint32)
    seen: set[int] = set()
    counts: Counter[tuple[Group, int]] = Counter()
    nbytes: Counter[Namespace] = Counter()
    pinned = pinned_blocks = pinned_dropped = unverified = 0
    for head in heads.tolist():
        group = cache.life.group_of(head)
        ring = blocks.slots(np.array([head], np.uint32), len(group.sizes))[0].tolist()
        assert len(set(ring)) == len(ring)
        assert int(blocks.next[ring[-1]]) == head, "the ring is not closed"
        assert not seen.intersection(ring), "a slot is in two blocks"
        seen.update(ring)
        state = int(blocks.state[head])
        assert all(blocks.state[slot] == NOT_FIRST for slot in ring[1:])
        shards = [int(blocks.shard[slot]) for slot in ring]
        assert blocks.missing[head] == sum(shard & SHARD_STATE != WRITTEN for shard in shards) or state == DROPPED
        assert (state == READY) == (blocks.missing[head] == 0) or state == DROPPED
        for rank, (slot, shard) in enumerate(zip(ring, shards, strict=True)):
            assert slots.slot_bytes[slot // slots.slots_per_region] == group.sizes[rank]
            assert table.records["rank"][slot] == rank
            unverified += bool(shard & UNVERIFIED)
            assert state == DROPPED or not shard & CORRUPT
            readable = table.records["state"][slot] == READY_RECORD
            assert (table.records["state"][slot] == BAD_RECORD) == bool(shard & CORRUPT), "a successor uses it"
            if not group.retired:  # whose number no successor knows
                assert readable == (shard & SHARD_STATE == WRITTEN and state != DROPPED), "a successor is misled"
        writing = any(shard & SHARD_STATE == WRITING_SHARD for shard in shards)
        partial = state == WRITING and not writing
        assert group.retired or (head in cache.life.partial) == partial
        key = blocks.keys(np.array([head], np.uint32), group.key_bytes)
        found, number = blocks.find(group, key)
        if state == DROPPED:
            assert blocks.pins[head] or writing, "a dropped block is held by nothing"
            assert number[0] != head
        else:
            assert (found[0], int(number[0])) == (state, head)
        if blocks.pins[head]:
            pinned += group.block_bytes
            pinned_blocks += 1
            pinned_dropped += group.block_bytes * (state == DROPPED)
        counts[group, DROPPED if group.retired else state] += 1
        nbytes[group.namespace] += group.block_bytes
    assert all(blocks.state[block] == WRITING for block in cache.life.partial), (
        "a block that ended counts as incomplete"
    )
    quarantined = {int(slot) for slot in np.flatnonzero(slots.in_use) if int(slot) not in seen}
    assert all(blocks.shard[slot] == CORRUPT for slot in quarantined), "a slot in use is of no block"
    assert seen <= set(np.flatnonzero(slots.in_use).tolist()), "a block's slot is free"
    assert (cache.blocks.pinned_bytes, cache.blocks.pinned_blocks) == (pinned, pinned_blocks)
    assert cache.blocks.pinned_dropped_bytes == pinned_dropped
    assert cache.life.quarantined_slots == len(quarantined)
    assert cache.blocks.unverified_slots == unverified
    for number, known in cache.blocks.groups.items():
        assert known.number == number
        assert known.retired or known.namespace.groups[known.index] is known
        assert all(known.by_state.blocks[state] == counts.pop((known, state), 0) for state in (WRITING, READY, DROPPED))
        assert not known.retired or known.by_state.blocks[DROPPED], "a group that is over is still known"
        listed = blocks.oldest(known, len(heads) + 1).tolist()
        indexed = np.isin(blocks.state, (WRITING, READY)) & (blocks.group == number)
        assert sorted(listed) == np.flatnonzero(indexed).tolist(), "the group's list has other blocks"
    assert not counts, "a block is of a group that is forgotten"
    for namespace in cache.namespaces.values():
        assert namespace.held_bytes == nbytes[namespace]
    usage = cache.life.usage
    assert usage.free + usage.writing + usage.ready + usage.dropped + usage.quarantined == slots.pool_bytes
    pins: Counter[int] = Counter()
    held: dict[tuple[int, Namespace], SessionLeases] = {}
    active = [lease for lease in cache.leases.by_id.values() if lease.active]
    ended = [lease for together in cache.leases._to_unpin for lease in together]
    assert cache.leases._count_to_unpin == len(ended)
    assert not {*active} & {*ended}
    assert {*cache.leases.by_id.values()} <= {*active, *ended}
    for lease in ended:
        pins.update(lease.blocks.tolist())
    for lease in active:
        pins.update(lease.blocks.tolist())
        one = held.setdefault((lease.session, lease.namespace), SessionLeases())
        one.leases[lease] = None
        one.keys += len(lease.blocks)
        one.nbytes += lease.nbytes
    assert {where: (one.leases, one.keys, one.nbytes) for where, one in held.items()} == {
        (session, namespace): (one.leases, one.keys, one.nbytes)
        for session, namespaces in cache.leases.by_session.items()
        for namespace, one in namespaces.items()
    }
    assert all(cache.leases.by_session.values()), "a session without leases is listed"
    nbytes_of: Counter[int] = Counter()
    for (session, _), one in held.items():
        nbytes_of[session] += one.nbytes
    assert cache.leases._bytes_of == nbytes_of
    assert cache.leases._bytes_of.keys() <= cache.leases.by_session.keys()
    assert cache.leases.count == len(active)
    assert all(blocks.pins[block] >= count for block, count in pins.items())
    assert {int(block): int(blocks.leases[block]) for block in np.flatnonzero(blocks.leases)} == pins
    assert blocks.leased_bytes == sum(cache.life.group_of(block).block_bytes for block in pins)
    assert blocks.leased_bytes <= cache.leases.most_bytes, "leases pin more than they may"
    retained, outside = cache.order.retentions, cache.order._outside
    order = [int(block) for batch in cache.order.candidates() for block in batch]
    passed = [block for number in cache.order.passed_over for block in outside[number]]
    assert blocks.pins[passed].all(), "a block that can be evicted is in no order"
    assert sorted(order + passed) == np.flatnonzero(blocks.state == READY).tolist(), "the policy knows other blocks"
    assert all((retained.hint_of[[*part]] == number).all() for number, part in outside.items())
    assert {*outside} - {*retained.live} == {*cache.order._released, *cache.order._ended, *cache.order.passed_over}
    kept = [head for head in order if int(retained.hint_of[head]) in retained.live]
    assert retained.retained_bytes == sum(cache.life.group_of(head).block_bytes for head in kept)
    retentions = [*retained.live.values()]
    of_namespaces, of_sessions = Counter[Namespace](), Counter[int]()
    for retention in retentions:
        assert retention.nbytes == sum(
            cache.life.group_of(head).block_bytes for head in kept if retained.hint_of[head] == retention.number
        )
        of_namespaces[retention.wish.namespace] += retention.nbytes
        of_sessions[retention.wish.session] += retention.nbytes
    assert all(namespace.retained_bytes == of_namespaces[namespace] for namespace in cache.namespaces.values())
    assert retained._bytes_of == of_sessions
    assert retentions == sorted(
        [one for rank in retained._ranked.values() for one in rank.values()], key=lambda one: one.number
    )
    assert (blocks.state[~slots.in_use] == FREE).all()
    assert (blocks.shard[~slots.in_use] == UNWRITTEN).all()
    assert NO_BLOCK not in seen
