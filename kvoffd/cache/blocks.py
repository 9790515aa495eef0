"""All blocks of the pool, in any state: their index, slots, pins and order, moved together or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TypeAlias

from kvoffd.cache.block import Block, BlockState, Shard
from kvoffd.cache.eviction import choose_victims
from kvoffd.cache.listener import CacheListener
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.tiering_hooks import TieringHooks
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import SlotRecord

ABSENT, WRITING, READY, LEAVING = BlockState
MAX_KEYS_TOLD = 1000
"""Adopted keys in one call of the listener."""

_ByBooks: TypeAlias = Iterable[tuple[tuple[Namespace, int, BlockState], list[Block]]]
"""Blocks of a namespace, a group and a state."""


class Blocks:
    """The steps of a block's life: ``absent -> writing -> ready -> absent``, or out by way of ``leaving``.

    A block that is dropped while something holds it leaves the index at once, its slots when the last hold goes:
    written shards with the last pin, a shard that is being written with the end of its store.
    """

    def __init__(
        self, slots: Pool, policy: EvictionPolicy, listener: CacheListener, clock: Callable[[], float]
    ) -> None:
        self.block_at: dict[int, Block] = {}
        """By the offset of a slot in use, the block it belongs to."""
        self.half_stored: dict[Block, float] = {}
        """Incomplete blocks that nobody is writing, and since when; oldest first."""
        self.unverified: dict[Shard, tuple[Block, int]] = {}
        """Shards that are not verified yet, with their block and rank; oldest first."""
        self.kept: dict[Block, None] = {}
        """Ready blocks with a pin of an operator, the earliest first. It ends when they are dropped."""
        self.quarantined: dict[int, int] = {}
        """By offset, the size of slots that are never used again."""
        self.quarantined_bytes = 0
        self.pinned_blocks = 0
        self.pinned_bytes = 0
        self.tiering: TieringHooks | None = None
        self._slots = slots
        self._policy = policy
        self._listener = listener
        self._clock = clock

    # --- in --------------------------------------------------------------------------------------

    def take_slots(self, slot_bytes: int, count: int, protected: Set[Block], node: int | None = None) -> list[int]:
        """Up to ``count`` slots, evicting what is not pinned, being written or spared; their offsets, ascending."""
        offsets = self._slots.take(slot_bytes, count, node)
        while (lacking := count - len(offsets)) > 0:
            victims = choose_victims(self._policy, self._slots, self.block_at, slot_bytes, lacking, protected)
            if not victims:
                break
            self._evict(victims)
            # Nothing came free if it was the pool's last region, too short for this size: then the next one will do.
            offsets.extend(self._slots.take(slot_bytes, lacking, node))
        return sorted(offsets)

    def give_back_slot(self, offset: int) -> None:
        """Return a slot that was taken and not used."""
        self._slots.free([offset])

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
        index, block_at, half_stored = namespace.index[group], self.block_at, self.half_stored
        fresh = [Block(namespace, group, key) for key in keys if key not in index]
        index.update((block.key, block) for block in fresh)
        namespace.move_all(fresh, ABSENT, WRITING)
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
        """Take a written shard back to where it is to be written again. Nothing may pin the block."""
        assert not block.pins
        block.shards[rank].written = False
        block.missing += 1
        if block.state is READY:
            self._policy.remove(block, evicted=False)
            block.namespace.move(block, WRITING)
            self._listener.removed(block.namespace, block.group, [block.key])

    def finish_shards(self, blocks: Sequence[Block], rank: int, shard_bytes: int, checksums: Sequence[int] = ()) -> int:
        """A store wrote this rank's shards of ``blocks``, all of one group. Returns how many became ready.

        ``checksums`` are those of the shards; where there are none the shards are never verified.
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
            block.missing -= 1
            written.append((shard.offset, shard.first_block, checksum))
            if not block.missing:
                ready.append(block)
            elif not block.writers:
                self.half_stored[block] = self._clock()
        if written:
            offsets, first_blocks, told = zip(*written, strict=True)
            self._slots.mark_all_ready(offsets, first_blocks, shard_bytes, told)
        if ready:
            self._make_ready(ready)
        return len(ready)

    def _make_ready(self, tail_first: Sequence[Block]) -> None:
        namespace = tail_first[0].namespace
        namespace.move_all(tail_first, WRITING, READY)
        for block in tail_first:
            self._policy.insert(block)
        namespace.counters.stored_blocks += len(tail_first)
        self._listener.stored(namespace, tail_first[0].group, [block.key for block in reversed(tail_first)])

    def adopt(self, namespaces: Mapping[bytes, Namespace], blocks: Sequence[Sequence[SlotRecord]]) -> None:
        """Enter whole blocks that an earlier daemon wrote, each given by its slots; oldest first."""
        made: list[Block] = []
        for first, *_ in blocks:
            namespace = namespaces[first.fingerprint]
            block = namespace.index[first.group][first.key] = Block(namespace, first.group, first.key)
            made.append(block)
        fresh = _by_books(made)
        for (namespace, _, _), found in fresh:
            namespace.move_all(found, ABSENT, READY)
        for block, records in zip(made, blocks, strict=True):
            for record in records:
                shard = block.shards[record.rank] = Shard(record.offset, record.slot_bytes)
                shard.first_block = record.first_block
                shard.written = True
                shard.checksum = record.checksum
                shard.verified = False
                self.unverified[shard] = (block, record.rank)
                block.slot_bytes += record.slot_bytes
                self.block_at[record.offset] = block
            block.namespace.bytes_in[READY] += block.slot_bytes
            block.missing = 0
            self._policy.insert(block)
        for namespace in namespaces.values():
            self._listener.cleared(namespace)
        for (namespace, group, _), found in fresh:
            keys = [block.key for block in found]
            for start in range(0, len(keys), MAX_KEYS_TOLD):
                self._listener.stored(namespace, group, keys[start : start + MAX_KEYS_TOLD])

    def abandon_shards(self, blocks: Sequence[Block], rank: int) -> None:
        """A store failed: its shards go; what other ranks wrote of the blocks waits for another one."""
        self._free_shards([(block, rank) for block in blocks])
        for block in blocks:
            if block.state is WRITING and not block.writers:
                self.half_stored[block] = self._clock()

    # --- out -------------------------------------------------------------------------------------

    def drop(self, blocks: Sequence[Block]) -> None:
        """Take blocks out of the index. It is the caller who tells the listener."""
        for block in blocks:
            if block.state is READY:
                self._policy.remove(block, evicted=False)
            self.half_stored.pop(block, None)
            if block in self.kept:
                del self.kept[block]
                self.unpin([block])
            block.namespace.counters.invalidated_blocks += 1
        self._leave(blocks)

    def drop_half_stored(self, until: float) -> int:
        """Drop incomplete blocks that nobody wrote since ``until``, or before. Returns how many."""
        stale: list[Block] = []
        for block, since in self.half_stored.items():
            if since > until:
                break
            stale.append(block)
        self.drop(stale)
        return len(stale)

    def mark_verified(self, shard: Shard) -> None:
        """Its bytes are those that were stored."""
        shard.verified = True
        self.unverified.pop(shard, None)

    def quarantine(self, block: Block, rank: int) -> None:
        """A shard's bytes are not those that were stored: its block goes, and its slot is never used again."""
        shard = block.shards[rank]
        shard.corrupt = True
        self.unverified.pop(shard, None)
        readable = block.state is READY
        if readable or block.state is WRITING:
            self.drop([block])
        if readable:
            self._listener.removed(block.namespace, block.group, [block.key])

    def _evict(self, blocks: Sequence[Block]) -> None:
        if self.tiering is not None:
            self.tiering.evicted(blocks)
        for block in blocks:
            assert block.state is READY
            assert not block.pins
            self._policy.remove(block, evicted=True)
        for (namespace, group, _), alike in self._leave(blocks):
            namespace.counters.evicted_blocks += len(alike)
            self._listener.removed(namespace, group, [block.key for block in alike])

    def _leave(self, blocks: Sequence[Block]) -> _ByBooks:
        """Take blocks out of the index and let their slots go as soon as may be; returns them by their books before."""
        by_books = _by_books(blocks)
        for (namespace, group, state), alike in by_books:
            index = namespace.index[group]
            for block in alike:
                del index[block.key]
            namespace.move_all(alike, state, LEAVING)
        self._free_written([block for block in blocks if not block.pins])
        for block in blocks:
            if block.pins:
                for shard in block.shards.values():
                    if shard.written:  # who holds it may go on reading, but a successor must not bring it back
                        self._slots.revoke_record(shard.offset)
        return by_books

    def _free_written(self, blocks: Iterable[Block]) -> None:
        self._free_shards([(block, rank) for block in blocks for rank, shard in block.shards.items() if shard.written])

    def _free_shards(self, shards: Sequence[tuple[Block, int]]) -> None:
        """Give slots back, by block and rank; a block without any is gone."""
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
        for (namespace, group, state), alike in _by_books(gone):
            if state is WRITING:
                for block in alike:
                    del namespace.index[group][block.key]
            namespace.move_all(alike, state, ABSENT)

    # --- pins ------------------------------------------------------------------------------------

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
        for block in blocks:
            block.pins -= 1
            if not block.pins:
                loose += 1
                loose_bytes += block.slot_bytes
                if block.state is LEAVING:
                    self._free_written([block])
        self.pinned_blocks -= loose
        self.pinned_bytes -= loose_bytes


def _by_books(blocks: Iterable[Block]) -> _ByBooks:
    """Blocks that are in the same books together: those of a namespace, a group and a state."""
    alike: dict[tuple[Namespace, int, BlockState], list[Block]] = {}
    for block in blocks:
        alike.setdefault((block.namespace, block.group, block.state), []).append(block)
    return alike.items()
