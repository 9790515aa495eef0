"""The life of a block: each change of its state, which C counts, and which is reported to policy and listener.

Tiers hear of evictions. Who stores or drops keys calls ``TierHooks.stored`` or ``remove`` too.

::

    FREE    -> WRITING  make: the slots of all ranks are allocated at once
    FREE    -> READY    enter_recovered
    WRITING -> READY    publish: the last missing shard is written
    WRITING -> FREE     end_writes, if no other shard of it is written or being written (DROPPED while it is pinned)
    WRITING -> DROPPED  drop: invalidated, corrupt, partial for too long
    READY   -> DROPPED  drop
    READY   -> FREE     evict
    READY   -> WRITING  replace: it is evicted, and a new block of its group gets its slots
    DROPPED -> FREE     at once, or with the last unpin or the end of the write that still uses it; a CORRUPT slot is
                        quarantined instead, and never FREE again

Words for an end:

* *evict*: a READY block that nobody uses goes for another one;
* *drop*: a block must not be found any more. It leaves the index now and keeps its slots until nothing uses them;
* *retire*: all blocks of a group, whose namespace was reset or forgotten, are DROPPED at once, in the counts. They are
  not found, since the namespace has another group now. Until ``sweep`` has taken them out of the index, some at a time,
  the group is *unswept*;
* *return*: slots go back to the allocator.

``Cache`` adds *reset* (retire a namespace's groups, end its leases) and *invalidate* (drop keys here and in the tiers).

Rules of access:

1. Only this class changes a block's ``state``, ``group``, ``missing`` and ``shard``, the index and the records. All may
   read them. ``recover`` fills an empty table; ``choose_victims`` keeps marks in ``missing`` within one call.
2. The bytes of a READY block may be read by who has pinned it; without a pin only to compare a checksum, by rule 4.
   ``BlockLife.unpin`` ends a pin. ``BlockTable.unpin`` and ``end_lease`` are its first half: who calls these passes the
   result to ``return_unpinned``, as it may be DROPPED.
3. A shard that is WRITING_SHARD belongs to the store or the fill that began it, which alone writes its slot, and which
   ends it exactly once by ``publish`` or ``end_writes``, even if the block was dropped or its namespace reset.
4. Without a pin or a write of one's own, a slot may hold another block by the next call. Who remembers a slot compares
   the sequence number of its record.
5. ``BlockTable.oldest`` may reorder a group's list (``older``, ``newer``). ``prompt`` and ``last_prompt`` are set by
   ``Cache.lookup`` and ``BlockStores``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, takewhile
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import NO_BLOCKS, BlockIds, BlockTable, ChainStart, EndedSlots, Offsets, select_keys
from kvoffd.cache.hints import HintedOrder
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens, CacheListener, TierHooks
from kvoffd.cache.namespace import Group, MissReason
from kvoffd.cache.policy import Policy
from kvoffd.cache.states import (
    CORRUPT,
    DROPPED,
    FREE,
    READY,
    SHARD_STATE,
    UNVERIFIED,
    UNWRITTEN,
    WRITING,
    WRITING_SHARD,
)
from kvoffd.cache.tickets import PoolUsage
from kvoffd.pool.allocator import SlotAllocator, SlotIds

ABANDONED_S = 10.0
"""Age from which a partial block to which only some stores add shards is dropped for another store of its key."""
RECOVERED_AT_ONCE = 4096
"""Recovered blocks entered together, by group. Small, so that the order of use stays about right."""
NO_REASON = MissReason.UNKNOWN, MissReason.FORGOTTEN
"""Entries of keys whose reason is not known."""


class BlockLife:
    """All blocks that have slots, those of reset namespaces included.

    Attributes:
        tiers: the tiers below the pool; None if there are none.
        order: the order of eviction of READY blocks.
        unswept: retired groups that may have blocks in the index, by number.
        partial: WRITING blocks of which no shard is being written, also of retired groups, with the time when that
            began, the oldest first.
        quarantined_slots, quarantined_bytes: slots that hold wrong bytes and are not used again.
        unannounced: [slots] whether it is a recovered block that was not reported to the listener yet.
        ready_losses: how often READY blocks have left the index: while it stays, those that a lookup found are READY.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        blocks: BlockTable,
        policy: Policy,
        quotas: Mapping[bytes, int],
        events: CacheListener,
        clock: Callable[[], float],
    ) -> None:
        self.slots, self.blocks = slots, blocks
        self.tiers: TierHooks | None = None
        self.order = HintedOrder(policy, blocks, quotas, clock, slots.pool_bytes)
        self.unswept: dict[int, Group] = {}
        self.partial: dict[int, float] = {}
        self.quarantined_slots = self.quarantined_bytes = 0
        self.unannounced = np.zeros(len(blocks.state), np.bool_)
        self.ready_losses = 0
        self._events, self._clock = events, clock
        self._bytes_by_state = blocks.by_state.bytes
        """Bytes of all blocks by state, including those of forgotten namespaces."""
        self._sole_of: dict[int, int] = {}
        """WRITING blocks that a store with a ``sole`` number began, and the number; see ``set_sole``."""
        self._to_announce = NO_BLOCKS

    @property
    def usage(self) -> PoolUsage:
        writing, ready, dropped = (self._bytes_by_state[state] for state in (WRITING, READY, DROPPED))
        pinned = self.blocks.pinned_bytes, self.blocks.pinned_blocks
        return PoolUsage(self.slots.free_bytes, writing, ready, dropped, self.quarantined_bytes, *pinned)

    def group_of(self, slot: int) -> Group:
        return self.blocks.groups[int(self.blocks.group[slot])]

    # --- from FREE to READY ---------------------------------------------------------------------

    def make(self, group: Group, keys: bytes, count: int) -> npt.NDArray[np.uint32]:
        """Make WRITING blocks for the first ``count`` keys, which have none, or as many as free slots allow. Returns
        their slots, [blocks, ranks]."""
        return self.blocks.make(self.slots, group, keys, count)

    def replace(self, group: Group, victims: BlockIds, keys: bytes) -> npt.NDArray[np.uint32]:
        """Evict READY, unpinned blocks of a group, and make WRITING ones for the keys in their slots. Returns these
        slots, [blocks, ranks]."""
        if self.tiers is not None:
            self.tiers.evicted(victims)
        group.namespace.counters.evicted_blocks += len(victims)
        slots, packed_keys = self.blocks.replace(group, victims, keys, MissReason.EVICTED)
        self._report_removed(group, victims, packed_keys)
        return slots

    def begin_writes(self, blocks: BlockIds, rank: int) -> tuple[SlotIds, Offsets]:
        """Mark a rank's shards of WRITING blocks as being written. Returns their slots and pool offsets."""
        if self.partial:
            for block in blocks.tolist():
                self.partial.pop(block, None)
        return self.blocks.begin_writes(self.slots, blocks, rank)

    def begin_all_writes(self, slots: npt.NDArray[np.uint32]) -> None:
        """Mark all shards of new blocks, whose slots these are, as being written."""
        self.blocks.shard[slots] = WRITING_SHARD

    def set_sole(self, blocks: BlockIds, sole: int) -> None:
        """Let only stores with this number add shards to new blocks.

        A client that is no engine may store other bytes for a key than an engine does: a block with shards of both
        would be wrong.

        Stores of several ranks that belong together have the same ``sole`` number: a block that they begin has shards
        of these alone, or does not become READY. A block of stores with the number 0 has a shard of any of them.
        """
        self._sole_of |= dict.fromkeys(blocks.tolist(), sole)

    def unjoinable(self, blocks: BlockIds, sole: int) -> list[int]:
        """Return those of the WRITING blocks to which a store with this ``sole`` number may not add a shard."""
        if not (sole or self._sole_of):  # all have 0
            return []
        return [block for block in blocks.tolist() if self._sole_of.get(block, 0) != sole]

    def drop_abandoned(self, blocks: BlockIds, sole: int) -> bool:
        """Drop those of some blocks that have been partial for ABANDONED_S, and that only stores with another number
        than ``sole`` may complete: these may be gone. Returns whether there are any."""
        if not self._sole_of:
            return False
        # Blocks of stores with the number 0 have no entry, and stay: any such store may add what they lack.
        others = dict.fromkeys(block for block in blocks.tolist() if self._sole_of.get(block, sole) != sole)
        until = self._clock() - ABANDONED_S
        abandoned = [block for block in others if self.partial.get(block, inf) <= until]
        self.drop_partial(abandoned)
        return bool(abandoned)

    def publish(
        self,
        group: Group,
        blocks: BlockIds,
        slots: SlotIds,
        first_blocks: Iterable[int] | None,
        checksums: Iterable[int],
        tokens: Mapping[bytes, BlockTokens] = NO_TOKENS,
        chains: Sequence[ChainStart] = (),
        *,
        by_several: bool = False,
    ) -> BlockIds:
        """End the writes to these shards' slots, whose bytes are all there. Returns the blocks that became READY, in
        the order of ``blocks``, and reports them.

        ``first_blocks``: first engine block of each shard; None for 0 of all. ``checksums``: 0 for those that are still
        to be computed. ``chains``: see ``BlockTable.publish``; with them the records name the block before each.
        ``by_several``: see ``HintedOrder.insert``.
        """
        if group.retired or not blocks.size:
            self.end_writes(group, blocks, slots)
            return NO_BLOCKS
        sums, living = array("Q", checksums), self.blocks.state[blocks] == WRITING
        if not living.all():  # some were dropped since
            self.end_writes(group, blocks[~living], slots[~living])
            blocks, slots, sums = blocks[living], slots[living], array("Q", compress(sums, living))
            first_blocks = None if first_blocks is None else array("H", compress(first_blocks, living))
            chains = ()  # they are not whole any more
        ready, packed_keys = self.blocks.publish(group, blocks, slots, first_blocks, sums, chains)
        if len(ready) < len(blocks):
            self._mark_partial(group, blocks[self.blocks.missing[blocks] != 0])
        if ready.size:
            if self._sole_of:
                for block in ready.tolist():
                    self._sole_of.pop(block, None)
            group.namespace.counters.stored_blocks += len(ready)
            self.order.insert(group, ready, packed_keys, by_several=by_several)
            keys = np.frombuffer(packed_keys, group.namespace.key_type)[::-1].tolist()
            self._events.stored(group.namespace, group.index, keys, tokens=tokens)
        return ready[::-1]  # C goes from the last to the first

    def end_writes(self, group: Group, blocks: BlockIds, slots: SlotIds) -> None:
        """End the writes to these shards' slots, whose content is discarded. Shards of other ranks stay and wait."""
        if not blocks.size:
            return
        self.blocks.shard[slots] = UNWRITTEN
        writing = blocks[self.blocks.state[blocks] == WRITING]
        if writing.size and not group.retired:  # those of a retired group wait for ``sweep``
            every = self.blocks.shard[self.blocks.slots(writing, len(group.sizes))] & SHARD_STATE
            unused = (every == UNWRITTEN).all(axis=1)
            self._mark_partial(group, writing[~unused])
            self._remove(group, WRITING, writing[unused])
        self._return_dropped(blocks[self.blocks.state[blocks] == DROPPED])

    def _mark_partial(self, group: Group, blocks: BlockIds) -> None:
        """Mark those of the blocks that nobody is writing as partial."""
        shards, now = self.blocks.shard[self.blocks.slots(blocks, len(group.sizes))] & SHARD_STATE, self._clock()
        self.partial |= dict.fromkeys(blocks[(shards != WRITING_SHARD).all(axis=1)].tolist(), now)

    def partial_since(self, until: float) -> Iterator[int]:
        """Iterate over the blocks that have been partial since this time or longer."""
        return (block for block, since in takewhile(lambda item: item[1] <= until, self.partial.items()))

    # --- after a restart ------------------------------------------------------------------------

    def enter_recovered(self, blocks: BlockIds, quarantined: SlotIds) -> None:
        """Add READY blocks that are in the BlockTable and the allocator, the least recently used first, and quarantined
        slots. Call ``announce_recovered`` afterwards."""
        for begin in range(0, len(blocks), RECOVERED_AT_ONCE):
            for group, members in self.blocks.by_group(blocks[begin : begin + RECOVERED_AT_ONCE]):
                self.blocks.add_recovered(group, members)
                keys = self.blocks.keys(members, group.key_bytes)
                self.order.insert(group, members, keys, by_several=True)  # whose prompts use them is not known any more
        self._to_announce = blocks
        self.unannounced[blocks] = True
        self._quarantine(quarantined)

    def announce_recovered(self) -> bool:
        """Report a batch of recovered blocks to the listener, the latest first. Returns whether more remain."""
        if not self._to_announce.size:
            return False
        batch, self._to_announce = self._to_announce[-RECOVERED_AT_ONCE:], self._to_announce[:-RECOVERED_AT_ONCE]
        batch = batch[self.unannounced[batch]]
        self.unannounced[batch] = False
        for group, members in self.blocks.by_group(batch):
            if not group.retired:
                keys = self.blocks.split_keys(members, group.key_bytes)
                self._events.stored(group.namespace, group.index, keys[::-1])
        return bool(self._to_announce.size)

    # --- ends -----------------------------------------------------------------------------------

    def evict(self, blocks: BlockIds, reason: MissReason = MissReason.EVICTED) -> None:
        """Evict READY, unpinned blocks."""
        if self.tiers is not None and blocks.size:
            self.tiers.evicted(blocks)
        for group, members in self.blocks.by_group(blocks):
            if not group.retired:
                group.namespace.counters.evicted_blocks += len(members)
            self._remove(group, READY, members, reason)

    def drop(self, blocks: BlockIds | Sequence[int], reason: MissReason) -> None:
        """Take WRITING and READY blocks out of the index. Their slots return once nothing uses them."""
        for group, members in self.blocks.by_group(np.asarray(blocks, np.uint32)):
            if not group.retired:  # otherwise counted when it was reset
                group.namespace.counters.invalidated_blocks += len(members)
            for state in (READY, WRITING):
                self._remove(group, state, members[self.blocks.state[members] == state], reason)

    def drop_partial(self, blocks: Sequence[int]) -> None:
        """Drop blocks that lack a shard which was not stored in time."""
        for group, members in self.blocks.by_group(np.array(blocks, np.uint32)):
            if not group.retired:
                group.namespace.counters.partial_blocks += len(members)
            self.drop(members, MissReason.PARTIAL)

    def retire(self, group: Group) -> int:
        """Stop using a group, which its namespace has replaced or left: count its blocks as DROPPED, and leave them to
        ``sweep``. Returns how many blocks were in the index."""
        group.retired = True
        if dropped := int(group.by_state.blocks[WRITING] + group.by_state.blocks[READY]):
            self.unswept[group.number] = group
            group.namespace.counters.invalidated_blocks += dropped
        self.blocks.retire(group)
        if not group.by_state.blocks[DROPPED]:
            del self.blocks.groups[group.number]
        return dropped

    def sweep(self, groups: Iterable[Group], count: int) -> int:
        """Take up to ``count`` blocks of retired groups out of the index. Returns how many."""
        taken = 0
        for group in groups:
            blocks = self.blocks.oldest(group, count - taken)
            taken += len(blocks)
            if taken < count:  # it has no more
                del self.unswept[group.number]
            states = self.blocks.state[blocks]
            for state in (READY, WRITING):
                self._remove(group, state, blocks[states == state])
            if taken == count:
                break
        return taken

    def unpin(self, blocks: BlockIds) -> None:
        """Undo ``BlockTable.pin``."""
        self.return_unpinned(self.blocks.unpin(blocks))

    def return_unpinned(self, unpinned: BlockIds) -> None:
        """Return the slots of the DROPPED ones of blocks that are not pinned any more. Others can be evicted again."""
        if self.order.passed_over:
            self.order.unpinned(unpinned)
        if self._bytes_by_state[DROPPED]:
            self._return_dropped(unpinned[self.blocks.state[unpinned] == DROPPED])

    def _remove(self, group: Group, state: int, blocks: BlockIds, reason: MissReason | None = None) -> None:
        """Take blocks of one state out of index and policy, and return the slots of those that are not in use."""
        if not blocks.size:
            return
        packed_keys, ended = self.blocks.drop(group, blocks, reason or 0)
        if group.retired and group.namespace.groups:  # a forgotten namespace has none
            self._record_reset(group.namespace.groups[group.index], packed_keys)
        if state == READY:
            self._report_removed(group, blocks, packed_keys)
        elif self.partial or self._sole_of:
            for block in blocks.tolist():
                self.partial.pop(block, None)
                self._sole_of.pop(block, None)
        self._return_slots(group, ended)

    def _report_removed(self, group: Group, blocks: BlockIds, packed_keys: bytes) -> None:
        """Report to policy and listener that READY blocks are gone."""
        self.ready_losses += 1
        self.order.remove(group, blocks, packed_keys)
        keys = np.frombuffer(packed_keys, group.namespace.key_type)
        if self._to_announce.size:  # some may never have been reported
            silent = self.unannounced[blocks]
            self.unannounced[blocks] = False
            keys = keys[~silent]
        if keys.size and not group.retired:
            self._events.removed(group.namespace, group.index, keys.tolist())

    def _return_dropped(self, blocks: BlockIds) -> None:
        """Return the slots of DROPPED blocks that are not in use."""
        for group, members in self.blocks.by_group(blocks):
            self._return_slots(group, self.blocks.end_dropped(group, members))

    def _return_slots(self, group: Group, ended: EndedSlots) -> None:
        """Return the slots of ended blocks of a group, and forget it if it was retired and they were its last."""
        slots = ended.slots
        if ended.corrupt:  # they stay allocated, so that nobody else gets them
            bad = self.blocks.shard[slots] != 0  # CORRUPT is the only mark that an ended block's slots may have
            self._quarantine(slots[bad])
            slots = slots[~bad]
        if slots.size:
            self.slots.free(slots)
        if group.retired and not group.by_state.blocks[DROPPED]:
            del self.blocks.groups[group.number]

    def _quarantine(self, slots: SlotIds) -> None:
        self.quarantined_slots += len(slots)
        self.quarantined_bytes += int(self.slots.slot_bytes[slots // self.slots.slots_per_region].sum())
        self.blocks.group[slots] = 0

    # --- keys that a reset took ------------------------------------------------------------------
    #
    # Why a key left is remembered by its group's number, and a reset gives a namespace groups with other numbers. A key
    # that the new group does not know is INVALIDATED in two cases. It left before the reset, for any reason: then a
    # predecessor of the group knows it. Or its block was in the index at the reset: then ``sweep`` records that for the
    # new group when it takes the block out, and ``_record_unswept`` does for keys that are asked for before.

    def reasons_of(self, group: Group, keys: bytes) -> bytes:
        """Return the ``MissReason`` of each key when it was last missing, if known; it may have been stored since."""
        return self.reasons_with_resets(group, keys, self.blocks.miss_reasons(group, keys))

    def reasons_with_resets(self, group: Group, keys: bytes, reasons: bytes) -> bytes:
        """Return the reasons of keys, with INVALIDATED for absent ones that a reset took, or that only predecessors of
        the group know."""
        if set(NO_REASON).isdisjoint(reasons):
            return reasons
        self._record_unswept(group, keys)
        for one in (group, *group.predecessors):  # the group itself for what was just recorded
            now, known = (np.frombuffer(each, np.uint8) for each in (reasons, self.blocks.miss_reasons(one, keys)))
            dropped = np.isin(now, NO_REASON) & ~np.isin(known, NO_REASON)
            reasons = np.where(dropped, np.uint8(MissReason.INVALIDATED), now).tobytes()
        return reasons

    def _record_unswept(self, group: Group, keys: bytes) -> None:
        """Record which of these keys a reset took from a group, as ``sweep`` does when it reaches their blocks."""
        for number in self.unswept.keys() & group.unswept_before:
            states, _ = self.blocks.find(self.unswept[number], keys)
            gone = np.flatnonzero(np.frombuffer(states, np.uint8) != FREE)
            self._record_reset(group, select_keys(keys, gone, group.key_bytes))

    def _record_reset(self, group: Group, keys: bytes) -> None:
        """Record that a reset took keys from a predecessor of a group, except where a later reason is known."""
        unknown = np.isin(np.frombuffer(self.blocks.miss_reasons(group, keys), np.uint8), NO_REASON)
        taken = select_keys(keys, np.flatnonzero(unknown), group.key_bytes)
        self.blocks.record_misses(group, taken, MissReason.INVALIDATED)

    # --- bytes ----------------------------------------------------------------------------------

    def set_checksum(self, slot: int, checksum: int) -> None:
        """Set the checksum of a shard that was published without one: its bytes need no comparison then."""
        self.blocks.set_checksum(slot, checksum)
        self.mark_verified(slot)

    def mark_verified(self, slot: int) -> None:
        """Note that a shard's bytes agree with its checksum."""
        if self.blocks.shard[slot] & UNVERIFIED:
            self.blocks.shard[slot] &= ~np.uint8(UNVERIFIED)
            self.blocks.unverified_slots -= 1

    def mark_corrupt(self, slot: int) -> None:
        """Note that a slot holds wrong bytes, whatever is using it now. The next daemon does not use it either."""
        assert not self.blocks.shard[slot] & CORRUPT
        self.blocks.set_corrupt(slot)
