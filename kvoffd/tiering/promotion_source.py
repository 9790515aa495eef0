"""The source of promotions that one tier is, a disk of this node or a shared store: which blocks come up, how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING

from kvoffd.cache.block_table import CAME, IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.tickets import FillTicket
from kvoffd.system.calls import call_each
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.fills import Blocked, Fill, FillQueue, NotRead, UnsettledFills
from kvoffd.tiering.source_reads import SourceReads
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import ABSENT, Result, Tier

if TYPE_CHECKING:
    from kvoffd.tiering.block_origins import BlockOrigins
    from kvoffd.tiering.writer import Writer

MISSES: dict[Result | NotRead, MissReason] = {
    NotRead.NO_SPACE: MissReason.NO_SPACE,
    NotRead.QUOTA: MissReason.QUOTA,
    NotRead.OVERDUE: MissReason.TIER_LATE,
    Result.DEADLINE: MissReason.TIER_LATE,
    Result.CORRUPT: MissReason.CORRUPT,
    Result.GONE: MissReason.EVICTED,
}
"""Miss reasons of failures; any other is a failure of the tier."""
MAX_QUEUED = 2**16
"""Blocks of one source that may wait to be read. An engine that computes them sooner does not wait for them."""
FILL_BYTES = 560
"""Memory of a waiting block, measured."""
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
READ_AGAIN_S = 60.0
"""Interval after which one read is tried even if it seems slower than computing: speeds change."""


class _BatchEnd(Enum):
    """End of an attempt to begin a batch of fills."""

    ALL_BEGUN = auto()
    """All of them were begun, or settled."""
    NO_SLOTS = auto()
    """The pool has no slots for the rest."""
    TIER_FULL = auto()
    """The tier accepts no more reads now."""


class PromotionSource:
    """A tier as the source of promotions: a disk of this node, or one store. It has the queues of blocks to read,
    reserves pool space for them, and settles each fill; ``SourceReads`` has those that are being read.

    Args:
        unsettled: the fills that lookups may wait for, shared by all sources.
        sources, writers: all of them, this one and its own included.
        origins: records which blocks this source promoted.
        shared: whether other nodes use the source too.

    Attributes:
        writer: writes blocks to the tier.
        reserved_bytes: pool bytes reserved for its queues: the queued and running blocks of those that are
            ``is_reserved``. ``Leases.withheld_bytes`` is the sum of these and of ``SourceReads.given_up_bytes`` of all
            sources.
        queued_blocks: number of fills that have not begun, in all queues.
        has_overdue: whether ``end_overdue`` left some of what is overdue.
        failures: fills that failed, those that were settled before included, by ``NotRead`` or ``Result``.
        unused_blocks: promoted blocks that were evicted before they were loaded.
    """

    def __init__(
        self,
        tier: Tier,
        settings: TieringSettings,
        cache: Cache,
        clock: Callable[[], float],
        unsettled: UnsettledFills,
        sources: Sequence[PromotionSource],
        writer: Writer,
        writers: Sequence[Writer],
        origins: BlockOrigins,
        *,
        shared: bool,
    ) -> None:
        self.tier, self.shared, self._sources = tier, shared, sources
        self.writer, self._writers, self._origins = writer, writers, origins
        self._cache, self._clock, self._unsettled = cache, clock, unsettled
        self._patience_s = settings.deadline_s
        """Time that a block may take to read from the beginning of its turn, and a queue may be blocked."""
        most_bytes = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        self.reads = SourceReads(tier, cache.leases, clock, self._patience_s, most_bytes)
        self._queues: dict[FillQueue, None] = {}
        """Queues with queued or running fills, in the order in which they are promoted."""
        self._queued_by: Counter[int] = Counter()
        """Queued blocks by session."""
        self.queued_blocks = self.reserved_bytes = 0
        self.has_overdue = False
        self.failed_at = -inf
        """Time of the last read that failed."""
        self.promoted_blocks = self.promoted_bytes = 0
        self.unused_blocks = 0
        self.failures: Counter[str] = Counter()
        self._read_again_at = 0.0
        """Time from which one read is tried even if it seems slower than computing."""
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
        return self.queued_blocks + len(self.reads.under_way)

    # --- what lookups ask, and queue -------------------------------------------------------------

    def wait_s(self, awaited: Collection[Fill]) -> float:
        """Return the expected time until the awaited fills of this source end, at the current speed; 0 if unknown."""
        its_queues = {fill.queue for fill in awaited if not fill.is_settled and fill.queue.source is self}
        if not (its_queues and (speed := self.reads.speed.current)):
            return 0.0
        nbytes, left = 0, len(its_queues)
        for queue in self._queues:  # all queues up to its last one are read first
            if queue in its_queues:
                left -= 1
            elif queue.blocked is not None:  # passed over
                continue
            nbytes += (len(queue.fills) + queue.under_way) * queue.group.block_bytes
            if not left:
                behind_last_awaited = takewhile(lambda fill: fill not in awaited, reversed(queue.fills))
                nbytes -= sum(1 for _ in behind_last_awaited) * queue.group.block_bytes
                break
        # A queue that is blocked is expected to stay so as long again as so far.
        now = self._clock()
        blocked_s = max((now - queue.blocked.since for queue in its_queues if queue.blocked), default=0.0)
        return nbytes / speed + blocked_s

    def skips(self, group: Group, count: int) -> bool:
        """Return whether to skip ``count`` blocks of a group, as they take longer to read than to compute, by the
        measured speeds and without a queue; only the engine, which has a queue too, can weigh the queues.

        Every READ_AGAIN_S it lets some be read, and notes when, so that the speed is measured again.
        """
        namespace, tokens = group.namespace, count * group.tokens
        prefill, speed = namespace.counters.prefill_tokens_per_second, self.reads.speed.measured
        if not (tokens and prefill and speed):
            return False
        # The tokens need the blocks of all groups: those of the others count as if they were as large.
        nbytes = len(namespace.specs) * count * group.block_bytes
        now = self._clock()
        if nbytes / speed > tokens / prefill and now < self._read_again_at:
            return True
        self._read_again_at = now + READ_AGAIN_S
        return False

    def enqueue(self, queue: FillQueue, key: bytes) -> Fill | None:
        """Queue a block that the tier has; None if too many are queued. No session gets over three quarters of that."""
        if self.queued_blocks + self._queued_by[queue.session] // 3 >= MAX_QUEUED:
            return None
        fill = Fill(queue, key)
        self._unsettled.setdefault(queue.block_group.tag, {})[key] = fill
        self._queues[queue] = queue.fills[fill] = None
        self._count(queue, queued=1)
        return fill

    def drop_unawaited(self, queue: FillQueue) -> None:
        """Remove blocks for which nobody waits from the queue, so that they are not read."""
        for fill in [fill for fill in queue.fills if not fill.leases]:
            self.settle(fill, IN_A_TIER)  # the engine reports why it is not loaded

    # --- beginning reads -------------------------------------------------------------------------

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin up to ``most`` fills that may begin now, in the order of the queues. Blocked ones are passed over."""
        if self._stopped:
            return
        unreserved = 0  # queues
        too_large = inf  # the least bytes of a block for which the pool has no slots now
        for queue in list(islice(self._queues, MAX_LOOKED_AT)):
            if not queue.fills:
                continue
            if not self._reserve(queue):
                unreserved += 1
                if unreserved > MAX_WITHOUT_SPACE:  # as if it had waited long enough: the next tick fails it
                    queue.blocked = Blocked(NotRead.NO_SPACE, self._clock() - self._patience_s)
                continue
            if queue.group.block_bytes >= too_large:
                self._block(queue, NotRead.NO_SPACE)
                continue
            while queue.fills:
                if not (count := min(most, self.reads.free_blocks(queue.group.block_bytes))):
                    if not most or self.reads.under_way:
                        return
                    self._block(queue, NotRead.OVERDUE)  # by reads that were given up and have not ended
                    break
                batch = list(islice(queue.fills, count))
                most -= len(batch)
                ended_by = self._begin_batch(queue, batch)
                if ended_by is _BatchEnd.TIER_FULL:
                    return
                if ended_by is _BatchEnd.NO_SLOTS:
                    too_large = queue.group.block_bytes
                    break

    def _reserve(self, queue: FillQueue) -> bool:
        """Reserve pool space for all queues of a prompt, and return whether this one has its; else it is blocked.

        Nothing is reserved for a prefetch, whose blocks nobody pins: it may begin while there is space for a block.
        """
        if queue.is_reserved:
            return True
        leasable = self._cache.leases.leasable_bytes
        if queue.session == NO_SESSION:
            if queue.group.block_bytes <= leasable:
                return True
        else:
            joint = [one for one in queue.joint.members if not one.is_reserved]
            if self._fits(queue, joint, leasable):
                for one in joint:
                    one.is_reserved, one.blocked = True, None
                    one.source._count_reserved(one.queued_bytes)
                return True
        self._block(queue, NotRead.NO_SPACE)
        return False

    def _fits(self, queue: FillQueue, joint: Sequence[FillQueue], leasable: int) -> bool:
        """Return whether leases may pin all blocks of a queue and of those that get space jointly with it.

        What a store is being asked for, for the same prompt, needs space too. It counts within the queue's patience
        only: the engine may never look it up again. Once it does not count, the prompt may use what other sources have
        reserved and will not have filled by the time that it is read and loaded.
        """
        if leasable >= self._cache.leases.most_bytes:  # all there is: to wait would give no more
            return True
        lease, waited_s = queue.joint.lease, self._clock() - queue.blocked.since if queue.blocked else 0.0
        asked_bytes = lease.asking_bytes if lease.active and waited_s < self._patience_s else 0
        nbytes = sum([one.queued_bytes for one in joint]) + asked_bytes
        if nbytes > leasable and not asked_bytes:
            read_s = max(one.queued_bytes / (one.source.reads.speed.current or inf) for one in joint)
            seconds = self._patience_s + read_s
            leasable += sum([one._unfilled_after(seconds) for one in self._sources if one is not self])
        return nbytes <= leasable

    def _unfilled_after(self, seconds: float) -> int:
        """Return the reserved bytes that are not filled after this time, if blocks come at all."""
        if not (self.reserved_bytes and (speed := self.reads.speed.current)):
            return 0
        return max(0, self.reserved_bytes - int(speed * seconds))

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self._cache.leases.withheld_bytes += nbytes

    def _block(self, queue: FillQueue, reason: NotRead) -> None:
        """Record why a queue cannot begin now. The time since which it cannot stays."""
        queue.blocked = Blocked(reason, queue.blocked.since if queue.blocked else self._clock())

    def _begin_batch(self, queue: FillQueue, batch: Sequence[Fill]) -> _BatchEnd:
        """Begin to read the first fills of a queue, as far as there is space. Settle those that cannot be read."""
        try:
            ended_by = self._begin_reads(batch, self._cache.stores.begin_fill(queue.group, [one.key for one in batch]))
        except BaseException:
            for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                if fill.ticket is None and not fill.is_settled:
                    self._fail(fill, Result.FAILED)
            raise
        if ended_by is _BatchEnd.NO_SLOTS:
            cause = self._cache.space.no_space_cause(queue.group)
            if cause in ("pinned", "writing"):  # it gets slots once others end
                self._block(queue, NotRead.NO_SPACE)
                return ended_by
            for fill in list(queue.fills):
                self._fail(fill, NotRead.QUOTA if cause == NotRead.QUOTA else NotRead.NO_SPACE)
            return _BatchEnd.ALL_BEGUN
        return ended_by

    def _begin_reads(self, batch: Sequence[Fill], tickets: dict[int, FillTicket | None]) -> _BatchEnd:
        """Begin to read fills into the slots of ``tickets``: see ``BlockStores.begin_fill``. What gets no slots, or is
        not accepted by the tier now, stays queued."""
        ended_by = _BatchEnd.ALL_BEGUN
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has the block by now
                    self.settle(fill, CAME)
                elif (ticket := tickets[number]) is None:
                    ended_by = _BatchEnd.NO_SLOTS
                elif self.reads.begin(fill, ticket, partial(self._on_end, fill)):
                    del tickets[number]  # its slots are the read's from now on
                    del fill.queue.fills[fill]
                    self._count(fill.queue, queued=-1, under_way=1)
                    fill.queue.blocked = None
                elif not self.tier.available():
                    self._fail(fill, Result.DEADLINE)
                elif self.tier.find(fill.queue.block_group, [fill.key], prefix=False).states[0] == ABSENT:
                    self._fail(fill, Result.GONE)
                else:
                    return _BatchEnd.TIER_FULL
        finally:
            for unused in filter(None, tickets.values()):
                self._cache.stores.end_fill(unused, (), ())
        return ended_by

    # --- deadlines -------------------------------------------------------------------------------

    def tick(self) -> None:
        """End overdue fills, and begin others."""
        if not self.tier.available():  # its measured speed may be low because of that: try the next read at any speed
            self._read_again_at = 0.0
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
            self._count(fill.queue, under_way=-1)
            self._fail(fill, NotRead.OVERDUE)
            self._cache.stores.drop_unfinished([fill.ticket], MissReason.TIER_LATE)
        return len(overdue)

    def _fail_blocked(self, most: int) -> bool:
        """Fail up to ``most`` blocks of queues that were blocked for as long as a block may take to read.

        Return whether there are more. A queue that gets space now has its turn instead, however long it was blocked.
        """
        since = self._clock() - self._patience_s
        for queue in list(self._queues):
            if queue.blocked is None:
                continue
            # A new reservation unblocks the queue. One that it had before says nothing about slots.
            is_reserved = queue.blocked.reason is NotRead.NO_SPACE and self._reserve(queue)
            if is_reserved and queue.blocked is not None and queue.blocked.since <= since:
                self._begin_batch(queue, list(islice(queue.fills, 1)))  # unblocks it if there are slots by now
            if queue.blocked is None or queue.blocked.since > since:
                continue
            for fill in list(islice(reversed(queue.fills), most)):  # the others are a prefix, and may still get space
                most -= 1
                self._fail(fill, queue.blocked.reason)
            if queue.fills:
                return True
        return False

    # --- ends ------------------------------------------------------------------------------------

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Handle the end of a read: see the table of ``Fill``."""
        ticket, fill.ticket = fill.ticket, None  # a lookup may refer to the fill for some seconds more
        assert ticket is not None
        was_given_up = self.reads.end(fill, fill.queue.block_group.nbytes if result is Result.DONE else 0)
        if result is Result.UNWANTED and fill.is_awaited():
            self._queue_again(fill, ticket)
        else:
            if not was_given_up:  # else _give_up_overdue has counted it
                self._count(fill.queue, under_way=-1)
            self._end_read(fill, ticket, result, block)
        if self.reads.are_few(fill.queue.group.block_bytes):
            self.pump(BEGUN_PER_END)

    def _queue_again(self, fill: Fill, ticket: FillTicket) -> None:
        """Put a fill, which a lookup joined after nobody waited for it in its turn, first in its queue."""
        fill.queue.fills[fill] = None
        fill.queue.fills.move_to_end(fill, last=False)
        self._count(fill.queue, queued=1, under_way=-1)
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
                self._origins.promoted(self, int(ticket.slots[0]))
                for writer in self._writers:
                    if writer is not self.writer:  # its tiers may lack the block
                        writer.stored(ticket.blocks)
        except BaseException:
            self.settle(fill, MissReason.TIER_FAILED)  # lookups must not wait for it
            raise
        if is_ready:
            self.settle(fill, CAME)
        elif result is Result.UNWANTED:
            self.settle(fill, IN_A_TIER)
        elif not fill.is_settled:
            self._fail(fill, Result.CORRUPT if result is Result.DONE else result)

    def _fail(self, fill: Fill, reason: Result | NotRead) -> None:
        """Settle a fill that failed, and record the reason for its key. One that was settled is only counted."""
        self.failures[reason.value] += 1
        if fill.is_settled:
            return
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        if miss is MissReason.TIER_FAILED:
            self.failed_at = self._clock()
        self.settle(fill, miss)
        self._cache.blocks.record_misses(fill.queue.group, fill.key, miss)

    def settle(self, fill: Fill, reason: int) -> None:
        """Count the key once for all lookups that asked for it, have none wait for it any more, and take it out of its
        queue. If it is being read, as when its key is removed, the end of the read frees its slots and changes nothing
        else. Does nothing for a fill that was settled before.

        Args:
            reason: CAME or IN_A_TIER, which count as found, or a ``MissReason``.
        """
        if fill.is_settled:
            return
        fill.is_settled = True
        askers, fill.askers = fill.askers, []
        for asked, position in askers:
            asked.set(position, bytes([reason]))
        if reason in (CAME, IN_A_TIER):
            counters = fill.queue.group.namespace.counters
            if self.shared:
                counters.found_shared += len(askers)
            else:
                counters.found_disk += len(askers)
        if fill in fill.queue.fills:
            del fill.queue.fills[fill]
            self._count(fill.queue, queued=-1)
        for lease in fill.leases:
            lease.coming -= 1
        fills = self._unsettled.get(fill.queue.block_group.tag, {})
        if fills.get(fill.key) is fill:  # another one may have its key by now
            del fills[fill.key]
            if not fills:
                del self._unsettled[fill.queue.block_group.tag]

    def _count(self, queue: FillQueue, *, queued: int = 0, under_way: int = 0) -> None:
        """Add to the numbers of a queue's blocks that wait and that are under way, and to what follows from them. Drop
        a queue that has none left."""
        self.queued_blocks += queued
        self._queued_by[queue.session] += queued
        if not self._queued_by[queue.session]:
            del self._queued_by[queue.session]
        queue.under_way += under_way
        if queue.is_reserved:
            self._count_reserved((queued + under_way) * queue.group.block_bytes)
        if not (queue.fills or queue.under_way):
            self._queues.pop(queue, None)
            if queue in queue.joint.members:
                queue.joint.members.remove(queue)
