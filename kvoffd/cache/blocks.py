"""All blocks of the pool in all states. Their index, slots, pins and order of eviction change together, and only here.

A block's life, and the steps that take it from state to state::

    ABSENT    -> WRITING   start_shards: a store begins to write its first shard
    WRITING   -> READY     finish_shards: the last missing shard is written
    READY     -> WRITING   reopen_shard: a store offers more of the key than the block holds
    WRITING   -> ABSENT    abandon_shards: a store failed, and no other shard is there
    WRITING   -> LEAVING   drop: invalidated, corrupt, half stored for too long
    READY     -> LEAVING   drop
    READY     -> ABSENT    evict
    LEAVING   -> ABSENT    at once; or with the last unpin, finish_shards or abandon_shards that it waits for
    ABSENT    -> INHERITED expect: an earlier daemon left it whole
    INHERITED -> READY     adopt
    INHERITED -> ABSENT    let_go: it was stored anew, invalidated, or others needed the room

WRITING and READY blocks are in the index. A LEAVING block has left it at once, and keeps its slots until nothing holds
them: a written shard is held by the block's pins, a shard that is being written by its store.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from kvoffd.cache.hooks import BlockTokens, CacheListener, TieringHooks
from kvoffd.cache.inherited import InheritedBlocks, SomeBlocks
from kvoffd.cache.misses import Misses
from kvoffd.cache.namespace import (
    CORRUPT,
    FIRST_BLOCK,
    FIRST_BLOCK_AT,
    HELD,
    OFFSET_AT,
    PAGES,
    UNVERIFIED,
    WRITTEN,
    Block,
    BlockState,
    MissReason,
    Namespace,
)
from kvoffd.cache.policies import EvictionPolicy
from kvoffd.cache.room import Room
from kvoffd.pool.pool import Pool
from kvoffd.pool.records import Ints
from kvoffd.pool.table_format import keys_of

ABSENT, WRITING, READY, LEAVING, INHERITED = BlockState
INDEXED = (WRITING, READY)
UNKNOWN = (ABSENT, INHERITED)
"""States in which there is no ``Block``."""

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
        max_index_bytes: int = 2**62,
    ) -> None:
        super().__init__(slots, policy, clock, max_index_bytes)
        self.unverified_slots = 0
        """Slots whose shard is not verified."""
        self.without_checksum: dict[int, tuple[Block, int]] = {}
        """By offset: shards whose checksum is still to be taken, block and rank; oldest first. One that is written anew
        has a new entry."""
        self.adopted = array("Q")
        """Offsets of the slots of an earlier daemon that are not verified, and others; as they were taken over."""
        self.quarantined: dict[int, int] = {}
        """By offset, the size of slots that are never used again."""
        self.quarantined_bytes = 0
        self.pinned_bytes = 0
        self.misses = Misses()
        self.tiering: TieringHooks | None = None
        """Who looks after the tiers below the pool; None while there are none."""
        self._listener = listener
        self._clock = clock

    def add_namespace(self, namespace: Namespace) -> None:
        self.namespaces[namespace.fingerprint] = namespace

    def remove_namespace(self, namespace: Namespace) -> None:
        """Undo ``add_namespace``. It may have no block any more."""
        del self.namespaces[namespace.fingerprint]
        self.quotas.forget(namespace)

    def start_shards(
        self,
        namespace: Namespace,
        group: int,
        keys: Sequence[bytes],
        known: Sequence[Block | None],
        rank: int,
        offsets: Sequence[int],
        slot_bytes: int,
        first_blocks: Sequence[int],
    ) -> list[Block]:
        """Begin to write a shard of each key, given with its block if it has one, in the slot at its offset."""
        half_stored = self.half_stored
        blocks = [block or Block(namespace, group, key) for key, block in zip(keys, known, strict=True)]
        self._move([block for block in blocks if block.state is ABSENT], ABSENT, WRITING)
        at, added = 2 * rank, []
        for block, offset, first_block in zip(blocks, offsets, first_blocks, strict=True):
            if half_stored:
                half_stored.remove(block)
            words = block.words
            if not words[at]:
                block.slot_bytes = block.slot_bytes + slot_bytes if block.slot_bytes else slot_bytes
                added.append((offset, block))
            elif words[at] & UNVERIFIED:
                self.mark_verified(block, rank)
            words[at] = offset << OFFSET_AT | first_block << FIRST_BLOCK_AT | HELD
            words[at + 1] = 0
        self.holders.put(slot_bytes, added)
        namespace.bytes_in[WRITING] += len(added) * slot_bytes
        self._slots.mark_all_writing(offsets, namespace.fingerprint, group, keys, rank, namespace.world_size)
        return blocks

    def reopen_shard(self, block: Block, rank: int) -> None:
        """Make a written shard one that is to be written again. Nothing may pin the block."""
        assert not block.pins
        block.words[2 * rank] &= ~WRITTEN
        block.missing += 1
        if block.state is READY:
            self._policy.remove([block], evicted=False)
            self._move([block], READY, WRITING)
            self._listener.removed(block.namespace, block.group, [block.key])

    def finish_shards(
        self,
        blocks: Sequence[Block],
        rank: int,
        shard_bytes: int,
        checksums: Sequence[int],
        tokens: Mapping[bytes, BlockTokens],
    ) -> int:
        """A store wrote this rank's shards of ``blocks``, all of one group. Returns how many became ready.

        ``checksums`` are those of the shards, 0 where one is still to be taken; where there are none the shards are
        never verified. ``tokens`` go with the event.
        """
        ready: list[Block] = []
        sums = checksums or [0] * len(blocks)
        written: list[tuple[int, int, int]] = []
        at = 2 * rank
        # As in a touch, the tail is the older one, for a successor too.
        for block, checksum in zip(reversed(blocks), reversed(sums), strict=True):
            if block.state is LEAVING:
                self._free_shards([(block, rank)])
                continue
            words = block.words
            word = words[at]
            offset = word >> OFFSET_AT & PAGES
            if checksums and not checksum:
                words[at] = word | WRITTEN | UNVERIFIED
                self.without_checksum[offset] = block, rank
                self.unverified_slots += 1
            else:
                words[at] = word | WRITTEN
                words[at + 1] = checksum
            block.missing -= 1
            written.append((offset, (word & FIRST_BLOCK) >> FIRST_BLOCK_AT, checksum))
            if not block.missing:
                ready.append(block)
            elif not block.writers:
                self.half_stored.add(block)
        if written:
            offsets, first_blocks, written_sums = zip(*written, strict=True)
            self._slots.mark_all_ready(offsets, first_blocks, shard_bytes, written_sums)
        if ready:
            self._make_ready(ready, tokens)
        return len(ready)

    def _make_ready(self, tail_first: Sequence[Block], tokens: Mapping[bytes, BlockTokens]) -> None:
        namespace, group = tail_first[0].namespace, tail_first[0].group
        self._move(tail_first, WRITING, READY)
        self._policy.insert(tail_first)
        namespace.counters.stored_blocks += len(tail_first)
        keys = [block.key for block in reversed(tail_first)]
        self._listener.stored(namespace, group, keys, tokens=tokens)

    def abandon_shards(self, blocks: Sequence[Block], rank: int) -> None:
        """A store failed: its shards go; what other ranks wrote of the blocks waits for another one."""
        self._free_shards([(block, rank) for block in blocks])
        for block in blocks:
            if block.state is WRITING and not block.writers:
                self.half_stored.add(block)

    def expect(self, inherited: InheritedBlocks, opened: Mapping[bytes, Namespace]) -> int:
        """Have blocks taken over that are in these new namespaces, by fingerprint. Returns their bytes."""
        for namespace in opened.values():
            self.add_namespace(namespace)
        self.inherited = inherited
        self.inherited_owners = {
            number: (opened[group.fingerprint], group.group)
            for number, group in enumerate(inherited.groups)
            if inherited.counts[number]
        }
        for number, (namespace, group) in self.inherited_owners.items():
            count = int(inherited.counts[number])
            self._count(namespace, ABSENT, INHERITED, count, count * namespace.block_bytes(group))
        for namespace in self.namespaces.values():
            self._listener.cleared(namespace)
        return sum(namespace.bytes_in[INHERITED] for namespace in opened.values())

    def adopt(
        self, namespace: Namespace, group: int, keys: list[bytes], words: Sequence[array[int]], offsets: Ints
    ) -> None:
        """Enter inherited blocks, with what is known of their shards: the newest first, older than all others.

        ``offsets``: [blocks, ranks], of their slots.
        """
        made = [Block(namespace, group, key, its_words) for key, its_words in zip(keys, words, strict=True)]
        block_bytes = namespace.block_bytes(group)
        for block in made:
            block.missing = 0
            block.slot_bytes = block_bytes
        oldest_first = made[::-1]
        self._move(oldest_first, INHERITED, READY)
        for rank, of_rank in enumerate(offsets.T):
            self.holders.put_all(namespace.slot_bytes(rank, group), of_rank, made)
        self.unverified_slots += offsets.size
        self.adopted.frombytes(offsets.astype(np.uint64).tobytes())
        self._policy.insert(oldest_first, older=True)
        self._listener.stored(namespace, group, keys)

    def evict(self, blocks: Sequence[Block]) -> None:
        """Let ready blocks go that nothing pins, because others need the room."""
        if self.tiering is not None:
            self.tiering.evicted(blocks)
        for (namespace, group, _), alike in _group(blocks):
            self._policy.remove(alike, evicted=True)
            self._free_ready(namespace, alike)
            namespace.counters.evicted_blocks += len(alike)
            keys = [block.key for block in alike]
            self._listener.removed(namespace, group, keys)
            self.misses.note(namespace, group, keys, MissReason.EVICTED)

    def _free_ready(self, namespace: Namespace, blocks: Sequence[Block]) -> None:
        """Free all slots of ready blocks of one group that nothing pins; they are gone then."""
        offsets: list[int] = []
        nbytes = 0
        for block in blocks:
            assert block.state is READY
            assert not block.pins
            for rank, word in enumerate(block.words[::2]):
                if word & UNVERIFIED:
                    self.mark_verified(block, rank)
                offsets.append(word >> OFFSET_AT & PAGES)
            nbytes += block.slot_bytes
            block.words[:] = namespace.no_shards
            block.slot_bytes, block.missing = 0, namespace.world_size
        namespace.bytes_in[READY] -= nbytes
        self._move(blocks, READY, ABSENT)
        self.holders.remove(offsets)
        self._slots.free(offsets)

    def drop(self, blocks: Sequence[Block], reason: MissReason = MissReason.INVALIDATED) -> None:
        """Take blocks out of the index, ready or not. The caller tells the listener."""
        for block in blocks:
            self.half_stored.remove(block)
            block.namespace.counters.invalidated_blocks += 1
        for (namespace, group, state), alike in _group(blocks):
            if state is READY:
                self._policy.remove(alike, evicted=False)
            self._move(alike, state, LEAVING)
            self.misses.note(namespace, group, [block.key for block in alike], reason)
        self._free_written([block for block in blocks if not block.pins])
        for block in blocks:
            for word in block.words[::2] if block.pins else ():
                if word & WRITTEN:  # who holds it may go on reading, but a successor must not bring it back
                    self._slots.revoke_record(word >> OFFSET_AT & PAGES)

    def drop_half_stored(self, blocks: Sequence[Block]) -> None:
        if not blocks:
            return  # as for nearly every store into a full pool
        for block in blocks:
            block.namespace.counters.half_stored_blocks += 1
        self.drop(blocks, MissReason.PARTIAL)

    def mark_verified(self, block: Block, rank: int) -> None:
        """The shard's bytes are those that were stored, or are not asked for any more."""
        word = block.words[2 * rank]
        if word & UNVERIFIED:
            block.words[2 * rank] = word & ~UNVERIFIED
            self.unverified_slots -= 1
            if not block.words[2 * rank + 1]:
                del self.without_checksum[word >> OFFSET_AT & PAGES]

    def take_checksum(self, block: Block, rank: int, checksum: int) -> None:
        """Note the checksum of a shard that was stored without one."""
        self.mark_verified(block, rank)
        block.words[2 * rank + 1] = checksum
        self._slots.set_checksum(block.words[2 * rank] >> OFFSET_AT & PAGES, checksum)

    def set_first_block(self, block: Block, rank: int, first_block: int) -> None:
        """Note where a shard begins that is being written, which whoever reads it from a tier learns at the end."""
        words, at = block.words, 2 * rank
        words[at] = words[at] & ~FIRST_BLOCK | first_block << FIRST_BLOCK_AT

    def quarantine(self, block: Block, rank: int) -> None:
        """A shard's bytes are not those that were stored: its block goes, and its slot is never used again."""
        self.mark_verified(block, rank)
        block.words[2 * rank] |= CORRUPT
        readable = block.state is READY
        if block.state in INDEXED:
            self.drop([block], MissReason.CORRUPT)
        if readable:
            self._listener.removed(block.namespace, block.group, [block.key])

    def let_go(self, some: SomeBlocks, reason: MissReason | None) -> list[bytes]:
        """Free the slots of inherited blocks. Returns their keys; a reason of None says that these are there."""
        namespace, group = self.inherited_owners[some.number]
        keys = keys_of(self._slots.rows(some.offsets[:, 0]), namespace.key_bytes)
        if reason is not None:
            self.misses.note(namespace, group, keys, reason)
        namespace.counters.evicted_blocks += len(keys) * (reason is MissReason.EVICTED)
        namespace.counters.invalidated_blocks += len(keys) * (reason is MissReason.INVALIDATED)
        self._count(namespace, INHERITED, ABSENT, len(keys), len(keys) * namespace.block_bytes(group))
        self._slots.free(some.offsets.reshape(-1).tolist())
        self.inherited = self.inherited or None
        return keys

    def _free_written(self, blocks: Iterable[Block]) -> None:
        self._free_shards(
            [(block, rank) for block in blocks for rank, word in enumerate(block.words[::2]) if word & WRITTEN]
        )

    def _free_shards(self, shards: Sequence[tuple[Block, int]]) -> None:
        """Free slots, given by block and rank; a block without any is ABSENT again."""
        offsets: list[int] = []
        free: list[int] = []
        gone: list[Block] = []
        for block, rank in shards:
            words, at = block.words, 2 * rank
            word, namespace = words[at], block.namespace
            offset = word >> OFFSET_AT & PAGES
            if word & UNVERIFIED:
                self.mark_verified(block, rank)
            words[at] = words[at + 1] = 0
            block.missing += bool(word & WRITTEN)
            slot_bytes = namespace.slot_bytes(rank, block.group)
            block.slot_bytes -= slot_bytes
            namespace.bytes_in[block.state] -= slot_bytes
            if not block.slot_bytes:
                gone.append(block)
            offsets.append(offset)
            if not word & CORRUPT:
                free.append(offset)
                continue
            # It stays handed out, so that nobody else gets it.
            self._slots.revoke_record(offset)
            self.quarantined[offset] = slot_bytes
            self.quarantined_bytes += slot_bytes
        self.holders.remove(offsets)
        self._slots.free(free)
        for (_, _, state), alike in _group(gone):
            self._move(alike, state, ABSENT)

    def used(self, namespace: Namespace, group: int, blocks: Sequence[Block]) -> None:
        """Note that a request found these ready blocks, root first."""
        self.quotas.used(namespace, blocks)

    def _move(self, blocks: Sequence[Block], before: BlockState, after: BlockState) -> None:
        """Change the state of blocks of one group that are all in ``before``, and with it what is counted by state."""
        if not blocks:
            return
        nbytes = 0
        for block in blocks:
            nbytes += block.slot_bytes
            block.state = after
        namespace = blocks[0].namespace
        self._count(namespace, before, after, len(blocks), nbytes)
        self.quotas.moved(namespace, blocks, before, after)
        if before in INDEXED or after in INDEXED:
            index, keys = namespace.index[blocks[0].group], b"".join([block.key for block in blocks])
            if before not in INDEXED:
                index.add(keys, blocks, after)
            elif after in INDEXED:
                index.set(keys, after)
            else:
                index.remove(keys)

    def _count(self, namespace: Namespace, before: BlockState, after: BlockState, count: int, nbytes: int) -> None:
        """Count ``count`` blocks of so many bytes as of another state."""
        namespace.blocks_in[before] -= count
        namespace.bytes_in[before] -= nbytes
        namespace.blocks_in[after] += count
        namespace.bytes_in[after] += nbytes
        self._known_bytes += count * namespace.index_bytes_per_block * ((before in UNKNOWN) - (after in UNKNOWN))

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
