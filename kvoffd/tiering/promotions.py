"""Promotions to the pool from one source, the disks of this node or one shared store: which blocks, and how fast."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import FillTicket, Lease
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
"""Blocks of one source that may wait to be read. An engine that computes them sooner gives them up."""
FILL_BYTES = 480
"""Memory of a waiting block, measured."""
MAX_FILLING_BYTES = 2**30
"""Limit of the pool bytes used by fills: at most this, and at most an eighth of the pool."""
UNMEASURED_BYTES = 64 * 2**20
"""Limit of these bytes while the speed is unknown."""
AHEAD_S = 0.25
"""Once the speed is known, reads under way are limited to what comes in this time: abandoned ones end soon."""
AHEAD_BLOCKS = 16
"""Lower limit of the blocks under way."""
MAX_BEGUN, BEGUN_PER_END = 64, 16
"""Limits of the blocks begun by one call of ``pump``, and by the end of a read if at most half of the bytes that may be
under way are: evicting for a few blocks takes as long as for many. Their slots are allocated together, so that
neighbours in the queue are neighbours in the pool."""
NO_SPACE_S = 1.0
"""Time after the pool had no space for a session's block in which the session's repeated lookups do not wait."""
READ_AGAIN_S = 60.0
"""Interval after which one read is tried even if it seems slower than computing: speeds change."""


@dataclass(slots=True, eq=False)
class Wanted:
    """Blocks of one group that one lookup requested from a source, in the order in which they are promoted."""

    first_lease: Lease
    """Lease of the lookup that asked first; it may have ended."""
    group: BlockGroup
    source: Promotions
    block_bytes: int
    """Pool bytes of a block."""
    queue: deque[Fill] = field(default_factory=deque)
    """Fills that have not begun."""
    under_way: int = 0
    """Number of blocks that are being read."""

    @property
    def namespace(self) -> Namespace:
        return self.first_lease.namespace


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup requested and a tier has."""

    wanted: Wanted
    key: bytes
    tier: Tier
    ticket: FillTicket | None = None
    """Its block in the pool while the tier reads into it: the slots stay allocated until that has ended."""
    begun_at: float = 0.0
    withdrawn: bool = False
    """Whether it has ended, is overdue, or was invalidated: no lookup waits for it any more."""
    leases: dict[Lease, None] = field(default_factory=dict)
    """Leases of lookups that wait for it: they pin it once it is READY."""
    askers: list[Asker] = field(default_factory=list)
    """Positions in lookups at which it is counted as found, or as a miss, once the result is known."""


Asker = tuple[AskedKeys, int]
"""Keys of a lookup, and a position among them."""
Coming = dict[int, dict[bytes, Fill]]
"""Fills that are not withdrawn, from all tiers, by tag of the group and by key."""


class Promotions:
    """Promotions from one source: the disks of this node together, or one store.

    Args:
        tiers: disks may be added while the daemon serves.
        coming: the fills that lookups may wait for, shared by all sources.
        promoted: called with each promoted block.
        shared: whether other nodes use the source too.
    """

    def __init__(
        self,
        tiers: list[Tier],
        settings: TieringSettings,
        cache: Cache,
        clock: Callable[[], float],
        coming: Coming,
        promoted: Callable[[Promotions, int], None],
        *,
        shared: bool,
    ) -> None:
        self.tiers, self.shared = tiers, shared
        self._cache, self._clock, self._patience_s, self._coming = cache, clock, settings.deadline_s, coming
        self._most_bytes = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        """Pool bytes that fills may use at once. A larger block is read alone. Fills that were given up and have not
        ended, as on a hanging device, may use as much again, so that others are still read."""
        self._wanted: dict[Wanted, None] = {}
        """Requests with waiting or running fills, in the order in which they are promoted."""
        self._queued_by: Counter[int] = Counter()
        """Waiting blocks by session."""
        self.under_way: dict[Fill, None] = {}
        """Running fills in the order in which they were begun."""
        self.given_up: dict[Fill, None] = {}
        """Overdue fills, into whose slots the tier may still write."""
        self._turn_at = 0.0
        """Time when the first running fill became the first."""
        self._came_at = 0.0
        """Time when a fill last ended."""
        self._blocked_since: float | None = None
        """Time since which the pool has no space for the next block."""
        self.queued_blocks = self.under_way_bytes = self._given_up_bytes = 0
        self.promoted_blocks = self.promoted_bytes = 0
        self.unused_blocks = 0
        """Promoted blocks that were evicted before they were loaded."""
        self.failures: Counter[str] = Counter()
        """Requested blocks that were not promoted, by reason: a ``Result``, or one of the above."""
        self.speed = ReadSpeed(clock)
        self._promoted = promoted
        self._read_again_at = 0.0
        self.no_space_until: dict[int, float] = {}
        """Ends of NO_SPACE_S by session."""
        self._stopped = False

    @property
    def name(self) -> str:
        """Name of a store; empty for disks."""
        return self.tiers[0].name if self.shared else ""

    @property
    def only_named(self) -> bool:
        return self.shared and self.tiers[0].only_named

    @property
    def available(self) -> bool:
        for tier in self.tiers:  # noqa: SIM110 - each lookup asks, and a generator takes twice as long
            if tier.available():
                return True
        return False

    def stop(self) -> None:
        """Begin nothing more."""
        self._stopped = True

    @property
    def idle(self) -> bool:
        """Whether nothing is being read, not even what was given up."""
        return not (self.waiting_blocks or self.given_up)

    @property
    def waiting_blocks(self) -> int:
        """Number of waiting and running fills."""
        return self.queued_blocks + len(self.under_way)

    def wait_s(self, awaited: Collection[Fill]) -> float:
        """Return the expected time until the awaited fills of this source end, at the current speed; 0 if unknown."""
        if not (speed := self.speed.current):
            return 0.0
        of = {fill.wanted for fill in awaited if not fill.withdrawn}
        last = max((at for at, wanted in enumerate(self._wanted) if wanted in of), default=-1)
        ahead = list(islice(self._wanted, last + 1))
        nbytes = sum((len(wanted.queue) + wanted.under_way) * wanted.block_bytes for wanted in ahead)
        for wanted in ahead[-1:]:  # fills behind the last awaited one do not count
            behind = takewhile(lambda fill: fill not in awaited, reversed(wanted.queue))
            nbytes -= sum(1 for _ in behind) * wanted.block_bytes
        # While the pool has no space, expect the wait to last as long again as so far.
        blocked_s = self._clock() - self._blocked_since if self._blocked_since is not None else 0.0
        return nbytes / speed + blocked_s

    def is_slower(self, namespace: Namespace, group: int, count: int) -> bool:
        """Return whether ``count`` blocks take longer to read than to compute, by the measured speeds and without a
        queue; at intervals, return False. Only the engine, which has a queue too, can weigh the queues."""
        prefill, speed = namespace.totals.prefill_tokens_per_second, self.speed.measured
        tokens = count * namespace.groups[group].tokens_per_block
        if not (tokens and prefill and speed):
            return False
        # The tokens need the blocks of all groups: those of the others count as if they were as large.
        nbytes = len(namespace.groups) * count * self._cache.group(namespace, group).block_bytes
        now = self._clock()
        if nbytes / speed <= tokens / prefill or now >= self._read_again_at:
            self._read_again_at = max(self._read_again_at, now + READ_AGAIN_S)
            return False
        return True

    def request(self, wanted: Wanted, key: bytes, tier: Tier) -> Fill | None:
        """Queue a block that a tier has; None if the queue is full. No session gets over three quarters of it."""
        if self.queued_blocks + self._queued_by[wanted.first_lease.session] // 3 >= MAX_QUEUED:
            return None
        fill = Fill(wanted, key, tier)
        self._coming.setdefault(wanted.group.tag, {})[key] = fill
        self._wanted[wanted] = None
        wanted.queue.append(fill)
        self._count_queued(wanted, 1)
        return fill

    def forget(self, fill: Fill, why: MissReason) -> None:
        """Withdraw a fill whose key is invalid. A running read ends without effect: the cache dropped its block."""
        self._settle(fill, why)
        self._withdraw(fill)
        if fill.ticket is None:
            fill.wanted.queue.remove(fill)
            self._count_queued(fill.wanted, -1)
            self._forget_if_done(fill.wanted)

    def drop_unawaited(self, wanted: Wanted) -> None:
        """Remove blocks for which nobody waits from the queue, so that they are not read."""
        self._blocked_since = None
        every = self._take_queued(wanted)
        wanted.queue.extend(fill for fill in every if fill.leases)
        self._count_queued(wanted, len(wanted.queue))
        for fill in every:
            if not fill.leases:
                self._settle(fill)  # a tier has it: the engine reports why it is not loaded
                self._withdraw(fill)
        self._forget_if_done(wanted)

    def _take_queued(self, wanted: Wanted) -> list[Fill]:
        """Take all waiting fills out of the queue."""
        fills = list(wanted.queue)
        wanted.queue.clear()
        self._count_queued(wanted, -len(fills))
        return fills

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin up to ``most`` fills that may begin now."""
        while not self._stopped and most > 0 and (batch := self._next_batch(most)):
            most -= len(batch)
            try:
                whole = self._begin_batch(batch)
            except BaseException:
                for fill in batch:  # lookups must not wait for fills that are neither running nor queued
                    if fill.ticket is None and not fill.withdrawn:
                        self._failed(fill, Result.FAILED)
                self._forget_if_done(batch[0].wanted)
                raise
            if not whole:
                return

    def _begin_batch(self, batch: Sequence[Fill]) -> bool:
        """Begin fills of one group; return False if not all could begin: those are queued again, or failed."""
        wanted = batch[0].wanted
        tickets = self._cache.begin_fill(wanted.namespace, wanted.group.number, [fill.key for fill in batch])
        refused: list[Fill] = []
        no_space: list[Fill] = []
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has the block by now
                    self._settle(fill)
                    self._withdraw(fill)
                elif (ticket := tickets[number]) is None:
                    no_space.append(fill)
                elif not refused and self._begin(fill, ticket):
                    del tickets[number]
                else:
                    refused.append(fill)
        finally:
            for ticket in filter(None, tickets.values()):
                self._end_fill(ticket, None)
        self._put_back([*self._still_in_tier(refused), *self._awaiting_space(wanted, no_space)])
        self._forget_if_done(wanted)
        return not refused and not no_space

    def _still_in_tier(self, refused: Sequence[Fill]) -> list[Fill]:
        """Return the fills refused by the tier whose blocks it may still have; it accepts them later."""
        kept = []
        for fill in refused:
            if not fill.tier.available():
                self._failed(fill, Result.DEADLINE)
            elif fill.tier.find(fill.wanted.group, [fill.key], prefix=False)[0] == ABSENT:
                self._failed(fill, Result.GONE)
            else:
                kept.append(fill)
        return kept

    def _awaiting_space(self, wanted: Wanted, fills: Sequence[Fill]) -> Sequence[Fill]:
        """Return the fills without pool space that should wait for it: pinned blocks become free soon."""
        if not fills:
            self._blocked_since = None
            return fills
        cause = self._cache.no_space_cause(self._cache.group(wanted.namespace, wanted.group.number))
        if cause in ("pinned", "writing") and not self._is_blocked_for(self._patience_s):
            return fills
        self._fail_for_space(wanted, QUOTA if cause == QUOTA else NO_SPACE, fills)
        return ()

    def _is_blocked_for(self, seconds: float) -> bool:
        """Record that there is no space for the next block; return whether that has been so for ``seconds``."""
        now = self._clock()
        if self._blocked_since is None or self._came_at > self._blocked_since:
            self._blocked_since = now
        return now - self._blocked_since >= seconds

    def _fail_for_space(self, wanted: Wanted, reason: str, fills: Sequence[Fill]) -> None:
        """Fail fills, and all queued fills of the same request (one group, one source)."""
        self._blocked_since = None
        self.no_space_until[wanted.first_lease.session] = self._clock() + NO_SPACE_S
        for fill in [*fills, *self._take_queued(wanted)]:
            self._failed(fill, reason)
        self._forget_if_done(wanted)

    def _put_back(self, fills: Sequence[Fill]) -> None:
        """Queue fills of one lookup again, before its others."""
        if not fills:
            return
        wanted = fills[0].wanted
        wanted.queue.extendleft(reversed(fills))
        self._count_queued(wanted, len(fills))

    def tick(self) -> None:
        """End overdue fills, and begin others."""
        for tier in self.tiers:
            tier.tick()
        if not self.available:  # its measured speed may be low because of that: try the next read at any speed
            self._read_again_at = 0.0
        self._give_up_overdue()
        now = self._clock()
        self.no_space_until = {session: until for session, until in self.no_space_until.items() if until > now}
        self.pump()

    def _give_up_overdue(self) -> None:
        """Give up reads that do not end. The turn of a read begins when all earlier ones have ended; then it has the
        time that the settings allow. If nothing has ended in that time, all reads that are as old are given up."""
        now = self._clock()
        if not self.under_way or now - self._turn_at < self._patience_s:
            return
        stuck = list(islice(self.under_way, 1))
        if self._came_at <= self._turn_at:
            stuck = list(takewhile(lambda fill: now - fill.begun_at >= self._patience_s, self.under_way))
        for fill in stuck:
            assert fill.ticket is not None
            del self.under_way[fill]
            self._count_under_way(fill.wanted, -1)
            self._forget_if_done(fill.wanted)
            self.given_up[fill] = None
            self._given_up_bytes += fill.wanted.block_bytes
            self._failed(fill, OVERDUE)
            self._cache.drop_unfinished([fill.ticket], MissReason.TIER_LATE)
        self._turn_at = now

    def _next_batch(self, most: int) -> list[Fill]:
        """Take the next fills of one lookup's group out of the queue, as many as may begin now."""
        queued = [wanted for wanted in self._wanted if wanted.queue]
        if not queued:
            self._blocked_since = None
            return []
        if (wanted := self._first_that_fits(queued)) is None:
            return []
        free = self._may_be_under_way(wanted.block_bytes) - self.under_way_bytes
        free -= max(0, self._given_up_bytes - self._most_bytes)
        batch: list[Fill] = []
        while wanted.queue and len(batch) < most:
            if wanted.block_bytes > free and (batch or self.under_way or self.given_up):
                if not (batch or self.under_way) and self._is_blocked_for(self._patience_s):
                    self._fail_for_space(wanted, OVERDUE, ())  # the space is used by hanging fills
                break
            batch.append(wanted.queue.popleft())
            free -= wanted.block_bytes
        self._count_queued(wanted, -len(batch))
        return batch

    def _first_that_fits(self, queued: Sequence[Wanted]) -> Wanted | None:
        """Return the first request whose waiting blocks leases may all pin: two requests with a part each could block
        one another. If none fits for a while, fail the last one, whose prompt then loads the blocks it has."""
        leasable = self._cache.leasable_bytes - self.under_way_bytes
        if not (self.under_way or self._cache.blocks.pinned_bytes):
            return queued[0]  # there will never be more space for it
        for wanted in queued if not self._is_passed_over else queued[:1]:
            if wanted.under_way or len(wanted.queue) * wanted.block_bytes <= leasable:
                return wanted
        if self._is_blocked_for(self._patience_s / 2 if len(queued) > 1 else self._patience_s):
            self._fail_for_space(queued[-1], NO_SPACE, ())
        return None

    @property
    def _is_passed_over(self) -> bool:
        """Whether the first in the queue was passed over for long enough, so that it must be next."""
        return self._blocked_since is not None and self._clock() - self._blocked_since >= self._patience_s / 4

    def _may_be_under_way(self, block_bytes: int) -> int:
        """Return the pool bytes that fills may use now."""
        if not (speed := self.speed.measured):
            return min(self._most_bytes, UNMEASURED_BYTES)
        return min(self._most_bytes, max(int(AHEAD_S * speed), AHEAD_BLOCKS * block_bytes))

    def _begin(self, fill: Fill, ticket: FillTicket) -> bool:
        """Begin the tier's read into the slots; return False if the tier does not accept it now."""
        block_group = fill.wanted.group
        if not fill.tier.read(block_group, fill.key, ticket.offsets, self._patience_s, partial(self._on_end, fill)):
            return False
        fill.begun_at = self._clock()
        if not self.under_way:
            self._turn_at = fill.begun_at
        self.speed.begin(block_group.nbytes)
        fill.ticket = ticket
        self.under_way[fill] = None
        self._count_under_way(fill.wanted, 1)
        return True

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        assert fill.ticket is not None
        self._came_at = self._clock()
        if fill in self.given_up:
            del self.given_up[fill]
            self._given_up_bytes -= fill.wanted.block_bytes
        else:
            if next(iter(self.under_way)) is fill:
                self._turn_at = self._came_at
            del self.under_way[fill]
            self._count_under_way(fill.wanted, -1)
            self._forget_if_done(fill.wanted)
        try:
            if self._end_fill(fill.ticket, block if result is Result.DONE else None):
                self.promoted_blocks += 1
                self.promoted_bytes += fill.wanted.group.nbytes
                for lease in fill.leases:
                    self._cache.hold(lease, fill.ticket.blocks)
                self._promoted(self, int(fill.ticket.blocks[0]))
                self._settle(fill)
            elif not fill.withdrawn:
                self._failed(fill, Result.CORRUPT if result is Result.DONE else result)
        finally:
            self._withdraw(fill)  # lookups must not wait for it, even after an error
            fill.ticket = None  # a lookup may refer to the fill for some seconds more
        self.speed.end(fill.wanted.group.nbytes if result is Result.DONE else 0, len(self.under_way))
        if 2 * self.under_way_bytes <= self._may_be_under_way(fill.wanted.block_bytes):
            self.pump(BEGUN_PER_END)

    def _end_fill(self, ticket: FillTicket, block: Block | None) -> bool:
        """End a fill with the block that was read, None if incomplete. Returns whether the pool's block is READY."""
        whole = block is not None and all(block.checksums)
        return self._cache.end_fill(ticket, *((block.first_blocks, block.checksums) if block and whole else ((), ())))

    def _failed(self, fill: Fill, reason: str) -> None:
        """Withdraw a failed fill, and record the reason for its key."""
        self.failures[str(reason)] += 1
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        self._settle(fill, miss)
        if not fill.withdrawn:
            self._withdraw(fill)
            self._cache.record_misses(fill.wanted.namespace, fill.wanted.group.number, fill.key, miss)

    def _settle(self, fill: Fill, miss: MissReason | None = None) -> None:
        """Count the key once for all lookups that asked for it: as found, or as a miss."""
        askers, fill.askers = fill.askers, []
        counters = fill.wanted.namespace.counters
        if miss is not None:
            for asked, position in askers:
                asked.missed(position, bytes([miss]))
        elif self.shared:
            counters.found_shared += len(askers)
        else:
            counters.found_disk += len(askers)

    def _withdraw(self, fill: Fill) -> None:
        """Stop lookups from waiting for a fill."""
        if fill.withdrawn:
            return
        fill.withdrawn = True
        for lease in fill.leases:
            lease.coming -= 1
        keys = self._coming.get(fill.wanted.group.tag, {})
        if keys.get(fill.key) is fill:
            del keys[fill.key]
            if not keys:
                del self._coming[fill.wanted.group.tag]

    def _count_queued(self, wanted: Wanted, blocks: int) -> None:
        """Count blocks that joined the queue, or left it if negative."""
        self.queued_blocks += blocks
        self._queued_by[wanted.first_lease.session] += blocks
        if not self._queued_by[wanted.first_lease.session]:
            del self._queued_by[wanted.first_lease.session]

    def _count_under_way(self, wanted: Wanted, blocks: int) -> None:
        wanted.under_way += blocks
        self.under_way_bytes += blocks * wanted.block_bytes

    def _forget_if_done(self, wanted: Wanted) -> None:
        if not (wanted.queue or wanted.under_way):
            self._wanted.pop(wanted, None)
