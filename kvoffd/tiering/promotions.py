"""Promotions to the pool from one source, a disk of this node or a shared store: which blocks, and how fast."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from math import inf

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import CAME, IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.tickets import FillTicket, Lease
from kvoffd.system.calls import call_each
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.read_speed import ReadSpeed
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.tier import ABSENT, Result, Tier

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
"""Limit of the pool bytes used by fills from all disks, or from one store: at most this, and an eighth of the pool."""
UNMEASURED_BYTES = 64 * 2**20
"""Limit of these bytes while the speed is unknown."""
AHEAD_S = 0.25
"""Once the speed is known, reads under way are limited to what comes in this time: those that nobody waits for any
more end soon."""
AHEAD_BLOCKS = 16
"""Lower limit of the blocks under way."""
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


@dataclass(slots=True, eq=False)
class FillQueue:
    """Blocks of one group that one lookup has a source read: those that wait for it, in order, and those under way."""

    first_lease: Lease
    """Lease of the lookup that asked first; it may have ended."""
    last_lease: Lease
    """Lease of the last lookup that waited for it before it had space."""
    group: BlockGroup
    source: Promotions
    block_bytes: int
    """Pool bytes of a block."""
    fills: OrderedDict[Fill, None] = field(default_factory=OrderedDict)
    """Fills that have not begun."""
    under_way: int = 0
    """Number of blocks that are being read."""
    together: list[FillQueue] = field(default_factory=list)
    """All queues that the last lease waits for, of all sources: space is reserved for all of them or none."""
    is_reserved: bool = False
    """Whether leases may pin all of these blocks: no other queue gets their space."""
    no_space_since: float | None = None
    """Time since which it has no space in the pool; None if it has some, or its turn has not come."""
    fails_as: str = ""
    """Reason for which its fills fail if that lasts too long: NO_SPACE, or OVERDUE if reads that hang have it."""

    @property
    def namespace(self) -> Namespace:
        return self.first_lease.namespace

    @property
    def is_prefetch(self) -> bool:
        return self.first_lease.session == NO_SESSION

    @property
    def queued_bytes(self) -> int:
        return len(self.fills) * self.block_bytes


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup requested and a tier has. It is settled once: ``Promotions._settle`` counts its key for all
    lookups that asked for it, and none waits for it any more.

    | event                           | method              | counted as        | its slots             |
    |---------------------------------|---------------------|-------------------|-----------------------|
    | it was read                     | _end_read           | found             | READY, leases pin it  |
    | nobody waits for it             | drop_unawaited      | found, see below  | none, it was queued   |
    | the same at its turn (UNWANTED) | _end_read           | found, see below  | freed                 |
    | the pool has it by now          | _begin_reads        | found             | none                  |
    | no space; it has left the tier  | _fail               | miss, by reason   | none                  |
    | the read fails                  | _end_read, _fail    | miss, by Result   | freed                 |
    | the read is overdue             | _give_up_overdue    | miss, TIER_LATE   | freed when it ends    |
    | its key was removed             | invalidate          | miss, by reason   | freed when it ends    |

    What nobody waits for counts as found because the tier has it: the engine reports why it did not load it.
    A read that ends after its fill was settled changes nothing but its slots. One that ends as UNWANTED although a
    lookup has joined it since settles nothing: ``_queue_again``.
    """

    queue: FillQueue
    key: bytes
    ticket: FillTicket | None = None
    """Its block in the pool while the tier reads into it: the slots stay allocated until that has ended."""
    begun_at: float = 0.0
    is_settled: bool = False
    leases: dict[Lease, None] = field(default_factory=dict)
    """Leases of lookups that wait for it: they pin it once it is READY."""
    askers: list[Asker] = field(default_factory=list)
    """Positions in lookups at which it is counted as found, or as a miss, once the result is known."""

    def is_awaited(self) -> bool:
        """Return whether a lookup waits for it. For any thread."""
        return not self.is_settled and bool(self.leases)


Asker = tuple[AskedKeys, int]
"""Keys of a lookup, and a position among them."""
Coming = dict[int, dict[bytes, Fill]]
"""Fills that are not settled, from all tiers, by tag of the group and by key."""
Lender = tuple[int, float]
"""Pool bytes that another source has reserved, and its bytes per second."""


class Promotions:
    """Promotions from one source: a disk of this node, or one store.

    Args:
        coming: the fills that lookups may wait for, shared by all sources.
        sources: all sources, this one included.
        promoted: called with each promoted block.
        shared: whether other nodes use the source too.

    Attributes:
        most_bytes: pool bytes that fills may use at once. A larger block is read alone. Reads that were given
            up may use as much again, so that others are still read.
        given_up_bytes: pool bytes of these: allocated, although no lookup waits for them.
        reserved_bytes: pool bytes reserved for its queues: see ``FillQueue.is_reserved``. ``Leases.withheld_bytes`` is
            the sum of these and of ``given_up_bytes`` of all sources.
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
        promoted: Callable[[Promotions, int], None],
        *,
        shared: bool,
    ) -> None:
        self.tier, self.shared, self._sources = tier, shared, sources
        self._cache, self._clock, self._patience_s, self._coming = cache, clock, settings.deadline_s, coming
        self.most_bytes = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        self._queues: dict[FillQueue, None] = {}
        """Queues with queued or running fills, in the order in which they are promoted."""
        self._queued_by: Counter[int] = Counter()
        """Queued blocks by session."""
        self.under_way: dict[Fill, None] = {}
        """Running fills in the order in which they were begun."""
        self.given_up: dict[Fill, None] = {}
        """Fills whose reads were given up, as they were overdue: the tier may still write into their slots."""
        self._turn_at = 0.0
        """Time when the first running fill became the first."""
        self._ended_at = 0.0
        """Time when a fill last ended."""
        self.queued_blocks = self.under_way_bytes = self.given_up_bytes = self.reserved_bytes = 0
        self.ends_more = False
        self.failed_at = -inf
        """Time of the last read that failed."""
        self.promoted_blocks = self.promoted_bytes = 0
        self.unused_blocks = 0
        """Promoted blocks that were evicted before they were loaded."""
        self.failures: Counter[str] = Counter()
        """Fills that failed, those that were settled before included, by reason: a ``Result``, or one of the above."""
        self.speed = ReadSpeed(clock)
        self._promoted = promoted
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
        return not (self.waiting_blocks or self.given_up)

    @property
    def waiting_blocks(self) -> int:
        """Number of queued and running fills."""
        return self.queued_blocks + len(self.under_way)

    def wait_s(self, awaited: Collection[Fill]) -> float:
        """Return the expected time until the awaited fills of this source end, at the current speed; 0 if unknown."""
        if not (speed := self.speed.current):
            return 0.0
        its_queues = {fill.queue for fill in awaited if not fill.is_settled and fill.queue.source is self}
        last = max((at for at, queue in enumerate(self._queues) if queue in its_queues), default=-1)
        # Others without space are passed over.
        before = islice(self._queues, last + 1)
        ahead = [queue for queue in before if queue in its_queues or queue.no_space_since is None]
        nbytes = sum((len(queue.fills) + queue.under_way) * queue.block_bytes for queue in ahead)
        if ahead:  # fills behind the last awaited one do not count
            behind = takewhile(lambda fill: fill not in awaited, reversed(ahead[-1].fills))
            nbytes -= sum(1 for _ in behind) * ahead[-1].block_bytes
        # Who has no space is expected to wait as long again as so far.
        now, since = self._clock(), (queue.no_space_since for queue in its_queues)
        blocked_s = max((now - at for at in since if at is not None), default=0.0)
        return nbytes / speed + blocked_s

    def is_slower(self, group: Group, count: int) -> bool:
        """Return whether ``count`` blocks of a group take longer to read than to compute, by the measured speeds and
        without a queue; at intervals, return False. Only the engine, which has a queue too, can weigh the queues."""
        namespace, tokens = group.namespace, count * group.tokens
        prefill, speed = namespace.counters.prefill_tokens_per_second, self.speed.measured
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
        self._coming.setdefault(queue.group.tag, {})[key] = fill
        self._queues[queue] = queue.fills[fill] = None
        self._count(queue, 1)
        return fill

    def invalidate(self, fill: Fill, why: MissReason) -> None:
        """Settle a fill whose key was removed. A running read ends without effect: the cache dropped its block."""
        self._settle(fill, why)

    def drop_unawaited(self, queue: FillQueue) -> None:
        """Remove blocks for which nobody waits from the queue, so that they are not read."""
        for fill in [fill for fill in queue.fills if not fill.leases]:
            self._settle(fill, IN_A_TIER)  # the engine reports why it is not loaded

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin up to ``most`` fills that may begin now. Queues without space are passed over."""
        without_space = 0  # queues
        too_large = inf  # the least bytes of a block for which the pool has no slots now
        lenders = self._lenders()
        for queue in list(islice(self._queues, MAX_LOOKED_AT)):
            if not self._reserve(queue, lenders):
                without_space += 1
                if without_space > MAX_WITHOUT_SPACE:
                    queue.no_space_since = self._clock() - self._patience_s  # it ends with the next tick
                continue
            if queue.fills and queue.block_bytes >= too_large:
                self._note_no_space(queue, NO_SPACE)
                continue
            while queue.fills:
                free = self._free_bytes(queue.block_bytes)
                if self._stopped or most <= 0 or (self.under_way and free < queue.block_bytes):
                    return
                if free < queue.block_bytes and self.given_up:
                    self._note_no_space(queue, OVERDUE)
                    break
                batch = list(islice(queue.fills, max(1, min(most, free // max(1, queue.block_bytes)))))
                most -= len(batch)
                if not self._begin_batch(queue, batch):
                    return
                if queue.no_space_since is not None:
                    too_large = queue.block_bytes
                    break

    def _reserve(self, queue: FillQueue, lenders: Sequence[Lender]) -> bool:
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
            if queue.block_bytes <= leasable:
                return True
            self._note_no_space(queue, NO_SPACE)
            return False
        every = [one for one in queue.together or [queue] if not one.is_reserved]
        waited = queue.no_space_since is not None and self._clock() - queue.no_space_since >= self._patience_s
        asked_bytes = queue.last_lease.asking_bytes if queue.last_lease.active and not waited else 0
        nbytes = sum([one.queued_bytes for one in every]) + asked_bytes
        may_grow = leasable < self._cache.leases.most_bytes  # else there will never be more
        if nbytes > leasable and may_grow:
            if not asked_bytes and lenders:
                seconds = self._patience_s + max(one.queued_bytes / (one.source.speed.current or inf) for one in every)
                leasable += sum(max(0, reserved - int(speed * seconds)) for reserved, speed in lenders)
            if nbytes > leasable:
                self._note_no_space(queue, NO_SPACE)
                return False
        for one in every:
            one.is_reserved, one.no_space_since = True, None
            one.source._count_reserved(one.queued_bytes)
        return True

    def _lenders(self) -> list[Lender]:
        """Return the other sources that have reserved space, and deliver blocks."""
        if self._cache.leases.withheld_bytes == self.reserved_bytes:  # none has
            return []
        others = [source for source in self._sources if source is not self and source.reserved_bytes]
        return [(source.reserved_bytes, speed) for source in others if (speed := source.speed.current)]

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self._cache.leases.withheld_bytes += nbytes

    def _count_given_up(self, nbytes: int) -> None:
        self.given_up_bytes += nbytes
        self._cache.leases.withheld_bytes += nbytes

    def _note_no_space(self, queue: FillQueue, fails_as: str) -> None:
        """Record that a queue has no space now."""
        queue.fails_as = fails_as
        if queue.no_space_since is None:
            queue.no_space_since = self._clock()

    def _begin_batch(self, queue: FillQueue, batch: Sequence[Fill]) -> bool:
        """Begin the first fills of a queue, as far as there is space; return False if the tier accepts no more."""
        try:
            tickets = self._cache.stores.begin_fill(
                queue.namespace, queue.group.group_index, [fill.key for fill in batch]
            )
            not_begun, has_space = self._begin_reads(batch, tickets)
        except BaseException:
            for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                if fill.ticket is None and not fill.is_settled:
                    self._fail(fill, Result.FAILED)
            raise
        if not has_space:
            self._wait_or_fail(queue)
        return not (not_begun and self._fail_absent(not_begun))

    def _begin_reads(self, batch: Sequence[Fill], tickets: dict[int, FillTicket | None]) -> tuple[Sequence[Fill], bool]:
        """Begin to read fills into the slots of ``tickets``, which are those of ``BlockStores.begin_fill``.

        Return the fills that the tier did not begin, whose slots are free again, and whether all had slots.
        """
        not_begun, has_space = list[Fill](), True
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has the block by now
                    self._settle(fill, CAME)
                elif (ticket := tickets[number]) is None:
                    has_space = False
                elif not not_begun and self._begin_read(fill, ticket):
                    del tickets[number]
                    fill.queue.no_space_since = None
                else:
                    not_begun.append(fill)
        finally:
            for ticket in filter(None, tickets.values()):
                self._cache.stores.end_fill(ticket, (), ())
        return not_begun, has_space

    def _fail_absent(self, not_begun: Sequence[Fill]) -> bool:
        """Fail those of these fills whose blocks the tier does not have; return whether it has others, and accepts
        these later."""
        accepts_more = False
        for fill in not_begun:
            if not self.tier.available():
                self._fail(fill, Result.DEADLINE)
            elif self.tier.find(fill.queue.group, [fill.key], prefix=False).states[0] == ABSENT:
                self._fail(fill, Result.GONE)
            else:
                accepts_more = True
        return accepts_more

    def _wait_or_fail(self, queue: FillQueue) -> None:
        """Have a queue wait for blocks that are pinned or being written; fail its fills if these are not the cause."""
        cause = self._cache.space.no_space_cause(queue.namespace.group(queue.group.group_index))
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
        now, lenders = self._clock(), self._lenders()
        for queue in list(self._queues):
            if queue.no_space_since is None:
                continue
            may_begin = queue.fails_as == NO_SPACE and self._reserve(queue, lenders)
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
        """Give up reads that do not end, up to ``ENDED_AT_ONCE``; return how many.

        The turn of a read begins when all earlier ones have ended; then it has the time that the settings allow. If
        nothing has ended in that time, all reads that are as old are given up.
        """
        now = self._clock()
        if not self.under_way or now - self._turn_at < self._patience_s:
            return 0
        stuck = list(islice(self.under_way, 1))
        if self._ended_at <= self._turn_at:
            old = takewhile(lambda fill: now - fill.begun_at >= self._patience_s, self.under_way)
            stuck = list(islice(old, ENDED_AT_ONCE))
        for fill in stuck:
            assert fill.ticket is not None
            del self.under_way[fill]
            self._count(fill.queue, under_way=-1)
            self.given_up[fill] = None
            self._count_given_up(fill.queue.block_bytes)
            self._fail(fill, OVERDUE)
            self._cache.stores.drop_unfinished([fill.ticket], MissReason.TIER_LATE)
        if len(stuck) < ENDED_AT_ONCE:
            self._turn_at = now
        return len(stuck)

    def _free_bytes(self, block_bytes: int) -> int:
        """Return the pool bytes that further fills may use now."""
        beyond_their_own = max(0, self.given_up_bytes - self.most_bytes)
        return self._may_be_under_way(block_bytes) - self.under_way_bytes - beyond_their_own

    def _may_be_under_way(self, block_bytes: int) -> int:
        """Return the pool bytes that fills may use now."""
        if not (speed := self.speed.measured):
            return min(self.most_bytes, max(UNMEASURED_BYTES, AHEAD_BLOCKS * block_bytes))
        return min(self.most_bytes, max(int(AHEAD_S * speed), AHEAD_BLOCKS * block_bytes))

    def _begin_read(self, fill: Fill, ticket: FillTicket) -> bool:
        """Begin the tier's read into the slots; return False if the tier does not accept it now."""
        block_group, on_end = fill.queue.group, partial(self._on_end, fill)
        if not self.tier.read(block_group, fill.key, ticket.offsets, self._patience_s, on_end, fill.is_awaited):
            return False
        fill.begun_at = self._clock()
        if not self.under_way:
            self._turn_at = fill.begun_at
        self.speed.begin(block_group.nbytes)
        fill.ticket = ticket
        self.under_way[fill] = None
        del fill.queue.fills[fill]
        self._count(fill.queue, -1, 1)
        return True

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Handle the end of a read: see the table of ``Fill``."""
        self._ended_at = self._clock()
        if next(iter(self.under_way), None) is fill:
            self._turn_at = self._ended_at
        if result is Result.UNWANTED and fill.is_awaited():
            self._queue_again(fill)
        else:
            self._end_read(fill, result, block)
        self.speed.end(fill.queue.group.nbytes if result is Result.DONE else 0, len(self.under_way))
        if 2 * self.under_way_bytes <= self._may_be_under_way(fill.queue.block_bytes):
            self.pump(BEGUN_PER_END)

    def _queue_again(self, fill: Fill) -> None:
        """Put a fill, which a lookup joined after nobody waited for it in its turn, first in its queue."""
        ticket, fill.ticket = fill.ticket, None
        assert ticket is not None
        fill.queue.fills[fill] = None
        fill.queue.fills.move_to_end(fill, last=False)
        del self.under_way[fill]
        self._count(fill.queue, 1, -1)
        self._cache.stores.end_fill(ticket, (), ())

    def _end_read(self, fill: Fill, result: Result, block: Block | None) -> None:
        """Publish the block of a read, or free its slots, and settle the fill."""
        ticket, fill.ticket = fill.ticket, None  # a lookup may refer to the fill for some seconds more
        assert ticket is not None
        if fill in self.given_up:
            del self.given_up[fill]
            self._count_given_up(-fill.queue.block_bytes)
        else:
            del self.under_way[fill]
            self._count(fill.queue, under_way=-1)
        # Without its checksums a damaged block could not be detected later.
        is_whole = result is Result.DONE and block is not None and all(block.checksums)
        first_blocks, checksums = (block.first_blocks, block.checksums) if block is not None and is_whole else ((), ())
        try:
            if is_ready := self._cache.stores.end_fill(ticket, first_blocks, checksums):
                self.promoted_blocks += 1
                self.promoted_bytes += fill.queue.group.nbytes
                for lease in fill.leases:
                    self._cache.leases.hold(lease, ticket.blocks)
                self._promoted(self, int(ticket.blocks[0]))
        except BaseException:
            self._settle(fill, MissReason.TIER_FAILED)  # lookups must not wait for it
            raise
        if is_ready:
            self._settle(fill, CAME)
        elif result is Result.UNWANTED:
            self._settle(fill, IN_A_TIER)
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
        self._settle(fill, miss)
        self._cache.blocks.record_misses(fill.queue.namespace.group(fill.queue.group.group_index), fill.key, miss)

    def _settle(self, fill: Fill, reason: int) -> None:
        """Count the key once for all lookups that asked for it, as found if it CAME or is IN_A_TIER, else as a miss.
        None waits for it any more. It is not begun. A fill that was settled before stays as it is."""
        if fill.is_settled:
            return
        fill.is_settled = True
        askers, fill.askers = fill.askers, []
        for asked, position in askers:
            asked.set(position, bytes([reason]))
        if reason in (CAME, IN_A_TIER):
            counters = fill.queue.namespace.counters
            if self.shared:
                counters.found_shared += len(askers)
            else:
                counters.found_disk += len(askers)
        if fill in fill.queue.fills:
            del fill.queue.fills[fill]
            self._count(fill.queue, -1)
        for lease in fill.leases:
            lease.coming -= 1
        keys = self._coming.get(fill.queue.group.tag, {})
        if keys.get(fill.key) is fill:
            del keys[fill.key]
            if not keys:
                del self._coming[fill.queue.group.tag]

    def _count(self, queue: FillQueue, queued: int = 0, under_way: int = 0) -> None:
        """Count blocks that joined a queue or began, or left and ended if negative. Drop a queue that has none left."""
        self.queued_blocks += queued
        self._queued_by[queue.first_lease.session] += queued
        if not self._queued_by[queue.first_lease.session]:
            del self._queued_by[queue.first_lease.session]
        queue.under_way += under_way
        self.under_way_bytes += under_way * queue.block_bytes
        if queue.is_reserved:
            self._count_reserved((queued + under_way) * queue.block_bytes)
        if not (queue.fills or queue.under_way):
            self._queues.pop(queue, None)
            if queue in queue.together:
                queue.together.remove(queue)
