"""Promotions: blocks that lookups have come up from the tiers, from the lookup that requests them to their end."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from itertools import chain, takewhile
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import CAME, IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.tickets import FillTicket, Lease
from kvoffd.system.fair_shares import FairShares
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Result
from kvoffd_proto.messages import PENDING, SHARED

if TYPE_CHECKING:
    from kvoffd.tiering.promotion_source import PromotionSource
    from kvoffd.tiering.tier_lookups import CurrentLookup, LookupPart


class NotRead(StrEnum):
    """Reasons for which a block that a tier has is not read to its end, besides the ``Result`` of a read."""

    NO_SPACE = "no_space"  # leases may not pin it, or the pool has no slots for it
    QUOTA = "quota"  # its namespace may not have more of the pool
    OVERDUE = "overdue"  # its read was given up, or reads that hang keep it from being begun
    SLOWER = "slower"  # the engine computes it in less time


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
READ_AGAIN_S = 60.0
"""Interval after which one read is tried even if it seems slower than computing: speeds change."""


class FillState(Enum):
    """State of a ``Fill``."""

    QUEUED = auto()
    """It waits in its queue."""
    READING = auto()
    """Its tier reads it into slots of the pool."""
    READ = auto()
    """Its read has ended, and in the same call it is settled, or queued again."""
    ABANDONED = auto()
    """It was settled while it was being read: the tier may still write into its slots."""
    ENDED = auto()
    """It was settled, and has no slots."""


SETTLED = FillState.ABANDONED, FillState.ENDED
"""States of a fill that is settled."""


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup requested and a tier has. Four methods change its state::

        QUEUED    -> READING    SourceReads.begin: its tier has accepted the read
        QUEUED    -> ENDED      Promotions.settle
        READING   -> READ       SourceReads.end
        READING   -> ABANDONED  Promotions.settle
        READ      -> ENDED      Promotions.settle
        READ      -> QUEUED     PromotionSource._on_end: UNWANTED, but a lookup has joined it since
        ABANDONED -> ENDED      SourceReads.end: only its slots are freed

    It is settled once: its key is counted for all lookups that asked for it, and none waits for it any more.

    | it is settled because           | by                  | counted as        | its slots             |
    |---------------------------------|---------------------|-------------------|-----------------------|
    | it was read                     | _end_read           | found             | READY, leases pin it  |
    | nobody waits for it             | lease_ended         | found, see below  | none, it was queued   |
    | the same at its turn (UNWANTED) | _end_read           | found, see below  | freed                 |
    | the pool has it by now          | _begin_batch        | found             | none                  |
    | no space; its tier is away, or  | fail                | miss, by reason   | none                  |
    | has lost it                     |                     |                   |                       |
    | the read fails                  | _end_read, fail     | miss, by Result   | freed                 |
    | the read is overdue             | _give_up_overdue    | miss, TIER_LATE   | freed when it ends    |
    | its key was removed             | remove, cancel      | miss, by reason   | freed when it ends    |

    Methods with an underscore are those of ``PromotionSource``, the others of ``Promotions``. What nobody waits for
    counts as found because the tier has it: the engine reports why it did not load it.
    """

    queue: FillQueue
    key: bytes
    state: FillState = FillState.QUEUED
    ticket: FillTicket | None = None
    """Its block in the pool while it is READING or ABANDONED: the slots stay allocated until the read has ended."""
    begun_at: float = 0.0
    """Time when its read began, if it has."""
    leases: dict[Lease, None] = field(default_factory=dict)
    """Leases of lookups that wait for it: they pin it once it is READY."""
    askers: list[Asker] = field(default_factory=list)
    """Positions in lookups at which it is counted as found, or as a miss, once the result is known."""

    def is_awaited(self) -> bool:
        """Return whether a lookup waits for it. For any thread."""
        return self.state not in SETTLED and bool(self.leases)


Owner: TypeAlias = int | bytes
"""One that shares a source with others: a session; for prefetches, which have none, a namespace by its fingerprint."""
Asker = tuple[AskedKeys, int]
"""Keys of a lookup, and a position among them."""


@dataclass(slots=True, eq=False)
class FillQueue:
    """Blocks of one group that one lookup has a source read: those that wait for it, in order, and those under way."""

    session: int
    """Session of that lookup, NO_SESSION for a prefetch."""
    owner: Owner
    of_lookup: LookupQueues
    """The queues that get space together with this one: those of the last lookup that joined it before it had space.
    Engines repeat lookups under new leases."""
    group: Group
    block_group: BlockGroup
    """The group, for tiers."""
    source: PromotionSource
    turns: SharedQueues
    """The queues with which it takes turns, itself included: one of the two of the source's ``ReadOrder``."""
    fills: OrderedDict[Fill, None] = field(default_factory=OrderedDict)
    """QUEUED fills."""
    under_way: int = 0
    """Number of blocks that are being read, without those that were given up."""
    is_reserved: bool = False
    """Whether leases may pin all of these blocks: no other queue gets their space. Never of a prefetch."""
    blocked: Blocked | None = None
    """None if it can begin, or its turn has not come."""

    @property
    def queued_bytes(self) -> int:
        return len(self.fills) * self.group.block_bytes

    @property
    def unread_bytes(self) -> int:
        """Pool bytes of those that wait, and of those under way."""
        return (len(self.fills) + self.under_way) * self.group.block_bytes


class Blocked(NamedTuple):
    """Reason for which a queue cannot begin its next block, and since when."""

    reason: NotRead
    """Reason with which its fills fail if it is blocked for as long as a block may take to read."""
    since: float
    """Time since which it cannot."""
    tried_at: float
    """Time of the last attempt to begin it, which found the reason again."""


@dataclass(slots=True, eq=False)
class LookupQueues:
    """Queues whose blocks one lookup waits for, of all its groups and sources. Space is reserved for all or none: two
    prompts with a part each would wait for one another."""

    lease: Lease
    """The lookup's lease."""
    queues: list[FillQueue] = field(default_factory=list)
    """Those of them that have blocks left, reserved ones included."""


@dataclass(slots=True)
class SharedQueues:
    """Queues of several owners, who get equal parts of what is read. Each owner's are read in order."""

    by_owner: dict[Owner, dict[FillQueue, None]] = field(default_factory=dict)
    """No owner has an empty dict."""
    shares: FairShares[Owner] = field(default_factory=FairShares)
    """Bytes that each has read while others had queues too."""

    def remove(self, queue: FillQueue) -> None:
        of_owner = self.by_owner[queue.owner]
        del of_owner[queue]
        if not of_owner:
            del self.by_owner[queue.owner]

    def in_turn(self) -> Iterator[FillQueue]:
        """Yield the first queue of each owner, that of the least share first, then the second ones: none waits for all
        that another one has queued, or for its space."""
        of_owners = deque(iter(list(self.by_owner[owner])) for owner in self.shares.order(self.by_owner))
        while of_owners:
            if (queue := next(of_owners[0], None)) is None:
                of_owners.popleft()
            else:
                yield queue
                of_owners.rotate(-1)


@dataclass(slots=True)
class ReadOrder:
    """The queues of one source, in the order in which it reads their blocks."""

    by_lookups: SharedQueues = field(default_factory=SharedQueues)
    """Those with queued or running fills that a lookup has waited for."""
    prefetched: SharedQueues = field(default_factory=SharedQueues)
    """The others, of hints alone: they are read after these, so that no hint delays the lookups of others."""
    blocks: int = 0
    """Number of fills that have not begun."""
    blocks_of: Counter[int] = field(default_factory=Counter)
    """The same by session."""
    reserved_bytes: int = 0
    """Pool bytes of the queued and running blocks of those that are ``is_reserved``. ``Leases.withheld_bytes`` is the
    sum of these and of ``SourceReads.given_up_bytes`` of all sources."""

    def queues(self) -> Iterator[FillQueue]:
        """Yield the queues in the order in which they may begin now. They may change while the caller iterates."""
        for shared in (self.by_lookups, self.prefetched):
            yield from shared.in_turn() if len(shared.by_owner) > 1 else chain(*map(list, shared.by_owner.values()))


class Promotions:
    """Blocks that lookups have come up, from all sources: who waits for which, in which queue, and with which space.

    A ``Fill`` is a block, and a ``FillQueue`` the blocks of one group that one lookup has one source read. Each queue
    is in two lists: in ``LookupQueues`` with those that get space together with it, and in the ``ReadOrder`` of its
    source. The parts below follow a fill: it is requested, gets space, is read by its ``PromotionSource``, and ends.

    Args:
        sources: the disks of this node, then shared stores in the order of asking.

    Attributes:
        unsettled: fills that are not settled, by the group's tag and by key. No group has an empty dict.
        fills_of_lease: fills that each lease waits for, settled ones included, in the order of the prompt, with the key
            before each; empty at its beginning. ``Fill.leases`` has the same by fill.
    """

    def __init__(self, cache: Cache, sources: Sequence[PromotionSource], clock: Callable[[], float]) -> None:
        self._cache, self._sources, self._clock = cache, sources, clock
        self.unsettled: dict[int, dict[bytes, Fill]] = {}
        self.fills_of_lease: dict[Lease, dict[Fill, bytes]] = {}

    # --- what lookups request --------------------------------------------------------------------

    def request(self, lookup: CurrentLookup, part: LookupPart, places: Sequence[int]) -> None:
        """Request keys of a part, by their places, that are in a tier or coming, up to the first that cannot be
        requested; set their states."""
        if not places:
            return
        slower, lease = self._slower_sources(lookup, part, places), lookup.lease
        queues: dict[PromotionSource, FillQueue] = {}
        """Those of the new fills."""
        for number, place in enumerate(places):
            # Not in ``part.fills``, which may lack what this loop adds: a key may occur twice.
            if (fill := self.unsettled.get(part.block_group.tag, {}).get(part.keys[place])) is None:
                if (refusal := self._refusal(lookup, part, place, slower)) is not None:
                    part.mark(places[number:], refusal)
                    return
                fill = self._new_fill(lookup, part, place, queues)
            elif not fill.queue.is_reserved:
                self._join(lookup.queues, fill.queue)
            if lease not in fill.leases:
                lookup.promotable_bytes -= part.group.block_bytes
                lease.coming += 1
                fill.leases[lease] = None
                self.fills_of_lease.setdefault(lease, {})[fill] = part.keys[place - 1] if place else part.key_before
            part.found_by[fill.queue.source.tier.name] = None
            if part.asked is not None:
                fill.askers.append((part.asked, part.start + place))
            part.states[place] = SHARED if fill.queue.source.shared else PENDING

    def _slower_sources(
        self, lookup: CurrentLookup, part: LookupPart, places: Sequence[int]
    ) -> Collection[PromotionSource]:
        """Return the sources whose keys take longer to read than to compute; count these keys, which are skipped.

        The measured speeds are compared, without what waits at the source and at the engine: only the engine knows
        both. A hint's keys are never skipped. Once in READ_AGAIN_S those of one lookup are not either, so that the
        speed is measured again.
        """
        if lookup.lease.session == NO_SESSION:
            return ()
        slower: set[PromotionSource] = set()
        group, namespace = part.group, part.group.namespace
        prefill = namespace.counters.prefill_tokens_per_second
        for source, count in Counter(part.there[place] for place in places if place in part.there).items():
            if source in lookup.worth_reading:
                continue
            tokens, speed = count * group.tokens, source.reads.speed.measured
            if tokens and prefill and speed:
                # The tokens need the blocks of all groups: those of the others count as if they were as large.
                nbytes, now = len(namespace.specs) * count * group.block_bytes, self._clock()
                if nbytes / speed > tokens / prefill and now < source.read_again_at:
                    source.failures[NotRead.SLOWER.value] += count
                    slower.add(source)
                    continue
                source.read_again_at = now + READ_AGAIN_S  # any read measures the speed again, a faster one too
            lookup.worth_reading.add(source)
        return slower

    def _refusal(
        self, lookup: CurrentLookup, part: LookupPart, place: int, slower: Collection[PromotionSource]
    ) -> MissReason | None:
        """Return why a key that a source has cannot be queued; None if it can."""
        source, block_bytes, session = part.there[place], part.group.block_bytes, lookup.lease.session
        if source in slower:
            return MissReason.SKIPPED
        if lookup.promotable_bytes < block_bytes:
            return MissReason.LEASE_LIMIT
        # If leases cannot pin all new fills of a lookup now, the last ones would wait for space.
        if not lookup.may_wait and lookup.new_bytes + block_bytes > self._cache.leases.leasable_bytes:
            last_reason = self._cache.life.reasons_of(part.group, part.keys[place])[0]
            if session == NO_SESSION or last_reason in (MissReason.NO_SPACE, MissReason.QUOTA):
                return MissReason.NO_SPACE
            lookup.may_wait = True  # for the keys behind it too
        order = source.read_order
        if order.blocks + order.blocks_of[session] // 3 >= MAX_QUEUED:  # no session gets over three quarters
            return MissReason.TIER_LATE
        return None

    def _new_fill(
        self, lookup: CurrentLookup, part: LookupPart, place: int, queues: dict[PromotionSource, FillQueue]
    ) -> Fill:
        """Return a queued fill for a key that a source has. ``queues``: those of the part's new fills. A source's is
        made with its first fill, not earlier: no queue in a ``ReadOrder`` is empty."""
        source, key, session = part.there[place], part.keys[place], lookup.lease.session
        if (queue := queues.get(source)) is None:
            order, is_prefetch = source.read_order, session == NO_SESSION
            owner = part.group.namespace.fingerprint if is_prefetch else session
            turns = order.prefetched if is_prefetch else order.by_lookups
            queue = FillQueue(session, owner, lookup.queues, part.group, part.block_group, source, turns)
            queues[source] = queue
            lookup.queues.queues.append(queue)
            turns.by_owner.setdefault(owner, {})[queue] = None
        fill = Fill(queue, key)
        self.unsettled.setdefault(part.block_group.tag, {})[key] = fill
        queue.fills[fill] = None
        self.count(queue, queued=1)
        lookup.new_bytes += part.group.block_bytes
        return fill

    def _join(self, of_lookup: LookupQueues, queue: FillQueue) -> None:
        """Have a queue get its space jointly with the others that this lookup waits for, no longer with those of an
        earlier lookup. A prefetch's is read with those of lookups instead."""
        if queue.of_lookup is of_lookup or of_lookup.lease.session == NO_SESSION:
            return
        if queue.session == NO_SESSION:
            order = queue.source.read_order
            if queue.turns is order.prefetched:
                queue.turns.remove(queue)
                queue.turns = order.by_lookups
                queue.turns.by_owner.setdefault(queue.owner, {})[queue] = None
            return
        queue.of_lookup.queues.remove(queue)
        of_lookup.queues.append(queue)
        queue.of_lookup = of_lookup

    def wait_s(self, lease: Lease) -> float:
        """Return the expected time until the blocks that a lease waits for have come, at the current speeds; 0 if
        unknown."""
        fills, longest_s = self.fills_of_lease.get(lease, {}), 0.0
        queues_of: dict[PromotionSource, set[FillQueue]] = defaultdict(set)
        for fill in fills:
            if fill.state not in SETTLED:
                queues_of[fill.queue.source].add(fill.queue)
        for source, queues in queues_of.items():
            if speed := source.reads.speed.current:
                nbytes, now = _bytes_until(source.read_order, queues, fills), self._clock()
                # A queue that is blocked is expected to stay so as long again as so far.
                blocked_s = max((now - queue.blocked.since for queue in queues if queue.blocked), default=0.0)
                longest_s = max(longest_s, nbytes / speed + blocked_s)
        return longest_s

    # --- space -----------------------------------------------------------------------------------

    def reserve(self, queue: FillQueue) -> bool:
        """Reserve pool space for all queues of a prompt, and return whether this one has its; else it is blocked.

        Nothing is reserved for a prefetch, whose blocks nobody pins: it may begin while there is space for a block.
        """
        if queue.is_reserved:
            return True
        leasable_bytes = self._cache.leases.leasable_bytes
        if queue.session == NO_SESSION:
            if queue.group.block_bytes <= leasable_bytes:
                return True
        else:
            together = [one for one in queue.of_lookup.queues if not one.is_reserved]
            if self._fits(queue, together, leasable_bytes):
                for one in together:
                    one.is_reserved, one.blocked = True, None
                    self._count_reserved(one.source.read_order, one.queued_bytes)
                return True
        self.set_blocked(queue, NotRead.NO_SPACE)
        return False

    def _fits(self, queue: FillQueue, together: Sequence[FillQueue], leasable_bytes: int) -> bool:
        """Return whether leases may pin all blocks of a queue and of those that get space together with it.

        What a store is being asked for, for the same prompt, needs space too. It counts within the queue's patience
        only: the engine may never look it up again.

        If nothing of that kind counts, the prompt may also use space that other sources have reserved, but fill only
        after it has been loaded. For example, a prompt of 4 GiB is read in 2 s and loaded within the patience of 5 s.
        In these 7 s a store that reads 0.1 GiB/s fills 0.7 GiB of the 10 GiB that it has reserved: the prompt may use
        the other 9.3 GiB.
        """
        if leasable_bytes >= self._cache.leases.most_bytes:  # all there is: to wait would give no more
            return True
        lease, patience_s = queue.of_lookup.lease, queue.source.patience_s
        waited_s = self._clock() - queue.blocked.since if queue.blocked else 0.0
        asked_bytes = lease.asking_bytes if waited_s < patience_s else 0
        wanted_bytes = sum([one.queued_bytes for one in together]) + asked_bytes
        if wanted_bytes > leasable_bytes and not asked_bytes:
            read_s = max(one.queued_bytes / (one.source.reads.speed.current or inf) for one in together)
            others = [one for one in self._sources if one is not queue.source]
            leasable_bytes += sum([_unfilled_after(one, patience_s + read_s) for one in others])
        return wanted_bytes <= leasable_bytes

    def _count_reserved(self, order: ReadOrder, nbytes: int) -> None:
        order.reserved_bytes += nbytes
        self._cache.leases.withheld_bytes += nbytes

    def set_blocked(self, queue: FillQueue, reason: NotRead, waited_s: float = 0.0) -> None:
        """Record why a queue cannot begin now. The time since which it cannot stays, unless it is to count as blocked
        for ``waited_s`` already."""
        now = self._clock()
        since = min(now - waited_s, queue.blocked.since if queue.blocked else now)
        queue.blocked = Blocked(reason, since, tried_at=now)

    def count(self, queue: FillQueue, *, queued: int = 0, under_way: int = 0) -> None:
        """Add to the numbers of a queue's blocks that wait and that are under way, and to what follows from them. Drop
        a queue that has none left."""
        order = queue.source.read_order
        order.blocks += queued
        order.blocks_of[queue.session] += queued
        if not order.blocks_of[queue.session]:
            del order.blocks_of[queue.session]
        queue.under_way += under_way
        if queue.is_reserved:
            self._count_reserved(order, (queued + under_way) * queue.group.block_bytes)
        if queue.fills:
            return
        queue.blocked = None  # it has nothing to begin
        if not queue.under_way:
            queue.turns.remove(queue)
            queue.of_lookup.queues.remove(queue)

    # --- ends ------------------------------------------------------------------------------------

    def fail(self, fill: Fill, reason: Result | NotRead) -> None:
        """Settle a fill that failed, and record the reason for its key. One that was settled is only counted."""
        source = fill.queue.source
        source.failures[reason.value] += 1
        if fill.state in SETTLED:
            return
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        if miss is MissReason.TIER_FAILED:
            source.failed_at = self._clock()
        self.settle(fill, miss)
        self._cache.blocks.record_misses(fill.queue.group, fill.key, miss)

    def settle(self, fill: Fill, reason: int) -> None:
        """Count the key once for all lookups that asked for it, have none wait for it any more, and take it out of its
        queue. Does nothing for a fill that was settled before.

        Args:
            reason: CAME or IN_A_TIER, which count as found, or a ``MissReason``.
        """
        if fill.state in SETTLED:
            return
        queue, was_queued = fill.queue, fill.state is FillState.QUEUED
        fill.state = FillState.ABANDONED if fill.state is FillState.READING else FillState.ENDED
        askers, fill.askers = fill.askers, []
        for asked, position in askers:
            asked.set(position, bytes([reason]))
        if reason in (CAME, IN_A_TIER):
            counters = queue.group.namespace.counters
            if queue.source.shared:
                counters.found_shared += len(askers)
            else:
                counters.found_disk += len(askers)
        if was_queued:
            del queue.fills[fill]
            self.count(queue, queued=-1)
        for lease in fill.leases:
            lease.coming -= 1
        fills = self.unsettled[queue.block_group.tag]
        del fills[fill.key]
        if not fills:
            del self.unsettled[queue.block_group.tag]

    def lease_ended(self, lease: Lease) -> None:
        """Stop what was to come up for this lease alone, and have what has come up get its place in the order of
        eviction: see ``TierHooks``."""
        lease.asking_bytes = 0  # it never looks up what a store is being asked for, which needs no space: see ``_fits``
        if (fills := self.fills_of_lease.pop(lease, None)) is None:
            return  # as most: thousands may end in one turn of the loop
        settled, queued = list[tuple[bytes, Fill]](), list[Fill]()
        for fill, key_before in fills.items():
            del fill.leases[lease]
            if fill.state in SETTLED:
                settled.append((key_before, fill))
            elif fill.state is FillState.QUEUED:  # else its tier asks in its turn whether it is awaited
                queued.append(fill)
        self._settle_unawaited(queued)
        self._hand_over(lease, queued)
        self._order_chains(settled)

    def _settle_unawaited(self, queued: Sequence[Fill]) -> None:
        """Settle those of some queued fills, and of the others in their queues, that no lease waits for."""
        for queue in dict.fromkeys(fill.queue for fill in queued if not fill.leases):
            for fill in [fill for fill in queue.fills if not fill.leases]:
                self.settle(fill, IN_A_TIER)  # the engine reports why it is not loaded

    def _hand_over(self, ended: Lease, queued: Sequence[Fill]) -> None:
        """Move queues of these fills that are in the ``LookupQueues`` of an ended lease, and have no space, to those of
        another lease that waits for them: the last one."""
        next_leases = {
            fill.queue: next(reversed(fill.leases))
            for fill in queued
            if fill.leases and fill.queue.of_lookup.lease is ended and not fill.queue.is_reserved
        }
        for queue, following in next_leases.items():
            of_lookups = (fill.queue.of_lookup for fill in self.fills_of_lease[following])
            its = next((of_lookup for of_lookup in of_lookups if of_lookup.lease is following), None)
            self._join(its or LookupQueues(following), queue)

    def _order_chains(self, settled: Sequence[tuple[bytes, Fill]]) -> None:
        """Order blocks that may have come up for eviction, the tail of a prompt first: they came one by one, mostly the
        root first, which would be evicted first. ``settled``: the key before each fill's, and the fill."""
        chains: dict[Group, dict[bytes, None]] = {}
        for key_before, fill in settled:
            keys = chains.setdefault(fill.queue.group, {})
            keys[key_before] = keys[fill.key] = None  # once each, in the order of the prompt
        for group, keys in chains.items():
            self._cache.stores.order_chain(group, b"".join(keys))

    def remove(self, tag: int, keys: Sequence[bytes], why: MissReason) -> None:
        """Settle the fills of keys that are removed. ``tag``: their group's."""
        fills = self.unsettled.get(tag, {})
        for fill in [fills[key] for key in keys if key in fills]:
            self.settle(fill, why)

    def cancel(self, namespace: Namespace) -> None:
        """Settle all fills of a namespace that was reset or forgotten: see ``TierHooks.cancel_promotions``."""
        for fills in list(self.unsettled.values()):
            for fill in list(fills.values()):
                if fill.queue.group.namespace is not namespace:
                    break  # all keys of a tag belong to one namespace
                self.settle(fill, MissReason.INVALIDATED)


def _bytes_until(order: ReadOrder, its_queues: Collection[FillQueue], its_fills: Collection[Fill]) -> int:
    """Return the bytes that a source reads until it has read the last of a lookup's fills in some of its queues.

    Owners get equal parts of the source, and each one's queues are read in order. So these are the bytes of the queues'
    owner up to the last of the fills, and as many of each other owner, or all if it has fewer. Other queues that are
    blocked are passed over.

    For example, the lookup's queue has 5 bytes, behind 10 others of its owner. Another owner has queued 40, a third one
    3. Once the first has read its 15, the second has read 15 too, and the third its 3: 33 in all.
    """
    most_bytes = total_bytes = 0
    """The most bytes of one owner of its queues, and the bytes of all owners."""
    others = list[dict[FillQueue, None]]()
    for of_owner in order.by_lookups.by_owner.values():
        left = sum(queue in of_owner for queue in its_queues)
        if not left:
            others.append(of_owner)
            continue
        nbytes = 0
        for queue in of_owner:
            if queue in its_queues:
                left -= 1
            elif queue.blocked is not None:
                continue
            nbytes += queue.unread_bytes
            if not left:
                behind_its_last = takewhile(lambda fill: fill not in its_fills, reversed(queue.fills))
                nbytes -= sum(1 for _ in behind_its_last) * queue.group.block_bytes
                break
        most_bytes, total_bytes = max(most_bytes, nbytes), total_bytes + nbytes
    for of_owner in others:
        nbytes = 0
        for queue in of_owner:
            if queue.blocked is None:
                nbytes += queue.unread_bytes
            if nbytes >= most_bytes:  # no more of it is counted: spare the other queues
                break
        total_bytes += min(nbytes, most_bytes)
    return total_bytes


def _unfilled_after(source: PromotionSource, seconds: float) -> int:
    """Return the bytes reserved for a source that are not filled after this time, if blocks come at all."""
    reserved_bytes = source.read_order.reserved_bytes
    if not (reserved_bytes and (speed := source.reads.speed.current)):
        return 0
    return max(0, reserved_bytes - int(speed * seconds))
