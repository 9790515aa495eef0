"""Bringing blocks up into the pool: a bounded queue, a bound on the bytes under way, and a deadline for each block."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvoffd.cache.block_table import FREE
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import FillTicket
from kvoffd.tiers.tier import PRESENT, Block, Result, Space, Tier

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
"""So long after the pool had no space for a namespace's block its lookups that are repeated are not told to wait."""
READ_AGAIN_S = 60.0
"""So long after the last read one is tried although it would be slower: speeds change."""


@dataclass(slots=True, eq=False)
class Fill:
    """A block that a lookup asked for and a tier has."""

    session: int
    namespace: Namespace
    space: Space
    key: bytes
    tier: Tier
    promoter: Promoter
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
    found: int = 0
    """Lookups that counted it as found when it came up."""


Coming = dict[int, dict[bytes, Fill]]
"""By tag of their space and by key: blocks that come up, from whatever tier, and are not withdrawn."""


class Promoter:
    """Fills from tiers that share these bounds: the disks of this node, or one store.

    Args:
        coming: where fills are noted as long as lookups may wait for them.
    """

    def __init__(
        self, cache: Cache, clock: Callable[[], float], deadline_s: float, coming: Coming, *, shared: bool
    ) -> None:
        self._cache, self._clock, self._deadline_s, self._coming = cache, clock, deadline_s, coming
        self.shared = shared
        self._under_way_limit = min(cache.slots.pool_bytes // 8, MAX_FILLING_BYTES)
        """Pool bytes that fills may hold at once. A larger block goes alone. What was given up and has not ended, as on
        a device that hangs, may hold as much again: others go on meanwhile."""
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

    @property
    def busy(self) -> bool:
        return bool(self.queued_blocks or self.under_way)

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

    def try_again(self) -> None:
        """Where reading was slow the tier was away: the next read is tried, whatever its speed was."""
        self._read_again_at = 0.0

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
        keys = b"".join([fill.key for fill in batch])
        taken = self._cache.begin_fill(namespace, group, keys)
        states, _ = self._cache.blocks.find(taken.group.number, keys, namespace.key_bytes)
        offsets = self._cache.slots.offsets(taken.slots).tolist()
        tickets = {key: FillTicket(taken.group, [0], taken.slots[at : at + 1]) for at, key in enumerate(taken.keys)}
        places = dict(zip(taken.keys, offsets, strict=True))
        refused: list[Fill] = []
        try:
            for number, fill in enumerate(batch):
                if (ticket := tickets.get(number)) is not None:
                    if not refused and self._begin(fill, ticket, places[number]):
                        del tickets[number]
                    else:
                        refused.append(fill)
                elif states[number] == FREE:
                    self.no_space_until[namespace] = self._clock() + NO_SPACE_S
                    self._failed(fill, QUOTA if self._cache.no_space_cause(taken.group) == QUOTA else NO_SPACE)
                else:  # the pool has it by now
                    self._settle(fill)
                    self._withdraw(fill)
        finally:
            for ticket in tickets.values():
                self._end_fill(ticket, None)
        if refused:
            self._put_back(refused)
        return not refused

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True

    def tick(self) -> None:
        """Give up what is overdue, in the queue or under way."""
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

    def _begin(self, fill: Fill, ticket: FillTicket, offsets: Sequence[int]) -> bool:
        """Have the tier read into the slots; False where it does not take the read now."""
        if not fill.tier.read(fill.space, fill.key, offsets, fill.deadline, partial(self._on_end, fill)):
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
                fill.tier.used(fill.space, [fill.key])
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
        firsts, sums = np.zeros(ticket.slots.shape, np.uint16), np.zeros(ticket.slots.shape, np.uint64)
        if whole := block is not None and all(block.checksums):
            assert block is not None
            firsts[0], sums[0] = block.first_blocks, block.checksums
        return bool(self._cache.end_fill(ticket, np.array([whole]), firsts, sums))

    def _failed(self, fill: Fill, reason: str) -> None:
        """Nobody waits for it any more, and why it is not there."""
        self.failures[str(reason)] += 1
        miss = MISSES.get(reason, MissReason.TIER_FAILED)
        self._settle(fill, miss)
        if not fill.withdrawn:
            self._withdraw(fill)
            self._cache.note_misses(fill.namespace, fill.space.group, fill.key, miss)

    def not_awaited(self, fill: Fill, why: MissReason) -> None:
        """One of the lookups that count it waits no longer: the tier has it, and that is a miss."""
        if fill.askers:
            fill.askers -= 1
            self._count_found(fill, 1)
        elif fill.found:
            fill.found -= 1
        else:
            return
        fill.namespace.counters.misses[why] += 1

    def _settle(self, fill: Fill, miss: MissReason | None = None) -> None:
        """Count the key for those who asked for it, once: as found, or as a miss."""
        askers, fill.askers = fill.askers, 0
        if not askers:
            return
        if miss is not None:
            fill.namespace.counters.misses[miss] += askers
        else:
            fill.found = askers
            self._count_found(fill, askers)

    def _count_found(self, fill: Fill, count: int) -> None:
        if self.shared:
            fill.namespace.counters.found_shared += count
        else:
            fill.namespace.counters.found_disk += count

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
