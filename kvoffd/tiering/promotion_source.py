"""The source of promotions that one tier is, a disk of this node or a shared store: its reads into the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import compress, islice, takewhile
from math import inf
from operator import not_
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
MAX_BEGUN = 64
"""Limit of the blocks begun by one call of ``pump``. Their slots are allocated together, so that neighbours in the
queue are neighbours in the pool."""
BEGUN_PER_END = 16
"""The same for the end of a read, which begins others only if as many bytes more as are under way may be: evicting for
a few blocks takes as long as for many."""
MAX_LOOKED_AT = 4096
"""Limit of the queues that one call of ``pump`` looks at."""
MAX_WITHOUT_SPACE = 256
"""Queues that may wait for space; blocks of further ones are better computed."""
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
    NEVER_SLOTS = auto()
    """The rest gets no slots however long it waits: ``end_overdue`` fails it."""
    TIER_BUSY = auto()
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
        has_overdue: whether ``end_overdue`` has something to fail, as what it left the last time.
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
        unreserved = 0
        """Number of queues that have no space."""
        too_large_bytes = inf
        """Size of the smallest block for which the pool has no slots now."""
        for queue in islice(self.read_order.queues(), MAX_LOOKED_AT):
            block_bytes = queue.group.block_bytes
            if not queue.fills:  # all of it is under way
                continue
            if not self._promotions.reserve(queue):
                unreserved += 1
                if unreserved > MAX_WITHOUT_SPACE:  # as if it had waited long enough: the next tick fails it
                    self._promotions.set_blocked(queue, NotRead.NO_SPACE, self.patience_s)
                continue
            if block_bytes >= too_large_bytes:
                self._promotions.set_blocked(queue, NotRead.NO_SPACE)
                continue
            while queue.fills:
                if not (count := min(most, self.reads.free_blocks(block_bytes))):
                    if not most or self.reads.under_way:  # the next call, at the latest the end of a read, continues
                        return
                    # Without other reads one block may always be read: those that were given up use the space.
                    self._promotions.set_blocked(queue, NotRead.OVERDUE)
                    break
                batch = list(islice(queue.fills, count))
                most -= len(batch)
                ended_by = self._begin_batch(queue, batch)
                if ended_by is _BatchEnd.TIER_BUSY:
                    return
                if ended_by is _BatchEnd.NO_SLOTS:
                    too_large_bytes = block_bytes
                if ended_by is not _BatchEnd.ALL_BEGUN:
                    break

    def _begin_batch(self, queue: FillQueue, batch: Sequence[Fill]) -> _BatchEnd:
        """Begin to read the first fills of a queue, as far as there is space. Settle those that cannot be read."""
        stores, promotions, group = self._cache.stores, self._promotions, queue.group
        try:
            states, _ = self._cache.blocks.find(group, b"".join([fill.key for fill in batch]))
            for fill in compress(batch, states):  # the pool has its block by now: FREE is 0
                promotions.settle(fill, CAME)
            lacking = list(compress(batch, map(not_, states)))
            tickets = stores.begin_fills(group, [fill.key for fill in lacking])  # of the first ones, if slots run out
            is_busy = not self._begin_reads(queue, dict(zip(lacking, tickets, strict=False)))
        except BaseException:
            for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                if fill.state is FillState.QUEUED:
                    promotions.fail(fill, Result.FAILED)
            raise
        if is_busy:
            return _BatchEnd.TIER_BUSY
        if len(tickets) == len(lacking):
            return _BatchEnd.ALL_BEGUN
        cause = self._cache.space.no_space_cause(group)
        if cause in ("pinned", "writing"):  # it gets slots once others end
            promotions.set_blocked(queue, NotRead.NO_SPACE)
            return _BatchEnd.NO_SLOTS
        # As if it had waited long enough: a queue may be too long to fail in one call.
        promotions.set_blocked(queue, NotRead.QUOTA if cause == "quota" else NotRead.NO_SPACE, self.patience_s)
        self.has_overdue = True
        return _BatchEnd.NEVER_SLOTS

    def _begin_reads(self, queue: FillQueue, tickets: dict[Fill, FillTicket]) -> bool:
        """Begin to read fills of a queue into the slots of their tickets; return False if the tier accepts no more now.
        The others stay queued then."""
        before_bytes, unused = self.reads.under_way_bytes, dict(tickets)
        try:
            for fill, ticket in tickets.items():
                if self.reads.begin(fill, ticket, partial(self._on_end, fill)):
                    del unused[fill]  # its slots are the read's from now on
                    del queue.fills[fill]
                    self._promotions.count(queue, queued=-1, under_way=1)
                    queue.blocked = None
                elif not self.tier.available():
                    self._promotions.fail(fill, Result.DEADLINE)
                elif self._recheck(fill) == ABSENT:
                    self._promotions.fail(fill, Result.GONE)
                else:  # a store may be ASKED: once it has answered, a later call begins the read, or finds it gone
                    return False
        finally:
            for ticket in unused.values():
                self._cache.stores.abort_fill(ticket)
            # All that began together is one piece of its owner's share.
            if len(queue.turns.by_owner) > 1 and (begun_bytes := self.reads.under_way_bytes - before_bytes):
                queue.turns.shares.use(queue.owner, begun_bytes)
        return True

    def _recheck(self, fill: Fill) -> int:
        """Return the tier's state of a block whose read it does not accept. A store is asked once more if its answer is
        too old, and at once for those behind the block too: one by one they would take an answer's time each."""
        keys = [one.key for one in islice(fill.queue.fills, MAX_BEGUN)]  # this one's is the first
        return self.tier.find(fill.queue.block_group, keys, prefix=False).states[0]

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
        """Fail up to ``most`` blocks of queues that were blocked for as long as a block may take to read, and get no
        space now either, or whose tier is away: other parts of their prompts wait for space together with them.

        Return whether there are more.
        """
        is_away = not self.tier.available()
        since = self._clock() - (0.0 if is_away else self.patience_s)
        for queue in self.read_order.queues():
            is_short = queue.blocked is not None and queue.blocked.reason is NotRead.NO_SPACE
            has_space = is_short and self._promotions.reserve(queue)
            blocked = queue.blocked  # by now: to get its space in this call unblocks it, however long it was blocked
            if blocked is None or blocked.since > since:
                continue
            # A queue that had its space before this call, and is blocked all the same, lacks slots.
            if has_space and not is_away and (blocked := self._still_blocked(queue, blocked)) is None:
                continue
            reason: Result | NotRead = Result.DEADLINE if is_away else blocked.reason
            for fill in list(islice(reversed(queue.fills), most)):  # the others are a prefix, and may still get space
                most -= 1
                self._promotions.fail(fill, reason)
            if queue.fills:
                return True
        return False

    def _still_blocked(self, queue: FillQueue, blocked: Blocked) -> Blocked | None:
        """Return why a queue that has its space but got no slots fails; None if it gets slots now, or waits longer."""
        if self.reads.free_blocks(queue.group.block_bytes):
            self._begin_batch(queue, list(islice(queue.fills, 1)))  # unblocks it if there are slots by now
            return queue.blocked
        # The reads under way use all bytes that this source may use, as they may whenever this is called. So the last
        # attempt of ``pump`` decides: it found no slots, and if the queue's patience was over by then, it fails.
        return blocked if blocked.tried_at - blocked.since >= self.patience_s else None

    # --- ends ------------------------------------------------------------------------------------

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Handle the end of a read: see the table of ``Fill``."""
        queue, ticket = fill.queue, fill.ticket
        assert ticket is not None
        was_given_up = self.reads.end(fill, queue.block_group.nbytes if result is Result.DONE else 0)
        if result is Result.UNWANTED and fill.is_awaited():  # a lookup joined it after its turn: it is the next again
            fill.state = FillState.QUEUED
            queue.fills[fill] = None
            queue.fills.move_to_end(fill, last=False)
            self._promotions.count(queue, queued=1, under_way=-1)
            self._cache.stores.abort_fill(ticket)
        else:
            if not was_given_up:  # else _give_up_overdue has counted it
                self._promotions.count(queue, under_way=-1)
            self._end_read(fill, ticket, result, block)
        block_bytes = queue.group.block_bytes
        if self.reads.free_blocks(block_bytes) * block_bytes >= self.reads.under_way_bytes:
            self.pump(BEGUN_PER_END)

    def _end_read(self, fill: Fill, ticket: FillTicket, result: Result, block: Block | None) -> None:
        """Publish the block of a read, or free its slots, and settle the fill."""
        # Without its checksums a damaged block could not be detected later.
        whole = block if result is Result.DONE and block is not None and all(block.checksums) else None
        is_ready = False
        try:
            if whole is None:
                self._cache.stores.abort_fill(ticket)
            elif is_ready := self._cache.stores.commit_fill(ticket, whole.first_blocks, whole.checksums):
                self.promoted_blocks += 1
                self.promoted_bytes += fill.queue.block_group.nbytes
                for lease in fill.leases:
                    self._cache.leases.hold(lease, ticket.blocks)
                number = int(ticket.blocks[0])
                self._origins.promoted(self, number)
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
        elif fill.state not in SETTLED:  # else it was given up, or its key removed
            # What is DONE and not READY lacks checksums.
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
        speed = self.speed.measured
        ahead_bytes = int(AHEAD_S * speed) if speed else UNMEASURED_BYTES
        most_bytes = min(self.most_bytes, max(ahead_bytes, AHEAD_BLOCKS * block_bytes))
        given_up_beyond = max(0, self.given_up_bytes - self.most_bytes)  # what they use of the others' bytes
        free_blocks = (most_bytes - self.under_way_bytes - given_up_beyond) // block_bytes
        return max(free_blocks, 0 if self.under_way or self.given_up else 1)

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
