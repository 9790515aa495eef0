"""The invariants of the cache: any two accounts of the same thing agree. Slow: every block is looked at."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from kvoffd.cache.blocks import Blocks
from kvoffd.cache.namespace import SLOT_BYTES, Block, BlockState, Namespace
from kvoffd.tiering.manager import TieringManager


def check_invariants(cache: BlockCache) -> None:
    """Raise AssertionError where an invariant is broken."""
    blocks = set(_blocks_by_slot(cache.blocks).values())
    _check_slots(cache, cache.blocks, blocks)
    _check_index(cache, blocks)
    _check_writers(cache, blocks)
    _check_pins(cache, blocks)


def _blocks_by_slot(blocks: Blocks) -> dict[int, Block]:
    found = {offset: blocks.holders.get(offset) for offset in blocks.holders.offsets()}
    return {offset: block for offset, block in found.items() if block is not None}


def _check_slots(cache: BlockCache, all_blocks: Blocks, blocks: set[Block]) -> None:
    usage, pool_bytes = cache.pool_usage(), cache.slots.pool_bytes
    held_bytes = usage.writing_bytes + usage.ready_bytes + usage.leaving_bytes + usage.inherited_bytes
    assert usage.free_bytes + held_bytes + usage.quarantined_bytes == pool_bytes, f"the pool does not add up: {usage}"
    held = {shard.offset: block for block in blocks for shard in block.shards.values()}
    assert held == _blocks_by_slot(all_blocks), "slots and shards differ"
    assert sorted(held) == sorted(all_blocks.holders.offsets())
    known_bytes = sum(b.namespace.index_bytes_per_block for b in blocks) + all_blocks.quotas.nbytes
    assert all_blocks.index_bytes == SLOT_BYTES * len(held) + known_bytes
    assert usage.quarantined_bytes == all_blocks.quarantined_bytes == sum(all_blocks.quarantined.values())
    spans = [(s.offset, s.offset + s.slot_bytes) for block in blocks for s in block.shards.values()]
    spans += [(offset, offset + size) for offset, size in all_blocks.quarantined.items()]
    spans = sorted([*spans, *_check_inherited(cache)])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "slots overlap"
    assert sum(end - start for start, end in spans) == pool_bytes - cache.slots.free_bytes
    for block in blocks:
        assert block.slot_bytes == sum(shard.slot_bytes for shard in block.shards.values())
        assert block.state is BlockState.LEAVING or not any(shard.corrupt for shard in block.shards.values())
    unverified = {(b, rank): s for b in blocks for rank, s in b.shards.items() if not s.verified}
    assert all_blocks.unverified_slots == len(unverified)
    without = {shard.offset: at for at, shard in unverified.items() if not shard.checksum}
    assert all_blocks.without_checksum == without
    assert {shard.offset for shard in unverified.values() if shard.checksum} <= set(all_blocks.adopted)


def _check_inherited(cache: BlockCache) -> list[tuple[int, int]]:
    """The slots of blocks that are still to be taken over, by begin and end."""
    left, spans, counts, nbytes = cache.blocks.inherited, [], Counter[Namespace](), Counter[Namespace]()
    assert left is None or left, "nothing is left, and is kept"
    for some in left or ():
        namespace, group = cache.blocks.inherited_owners[some.number]
        assert namespace in cache.namespaces, "blocks are left of a namespace that was forgotten"
        counts[namespace] += len(some.offsets)
        for offsets in some.offsets.tolist():
            for rank, offset in enumerate(offsets):
                spans.append((offset, offset + namespace.slot_bytes(rank, group)))
                nbytes[namespace] += namespace.slot_bytes(rank, group)
    for namespace in cache.namespaces:
        assert (namespace.inherited_blocks, namespace.bytes_in[BlockState.INHERITED]) == (
            counts[namespace],
            nbytes[namespace],
        )
    assert cache.inherited_blocks == sum(counts.values())
    return spans


def _check_index(cache: BlockCache, blocks: set[Block]) -> None:
    indexed = 0
    for namespace in cache.namespaces:
        own = [block for block in blocks if block.namespace is namespace]
        for state in (BlockState.WRITING, BlockState.READY, BlockState.LEAVING):
            in_state = [block for block in own if block.state is state]
            assert namespace.blocks_in[state] == len(in_state), f"miscounted {state.name} blocks"
            assert namespace.bytes_in[state] == sum(block.slot_bytes for block in in_state)
        assert sum(namespace.blocks_in) == 0
        if namespace in cache.blocks.quotas._uses:
            by_use = list(cache.blocks.quotas.by_use(namespace))
            assert len(set(by_use)) == len(by_use), "a block used twice at once"
            assert set(by_use) == {block for block in own if block.state is BlockState.READY}
        for group, index in enumerate(namespace.index):
            indexed += len(index)
            for key, block in index.items():
                assert (block.namespace, block.group, block.key) == (namespace, group, key)
                assert block.state in (BlockState.WRITING, BlockState.READY)
                assert block.shards, "an empty block in the index"
            states = namespace.states_of(group, b"".join(index))
            assert index.find(b"".join(index)) == index.blocks()
            assert len(index) == len(index.blocks())
            told = [BlockState.ABSENT if namespace.clearing else block.state for block in index.values()]
            assert list(states) == told, "lookups tell other states"
    assert indexed == sum(block.state is not BlockState.LEAVING for block in blocks)
    candidates = list(cache.policy.candidates())
    assert len(candidates) == len(cache.policy)
    assert len(set(candidates)) == len(candidates), "a candidate twice"
    assert set(candidates) == {block for block in blocks if block.state is BlockState.READY}


def _check_writers(cache: BlockCache, blocks: set[Block]) -> None:
    writing = Counter((block, ticket.rank) for ticket in cache.stores for block in ticket.blocks)
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
    half_stored = cache.blocks.half_stored
    assert set(half_stored) == waiting, "half-stored blocks are not all watched"
    assert half_stored._nbytes == sum(block.slot_bytes for block in waiting)
    assert half_stored._index_bytes == sum(block.index_bytes for block in waiting)


def _check_pins(cache: BlockCache, blocks: set[Block]) -> None:
    tiering = cache.blocks.tiering
    pins = Counter(block for lease in cache.leases for group in lease.blocks.values() for block in group)
    pins.update(block for lease in cache.ended for group in lease.blocks.values() for block in group)
    pins.update(block for ticket in cache.loads for block in ticket.blocks)
    if isinstance(tiering, TieringManager):
        pins.update(demotion.block for demotion in tiering.transfers.demotions)
    assert all(block.pins == pins[block] for block in blocks), "pins of nobody, or too few"
    assert set(pins) <= blocks, "a pinned block lost its slots"
    assert all(block.missing == 0 for block in pins), "an incomplete block is pinned"
    assert all(lease.keys for lease in cache.leases), "a lease on nothing"
    pinned = {block for block in blocks if block.pins}
    assert cache.blocks.pinned_blocks == len(pinned)
    assert cache.pool_usage().pinned_bytes == sum(block.slot_bytes for block in pinned)
