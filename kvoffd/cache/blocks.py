"""All blocks of the pool in all states. Their index, slots, pins and order of eviction change together, and only here.

A block's life, and the steps that take it from state to state::

    ABSENT  -> WRITING   start_shards: a store begins to write its first shard
    WRITING -> READY     finish_shards: the last missing shard is written
    READY   -> WRITING   reopen_shard: a store offers more of the key than the block holds
    WRITING -> ABSENT    abandon_shards: a store failed, and no other shard is there
    WRITING -> LEAVING   drop: invalidated, corrupt, half stored for too long
    READY   -> LEAVING   drop, evict
    LEAVING -> ABSENT    at once; or with the last unpin, finish_shards or abandon_shards that it waits for
    ABSENT  -> READY     adopt: an earlier daemon left it whole

WRITING and READY blocks are in the index. A LEAVING block has left it at once, and keeps its slots until nothing holds
them: a written shard is held by the block's pins, a shard that is being written by its store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, takewhile
from typing import TypeAlias

from kvoffd.cache.hooks import CacheListener, TieringHooks
from kvoffd.cache.misses import Misses
from kvoffd.cache.namespace import Block, BlockState, MissReason, Namespace, Shard
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.room import Room
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import SlotRecord

ABSENT, WRITING, READY, LEAVING = BlockState
INDEXED = (WRITING, READY)
MAX_KEYS_PER_EVENT = 1000
"""Adopted keys in one call of the listener."""

_Grouped: TypeAlias = Iterable[tuple[tuple[Namespace, int, BlockState], list[Block]]]
"""Blocks by namespace, group and state: what is counted, indexed and published together."""


class Blocks(Room):
    """The steps of a block's life. The caller sees to it that all pins are entered: see ``LeasedBlocks``."""

    def __init__(
        self,
        slots: Pool,
        policy: EvictionPolicy,
        listener: CacheListener,
        clock: Callable[[], float],
        max_slots: int = 2**62,
    ) -> None:
        super().__init__(slots, policy, clock, max_slots)
        self.half_stored: dict[Block, float] = {}
        """Incomplete blocks that nobody is writing, and since when; oldest first."""
        self.unverified: dict[Shard, tuple[Block, int]] = {}
        """Shards that are not verified yet, or whose checksum is still to be taken, with their block and rank; oldest
        first."""
        self.operator_pinned: dict[Block, None] = {}
        """Ready blocks with a pin of an operator, the earliest first. The pin ends when the block is dropped."""
        self.quarantined: dict[int, int] = {}
        """By offset, the size of slots that are never used again."""
        self.quarantined_bytes = 0
        self.pinned_blocks = 0
        """Blocks with pins of any kind."""
        self.pinned_bytes = 0
        self.misses = Misses()
        self.tiering: TieringHooks | None = None
        """Who looks after the tiers below the pool; None while there are none."""
        self._listener = listener
        self._clock = clock

    def add_namespace(self, namespace: Namespace) -> None:
        """Make room for a namespace in the index."""
        self.index[namespace] = tuple({} for _ in namespace.groups)

    def remove_namespace(self, namespace: Namespace) -> None:
        """Undo ``add_namespace``. It may have no block any more."""
        del self.index[namespace]
        self.shares.forget(namespace)
        self.hints.forget(namespace)

    # --- in --------------------------------------------------------------------------------------

    def start_shards(
        self,
        namespace: Namespace,
        group: int,
        keys: Sequence[bytes],
        rank: int,
        offsets: Sequence[int],
        slot_bytes: int,
        first_blocks: Sequence[int],
    ) -> list[Block]:
        """Begin to write a shard of each key in the slot at its offset; blocks are made where there are none."""
        index, block_at, half_stored = self.index[namespace][group], self.block_at, self.half_stored
        fresh = [Block(namespace, group, key) for key in keys if key not in index]
        index.update((block.key, block) for block in fresh)
        self._move(fresh, ABSENT, WRITING)
        blocks = [index[key] for key in keys]
        added = 0
        for block, offset, first_block in zip(blocks, offsets, first_blocks, strict=True):
            if half_stored:
                half_stored.pop(block, None)
            shard = block.shards.get(rank)
            if shard is None:
                shard = block.shards[rank] = Shard(offset, slot_bytes)
                block.slot_bytes += slot_bytes
                added += slot_bytes
                block_at[offset] = block
            else:
                shard.checksum = 0
                self.mark_verified(shard)
            shard.first_block = first_block
        namespace.bytes_in[WRITING] += added
        self._slots.mark_all_writing(offsets, namespace.fingerprint, group, keys, rank, namespace.world_size)
        return blocks

    def reopen_shard(self, block: Block, rank: int) -> None:
        """Make a written shard one that is to be written again. Nothing may pin the block."""
        assert not block.pins
        block.shards[rank].written = False
        block.missing += 1
        if block.state is READY:
            self._policy.remove([block], evicted=False)
            self._move([block], READY, WRITING)
            self._listener.removed(block.namespace, block.group, [block.key])

    def finish_shards(self, blocks: Sequence[Block], rank: int, shard_bytes: int, checksums: Sequence[int] = ()) -> int:
        """A store wrote this rank's shards of ``blocks``, all of one group. Returns how many became ready.

        ``checksums`` are those of the shards, 0 where one is still to be taken; where there are none the shards are
        never verified.
        """
        ready: list[Block] = []
        sums = checksums or [0] * len(blocks)
        written: list[tuple[int, int, int]] = []
        # As in a touch, the tail is the older one, for a successor too.
        for block, checksum in zip(reversed(blocks), reversed(sums), strict=True):
            shard = block.shards[rank]
            if block.state is LEAVING:
                self._free_shards([(block, rank)])
                continue
            shard.written = True
            shard.checksum = checksum
            if checksums and not checksum:
                shard.verified = False
                self.unverified[shard] = (block, rank)
            block.missing -= 1
            written.append((shard.offset, shard.first_block, checksum))
            if not block.missing:
                ready.append(block)
            elif not block.writers:
                self.half_stored[block] = self._clock()
        if written:
            offsets, first_blocks, written_sums = zip(*written, strict=True)
            self._slots.mark_all_ready(offsets, first_blocks, shard_bytes, written_sums)
        if ready:
            self._make_ready(ready)
        return len(ready)

    def _make_ready(self, tail_first: Sequence[Block]) -> None:
        namespace = tail_first[0].namespace
        self._move(tail_first, WRITING, READY)
        self._policy.insert(tail_first)
        namespace.counters.stored_blocks += len(tail_first)
        self._listener.stored(namespace, tail_first[0].group, [block.key for block in reversed(tail_first)])

    def abandon_shards(self, blocks: Sequence[Block], rank: int) -> None:
        """A store failed: its shards go; what other ranks wrote of the blocks waits for another one."""
        self._free_shards([(block, rank) for block in blocks])
        for block in blocks:
            if block.state is WRITING and not block.writers:
                self.half_stored[block] = self._clock()

    def adopt(self, namespaces: Iterable[Namespace], blocks: Sequence[tuple[Namespace, Sequence[SlotRecord]]]) -> None:
        """Enter whole blocks that an earlier daemon wrote, each given by its slots; oldest first."""
        for namespace in namespaces:
            self.add_namespace(namespace)
        made: list[Block] = []
        for namespace, (first, *_) in blocks:
            block = self.index[namespace][first.group][first.key] = Block(namespace, first.group, first.key)
            made.append(block)
        grouped = _group(made)
        for _, alike in grouped:
            self._move(alike, ABSENT, READY)
        for block, (_, slots) in zip(made, blocks, strict=True):
            for slot in slots:
                shard = block.shards[slot.rank] = Shard(slot.offset, slot.slot_bytes)
                shard.first_block = slot.first_block
                shard.written = True
                shard.checksum = slot.checksum
                shard.verified = False
                self.unverified[shard] = (block, slot.rank)
                block.slot_bytes += slot.slot_bytes
                self.block_at[slot.offset] = block
            block.namespace.bytes_in[READY] += block.slot_bytes
            block.missing = 0
        for _, alike_in_age in groupby(made, key=lambda block: (block.namespace, block.group)):
            self._policy.insert(list(alike_in_age))
        for namespace in self.index:
            self._listener.cleared(namespace)
        for (namespace, group, _), alike in grouped:
            keys = [block.key for block in alike]
            for start in range(0, len(keys), MAX_KEYS_PER_EVENT):
                self._listener.stored(namespace, group, keys[start : start + MAX_KEYS_PER_EVENT])

    # --- out -------------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[Block]) -> None:
        """Let ready blocks go that nothing pins, because others need the room."""
        if self.tiering is not None:
            self.tiering.evicted(blocks)
        for block in blocks:
            assert block.state is READY
            assert not block.pins
        self._policy.remove(blocks, evicted=True)
        for (namespace, group, _), alike in self._leave(blocks):
            namespace.counters.evicted_blocks += len(alike)
            keys = [block.key for block in alike]
            self._listener.removed(namespace, group, keys)
            self.misses.note(namespace, group, keys, MissReason.EVICTED)

    def drop(self, blocks: Sequence[Block], reason: MissReason = MissReason.INVALIDATED) -> None:
        """Take blocks out of the index, ready or not. The caller tells the listener."""
        self._policy.remove([block for block in blocks if block.state is READY], evicted=False)
        for block in blocks:
            self.half_stored.pop(block, None)
            if block in self.operator_pinned:
                del self.operator_pinned[block]
                self.unpin([block])
            block.namespace.counters.invalidated_blocks += 1
        for (namespace, group, _), alike in self._leave(blocks):
            self.misses.note(namespace, group, [block.key for block in alike], reason)

    def drop_half_stored(self, until: float) -> int:
        """Drop incomplete blocks that nobody wrote since ``until``, or before. Returns how many."""
        stale = [block for block, _ in takewhile(lambda item: item[1] <= until, self.half_stored.items())]
        for block in stale:
            block.namespace.counters.half_stored_blocks += 1
        self.drop(stale, MissReason.HALF_STORED)
        return len(stale)

    def mark_verified(self, shard: Shard) -> None:
        """The shard's bytes are those that were stored, or are about to be written anew."""
        shard.verified = True
        self.unverified.pop(shard, None)

    def take_checksum(self, shard: Shard, checksum: int) -> None:
        """Note the checksum of a shard that was stored without one."""
        shard.checksum = checksum
        self._slots.set_checksum(shard.offset, checksum)
        self.mark_verified(shard)

    def quarantine(self, block: Block, rank: int) -> None:
        """A shard's bytes are not those that were stored: its block goes, and its slot is never used again."""
        shard = block.shards[rank]
        shard.corrupt = True
        self.unverified.pop(shard, None)
        readable = block.state is READY
        if block.state in INDEXED:
            self.drop([block], MissReason.CORRUPT)
        if readable:
            self._listener.removed(block.namespace, block.group, [block.key])

    def _leave(self, blocks: Sequence[Block]) -> _Grouped:
        """Take blocks out of the index and free the slots that nothing holds. Returns them by their state before."""
        grouped = _group(blocks)
        for (namespace, group, state), alike in grouped:
            index = self.index[namespace][group]
            for block in alike:
                del index[block.key]
            self._move(alike, state, LEAVING)
        self._free_written([block for block in blocks if not block.pins])
        for block in blocks:
            if block.pins:
                for shard in block.shards.values():
                    if shard.written:  # who holds it may go on reading, but a successor must not bring it back
                        self._slots.revoke_record(shard.offset)
        return grouped

    def _free_written(self, blocks: Iterable[Block]) -> None:
        self._free_shards([(block, rank) for block in blocks for rank, shard in block.shards.items() if shard.written])

    def _free_shards(self, shards: Sequence[tuple[Block, int]]) -> None:
        """Free slots, given by block and rank; a block without any is ABSENT again."""
        offsets: list[int] = []
        gone: list[Block] = []
        for block, rank in shards:
            shard = block.shards.pop(rank)
            block.missing += shard.written
            block.slot_bytes -= shard.slot_bytes
            block.namespace.bytes_in[block.state] -= shard.slot_bytes
            del self.block_at[shard.offset]
            self.unverified.pop(shard, None)
            if not block.shards:
                gone.append(block)
            if not shard.corrupt:
                offsets.append(shard.offset)
                continue
            # It stays handed out, so that nobody else gets it.
            self._slots.revoke_record(shard.offset)
            self.quarantined[shard.offset] = shard.slot_bytes
            self.quarantined_bytes += shard.slot_bytes
        self._slots.free(offsets)
        for (namespace, group, state), alike in _group(gone):
            if state is WRITING:
                for block in alike:
                    del self.index[namespace][group][block.key]
            self._move(alike, state, ABSENT)

    # --- state and pins --------------------------------------------------------------------------

    def used(self, namespace: Namespace, group: int, blocks: Sequence[Block]) -> None:
        """Note that a request found these ready blocks, root first."""
        self.hints.used(blocks)
        if self.shares:
            self.shares.note_use(namespace)
            index = self.index[namespace][group]
            for block in reversed(blocks):
                index[block.key] = index.pop(block.key)

    def _move(self, blocks: Sequence[Block], before: BlockState, after: BlockState) -> None:
        """Change the state of blocks of one group that are all in ``before``, and with it what is counted by state."""
        if not blocks:
            return
        nbytes = 0
        for block in blocks:
            nbytes += block.slot_bytes
            block.state = after
        namespace = blocks[0].namespace
        namespace.blocks_in[before] -= len(blocks)
        namespace.bytes_in[before] -= nbytes
        namespace.blocks_in[after] += len(blocks)
        namespace.bytes_in[after] += nbytes
        if before in INDEXED or after in INDEXED:
            keys = b"".join([block.key for block in blocks])
            namespace.key_states[blocks[0].group].set(keys, after if after in INDEXED else ABSENT)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Keep the bytes of complete blocks where they are, once more for each time a block is named."""
        fresh = fresh_bytes = 0
        for block in blocks:
            if not block.pins:
                fresh += 1
                fresh_bytes += block.slot_bytes
            block.pins += 1
        self.pinned_blocks += fresh
        self.pinned_bytes += fresh_bytes

    def unpin(self, blocks: Iterable[Block]) -> None:
        """Undo one pin for each time a block is named. The last one lets a dropped block's slots go."""
        loose = loose_bytes = 0
        gone: list[Block] = []
        for block in blocks:
            block.pins -= 1
            if not block.pins:
                loose += 1
                loose_bytes += block.slot_bytes
                if block.state is LEAVING:
                    gone.append(block)
        if gone:
            self._free_written(gone)
        self.pinned_blocks -= loose
        self.pinned_bytes -= loose_bytes


def _group(blocks: Iterable[Block]) -> _Grouped:
    grouped: dict[tuple[Namespace, int, BlockState], list[Block]] = {}
    for block in blocks:
        grouped.setdefault((block.namespace, block.group, block.state), []).append(block)
    return grouped.items()
