"""Promotions to the pool from one source, a disk of this node or a shared store: which blocks, and how fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import islice, takewhile
from math import inf
from typing import TYPE_CHECKING

from kvoffd.cache.block_table import CAME, IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason
from kvoffd.cache.tickets import FillTicket
from kvoffd.system.calls import call_each
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.fills import Coming, Fill, FillQueue
from kvoffd.tiering.source_reads import SourceReads
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import ABSENT, Result, Tier

if TYPE_CHECKING:
    from kvoffd.tiering.promoted_blocks import PromotedBlocks
    from kvoffd.tiering.writer import Writer

NO_SPACE, QUOTA, OVERDUE, SLOWER = "no_space", "quota", "overdue", "slower"
"""Reasons not to promote a block, besides tiers' results. ``slower``: computing it takes less time."""
MISSES: dict[str, MissReason] = {
    NO_SPACE: MissReason.NO_SPACE,
    QUOTA: MissReason.QUOTA,
    OVERDUE: MissReason.TIER_LATE,
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

Reservation = tuple[int, float]
"""Pool bytes that another source has reserved, and its bytes per second."""


class Promotions:
    """Promotions from one source: a disk of this node, or one store. It has the queues of blocks to read, reserves pool
    space for them, and settles each fill; ``SourceReads`` has those that are being read.

    Args:
        coming: the fills that lookups may wait for, shared by all sources.
        sources: all sources, this one included.
        promoted_blocks: hears of each promoted block.
        shared: whether other nodes use the source too.

    Attributes:
        writer: writes blocks to the tier.
        reserved_bytes: pool bytes reserved for its queues: see ``FillQueue.is_reserved``. ``Leases.withheld_bytes`` is
            the sum of these and of ``SourceReads.given_up_bytes`` of all sources.
        ends_more: whether ``end_overdue`` has more to do now.
    """

    def __init__(
        self,
        tier: Tier,
        settings: TieringSettings,
        cache: Cache,
        clock: Callable[[], float],
        coming: Coming,
        sources: Sequence[Promotions],
        writer: Writer,
        promoted_blocks: PromotedBlocks,
        *,
        shared: bool,
    ) -> None:
        self.tier, self.shared, self._sources = tier, shared, sources
        self.writer, self._promoted = writer, promoted_blocks
        self._cache, self._clock, self._patience_s, self._coming = cache, clock, settings.deadline_s, coming
        most_bytes = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        self.reads = SourceReads(tier, cache.leases, clock, settings.deadline_s, most_bytes)
        self._queues: dict[FillQueue, None] = {}
        """Queues with queued or running fills, in the order in which they are promoted."""
        self._queued_by: Counter[int] = Counter()
        """Queued blocks by session."""
        self.queued_blocks = self.reserved_bytes = 0
        self.ends_more = False
        self.failed_at = -inf
        """Time of the last read that failed."""
        self.promoted_blocks = self.promoted_bytes = 0
        self.unused_blocks = 0
        """Promoted blocks that were evicted before they were loaded."""
        self.failures: Counter[str] = Counter()
        """Fills that failed, those that were settled before included, by reason: a ``Result``, or one of the above."""
        self._read_again_at = 0.0
        self._stopped = False

    @property
    def name(self) -> str:
        """Name of a store; empty for a disk."""
        return self.tier.name if self.shared else ""

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True

    @property
    def idle(self) -> bool:
        """Whether nothing is being read, not even what was given up."""
        return not (self.waiting_blocks or self.reads.given_up)

    @property
    def waiting_blocks(self) -> int:
        """Number of queued and running fills."""
        return self.queued_blocks + len(self.reads.under_way)

    def wait_s(self, awaited: Collection[Fill]) -> float:
        """Return the expected time until the awaited fills of this source end, at the current speed; 0 if unknown."""
        if not (speed := self.reads.speed.current):
            return 0.0
        its_queues = {fill.queue for fill in awaited if not fill.is_settled and fill.queue.source is self}
        last = max((at for at, queue in enumerate(self._queues) if queue in its_queues), default=-1)
        # Others without space are passed over.
        before = islice(self._queues, last + 1)
        ahead = [queue for queue in before if queue in its_queues or queue.no_space_since is None]
        nbytes = sum((len(queue.fills) + queue.under_way) * queue.group.block_bytes for queue in ahead)
        if ahead:  # fills behind the last awaited one do not count
            behind = takewhile(lambda fill: fill not in awaited, reversed(ahead[-1].fills))
            nbytes -= sum(1 for _ in behind) * ahead[-1].group.block_bytes
        # Who has no space is expected to wait as long again as so far.
        now, since = self._clock(), (queue.no_space_since for queue in its_queues)
        blocked_s = max((now - at for at in since if at is not None), default=0.0)
        return nbytes / speed + blocked_s

    def is_slower(self, group: Group, count: int) -> bool:
        """Return whether ``count`` blocks of a group take longer to read than to compute, by the measured speeds and
        without a queue; at intervals, return False. Only the engine, which has a queue too, can weigh the queues."""
        namespace, tokens = group.namespace, count * group.tokens
        prefill, speed = namespace.counters.prefill_tokens_per_second, self.reads.speed.measured
        if not (tokens and prefill and speed):
            return False
        # The tokens need the blocks of all groups: those of the others count as if they were as large.
        nbytes = len(namespace.specs) * count * group.block_bytes
        now = self._clock()
        if nbytes / speed <= tokens / prefill or now >= self._read_again_at:
            self._read_again_at = max(self._read_again_at, now + READ_AGAIN_S)
            return False
        return True

    def enqueue(self, queue: FillQueue, key: bytes) -> Fill | None:
        """Queue a block that the tier has; None if too many are queued. No session gets over three quarters of that."""
        if self.queued_blocks + self._queued_by[queue.first_lease.session] // 3 >= MAX_QUEUED:
            return None
        fill = Fill(queue, key)
        self._coming.setdefault(queue.block_group.tag, {})[key] = fill
        self._queues[queue] = queue.fills[fill] = None
        self._count(queue, 1)
        return fill

    def drop_unawaited(self, queue: FillQueue) -> None:
        """Remove blocks for which nobody waits from the queue, so that they are not read."""
        for fill in [fill for fill in queue.fills if not fill.leases]:
            self.settle(fill, IN_A_TIER)  # the engine reports why it is not loaded

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin up to ``most`` fills that may begin now. Queues without space are passed over."""
        without_space = 0  # queues
        too_large = inf  # the least bytes of a block for which the pool has no slots now
        reserved = self._reserved_by_others()
        for queue in list(islice(self._queues, MAX_LOOKED_AT)):
            if not self._reserve(queue, reserved):
                without_space += 1
                if without_space > MAX_WITHOUT_SPACE:
                    queue.no_space_since = self._clock() - self._patience_s  # it ends with the next tick
                continue
            if queue.fills and queue.group.block_bytes >= too_large:
                self._note_no_space(queue, NO_SPACE)
                continue
            while queue.fills:
                free = self.reads.free_bytes(queue.group.block_bytes)
                if self._stopped or most <= 0 or (self.reads.under_way and free < queue.group.block_bytes):
                    return
                if free < queue.group.block_bytes and self.reads.given_up:  # without these it would be read alone
                    self._note_no_space(queue, OVERDUE)
                    break
                batch = list(islice(queue.fills, max(1, min(most, free // max(1, queue.group.block_bytes)))))
                most -= len(batch)
                if not self._begin_batch(queue, batch):
                    return
                if queue.no_space_since is not None:
                    too_large = queue.group.block_bytes
                    break

    def _reserve(self, queue: FillQueue, reserved: Sequence[Reservation]) -> bool:
        """Reserve pool space for all blocks of a prompt, unless it has that; return whether it has.

        Two prompts with a part each could block one another, so there must be space for what a store is being asked
        for too; only within a queue's patience, since the engine may never ask for that. A prompt may use what other
        sources have reserved and cannot fill while it is read. Nothing is reserved for a prefetch, whose blocks nobody
        pins: it may begin while there is space for a block.
        """
        if queue.is_reserved:
            return True
        leasable = self._cache.leases.leasable_bytes
        if queue.is_prefetch:
            if queue.group.block_bytes <= leasable:
                return True
            self._note_no_space(queue, NO_SPACE)
            return False
        every = [one for one in queue.together or [queue] if not one.is_reserved]
        waited = queue.no_space_since is not None and self._clock() - queue.no_space_since >= self._patience_s
        asked_bytes = queue.last_lease.asking_bytes if queue.last_lease.active and not waited else 0
        nbytes = sum([one.queued_bytes for one in every]) + asked_bytes
        may_grow = leasable < self._cache.leases.most_bytes  # else there will never be more
        if nbytes > leasable and may_grow:
            if not asked_bytes and reserved:
                seconds = self._patience_s + max(
                    one.queued_bytes / (one.source.reads.speed.current or inf) for one in every
                )
                leasable += sum(max(0, its_bytes - int(speed * seconds)) for its_bytes, speed in reserved)
            if nbytes > leasable:
                self._note_no_space(queue, NO_SPACE)
                return False
        for one in every:
            one.is_reserved, one.no_space_since = True, None
            one.source._count_reserved(one.queued_bytes)
        return True

    def _reserved_by_others(self) -> list[Reservation]:
        """Return what the other sources that deliver blocks have reserved."""
        if self._cache.leases.withheld_bytes == self.reserved_bytes:  # none has
            return []
        others = [source for source in self._sources if source is not self and source.reserved_bytes]
        return [(source.reserved_bytes, speed) for source in others if (speed := source.reads.speed.current)]

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self._cache.leases.withheld_bytes += nbytes

    def _note_no_space(self, queue: FillQueue, fails_as: str) -> None:
        """Record that a queue has no space now."""
        queue.fails_as = fails_as
        if queue.no_space_since is None:
            queue.no_space_since = self._clock()

    def _begin_batch(self, queue: FillQueue, batch: Sequence[Fill]) -> bool:
        """Begin the first fills of a queue, as far as there is space; return False if the tier accepts no more."""
        try:
            tickets = self._cache.stores.begin_fill(queue.group, [fill.key for fill in batch])
            not_begun, has_space = self._begin_reads(batch, tickets)
        except BaseException:
            for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                if fill.ticket is None and not fill.is_settled:
                    self._fail(fill, Result.FAILED)
            raise
        if not has_space:
            self._wait_or_fail(queue)
        is_full = bool(not_begun) and self._fail_absent(not_begun)
        return not is_full

    def _begin_reads(self, batch: Sequence[Fill], tickets: dict[int, FillTicket | None]) -> tuple[Sequence[Fill], bool]:
        """Begin to read fills into the slots of ``tickets``: see ``BlockStores.begin_fill``.

        Return the fills that the tier did not begin, whose slots are free again, and whether all had slots.
        """
        not_begun, has_space = list[Fill](), True
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has the block by now
                    self.settle(fill, CAME)
                elif (ticket := tickets[number]) is None:
                    has_space = False
                elif not not_begun and self.reads.begin(fill, ticket, partial(self._on_end, fill)):
                    del tickets[number]
                    del fill.queue.fills[fill]
                    self._count(fill.queue, -1, 1)
                    fill.queue.no_space_since = None
                else:
                    not_begun.append(fill)
        finally:
            for ticket in filter(None, tickets.values()):
                self._cache.stores.end_fill(ticket, (), ())
        return not_begun, has_space

    def _fail_absent(self, not_begun: Sequence[Fill]) -> bool:
        """Fail those of these fills whose blocks the tier does not have; return whether it has one of them, and only
        accepts no more now."""
        is_full = False
        for fill in not_begun:
            if not self.tier.available():
                self._fail(fill, Result.DEADLINE)
            elif self.tier.find(fill.queue.block_group, [fill.key], prefix=False).states[0] == ABSENT:
                self._fail(fill, Result.GONE)
            else:
                is_full = True
        return is_full

    def _wait_or_fail(self, queue: FillQueue) -> None:
        """Have a queue wait for blocks that are pinned or being written; fail its fills if these are not the cause."""
        cause = self._cache.space.no_space_cause(queue.group)
        if cause in ("pinned", "writing"):
            self._note_no_space(queue, NO_SPACE)
        else:
            for fill in list(queue.fills):
                self._fail(fill, QUOTA if cause == QUOTA else NO_SPACE)

    def tick(self) -> None:
        """End overdue fills, and begin others."""
        if not self.tier.available():  # its measured speed may be low because of that: try the next read at any speed
            self._read_again_at = 0.0
        call_each((self.tier.tick, self.end_overdue, self.pump))

    def end_overdue(self) -> None:
        """Fail what is overdue: some of it, and set ``ends_more``, if it is much."""
        left = ENDED_AT_ONCE - self._give_up_overdue()
        self.ends_more = left <= 0 or self._fail_without_space(left)

    def _fail_without_space(self, left: int) -> bool:
        """Fail up to ``left`` blocks of queues that had no space for as long as a block may take to read.

        Return whether there are more. A queue that gets space now has its turn instead: it waits for that only.
        """
        now, reserved = self._clock(), self._reserved_by_others()
        for queue in list(self._queues):
            if queue.no_space_since is None:
                continue
            may_begin = queue.fails_as == NO_SPACE and self._reserve(queue, reserved)
            if queue.no_space_since is None or now - queue.no_space_since < self._patience_s:
                continue
            if left <= 0:
                return True
            if may_begin:  # leases may pin it, and the first block shows whether there are slots for it
                self._begin_batch(queue, list(islice(queue.fills, 1)))
            if queue.no_space_since is not None:
                last = list(islice(reversed(queue.fills), left))  # the others are a prefix, and may still get space
                left -= len(last)
                for fill in last:
                    self._fail(fill, queue.fails_as)
                if queue.fills:
                    return True
        return False

    def _give_up_overdue(self) -> int:
        """Give up reads that do not end, up to ``ENDED_AT_ONCE``; return how many."""
        overdue = self.reads.overdue(ENDED_AT_ONCE)
        for fill in overdue:
            assert fill.ticket is not None
            self.reads.give_up(fill)
            self._count(fill.queue, under_way=-1)
            self._fail(fill, OVERDUE)
            self._cache.stores.drop_unfinished([fill.ticket], MissReason.TIER_LATE)
        if 0 < len(overdue) < ENDED_AT_ONCE:  # these were all: the turn of those behind them begins
            self.reads.begin_turn()
        return len(overdue)

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Handle the end of a read: see the table of ``Fill``."""
        ticket, fill.ticket = fill.ticket, None  # a lookup may refer to the fill for some seconds more
        assert ticket is not None
        was_given_up = self.reads.end(fill, fill.queue.block_group.nbytes if result is Result.DONE else 0)
        if result is Result.UNWANTED and fill.is_awaited():
            self._queue_again(fill, ticket)
        else:
            if not was_given_up:
                self._count(fill.queue, under_way=-1)
            self._end_read(fill, ticket, result, block)
        if self.reads.are_few(fill.queue.group.block_bytes):
            self.pump(BEGUN_PER_END)

    def _queue_again(self, fill: Fill, ticket: FillTicket) -> None:
        """Put a fill, which a lookup joined after nobody waited for it in its turn, first in its queue."""
        fill.queue.fills[fill] = None
        fill.queue.fills.move_to_end(fill, last=False)
        self._count(fill.queue, 1, -1)
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
                block_number = int(ticket.slots[0])
                self.writer.was_read(block_number)
                self._promoted.promoted(self, block_number)
        except BaseException:
            self.settle(fill, MissReason.TIER_FAILED)  # lookups must not wait for it
            raise
        if is_ready:
            self.settle(fill, CAME)
        elif result is Result.UNWANTED:
            self.settle(fill, IN_A_TIER)
        elif not fill.is_settled:
            self._fail(fill, Result.CORRUPT if result is Result.DONE else result)

    def _fail(self, fill: Fill, reason: str) -> None:
        """Settle a fill that failed, and record the reason for its key. One that was settled is only counted."""
        self.failures[str(reason)] += 1
        if fill.is_settled:
            return
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        if miss is MissReason.TIER_FAILED:
            self.failed_at = self._clock()
        self.settle(fill, miss)
        self._cache.blocks.record_misses(fill.queue.group, fill.key, miss)

    def settle(self, fill: Fill, reason: int) -> None:
        """Count the key once for all lookups that asked for it, as found if it CAME or is IN_A_TIER, else as a miss.
        None waits for it any more. It is not begun; a read of it that runs, as when its key is removed, ends without
        effect. A fill that was settled before stays as it is."""
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
            self._count(fill.queue, -1)
        for lease in fill.leases:
            lease.coming -= 1
        keys = self._coming.get(fill.queue.block_group.tag, {})
        if keys.get(fill.key) is fill:
            del keys[fill.key]
            if not keys:
                del self._coming[fill.queue.block_group.tag]

    def _count(self, queue: FillQueue, queued: int = 0, under_way: int = 0) -> None:
        """Count blocks that joined a queue or began, or left and ended if negative. Drop a queue that has none left."""
        self.queued_blocks += queued
        self._queued_by[queue.first_lease.session] += queued
        if not self._queued_by[queue.first_lease.session]:
            del self._queued_by[queue.first_lease.session]
        queue.under_way += under_way
        if queue.is_reserved:
            self._count_reserved((queued + under_way) * queue.group.block_bytes)
        if not (queue.fills or queue.under_way):
            self._queues.pop(queue, None)
            if queue in queue.together:
                queue.together.remove(queue)
