"""The source of promotions that one tier is, a disk of this node or a shared store: its reads into the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING

from kvoffd.cache.block_table import CAME, IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.leases import Leases
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.tickets import FillTicket
from kvoffd.system.calls import call_each
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.promotions import SETTLED, Blocked, Fill, FillQueue, FillState, NotRead, Promotions, ReadOrder
from kvoffd.tiering.read_speed import ReadSpeed
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import ABSENT, ReadEnd, Result, Tier

if TYPE_CHECKING:
    from kvoffd.tiering.block_origins import BlockOrigins
    from kvoffd.tiering.writer import Writer

MAX_FILLING_BYTES = 2**30
"""Limit of the pool bytes used by reads from all disks, or from one store: at most this, and an eighth of the pool."""
MAX_BEGUN, BEGUN_PER_END = 64, 16
"""Limits of the blocks begun by one call of ``pump``, and by the end of a read if at most half of the bytes that may be
under way are: evicting for a few blocks takes as long as for many. Their slots are allocated together, so that
neighbours in the queue are neighbours in the pool."""
MAX_LOOKED_AT, MAX_WITHOUT_SPACE = 4096, 256
"""Queues of which ``pump`` begins some, or finds that they have no space; and those that may wait for space: blocks of
further ones are better computed."""
ENDED_AT_ONCE = 256
"""Blocks without space, or overdue, that are failed at a time, in a millisecond or two: ``background`` continues."""
UNMEASURED_BYTES = 64 * 2**20
"""Limit of the pool bytes that reads use at once while the speed is unknown."""
AHEAD_S = 0.25
"""Once the speed is known, reads under way are limited to what comes in this time: those that nobody waits for any
more end soon."""
AHEAD_BLOCKS = 16
"""Lower limit of the blocks under way."""


class _BatchEnd(Enum):
    """End of an attempt to begin a batch of fills."""

    ALL_BEGUN = auto()
    """All of them were begun, or settled."""
    NO_SLOTS = auto()
    """The pool has no slots for the rest."""
    TIER_FULL = auto()
    """The tier accepts no more reads now."""


class PromotionSource:
    """A tier as the source of promotions: a disk of this node, or one store. It reads into the pool what ``Promotions``
    has queued for it, in the order of the queues.

    Args:
        promotions: what lookups wait for, from all sources.
        writer: writes blocks to the tier.
        writers: those of all tiers, this one included.
        origins: records which blocks this source promoted.
        shared: whether other nodes use the source too.

    Attributes:
        patience_s: time that a block may take to read from the beginning of its turn, and a queue may be blocked.
        read_order: what is to be read, kept by ``Promotions``.
        read_again_at: time from which one read is tried even if it seems slower than computing.
        has_overdue: whether ``end_overdue`` left some of what is overdue.
        failures: fills that failed, those that were settled before included, by ``NotRead`` or ``Result``.
        failed_at: time of the last read that failed.
        unused_blocks: promoted blocks that were evicted before they were loaded.
    """

    def __init__(
        self,
        tier: Tier,
        settings: TieringSettings,
        cache: Cache,
        clock: Callable[[], float],
        promotions: Promotions,
        writer: Writer,
        writers: Sequence[Writer],
        origins: BlockOrigins,
        *,
        shared: bool,
    ) -> None:
        self.tier, self.shared, self.patience_s = tier, shared, settings.deadline_s
        self.writer, self._writers, self._origins = writer, writers, origins
        self._cache, self._clock, self._promotions = cache, clock, promotions
        most_bytes = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        self.reads = SourceReads(tier, cache.leases, clock, self.patience_s, most_bytes)
        self.read_order = ReadOrder()
        self.read_again_at = 0.0
        self.has_overdue = False
        self.failures: Counter[str] = Counter()
        self.failed_at = -inf
        self.promoted_blocks = self.promoted_bytes = self.unused_blocks = 0
        self._stopped = False

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True

    @property
    def idle(self) -> bool:
        """Whether nothing is being read, not even what was given up."""
        return not (self.unended_blocks or self.reads.given_up)

    @property
    def unended_blocks(self) -> int:
        """Number of queued and running fills, without reads that were given up."""
        return self.read_order.blocks + len(self.reads.under_way)

    # --- beginning reads -------------------------------------------------------------------------

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin up to ``most`` fills that may begin now, in the order of the queues. Blocked ones are passed over."""
        if self._stopped:
            return
        several = len(self.read_order.awaited.by_owner) > 1 or len(self.read_order.prefetched.by_owner) > 1
        unreserved = 0  # queues
        too_large = inf  # the least bytes of a block for which the pool has no slots now
        for queue in islice(self.read_order.queues(), MAX_LOOKED_AT):
            if not queue.fills:
                continue
            if not self._promotions.reserve(queue):
                unreserved += 1
                if unreserved > MAX_WITHOUT_SPACE:  # as if it had waited long enough: the next tick fails it
                    queue.blocked = Blocked(NotRead.NO_SPACE, self._clock() - self.patience_s)
                continue
            if queue.group.block_bytes >= too_large:
                self._promotions.block(queue, NotRead.NO_SPACE)
                continue
            while queue.fills:
                if not (count := min(most, self.reads.free_blocks(queue.group.block_bytes))):
                    if not most or self.reads.under_way:
                        return
                    self._promotions.block(queue, NotRead.OVERDUE)  # by reads that were given up and have not ended
                    break
                batch = list(islice(queue.fills, count))
                most -= len(batch)
                before_bytes = self.reads.under_way_bytes
                ended_by = self._begin_batch(queue, batch)
                if several and (begun_bytes := self.reads.under_way_bytes - before_bytes):
                    self.read_order.count_begun(queue, begun_bytes)
                if ended_by is _BatchEnd.TIER_FULL:
                    return
                if ended_by is _BatchEnd.NO_SLOTS:
                    too_large = queue.group.block_bytes
                    break

    def _begin_batch(self, queue: FillQueue, batch: Sequence[Fill]) -> _BatchEnd:
        """Begin to read the first fills of a queue, as far as there is space. Settle those that cannot be read."""
        try:
            ended_by = self._begin_reads(batch, self._cache.stores.begin_fill(queue.group, [one.key for one in batch]))
        except BaseException:
            for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                if fill.state is FillState.QUEUED:
                    self._promotions.fail(fill, Result.FAILED)
            raise
        if ended_by is _BatchEnd.NO_SLOTS:
            cause = self._cache.space.no_space_cause(queue.group)
            if cause in ("pinned", "writing"):  # it gets slots once others end
                self._promotions.block(queue, NotRead.NO_SPACE)
                return ended_by
            for fill in list(queue.fills):
                self._promotions.fail(fill, NotRead.QUOTA if cause == NotRead.QUOTA else NotRead.NO_SPACE)
            return _BatchEnd.ALL_BEGUN
        return ended_by

    def _begin_reads(self, batch: Sequence[Fill], tickets: dict[int, FillTicket | None]) -> _BatchEnd:
        """Begin to read fills into the slots of ``tickets``: see ``BlockStores.begin_fill``. What gets no slots, or is
        not accepted by the tier now, stays queued."""
        ended_by = _BatchEnd.ALL_BEGUN
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has the block by now
                    self._promotions.settle(fill, CAME)
                elif (ticket := tickets[number]) is None:
                    ended_by = _BatchEnd.NO_SLOTS
                elif self.reads.begin(fill, ticket, partial(self._on_end, fill)):
                    del tickets[number]  # its slots are the read's from now on
                    del fill.queue.fills[fill]
                    self._promotions.count(fill.queue, queued=-1, under_way=1)
                    fill.queue.blocked = None
                elif not self.tier.available():
                    self._promotions.fail(fill, Result.DEADLINE)
                elif self._is_gone(fill):
                    self._promotions.fail(fill, Result.GONE)
                else:
                    return _BatchEnd.TIER_FULL
        finally:
            for unused in filter(None, tickets.values()):
                self._cache.stores.end_fill(unused, (), ())
        return ended_by

    def _is_gone(self, fill: Fill) -> bool:
        """Return whether the tier lacks a block whose read it does not accept. A store is asked once more if its answer
        is too old, and at once for those behind the block too: one by one they would take an answer's time each."""
        keys = [one.key for one in islice(fill.queue.fills, MAX_BEGUN)]  # this one's is the first
        return self.tier.find(fill.queue.block_group, keys, prefix=False).states[0] == ABSENT

    # --- deadlines -------------------------------------------------------------------------------

    def tick(self) -> None:
        """End overdue fills, and begin others."""
        if not self.tier.available():  # its measured speed may be low because of that: try the next read at any speed
            self.read_again_at = 0.0
        call_each((self.tier.tick, self.end_overdue, self.pump))

    def end_overdue(self) -> None:
        """Fail overdue reads and blocked queues, up to ENDED_AT_ONCE blocks, and set ``has_overdue``."""
        left = ENDED_AT_ONCE - self._give_up_overdue()
        self.has_overdue = not left or self._fail_blocked(left)

    def _give_up_overdue(self) -> int:
        """Give up reads that do not end, up to ENDED_AT_ONCE; return how many."""
        overdue = self.reads.give_up_overdue(ENDED_AT_ONCE)
        for fill in overdue:
            assert fill.ticket is not None
            self._promotions.count(fill.queue, under_way=-1)
            self._promotions.fail(fill, NotRead.OVERDUE)
            self._cache.stores.drop_unfinished([fill.ticket], MissReason.TIER_LATE)
        return len(overdue)

    def _fail_blocked(self, most: int) -> bool:
        """Fail up to ``most`` blocks of queues that were blocked for as long as a block may take to read, or whose tier
        is away: other parts of their prompts wait for space together with them.

        Return whether there are more. A queue that gets space now has its turn instead, however long it was blocked.
        """
        is_away = not self.tier.available()
        since = self._clock() - (0.0 if is_away else self.patience_s)
        for queue in self.read_order.queues():
            if queue.blocked is None:
                continue
            # A new reservation unblocks the queue. One that it had before says nothing about slots.
            is_reserved = queue.blocked.reason is NotRead.NO_SPACE and self._promotions.reserve(queue)
            if is_reserved and queue.blocked is not None and queue.blocked.since <= since:
                self._begin_batch(queue, list(islice(queue.fills, 1)))  # unblocks it if there are slots by now
            if queue.blocked is None or queue.blocked.since > since:
                continue
            for fill in list(islice(reversed(queue.fills), most)):  # the others are a prefix, and may still get space
                most -= 1
                self._promotions.fail(fill, Result.DEADLINE if is_away else queue.blocked.reason)
            if queue.fills:
                return True
        return False

    # --- ends ------------------------------------------------------------------------------------

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Handle the end of a read: see the table of ``Fill``."""
        ticket = fill.ticket
        assert ticket is not None
        was_given_up = self.reads.end(fill, fill.queue.block_group.nbytes if result is Result.DONE else 0)
        if result is Result.UNWANTED and fill.is_awaited():
            self._queue_again(fill, ticket)
        else:
            if not was_given_up:  # else _give_up_overdue has counted it
                self._promotions.count(fill.queue, under_way=-1)
            self._end_read(fill, ticket, result, block)
        if self.reads.are_few(fill.queue.group.block_bytes):
            self.pump(BEGUN_PER_END)

    def _queue_again(self, fill: Fill, ticket: FillTicket) -> None:
        """Put a fill, which a lookup joined after nobody waited for it in its turn, first in its queue."""
        fill.state = FillState.QUEUED
        fill.queue.fills[fill] = None
        fill.queue.fills.move_to_end(fill, last=False)
        self._promotions.count(fill.queue, queued=1, under_way=-1)
        self._cache.stores.end_fill(ticket, (), ())

    def _end_read(self, fill: Fill, ticket: FillTicket, result: Result, block: Block | None) -> None:
        """Publish the block of a read, or free its slots, and settle the fill."""
        # Without its checksums a damaged block could not be detected later.
        is_whole = result is Result.DONE and block is not None and all(block.checksums)
        first_blocks, checksums = (block.first_blocks, block.checksums) if block is not None and is_whole else ((), ())
        try:
            if is_ready := self._cache.stores.end_fill(ticket, first_blocks, checksums):
                self.promoted_blocks += 1
                self.promoted_bytes += fill.queue.block_group.nbytes
                for lease in fill.leases:
                    self._cache.leases.hold(lease, ticket.blocks)
                self._origins.promoted(self, number := int(ticket.slots[0]))
                self.writer.waiting.pop(number, None)  # a dropped block may have had the same number
                for writer in self._writers:
                    if writer is not self.writer:  # its tiers may lack the block
                        writer.stored(ticket.blocks)
        except BaseException:
            self._promotions.settle(fill, MissReason.TIER_FAILED)  # lookups must not wait for it
            raise
        if is_ready:
            self._promotions.settle(fill, CAME)
        elif result is Result.UNWANTED:
            self._promotions.settle(fill, IN_A_TIER)
        elif fill.state not in SETTLED:
            self._promotions.fail(fill, Result.CORRUPT if result is Result.DONE else result)


class SourceReads:
    """The reads of one source, until its tier ends them.

    A tier may end reads in any order. The turn of a read begins when all earlier ones have ended or were given up; then
    it has its patience. A read that takes longer is given up: no lookup waits for it, and the tier may still write into
    its slots.

    Args:
        patience_s: time for a tier to read a block from the beginning of its turn.

    Attributes:
        most_bytes: pool bytes that reads may use at once. A larger block is read alone. Reads that were given up may
            use as much again, so that others are still read.
        under_way: in the order in which they were begun, without those that were given up.
        given_up: those that were given up, and have not ended.
        under_way_bytes: pool bytes of the former.
        given_up_bytes: pool bytes of the latter, a part of ``Leases.withheld_bytes``.
    """

    def __init__(
        self, tier: Tier, leases: Leases, clock: Callable[[], float], patience_s: float, most_bytes: int
    ) -> None:
        self._tier, self._leases, self._clock, self._patience_s = tier, leases, clock, patience_s
        self.most_bytes = most_bytes
        self.under_way: dict[Fill, None] = {}
        self.given_up: dict[Fill, None] = {}
        self.under_way_bytes = self.given_up_bytes = 0
        self.speed = ReadSpeed(clock)
        self._turn_at = 0.0
        """Time when the turn of the first read under way began."""
        self._ended_at = 0.0
        """Time when a read last ended."""

    def free_blocks(self, block_bytes: int) -> int:
        """Return how many further blocks of this size may be read now: at least one if no other read has slots."""
        given_up_beyond = max(0, self.given_up_bytes - self.most_bytes)  # what they use of the others' bytes
        free_bytes = self._most_under_way(block_bytes) - self.under_way_bytes - given_up_beyond
        return max(free_bytes // block_bytes, 0 if self.under_way or self.given_up else 1)

    def are_few(self, block_bytes: int) -> bool:
        """Return whether at most half of the bytes that may be under way are."""
        return 2 * self.under_way_bytes <= self._most_under_way(block_bytes)

    def _most_under_way(self, block_bytes: int) -> int:
        """Return the pool bytes that reads under way may use at once, at the measured speed."""
        speed = self.speed.measured
        ahead_bytes = int(AHEAD_S * speed) if speed else UNMEASURED_BYTES
        return min(self.most_bytes, max(ahead_bytes, AHEAD_BLOCKS * block_bytes))

    def begin(self, fill: Fill, ticket: FillTicket, on_end: ReadEnd) -> bool:
        """Begin a read into the slots of a ticket; return False if the tier does not accept it now."""
        group = fill.queue.block_group
        if not self._tier.read(group, fill.key, ticket.offsets, self._patience_s, on_end, fill.is_awaited):
            return False
        fill.state, fill.ticket, fill.begun_at = FillState.READING, ticket, self._clock()
        if not self.under_way:
            self._turn_at = fill.begun_at
        self.speed.begin(group.nbytes)
        self.under_way[fill] = None
        self.under_way_bytes += fill.queue.group.block_bytes
        return True

    def end(self, fill: Fill, came_bytes: int) -> bool:
        """Remove a read that its tier has ended, with 0 ``came_bytes`` if it failed; its slots are the caller's. Return
        whether it had been given up."""
        fill.state = FillState.READ if fill.state is FillState.READING else FillState.ENDED
        fill.ticket = None  # a lookup may refer to the fill for some seconds more
        self._ended_at = self._clock()
        if next(iter(self.under_way), None) is fill:
            self._turn_at = self._ended_at
        if was_given_up := fill in self.given_up:
            del self.given_up[fill]
            self._count_given_up(-fill.queue.group.block_bytes)
        else:
            del self.under_way[fill]
            self.under_way_bytes -= fill.queue.group.block_bytes
        self.speed.end(came_bytes, len(self.under_way))
        return was_given_up

    def give_up_overdue(self, most: int) -> list[Fill]:
        """Give up reads once the turn of the first has taken too long, and return them, up to ``most``."""
        overdue = self._overdue(most)
        for fill in overdue:
            del self.under_way[fill]
            self.under_way_bytes -= fill.queue.group.block_bytes
            self.given_up[fill] = None
            self._count_given_up(fill.queue.group.block_bytes)
        if 0 < len(overdue) < most:  # these were all: the turn of the one behind them begins
            self._turn_at = self._clock()
        return overdue

    def _overdue(self, most: int) -> list[Fill]:
        """Return the reads that are overdue: the first alone, if another one has ended in its turn; else the tier
        hangs, and they are all that began as long ago, up to ``most``."""
        now = self._clock()
        if not self.under_way or now - self._turn_at < self._patience_s:
            return []
        if self._ended_at > self._turn_at:
            return list(islice(self.under_way, 1))
        old = takewhile(lambda fill: now - fill.begun_at >= self._patience_s, self.under_way)
        return list(islice(old, most))

    def _count_given_up(self, nbytes: int) -> None:
        self.given_up_bytes += nbytes
        self._leases.withheld_bytes += nbytes
