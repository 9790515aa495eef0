"""What lies below the pool, as one: lookups find what it holds, blocks go up and down, what is invalidated goes."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import FREE, READY, WRITING, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import FillTicket
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.writer import Writer, space_of
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Block, Result, Space, Tier
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import COMING, PENDING, SHARED, GroupSpec

logger = logging.getLogger(__name__)

MOST_KEYS = 8192
"""Keys that one lookup may find below the pool, of each of its groups as many: the first that are missing, or the last
of a window. The next lookup of the same request goes on behind what is up by then. Each takes some microseconds of the
loop."""
ANSWER_S = 0.02
"""An answer of a store is expected after so long at most: engines that wait for it compare that with what computing
takes. The deadline for asking is for the worst case, and may be longer than any engine waits."""
LOGGED_S = 600.0
"""An error of a tier is logged again after so long."""
MOST_WAITING = 2**16
"""Leases of which it is known how many keys their lookups wait for."""
MOST_LOGGED = 1024
"""Kinds of errors of tiers, each of every server, of which it is known when they were logged."""
MOST_UNSHARED = 32_768
"""Namespaces that are not shared: those that there are, and the latest others."""

NO_SPACE, QUOTA, OVERDUE, SLOWER = "no_space", "quota", "overdue", "slower"
"""Why a block does not come up, beside the results of tiers. ``slower``: computing it takes less time."""
MISSES: dict[str, MissReason] = {
    NO_SPACE: MissReason.NO_SPACE,
    QUOTA: MissReason.QUOTA,
    OVERDUE: MissReason.TIER_LATE,
    Result.DEADLINE: MissReason.TIER_LATE,
    Result.CORRUPT: MissReason.CORRUPT,
    Result.GONE: MissReason.EVICTED,
}
"""What a failure is to those that asked; any other is the tier's failure."""
MAX_FILLING_BYTES = 2**30
"""Bound on the pool bytes that fills hold, beside an eighth of the pool."""
MAX_BEGUN, BEGUN_PER_END = 64, 16
"""Blocks that are begun in one go, and when one has ended and less than half of what may be is under way. Otherwise
they wait for the next go: to make room for a few takes as long as for many. Their slots are taken together, so that
neighbours in the queue are neighbours in the pool."""
SPEED_SAMPLE_S = 0.05
"""Reading is timed over at least this long."""
OLD_SPEED_WEIGHT = 0.7
"""Weight of what was measured before in the speed."""
NO_SPACE_S = 1.0
"""So long after the pool had no space for a namespace's block its lookups that are repeated do not wait."""
READ_AGAIN_S = 60.0
"""So long after the last read one is tried although it would be slower: speeds change."""

SETTLED = bytes([READY, *COMING])
"""States of keys that are there, or will be, without anything to be done about it."""


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup asked for and a tier has."""

    session: int
    namespace: Namespace
    space: Space
    key: bytes
    tier: Tier
    level: Level
    nbytes: int
    deadline: float
    ticket: FillTicket | None = None
    """Its block in the pool while the tier reads into it: the slots stay until that has ended."""
    withdrawn: bool = False
    """It was invalidated, its namespace reset, or it is overdue: nobody waits for it any more."""
    given_up: bool = False
    """It is overdue and under way: the tier may still write into its slots."""
    askers: int = 0
    """Lookups that count it as found, or as a miss, once it is known whether it comes up."""


Coming = dict[int, dict[bytes, Fill]]
"""By tag of their space and by key: blocks that come up, from whatever tier, and are not withdrawn."""


class Level:
    """One level below the pool, with its bounds and counts: the disks of this node together, or one store.

    What is brought up from it is here, what is written to it in ``writer``.

    Args:
        tiers: disks come while the daemon serves.
        coming: where fills are noted as long as lookups may wait for them.
        shared: other nodes use it too.
        unshared: fingerprints of namespaces of which nothing is shared.
    """

    def __init__(
        self,
        tiers: list[Tier],
        settings: TieringSettings,
        cache: Cache,
        clock: Callable[[], float],
        coming: Coming,
        engines_busy: Callable[[], bool],
        unshared: Collection[bytes] = (),
        *,
        shared: bool,
    ) -> None:
        self.tiers, self.shared = tiers, shared
        self._cache, self._clock, self._deadline_s, self._coming = cache, clock, settings.deadline_s, coming
        self._under_way_limit = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        """Pool bytes that fills may hold at once. A larger block goes alone. What was given up and has not ended, as on
        a device that hangs, may hold as much again: others go on."""
        self._requested_limit = cache.slots.pool_bytes * 2 // 3
        """Bytes that may be under way and wait, together; what is asked for beyond is absent. A session has no more
        than three times what it leaves to others."""
        self._queue: deque[Fill] = deque()
        """The one with the earliest deadline first; some are withdrawn."""
        self._held = Counter[int]()
        """By session, bytes that are under way or wait."""
        self.under_way: dict[Fill, None] = {}
        self._given_up_bytes = 0
        self.queued_blocks = self.queued_bytes = self.under_way_bytes = 0
        self.promoted_blocks = self.promoted_bytes = 0
        self.failures: Counter[str] = Counter()
        """Blocks that were asked for and did not come up, by reason: a ``Result``, or one of those above."""
        self.bytes_per_second = 0.0
        """Speed at which blocks came up lately; 0 before the first did."""
        self._sample_began = 0.0
        self._sample_bytes = 0
        self._read_again_at = 0.0
        self.no_space_until: dict[Namespace, float] = {}
        self._stopped = False
        self.writer = Writer(
            *(cache, tiers, clock, settings),
            shared=shared,
            idle=lambda: not self.waiting_blocks,
            engines_busy=engines_busy,
            left_out=unshared,
        )

    @property
    def available(self) -> bool:
        for tier in self.tiers:  # noqa: SIM110 - each lookup asks, and a generator takes twice as long
            if tier.available():
                return True
        return False

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True
        self.writer.stop()

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait or are under way."""
        return self.queued_blocks + len(self.under_way)

    @property
    def wait_s(self) -> float:
        """How long it will take until all that was asked for is up, by that speed; 0 where that is not known."""
        awaited = self.queued_bytes + self.under_way_bytes - self._given_up_bytes
        return awaited / self.bytes_per_second if self.bytes_per_second else 0.0

    def is_slower(self, namespace: Namespace, group: int, count: int) -> bool:
        """Whether so many blocks take longer to read than to compute, by the speeds of late; not once a while."""
        prefill, speed = namespace.counters.prefill_tokens_per_second, self.bytes_per_second
        tokens = count * namespace.groups[group].tokens_per_block
        if not (tokens and prefill and speed):
            return False
        nbytes = len(namespace.groups) * count * self._cache.group(namespace, group).block_bytes
        now = self._clock()
        if self.wait_s + nbytes / speed <= tokens / prefill or now >= self._read_again_at:
            self._read_again_at = max(self._read_again_at, now + READ_AGAIN_S)
            return False
        return True

    def request(self, session: int, namespace: Namespace, space: Space, key: bytes, tier: Tier) -> Fill | None:
        """Queue a block that a tier has; None where too much is asked for."""
        nbytes, held = self._cache.group(namespace, space.group).block_bytes, self.queued_bytes + self.under_way_bytes
        if held and held + nbytes + self._held[session] // 3 > self._requested_limit:
            return None
        fill = Fill(session, namespace, space, key, tier, self, nbytes, self._clock() + self._deadline_s)
        self._coming.setdefault(space.tag, {})[key] = fill
        self._queue.append(fill)
        self._count_queued(fill, 1)
        return fill

    def forget(self, fill: Fill) -> None:
        """Nobody is to have it any more. What is under way ends by itself and leaves nothing: the cache dropped it."""
        self._settle(fill, MissReason.INVALIDATED)
        self._withdraw(fill)
        if fill.ticket is None:
            self._count_queued(fill, -1)

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin what may begin now, of very much a part."""
        while not self._stopped and most > 0 and (batch := self._next_batch(most)):
            most -= len(batch)
            try:
                whole = self._begin_batch(batch)
            except BaseException:
                for fill in batch:  # no lookup waits for what is neither under way nor queued
                    if fill.ticket is None and not fill.withdrawn:
                        self._failed(fill, Result.FAILED)
                raise
            if not whole:
                return

    def _begin_batch(self, batch: Sequence[Fill]) -> bool:
        """Begin fills of one group; False where the tier took not all of them: those are queued again."""
        namespace, group = batch[0].namespace, batch[0].space.group
        keys = [fill.key for fill in batch]
        tickets = self._cache.begin_fill(namespace, group, keys)
        refused: list[Fill] = []
        try:
            for number, fill in enumerate(batch):
                if number not in tickets:  # the pool has it by now
                    self._settle(fill)
                    self._withdraw(fill)
                elif (ticket := tickets[number]) is None:
                    self.no_space_until[namespace] = self._clock() + NO_SPACE_S
                    cause = self._cache.no_space_cause(self._cache.group(namespace, group))
                    self._failed(fill, QUOTA if cause == QUOTA else NO_SPACE)
                elif not refused and self._begin(fill, ticket):
                    del tickets[number]
                else:
                    refused.append(fill)
        finally:
            for ticket in filter(None, tickets.values()):
                self._end_fill(ticket, None)
        if refused:
            self._put_back(refused)
        return not refused

    def tick(self) -> None:
        """End what is overdue, in the queue or under way, and look at the cold end of the pool."""
        for tier in self.tiers:
            tier.tick()
        if not self.available:  # reading was slow since the tier was away: the next one is tried, whatever the speed
            self._read_again_at = 0.0
        now = self._clock()
        while self._queue and (self._queue[0].withdrawn or self._queue[0].deadline <= now):
            if not (fill := self._queue.popleft()).withdrawn:
                self._count_queued(fill, -1)
                self._failed(fill, OVERDUE)
        for fill in [one for one in self.under_way if one.deadline <= now and not one.given_up]:
            # The tier may still write into its slots: they stay until it says that it does not.
            assert fill.ticket is not None
            fill.given_up = True
            self._given_up_bytes += fill.nbytes
            self._failed(fill, OVERDUE)
            self._cache.drop_unfinished(fill.ticket, MissReason.TIER_LATE)
        self.pump()
        self.writer.tick()

    def _next_batch(self, most: int) -> list[Fill]:
        """The next fills of one group, as many as may be under way now, out of the queue."""
        room = self._under_way_limit - self.under_way_bytes + min(self._given_up_bytes, self._under_way_limit)
        batch: list[Fill] = []
        while self._queue and len(batch) < most:
            fill = self._queue[0]
            if not fill.withdrawn:
                same = not batch or (fill.namespace is batch[0].namespace and fill.space == batch[0].space)
                if not same or (fill.nbytes > room and (batch or self.under_way)):
                    break
                batch.append(fill)
                room -= fill.nbytes
                self._count_queued(fill, -1)
            self._queue.popleft()
        return batch

    def _begin(self, fill: Fill, ticket: FillTicket) -> bool:
        """Have the tier read into the slots; False where it does not take the read now."""
        if not fill.tier.read(fill.space, fill.key, ticket.offsets, fill.deadline, partial(self._on_end, fill)):
            return False
        if not self.under_way:
            self._sample_began, self._sample_bytes = self._clock(), 0
        fill.ticket = ticket
        self.under_way[fill] = None
        self.under_way_bytes += fill.nbytes
        self._hold(fill, fill.nbytes)
        return True

    def _put_back(self, refused: Sequence[Fill]) -> None:
        """Queue fills again whose read the tier did not take, unless the block has left the tier or that hangs."""
        for fill in reversed(refused):
            if not fill.tier.available():
                self._failed(fill, Result.DEADLINE)
            elif fill.tier.find(fill.space, [fill.key], prefix=False)[0] != PRESENT:
                self._failed(fill, Result.GONE)
            else:
                self._queue.appendleft(fill)
                self._count_queued(fill, 1)

    def _on_end(self, fill: Fill, result: Result, block: Block | None) -> None:
        assert fill.ticket is not None
        del self.under_way[fill]
        self.under_way_bytes -= fill.nbytes
        self._hold(fill, -fill.nbytes)
        if fill.given_up:
            self._given_up_bytes -= fill.nbytes
        try:
            if self._end_fill(fill.ticket, block if result is Result.DONE else None):
                self.promoted_blocks += 1
                self.promoted_bytes += fill.space.nbytes
                self._settle(fill)
            elif not fill.withdrawn:
                self._failed(fill, Result.CORRUPT if result is Result.DONE else result)
        finally:
            self._withdraw(fill)  # whatever went wrong, no lookup waits for it
            fill.ticket = None  # a lookup may know the fill for some seconds more
        if result is Result.DONE:
            self._measure_speed(fill.space.nbytes)
        elif result in (Result.DEADLINE, Result.FAILED):  # no more than this came since the last one did
            speed = fill.space.nbytes / max(self._clock() - self._sample_began, 1e-4)
            self.bytes_per_second = min(self.bytes_per_second or speed, speed)
        if 2 * self.under_way_bytes <= self._under_way_limit:
            self.pump(BEGUN_PER_END)

    def _end_fill(self, ticket: FillTicket, block: Block | None) -> bool:
        """End it; ``block``: what was read, None where that is not all there. True where the block is READY."""
        whole = block is not None and all(block.checksums)
        return self._cache.end_fill(ticket, *((block.first_blocks, block.checksums) if block and whole else ((), ())))

    def _failed(self, fill: Fill, reason: str) -> None:
        """Nobody waits for it any more, and why it is not there."""
        self.failures[str(reason)] += 1
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        self._settle(fill, miss)
        if not fill.withdrawn:
            self._withdraw(fill)
            self._cache.note_misses(fill.namespace, fill.space.group, fill.key, miss)

    def _settle(self, fill: Fill, miss: MissReason | None = None) -> None:
        """Count the key for those who asked for it, once: as found, or as a miss."""
        askers, fill.askers = fill.askers, 0
        counters = fill.namespace.counters
        if miss is not None:
            counters.misses[miss] += askers
        elif self.shared:
            counters.found_shared += askers
        else:
            counters.found_disk += askers

    def _withdraw(self, fill: Fill) -> None:
        """Lookups do not wait for it any more."""
        if fill.withdrawn:
            return
        fill.withdrawn = True
        keys = self._coming.get(fill.space.tag, {})
        if keys.get(fill.key) is fill:
            del keys[fill.key]
            if not keys:
                del self._coming[fill.space.tag]

    def _count_queued(self, fill: Fill, sign: int) -> None:
        self.queued_blocks += sign
        self.queued_bytes += sign * fill.nbytes
        self._hold(fill, sign * fill.nbytes)

    def _hold(self, fill: Fill, nbytes: int) -> None:
        self._held[fill.session] += nbytes
        if not self._held[fill.session]:
            del self._held[fill.session]

    def _measure_speed(self, nbytes: int) -> None:
        now = self._clock()
        self._sample_bytes += nbytes
        seconds = now - self._sample_began
        if seconds >= SPEED_SAMPLE_S or not self.under_way:
            speed, before = self._sample_bytes / max(seconds, 1e-4), self.bytes_per_second
            self.bytes_per_second = OLD_SPEED_WEIGHT * before + (1 - OLD_SPEED_WEIGHT) * speed if before else speed
            self._sample_began, self._sample_bytes = now, 0


class _Lookup(NamedTuple):
    namespace: Namespace
    session: int
    again: bool
    levels: Sequence[Level]
    """Those that are of use to it now, in the order in which they are asked."""


class _Range:
    """Some keys of one group of a lookup, and what is known of them by their places."""

    def __init__(self, space: Space, keys: Sequence[bytes], states: memoryview, coming: Mapping[bytes, Fill]) -> None:
        self.space, self.keys, self.states, self.coming = space, keys, states, coming
        """``states``: to be answered with. ``coming``: what is on its way already."""
        free = len(states) if not any(states) else 0
        self.left = list(range(free)) or [at for at, state in enumerate(states) if state == FREE]
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if coming:
            self.left = [at for at in self.left if keys[at] not in coming]
        self.there: dict[int, tuple[Level, Tier]] = {}
        self.asked: list[int] = []
        """Keys that a store is being asked for."""

    def look(self, levels: Sequence[Level], *, prefix: bool) -> None:
        """Ask each tier of some levels for what none before it has."""
        for level in levels:
            for tier in level.tiers:
                if not self.left:
                    return
                found = tier.find(self.space, [self.keys[at] for at in self.left], prefix=prefix)
                if any(found):
                    answers = list(zip(self.left, found, strict=True))
                    source = level, tier
                    self.left = [at for at, one in answers if one == ABSENT]
                    self.asked += [at for at, one in answers if one == ASKED]
                    self.there.update([(at, source) for at, one in answers if one == PRESENT])


class Tiering:
    """Looks after the levels below the pool for one cache: its ``TierHooks``, and the ``TierListener`` of all tiers.

    ``pump`` begins what lookups asked for, once their replies are out; ``tick`` is for deadlines and the cold end.

    Attributes:
        disks: the level of this node's disks, which may have none.
        stores: a level for each store that nodes share, in the order in which they are asked.
        unshared: fingerprints of namespaces whose blocks here became stale: what others have under the same keys may be
            stale too.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache, self._clock = cache, clock
        self._coming: Coming = {}
        self._parts = cache, clock, self._coming, engines_busy
        self.unshared: dict[bytes, None] = {}
        self.disks = Level([], settings, *self._parts, shared=False)
        self.levels = [self.disks]
        self._answers_due = 0.0
        self._uncounted: dict[Namespace, Counter[tuple[int, bytes]]] = {}
        """By tag and key that is being asked for: lookups that got that answer and have not counted it yet."""
        self._waiting: dict[int, tuple[int, Namespace, int]] = {}
        """By lease, its session and namespace, and for how many keys its lookup waits."""
        self._evicted: list[tuple[Space, list[bytes]]] = []
        self._events = events
        self._logged: dict[tuple[str, str], float] = {}
        """Tiers and kinds of their errors that were logged, and when; the tiers count them."""

    @property
    def stores(self) -> list[Level]:
        return self.levels[1:]

    def share(self, tier: Tier, settings: TieringSettings) -> None:
        """Use a store that nodes share, for what the pool and the levels before it do not have."""
        self.levels.append(Level([tier], settings, *self._parts, self.unshared, shared=True))

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self,
        namespace: Namespace,
        session: int,
        lease_id: int,
        groups: Sequence[tuple[int, bytes]],
        states: list[bytes],
        again: bool,
    ) -> list[bytes]:
        levels = [level for level in self.levels if level.available]
        if levels and namespace.fingerprint in self.unshared:
            levels = [level for level in levels if not level.shared]
        if not levels or not groups or not self._cache.group(namespace, groups[0][0]).lengths:
            return states
        lookup = _Lookup(namespace, session, again, levels)
        answer, most, asking = list(map(bytearray, states)), MOST_KEYS // len(groups), False
        for number, limit in _whole_prefixes_first(namespace, groups, answer):
            group, keys = groups[number]
            start = run_end(answer[number]) if limit is None else max(0, limit - most)
            stop = start + most if limit is None else limit
            names: list[bytes] = np.frombuffer(keys, namespace.key_type)[start:stop].tolist()
            space = space_of(self._cache.group(namespace, group))
            some = _Range(space, names, memoryview(answer[number])[start:stop], self._coming.get(space.tag, {}))
            if limit is None:
                asking |= self._find_run(lookup, some)
            else:
                self._find_window(lookup, some, wait=asking)
        self._waiting.pop(lease_id, None)
        if waits := sum(one.count(PENDING) + one.count(SHARED) for one in answer):
            self._waiting[lease_id] = session, namespace, waits
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
        return list(map(bytes, answer))

    def _find_run(self, lookup: _Lookup, some: _Range) -> bool:
        """Find how far the run goes from the first of these keys on; returns whether any of it is being asked for."""
        states, end = bytes(some.states), len(some.keys)
        if WRITING in states:  # what an engine is writing may never be whole
            writing = (at for at, state in enumerate(states) if state == WRITING)
            end = next((at for at in writing if some.keys[at] not in some.coming), end)
            some.left = [at for at in some.left if at < end]
        every = some.left
        if not any(level.shared for level in lookup.levels):  # then mostly the first one is not there
            some.left = every[:1]
            some.look(lookup.levels, prefix=True)
            every = every[1:] if some.there else []
            some.left += every
        some.look(lookup.levels, prefix=True)
        end = min([end, *some.left[:1]])
        some.asked = [at for at in some.asked if at < end]
        self._mark_asked(lookup, some)
        places = set(some.there)
        if some.coming:
            coming = (at for at in range(end) if some.keys[at] in some.coming)
            places |= {at for at in coming if states[at] != READY}  # or it was stored while its fill was queued
        self._request(lookup, some, sorted(at for at in places if at < end))
        return bool(some.asked)

    def _find_window(self, lookup: _Lookup, some: _Range, *, wait: bool) -> None:
        """Bring up the last whole window of these keys, once all is known; ``wait``: how many count is not known.

        Stores are not asked where the disks have all of the window at the end.
        """
        spec = lookup.namespace.groups[some.space.group]
        window = range(0)
        for shared in (False, True):
            some.look([level for level in lookup.levels if level.shared is shared], prefix=False)
            there = [
                state in SETTLED or key in some.coming or at in some.there
                for at, (key, state) in enumerate(zip(some.keys, some.states, strict=True))
            ]
            window = last_window(there, spec)
            if not wait and window.stop == len(some.keys):
                break
        self._mark_asked(lookup, some)
        if not (wait or some.asked):
            self._request(lookup, some, [at for at in window if some.states[at] not in SETTLED])

    def _mark_asked(self, lookup: _Lookup, some: _Range) -> None:
        for at in some.asked:
            some.states[at] = SHARED
        if some.asked:
            self._answers_due = self._clock() + ANSWER_S
            if not lookup.again:
                names = [(some.space.tag, some.keys[at]) for at in some.asked]
                self._uncounted.setdefault(lookup.namespace, Counter()).update(names)

    def _request(self, lookup: _Lookup, some: _Range, places: Sequence[int]) -> None:
        """Request keys that are there or come, up to the first that cannot come up, and mark them."""
        slower = self._slower_levels(lookup, some, places)
        for at in places:
            key = some.keys[at]
            if (fill := self._coming.get(some.space.tag, {}).get(key)) is None:
                level, tier = some.there[at]
                no_space = level.no_space_until.get(lookup.namespace, 0.0) > self._clock()
                if level in slower or (lookup.again and no_space):
                    return
                fill = level.request(lookup.session, lookup.namespace, some.space, key, tier)
                if fill is None:
                    return
            fill.askers += not lookup.again
            some.states[at] = SHARED if fill.level.shared else PENDING

    def _slower_levels(self, lookup: _Lookup, some: _Range, places: Sequence[int]) -> set[Level]:
        """The levels from which what is there takes longer to read than to compute: none of that is read."""
        sources = [some.there[at] for at in places if at in some.there]
        slower = {
            level
            for level, count in Counter(level for level, _ in sources).items()
            if level.is_slower(lookup.namespace, some.space.group, count)
        }
        for level, _ in sources if slower else ():
            if level in slower:
                level.failures[SLOWER] += 1
                if lookup.again and level.shared:  # it was counted as found when it was answered
                    lookup.namespace.counters.misses[MissReason.SKIPPED] += 1
        return slower

    def released(self, session: int, lease_ids: Iterable[int], not_awaited: MissReason | None) -> None:
        for lease_id in lease_ids:
            owner, namespace, count = self._waiting.get(lease_id, (None, None, 0))
            if owner == session:
                del self._waiting[lease_id]
                if namespace is not None and not_awaited is not None:
                    namespace.counters.misses[not_awaited] += count

    def used(self, blocks: BlockIds) -> None:
        if levels := [level for level in self.levels if level.available]:
            for group, alike in self._cache.by_group(blocks):
                for level in levels:
                    level.writer.used(group, alike)

    def stored(self, blocks: BlockIds) -> None:
        for level in self.levels:
            level.writer.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        # What leaves the pool is spared by the disks' hands. That waits for the next tick: a store waits for this call.
        for group, alike in self._cache.by_group(blocks):
            if group.dead:
                continue
            keys = self._cache.blocks.split_keys(alike, group.key_bytes)
            for level in self.levels:
                level.writer.evicted(group, alike, keys)
            if self.disks.tiers:
                self._evicted.append((space_of(group), keys))

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        levels = [level for level in self.levels if level.writer.waiting and level.available]
        if not levels:
            return None
        return np.array([any(block in level.writer.waiting for level in levels) for block in blocks.tolist()], np.bool_)

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        names, space = namespace.split(group, keys), space_of(self._cache.group(namespace, group))
        coming = self._coming.get(space.tag, {})
        for fill in [coming[key] for key in names if key in coming]:
            fill.level.forget(fill)
        for level in self.levels:
            # Others use what a store has; bytes that are wrong here are not wrong there.
            for tier in level.tiers if not level.shared or why is not MissReason.CORRUPT else ():
                tier.remove(space, names, why.name.lower())

    def forget_all(self, namespace: Namespace) -> int:
        # The event of the cache that the namespace is cleared tells of the disks' blocks too.
        self._forget_fills(namespace)
        return self.remove_all(namespace.fingerprint)

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove what the disks have of a namespace, open or not, or of all; returns how many blocks that were. Of
        stores what is known of it."""
        return sum(tier.remove_all(fingerprint) for level in self.levels for tier in level.tiers)

    # --- what the daemon calls -------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """How long it will take until what lookups wait for is up, as far as that is known."""
        return max(self._answers_due - self._clock(), *(level.wait_s for level in self.levels), 0.0)

    def pump(self) -> None:
        """Begin what was requested, and go on writing. For when the replies are out."""
        for level in self.levels:
            if level.queued_blocks:
                level.pump()
        for level in self.levels:
            if level.writer.waiting:
                level.writer.pump()

    def stop(self) -> None:
        """Begin nothing any more."""
        for level in self.levels:
            level.stop()

    def tick(self) -> None:
        """A few times a second: deadlines, the cold end of the pool."""
        evicted, self._evicted = self._evicted, []
        for space, keys in evicted:
            for tier in self.disks.tiers:
                tier.used(space, keys)
        for level in self.levels:
            level.tick()

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Nobody has the namespace open, and the pool nothing of it. What disks and stores have of it stays."""
        self._forget_fills(namespace)
        self._uncounted.pop(namespace, None)
        self._waiting = {lease_id: one for lease_id, one in self._waiting.items() if one[1] is not namespace}
        for level in self.levels:
            level.no_space_until.pop(namespace, None)

    def unshare(self, fingerprint: bytes) -> None:
        """Share nothing of a namespace until ``reshare``."""
        put_newest(self.unshared, fingerprint, None, MOST_UNSHARED, lambda one: one in self._cache.namespaces)

    def reshare(self, fingerprint: bytes) -> None:
        self.unshared.pop(fingerprint, None)

    # --- what the tiers call: see TierListener ----------------------------------------------------

    def blocks_stored(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(space)) is not None:
            self._events.stored(namespace, space.group, list(keys), MEDIUM_STORAGE)

    def blocks_removed(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(space)) is not None:
            self._events.removed(namespace, space.group, list(keys), MEDIUM_STORAGE)

    def _namespace_of(self, space: Space) -> Namespace | None:
        """The namespace of a space, if it is open and was not reset since."""
        namespace = self._cache.namespaces.get(space.fingerprint)
        return namespace if namespace is not None and namespace.generation == space.generation else None

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged, (tier.name, kind), now, MOST_LOGGED)

    def answered(self, tier: Tier, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Count what lookups answered with as being asked for."""
        namespace = self._cache.namespaces.get(space.fingerprint)
        if namespace is None or not (uncounted := self._uncounted.get(namespace)):
            return
        lookups = [uncounted.pop((space.tag, key), 0) for key in keys]
        if not any(lookups):
            return
        absent: list[bytes] = []
        for key, count, there in zip(keys, lookups, found, strict=True):
            if there and namespace.generation == space.generation:
                namespace.counters.found_shared += count
            else:
                absent += [key] * count
        self._cache.count_misses(namespace, space.group, b"".join(absent))

    def _forget_fills(self, namespace: Namespace) -> None:
        for keys in list(self._coming.values()):
            for fill in list(keys.values()):
                if fill.namespace is not namespace:
                    break  # all of a tag are of one
                fill.level.forget(fill)


def run_end(states: bytes | bytearray) -> int:
    """Keys in the unbroken run from the start that are ready, or will be."""
    return len(states) - len(states.lstrip(SETTLED))


def last_window(there: Sequence[bool], spec: GroupSpec) -> range:
    """Places of the last whole window of which all keys are there.

    An engine with a sliding window needs its last blocks only, and takes the last place where all of them are there;
    one with a recurrent state needs one.
    """
    needed = max(1, -(-spec.window_tokens // spec.tokens_per_block)) if spec.tokens_per_block else len(there)
    run = 0
    for place in reversed(range(len(there))):
        run = run + 1 if there[place] else 0
        if run == needed or (run and not place):
            return range(place, place + run)
    return range(0)


def _whole_prefixes_first(
    namespace: Namespace, groups: Sequence[tuple[int, bytes]], states: Sequence[bytearray]
) -> Iterator[tuple[int, int | None]]:
    """The groups of a lookup by their number, and of how many keys a window may be of use; None for whole pasts.

    Groups that need their whole past come first: by then ``states`` say how far these go, and windows only so far.
    """
    limit_tokens: int | None = None
    windows: list[int] = []
    for number, (group, _) in enumerate(groups):
        spec = namespace.groups[group]
        if spec.window_tokens or "mamba" in spec.kind:
            windows.append(number)
            continue
        yield number, None
        end = run_end(states[number]) * spec.tokens_per_block
        limit_tokens = end if limit_tokens is None else min(end, limit_tokens)
    for number in windows:
        tokens = namespace.groups[groups[number][0]].tokens_per_block
        whole = limit_tokens is None or not tokens
        yield number, len(states[number]) if whole else min(len(states[number]), (limit_tokens or 0) // tokens)
