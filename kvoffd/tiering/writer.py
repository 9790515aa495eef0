"""Writes blocks to tiers in the background, ahead of their eviction: which, when, and within which budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import compress, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group
from kvoffd.cache.states import CORRUPT, READY
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.selection import RELIABLE_AFTER, Selection
from kvoffd.tiering.write_budget import Spent, WriteBudget
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import Result, Tier

if TYPE_CHECKING:
    from kvoffd.tiering.promotion_source import PromotionSource

_Sequences: TypeAlias = dict[int, int]
"""Block numbers with the sequence numbers of their records, which together identify a block: a number alone may belong
to another block when it is used."""

LATE, BUDGET, UNLIKELY = "late", "budget", "unlikely"
"""Reasons why a block left the pool unwritten: its turn came too late, as engines copy or the tier is slow or down; the
day's bytes are spent; the tier is full, and the block is unlikely to be reused."""

MAX_WRITING_BYTES = 16 * 2**20
"""Limit of the bytes being written: at most this, and at most a sixteenth of the pool."""
MAX_WAITING = 1 << 17
"""Blocks that may wait to be written. Further blocks are not queued; they are considered again when they are used or
next to be evicted."""
WAITING_BYTES = 100
"""Memory of a waiting block, measured."""
MAX_LOOKED_AT = 512
"""Waiting blocks, or blocks that a lookup found, that are examined at once."""
MAX_BEGUN = 64
"""Blocks whose writes are begun at once."""
COLD_DIVISOR = 8
"""The 1/8 of the pool that is to be evicted next is examined once less than that is free."""
MAX_COLD_BLOCKS = 1024
"""Limit of these blocks in one tick."""


@dataclass(slots=True, eq=False)
class BlockWrite:
    """A block that is being written to a tier. ``pump`` pins it before control returns to the event loop, so that its
    number and bytes stay valid."""

    number: int
    """The block's number in the pool."""
    copy: Block
    """The block as the tier will have it."""
    offsets: list[int]
    """Pool offset of the block's slot in bytes, by rank."""
    spent: Spent | None = None
    """Bytes that it took out of the budget. The budget gets them back if the tier had the block already, but not if the
    write failed: some of it may have been written."""
    trickles: bool = False
    """Whether it began while engines copied."""


def writes_of(cache: Cache, group: Group, blocks: BlockIds, keys: Sequence[bytes]) -> list[BlockWrite]:
    """Return the writes of READY blocks with these keys, except those without a checksum, or with wrong bytes."""
    slots = cache.blocks.slots(blocks, len(group.sizes))
    records = cache.table.records[slots]
    bad = ((records["checksum"] == 0) | (cache.blocks.shard[slots] & CORRUPT != 0)).any(axis=1)
    block_group = block_group_of(group)
    columns = blocks, bad, records["first_block"], records["checksum"], cache.slots.offsets(slots)
    return [
        BlockWrite(number, Block(block_group, key, tuple(firsts), tuple(sums)), offsets)
        for key, number, is_bad, firsts, sums, offsets in zip(
            keys, *(column.tolist() for column in columns), strict=True
        )
        if not is_bad
    ]


class _Attempt(Enum):
    """Result of an attempt to begin a write."""

    BEGUN = auto()
    NOT_TAKEN = auto()
    """No tier takes this block, at any time: it waits no longer."""
    NOT_NOW = auto()
    """No block can be written now: it stays the next."""


class _Hold(Enum):
    """Reason why waiting blocks are not written. Each write that is tried decides it."""

    NONE = auto()
    SPENT = auto()
    """The day's bytes are spent: none is left waiting. Those that come to wait later are tried."""
    BUSY = auto()
    """The tiers accepted no more at once, and a try is expensive: none is made before the next tick, unless half of
    what runs has ended."""
    AWAY = auto()
    """All tiers are away or refuse writes: none is tried before the next tick."""


class _Rejection(NamedTuple):
    """A block at the cold end that is not written, by the sequence number of its record, and why."""

    sequence: int
    reason: str


class _Evicted(NamedTuple):
    """Blocks that left the pool since the last tick, and why each is in no tier, if it is in none."""

    group: Group
    keys: Sequence[bytes]
    reasons: Sequence[str]


class _Unwritten(NamedTuple):
    """Blocks of a group that are to be in a tier, are in none, and are not being written."""

    blocks: BlockIds
    keys: Sequence[bytes]


def accepts_writes(tier: Tier) -> bool:
    """Return whether a tier is available, and does not refuse writes."""
    return tier.available() and not tier.refuses_writes()


class Writer:
    """Writes blocks to some tiers, all disks or one store, ahead of their eviction, so that no eviction waits.

    While a tier has space, stored blocks are written in order: the root of a chain before its tail. Once all tiers are
    full, blocks that are next to be evicted are judged, and written if they are likely to be reused
    (``WriteMode.AUTO``). Waiting blocks are evicted after others that are as cold (``Victims``). One that is evicted
    before its turn is lost.

    Args:
        tiers: the targets; each block is written to one that has space and a short queue.
        sources: all sources of promotions, of which its tiers are some.
        engines_busy: returns whether engines copy. They have priority: writes take memory bandwidth, CPUs and the GIL
            from them. While they copy, or wait for the tiers, writes are limited to ``trickle_bytes`` of ``settings``,
            or one block.
        leaves_out: returns whether a namespace, by its fingerprint, is not written.
    """

    def __init__(
        self,
        cache: Cache,
        tiers: Sequence[Tier],
        clock: Callable[[], float],
        settings: TieringSettings,
        sources: Sequence[PromotionSource],
        engines_busy: Callable[[], bool],
        leaves_out: Callable[[bytes], bool],
    ) -> None:
        self._cache, self._tiers = cache, tiers
        self._sequences = cache.table.records["sequence"]
        """Sequence number of each slot's record."""
        self.mode = settings.mode
        self.budget = WriteBudget(settings.per_day_bytes, clock)
        self._hold = _Hold.NONE
        self._busy_above = 0
        """Number of running writes above which BUSY holds."""
        self._under_way_limit = min(cache.slots.pool_bytes // 16, MAX_WRITING_BYTES)
        """Bytes of the pool that may be read, and are pinned, at once."""
        self._cold_bytes = cache.slots.pool_bytes // COLD_DIVISOR
        self._sources, self._engines_busy, self._leaves_out = sources, engines_busy, leaves_out
        self._trickle_bytes = self._trickle_left = settings.trickle_bytes
        self.waiting: _Sequences = {}
        """Blocks to write, in this order."""
        self._rejected: dict[int, _Rejection] = {}
        """Blocks that the last tick found at the cold end and that are not written."""
        self._evicted: list[_Evicted] = []
        self.under_way: dict[int, BlockWrite] = {}
        """Running writes by block."""
        self.under_way_bytes = 0
        self.written_blocks = self.written_bytes = 0
        self.not_written: Counter[str] = Counter()
        """Blocks that left the pool and are in no tier, by reason."""
        self._is_full = False
        """Whether blocks must be likely to be reused: the mode is AUTO, and all tiers were full at the last tick."""
        self._selection = Selection()
        self._accessed_before = cache.policy.accessed_bytes
        """Bytes requested up to the last tick."""

    @property
    def available(self) -> bool:
        return any(tier.available() for tier in self._tiers)

    @property
    def writes_soon(self) -> bool:
        """Whether blocks that wait are written soon: a tier is available, and does not refuse writes, and the day's
        bytes are not spent."""
        return self._hold is not _Hold.SPENT and any(map(accepts_writes, self._tiers))

    # --- what happens to blocks ------------------------------------------------------------------

    def stored(self, blocks: BlockIds) -> None:
        """Have blocks wait that a store made READY, or that came up from a tier of another writer."""
        if self._tiers and self.mode is not WriteMode.NEVER and not self._is_full:
            self._enqueue(blocks)

    def used(self, group: Group, blocks: BlockIds) -> None:
        """Consider blocks that a lookup found. Called only while a tier is available."""
        if self.mode is not WriteMode.NEVER and not self._is_full:
            self._enqueue(self._unwritten(group, blocks[:MAX_LOOKED_AT]).blocks)
            self._enqueue(blocks[MAX_LOOKED_AT:])  # examined in their turn

    def evicted(self, group: Group, blocks: BlockIds, keys: Sequence[bytes]) -> None:
        """Record blocks about to leave the pool. Whether they are in a tier is looked up at the next tick, since an
        engine's store waits for this call."""
        if self.mode is WriteMode.NEVER or not self._may_be_written(group):
            if self.waiting:
                for block in blocks.tolist():
                    self.waiting.pop(block, None)
            return
        default_reason = LATE if self.budget.allows(sum(group.lengths)) else BUDGET
        reasons: list[str] = []
        for block, sequence in zip(blocks.tolist(), self._sequences[blocks].tolist(), strict=True):
            self.waiting.pop(block, None)
            rejection = self._rejected.pop(block, None)
            reasons.append(rejection.reason if rejection and rejection.sequence == sequence else default_reason)
        self._evicted.append(_Evicted(group, keys, reasons))

    def stop(self) -> None:
        """Begin nothing more."""
        self.mode = WriteMode.NEVER
        self.waiting.clear()

    # --- the cold end ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Examine the cold end, and continue writing."""
        self._count_unwritten()
        self._note_if_full()
        before, self._rejected = self._rejected, {}
        if self.mode is not WriteMode.NEVER and self._cache.slots.free_bytes < self._cold_bytes:
            self._look_at_cold_end(before)
        self._trickle_left = self._trickle_bytes
        if self._hold is not _Hold.SPENT:
            self._hold = _Hold.NONE  # what runs may hang, while another tier accepts more
        self.pump()

    def _count_unwritten(self) -> None:
        """Count blocks that left the pool and are in no tier."""
        evicted, self._evicted = self._evicted, []
        for group, keys, reasons in evicted:
            if self._may_be_written(group):
                self.not_written += Counter(compress(reasons, self._are_wanted(group, keys)))

    def _look_at_cold_end(self, before: dict[int, _Rejection]) -> None:
        """Examine blocks that are next to be evicted. ``before``: ``_rejected`` as of the last tick."""
        left, left_bytes = MAX_COLD_BLOCKS, self._cold_bytes
        for batch in self._cache.order.candidates():
            for group, members in self._cache.blocks.by_group(batch):
                cold = members[: max(0, min(left, -(-left_bytes // group.block_bytes)))]
                left -= len(cold)
                if not group.retired:
                    left_bytes -= len(cold) * group.block_bytes
                blocks, keys = self._unwritten(group, cold)
                self._enqueue(blocks[self._are_worth_writing(group, blocks, keys, before)])
            if left <= 0 or left_bytes <= 0:
                return

    def _are_worth_writing(
        self, group: Group, blocks: BlockIds, keys: Sequence[bytes], before: dict[int, _Rejection]
    ) -> npt.NDArray[np.bool_]:
        """Return which blocks are worth writing (all, while a tier has space); record why the others are not."""
        if not self._is_full or not keys:
            return np.ones(len(keys), np.bool_)
        policy, sequences = self._cache.policy, self._sequences[blocks]
        lifetimes, packed_keys = self._selection.lifetimes(self._lifetime_bytes), b"".join(keys)
        by_lifetime = np.stack([policy.chance(group, packed_keys, one) for one in lifetimes], axis=1)
        # A block stays at the cold end for many ticks, and counts in the selection once.
        was_judged = [
            self.waiting.get(block) == sequence or (block in before and before[block].sequence == sequence)
            for block, sequence in zip(blocks.tolist(), sequences.tolist(), strict=True)
        ]
        # Lifetimes are ascending: the first ones are short enough for their chances to have been observed.
        reliable = sum(RELIABLE_AFTER * one <= policy.accessed_bytes for one in lifetimes)
        self._selection.record(by_lifetime[~np.array(was_judged)], sum(group.lengths), reliable)
        chances, least = self._selection.deciding(by_lifetime)
        # The emptier the budget, the likelier a block must be, so that the day's bytes go to the likeliest.
        rejected = chances < max(least, 1 - self.budget.left_share)
        reasons = [UNLIKELY if chance < least else BUDGET for chance in chances[rejected].tolist()]
        rejections = map(_Rejection, sequences[rejected].tolist(), reasons)
        self._rejected |= dict(zip(blocks[rejected].tolist(), rejections, strict=True))
        return ~rejected

    # --- beginning writes ------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin writes that are possible now, up to a limit. Do nothing while over half of the limit is in progress."""
        if not self.waiting or self._hold is _Hold.AWAY or 2 * self.under_way_bytes > self._under_way_limit:
            return
        if self._hold is _Hold.BUSY and len(self.under_way) > self._busy_above:
            return
        # Lookups that wait for blocks from its tiers have priority, too.
        own_sources = (source for source in self._sources if source.writer is self)
        is_read = any(source.read_order.blocks or source.reads.under_way for source in own_sources)
        trickles = is_read or self._engines_busy()
        if trickles and self._trickle_left <= 0:
            return
        targets = self._targets() if len(self._tiers) > 1 else self._tiers
        begun: list[int] = []
        try:
            for write in self._next_writes():
                if (attempt := self._begin(write, targets, trickles)) is _Attempt.NOT_NOW:
                    return
                del self.waiting[write.number]
                if attempt is _Attempt.BEGUN:
                    begun.append(write.number)
                is_limit = self.under_way_bytes >= self._under_way_limit or len(begun) == MAX_BEGUN
                if is_limit or (trickles and self._trickle_left <= 0):
                    return
        finally:  # what began is read by the tiers, even if a later one fails
            if begun:
                self._cache.blocks.pin(np.array(begun, np.uint32))

    def _targets(self) -> list[Tier]:
        """Return the tiers in the order of preference: with free space, with a short queue, and the least used."""
        figures = [(tier, tier.stats()) for tier in self._tiers]
        figures.sort(
            key=lambda one: (bool(one[0].lifetime_bytes), one[1].queued_writes, one[1].used_bytes / one[1].size_bytes)
        )
        return [tier for tier, _ in figures]

    def _next_writes(self) -> Iterator[BlockWrite]:
        """Yield the writes of waiting blocks, up to MAX_LOOKED_AT; the caller takes them out of the queue. Blocks that
        cannot or need not be written leave it here."""
        for _ in range(0, MAX_LOOKED_AT, MAX_BEGUN):
            batch = dict(islice(self.waiting.items(), MAX_BEGUN))
            blocks = np.fromiter(batch, np.uint32, len(batch))
            is_same = self._sequences[blocks] == np.fromiter(batch.values(), np.uint64, len(batch))
            ready = blocks[is_same & (self._cache.blocks.state[blocks] == READY)]
            writes: dict[int, BlockWrite] = {}
            for group, members in self._cache.blocks.by_group(ready):
                unwritten = self._unwritten(group, members)
                if unwritten.keys:
                    writes |= {write.number: write for write in writes_of(self._cache, group, *unwritten)}
            for block in batch:
                if block not in writes:
                    del self.waiting[block]
            yield from [writes[block] for block in batch if block in writes]
            if not self.waiting:
                return

    def _begin(self, write: BlockWrite, targets: Sequence[Tier], trickles: bool) -> _Attempt:
        """Begin a write to the first of the targets that accepts it, if the budget allows."""
        nbytes = write.copy.group.nbytes
        if (spent := self.budget.take(nbytes)) is None:
            self._hold = _Hold.SPENT
            self.waiting.clear()  # they wait again when they are used again, or next to be evicted
            return _Attempt.NOT_NOW
        self._hold, write.spent, write.trickles = _Hold.NONE, spent, trickles
        if any(tier.write(write.copy, write.offsets, partial(self._on_end, write)) for tier in targets):
            self.under_way[write.number] = write
            self.under_way_bytes += nbytes
            self._trickle_left -= nbytes if trickles else 0
            return _Attempt.BEGUN
        self.budget.refund(spent)
        return self._after_refusal(write)

    def _after_refusal(self, write: BlockWrite) -> _Attempt:
        """Decide whether a block that no tier accepted stays the next, and when one is tried again."""
        group, key = write.copy.group, write.copy.key
        if self.under_way:  # there were too many at once
            self._hold, self._busy_above = _Hold.BUSY, len(self.under_way) // 2
        elif not self.writes_soon:
            self._hold = _Hold.AWAY
        elif not any(accepts_writes(tier) and tier.takes(group, key) for tier in self._tiers):
            return _Attempt.NOT_TAKEN
        # Else a disk may have no slot now, as while it frees a region of blocks of another size.
        return _Attempt.NOT_NOW

    def _enqueue(self, blocks: BlockIds) -> None:
        """Have blocks wait, as far as MAX_WAITING allows. Those that wait already keep their places."""
        blocks = blocks[: MAX_WAITING - len(self.waiting)]
        self.waiting.update(zip(blocks.tolist(), self._sequences[blocks].tolist(), strict=True))

    # --- which blocks, and the ends of writes ----------------------------------------------------

    def _may_be_written(self, group: Group) -> bool:
        """Return whether blocks of a group may be written at all. A bench's may not."""
        namespace = group.namespace
        return bool(self._tiers) and not (
            group.retired or namespace.of_bench or self._leaves_out(namespace.fingerprint)
        )

    def _are_wanted(self, group: Group, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which keys of a group that is written are in no tier, and are not being written to one."""
        wanted, block_group = np.ones(len(keys), np.bool_), block_group_of(group)
        for tier in self._tiers:
            wanted &= tier.wants(block_group, keys)
        return wanted

    def _unwritten(self, group: Group, blocks: BlockIds) -> _Unwritten:
        """Return those of some blocks that are still to be written, and their keys."""
        if not blocks.size or not self._may_be_written(group):
            return _Unwritten(blocks[:0], [])
        keys = self._cache.blocks.split_keys(blocks, group.key_bytes)
        wanted = self._are_wanted(group, keys) & [block not in self.under_way for block in blocks.tolist()]
        return _Unwritten(blocks[wanted], [keys[at] for at in np.flatnonzero(wanted).tolist()])

    @property
    def _lifetime_bytes(self) -> int:
        """Bytes of writes that a block on a tier survives; 0 while one has free space."""
        each = [tier.lifetime_bytes for tier in self._tiers]
        return sum(each) if all(each) else 0

    def _note_if_full(self) -> None:
        """Record whether the tiers are full; if so, how much was requested since the last tick, and have the policy
        remember for as long as a written block stays."""
        tier_bytes, was_full = self._lifetime_bytes, self._is_full
        self._is_full = tier_bytes > 0 and self.mode is WriteMode.AUTO
        if self._is_full and not was_full:
            self.waiting.clear()  # they wait again when they are next to be evicted
        before, self._accessed_before = self._accessed_before, self._cache.policy.accessed_bytes
        if self._is_full:
            self._selection.record_traffic(self._accessed_before - before, tier_bytes)
            self._cache.policy.remember(self._selection.stay_bytes(tier_bytes))

    def _on_end(self, write: BlockWrite, result: Result) -> None:
        nbytes = write.copy.group.nbytes
        if result is Result.DONE:
            self.written_blocks += 1
            self.written_bytes += nbytes
        elif result is Result.EXISTED:
            assert write.spent is not None
            self.budget.refund(write.spent)
            self._trickle_left += nbytes if write.trickles else 0
            if self._is_full:
                self._selection.record_present(nbytes)
        del self.under_way[write.number]
        self.under_way_bytes -= nbytes
        self._cache.life.unpin(np.array([write.number], np.uint32))
        self.pump()
