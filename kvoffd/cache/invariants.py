"""The books: where the pool's bytes are, and the audit that they are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from kvoffd.cache.block import Block, BlockState
from kvoffd.cache.blocks import Blocks
from kvoffd.cache.lease import LeaseBook
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.ticket import LoadTicket, StoreTicket
from kvoffd.pool.pool import Pool
from kvoffd.tiering.transfers import WriteTicket


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pool bytes by use. free + writing + ready + leaving + quarantined = pool."""

    free_bytes: int
    writing_bytes: int
    ready_bytes: int
    leaving_bytes: int
    pinned_bytes: int
    """Of the ready and leaving ones, those that a lease or a running load needs."""
    quarantined_bytes: int = 0
    """In slots that lost what was stored in them."""

    @property
    def total_bytes(self) -> int:
        """What must be the size of the pool."""
        held = self.writing_bytes + self.ready_bytes + self.leaving_bytes
        return self.free_bytes + held + self.quarantined_bytes


def audit(
    slots: Pool,
    policy: EvictionPolicy,
    blocks: Blocks,
    namespaces: Iterable[Namespace],
    leases: LeaseBook,
    stores: Iterable[StoreTicket],
    loads: Iterable[LoadTicket],
    writes: Iterable[WriteTicket],
    balance: PoolUsage,
) -> None:
    """Raise AssertionError where any two accounts of the same thing differ. Slow: for tests and the simulator."""
    there = set(blocks.block_at.values())
    _audit_slots(slots, blocks, there, balance)
    _audit_index(namespaces, policy, there)
    _audit_writers(stores, blocks.half_stored, there)
    _audit_pins(leases, loads, writes, blocks.kept, there)
    pinned = {block for block in there if block.pins}
    assert blocks.pinned_blocks == len(pinned)
    assert balance.pinned_bytes == sum(block.slot_bytes for block in pinned)


def _audit_slots(slots: Pool, books: Blocks, blocks: set[Block], balance: PoolUsage) -> None:
    assert balance.total_bytes == slots.pool_bytes, f"the books do not balance: {balance}"
    held = {shard.offset: block for block in blocks for shard in block.shards.values()}
    assert held == books.block_at, "slots and shards differ"
    assert balance.quarantined_bytes == books.quarantined_bytes == sum(books.quarantined.values())
    spans = [(s.offset, s.offset + s.slot_bytes) for block in blocks for s in block.shards.values()]
    spans = sorted([*spans, *((offset, offset + size) for offset, size in books.quarantined.items())])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "slots overlap"
    assert sum(end - start for start, end in spans) == slots.pool_bytes - slots.free_bytes
    for block in blocks:
        assert block.slot_bytes == sum(shard.slot_bytes for shard in block.shards.values())
        assert block.state is BlockState.LEAVING or not any(shard.corrupt for shard in block.shards.values())
    doubtful = {shard for block in blocks for shard in block.shards.values() if not (shard.verified or shard.corrupt)}
    assert set(books.unverified) == doubtful


def _audit_index(namespaces: Iterable[Namespace], policy: EvictionPolicy, blocks: set[Block]) -> None:
    indexed = 0
    for namespace in namespaces:
        own = [block for block in blocks if block.namespace is namespace]
        for state in (BlockState.WRITING, BlockState.READY, BlockState.LEAVING):
            there = [block for block in own if block.state is state]
            assert namespace.blocks_in[state] == len(there), f"miscounted {state.name} blocks"
            assert namespace.bytes_in[state] == sum(block.slot_bytes for block in there)
        assert sum(namespace.blocks_in) == 0
        for group, index in enumerate(namespace.index):
            indexed += len(index)
            for key, block in index.items():
                assert (block.namespace, block.group, block.key) == (namespace, group, key)
                assert block.state in (BlockState.WRITING, BlockState.READY)
                assert block.shards, "an empty block in the index"
            told = namespace.states_of(group, b"".join(index))
            assert list(told) == [block.state for block in index.values()], "lookups tell other states"
            assert namespace.indexed(group) == len(index), "lookups find keys that are not there"
    assert indexed == sum(block.state is not BlockState.LEAVING for block in blocks)
    candidates = list(policy.candidates())
    assert len(candidates) == len(policy)
    assert len(set(candidates)) == len(candidates), "a candidate twice"
    assert set(candidates) == {block for block in blocks if block.state is BlockState.READY}


def _audit_writers(stores: Iterable[StoreTicket], half_stored: Collection[Block], blocks: set[Block]) -> None:
    writing = Counter((block, ticket.rank) for ticket in stores for block in ticket.blocks)
    assert all(count == 1 for count in writing.values()), "two stores write one shard"
    unwritten = {(b, rank) for b in blocks for rank, shard in b.shards.items() if not shard.written}
    assert unwritten == set(writing), "stores and unwritten shards differ"
    for block in blocks:
        written = sum(shard.written for shard in block.shards.values())
        assert block.missing == block.namespace.world_size - written
        assert block.writers == sum((block, rank) in writing for rank in block.shards)
        assert (block.state is BlockState.READY) <= (block.missing == 0)
        assert (block.state is BlockState.WRITING) <= (block.missing > 0)
        assert (block.state is BlockState.LEAVING) <= bool(block.writers or block.pins), "left, but still there"
    waiting = {block for block in blocks if block.state is BlockState.WRITING and not block.writers}
    assert set(half_stored) == waiting, "half-stored blocks are not all watched"


def _audit_pins(
    leases: LeaseBook,
    loads: Iterable[LoadTicket],
    writes: Iterable[WriteTicket],
    kept: Collection[Block],
    blocks: set[Block],
) -> None:
    pins = Counter(block for lease in leases for group in lease.blocks.values() for block in group)
    pins.update(block for ticket in loads for block in ticket.blocks)
    pins.update(ticket.block for ticket in writes)
    pins.update(list(kept))
    assert all(block.state is BlockState.READY for block in kept), "an operator's pin outlived its block"
    assert all(block.pins == pins[block] for block in blocks), "pins of nobody, or too few"
    assert set(pins) <= blocks, "a pinned block lost its slots"
    assert all(block.missing == 0 for block in pins), "an incomplete block is pinned"
    assert all(lease.pinned for lease in leases), "a lease on nothing"
