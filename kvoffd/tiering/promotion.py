"""Which of the keys that a lookup asked for are brought up from a tier, and bringing them up.

There is a bounded queue, in which sessions take turns, a bound on the bytes under way, and a deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffd.cache.block_table import FREE, READY
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import FillTicket
from kvoffd.system.turns import Turns
from kvoffd.tiering import TieringSettings
from kvoffd.tiers.tier import Tier, TierBlock, TierResult, TierShard
from kvoffd_proto.messages import COMING, GroupSpec

MISSES = {
    "no_space": MissReason.NO_SPACE,
    "overdue": MissReason.TIER_LATE,
    TierResult.DEADLINE.value: MissReason.TIER_LATE,
    TierResult.CORRUPT.value: MissReason.CORRUPT,
    TierResult.GONE.value: MissReason.EVICTED,
}
"""What a promotion's failure is to those that asked; any other is the disk's failure."""
MAX_PROMOTING_BYTES = 2**30
"""Bound on the pool bytes that promotions hold, beside an eighth of the pool."""
MAX_BEGUN, BEGUN_PER_END = 64, 16
"""Blocks that are begun in one go, and when one has ended and less than half of what may be is under way. Otherwise
they wait for the next go: to make room for a few takes as long as for many. Their slots are taken together, so that
neighbours in the queue are neighbours in the pool."""
SPEED_SAMPLE_S = 0.05
"""Reading is timed over at least this long."""
OLD_SPEED_WEIGHT = 0.7
"""Weight of what was measured before in the speed."""

SETTLED = bytes([READY, *COMING])
"""States of keys that are there, or will be, without anything to be done about it."""


def prefix_run(states: bytes, available: Callable[[int], bool]) -> list[int]:
    """Places of the keys that continue the run of ready ones at the start: those not ready, up to the first gap."""
    places: list[int] = []
    start = len(states) - len(states.lstrip(bytes([READY])))
    for place in range(start, len(states)):
        if states[place] == READY:
            continue
        if not available(place):
            break
        places.append(place)
    return places


def run_end(states: bytes | bytearray) -> int:
    """Keys in the unbroken run from the start that are ready, or will be."""
    return len(states) - len(states.lstrip(SETTLED))


def window_run(states: bytes, spec: GroupSpec, limit: int, available: Callable[[int], bool]) -> list[int]:
    """Places of the keys of the last whole window that ends within the first ``limit`` keys: those not ready.

    An engine with a sliding window needs its last blocks only, and takes the last place where all of them are there;
    one with a recurrent state needs one.
    """
    needed = max(1, -(-spec.window_tokens // spec.tokens_per_block)) if spec.tokens_per_block else len(states)
    run = 0
    for place in range(min(limit, len(states)) - 1, -1, -1):
        run = run + 1 if states[place] == READY or available(place) else 0
        if run == needed or (run and not place):
            return [at for at in range(place, place + run) if states[at] != READY]
    return []


def whole_prefixes_first(
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
        yield number, limit_tokens // tokens if limit_tokens is not None and tokens else len(states[number])


@dataclass(slots=True, eq=False)
class PromotionRequest:
    """A block that a lookup asked for."""

    session: int
    namespace: Namespace
    source: TierBlock
    nbytes: int
    deadline: float
    fill: FillTicket | None = None
    """Its block in the pool, while the tier reads into it: the slots stay until that has ended."""
    forgotten: bool = False
    """The key was invalidated, or its namespace reset, which may be gone by now."""
    askers: int = 0
    """Lookups that count it as found, or as a miss, once it is known whether it comes up."""


class Promoter:
    """Requests of sessions wait in turn; ``pump`` begins as many as the bound on bytes under way allows."""

    def __init__(
        self,
        cache: Cache,
        tier: Tier,
        clock: Callable[[], float],
        settings: TieringSettings,
        *,
        shared: bool = False,
    ) -> None:
        self._cache = cache
        self._shared = shared
        self._tier = tier
        self._clock = clock
        self._under_way_limit = min(cache.slots.pool_bytes // 8, MAX_PROMOTING_BYTES)
        """Pool bytes that promotions may hold at once. A larger block goes alone. What was given up and has not ended,
        as on a device that hangs, may hold as much again: others go on meanwhile."""
        self._requested_limit = cache.slots.pool_bytes * 2 // 3
        """Bytes that may be under way and wait, together; what is asked for beyond is absent. A session has no more
        than three times what it leaves to others."""
        self._deadline_s = settings.deadline_s
        self._requests: dict[tuple[Namespace, int], dict[bytes, PromotionRequest]] = {}
        """By namespace and group, and by key: blocks that come up, unless they were forgotten or are overdue."""
        self._queue: Turns[PromotionRequest] = Turns()
        self._held = Counter[int]()
        """By session, bytes that are under way or wait."""
        self.under_way: dict[PromotionRequest, None] = {}
        self._given_up: set[PromotionRequest] = set()
        """Requests under way that are overdue: the tier may still write into their slots."""
        self._given_up_bytes = 0
        self.queued_bytes = 0
        self.under_way_bytes = 0
        self.promoted_blocks = 0
        self.promoted_bytes = 0
        self.failures: Counter[str] = Counter()
        """Requested blocks that did not come up, by reason: a result of the tier, ``no_space``, ``overdue``."""
        self._stopped = False
        self.bytes_per_second = 0.0
        """Speed at which blocks came up lately; 0 before the first did."""
        self._sample_began = 0.0
        self._sample_bytes = 0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self.under_way or self._given_up)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait or are under way."""
        return len(self._queue) + len(self.under_way)

    @property
    def wait_s(self) -> float:
        """How long it will take until all requested blocks are up, by that speed; 0 where that is not known."""
        awaited = self.queued_bytes + self.under_way_bytes - self._given_up_bytes
        return awaited / self.bytes_per_second if self.bytes_per_second else 0.0

    def requested(self, namespace: Namespace, group: int) -> dict[bytes, PromotionRequest]:
        """The requests of a group, by key. Not to be changed."""
        return self._requests.get((namespace, group), {})

    def request(
        self,
        namespace: Namespace,
        session: int,
        group: int,
        keys: Sequence[bytes],
        places: Iterable[int],
        states: memoryview | bytearray,
        mark: int,
        askers: Callable[[bytes], int],
    ) -> None:
        """Queue the blocks of keys at some places that are not queued yet, up to the first that cannot be brought up.

        A lookup may ask for thousands at once. What comes up is marked in ``states``. ``askers``: how many lookups are
        to count a key.
        """
        sizes = [namespace.shard_bytes(rank) for rank in range(namespace.world_size)]
        lengths = [one[group] if one is not None else None for one in sizes]
        there = self._tier.readable(namespace.fingerprint, group)
        requested = self._requests.setdefault((namespace, group), {})
        nbytes, deadline = namespace.block_bytes(group), self._clock() + self._deadline_s
        for place in places:
            key = keys[place]
            if key not in requested:  # what is requested is WRITING once it is being read
                source = there.get(key) if states[place] == FREE else None
                if source is None or [shard.length for shard in source.shards] != lengths:
                    return
                held = self.queued_bytes + self.under_way_bytes
                if held and held + nbytes + self._held[session] // 3 > self._requested_limit:
                    return
                requested[key] = request = PromotionRequest(session, namespace, source, nbytes, deadline)
                self._enter_queue(request)
            requested[key].askers += askers(key)
            states[place] = mark

    def forget(self, namespace: Namespace, group: int, key: bytes) -> None:
        """Withdraw a request. What is under way ends by itself and leaves nothing, if the cache dropped it."""
        request = self.requested(namespace, group).get(key)
        if request is not None:
            self._settle(request, MissReason.INVALIDATED)
            request.forgotten = True
            self._withdraw(request)
            self._leave_queue(request)

    def forget_all(self, namespace: Namespace) -> None:
        for group in range(len(namespace.groups)):
            for key in list(self.requested(namespace, group)):
                self.forget(namespace, group, key)

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Withdraw all requests of a namespace, which will never be asked for again."""
        self.forget_all(namespace)
        for group in range(len(namespace.groups)):
            self._requests.pop((namespace, group), None)

    def pump(self, most: int = MAX_BEGUN) -> None:
        """Begin what may begin now, of very much a part."""
        while not self._stopped and most > 0 and (batch := self._next_batch(most)):
            most -= len(batch)
            self._queue.end_turn(batch[0].session)
            namespace, group = batch[0].namespace, batch[0].source.id.group
            keys = b"".join([request.source.id.key for request in batch])
            fill = self._cache.begin_fill(namespace, group, keys)
            states, _ = self._cache.blocks.find(fill.group.number, keys, namespace.key_bytes)
            offsets = self._cache.slots.offsets(fill.slots).tolist()
            begun = {number: (fill.slots[at : at + 1], offsets[at]) for at, number in enumerate(fill.keys)}
            full = False
            for number, request in enumerate(batch):
                self._leave_queue(request)
                if number not in begun:  # the pool has it by now, or no space
                    self._withdraw(request)
                    if states[number] == FREE:
                        self._failed(request, "no_space")
                    self._settle(request)
                    continue
                slots, places = begun[number]
                own = FillTicket(fill.group, [0], slots)
                full = full or not self._begin(request, own, places)
                if full and request.fill is None:
                    self._put_back(request, own)
            if full:
                return

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True

    def tick(self) -> None:
        """Give up what is overdue, in the queue or under way."""
        now = self._clock()
        for request in [one for one in self._queue if one.deadline <= now]:
            self._leave_queue(request)
            self._withdraw(request)
            self._failed(request, "overdue")
        for request in [one for one in self.under_way if one.deadline <= now and one not in self._given_up]:
            # The tier may still write into its slots: they stay until it says that it does not.
            self._given_up.add(request)
            self._given_up_bytes += request.nbytes
            self._withdraw(request)
            self._failed(request, "overdue")
            assert request.fill is not None
            self._cache.drop_unfinished(request.fill, MissReason.TIER_LATE)
        self.pump()

    def _next_batch(self, most: int) -> list[PromotionRequest]:
        """The next requests of one session and group, as many as may be under way now."""
        first = next(self._queue.turn(), None)
        room = self._under_way_limit - self.under_way_bytes + min(self._given_up_bytes, self._under_way_limit)
        batch: list[PromotionRequest] = []
        for request in self._queue.turn():
            assert first is not None
            same = request.namespace is first.namespace and request.source.id.group == first.source.id.group
            alone = not (batch or self.under_way)
            if not same or len(batch) == most or (request.nbytes > room and not alone):
                break
            batch.append(request)
            room -= request.nbytes
        return batch

    def _begin(self, request: PromotionRequest, fill: FillTicket, offsets: Sequence[int]) -> bool:
        """Have the tier read into the slots; False where it does not take the read now."""
        if not self._tier.read(request.source.id, offsets, request.deadline, self._on_done(request)):
            return False
        if not self.under_way:
            self._sample_began, self._sample_bytes = self._clock(), 0
        request.fill = fill
        self.under_way[request] = None
        self.under_way_bytes += request.nbytes
        self._hold(request, request.nbytes)
        return True

    def _put_back(self, request: PromotionRequest, fill: FillTicket) -> None:
        """Queue a request again whose read the tier did not take, unless the block has left the tier or that hangs."""
        self._end_fill(fill, ())
        fingerprint, group, key = request.source.id
        if key in self._tier.readable(fingerprint, group):
            self._enter_queue(request)
        else:
            self._withdraw(request)
            hangs = key in self._tier.index(fingerprint, group)
            self._failed(request, (TierResult.DEADLINE if hangs else TierResult.GONE).value)

    def _on_done(self, request: PromotionRequest) -> Callable[[TierResult], None]:
        def done(result: TierResult) -> None:
            self._end(request, result)
            if 2 * self.under_way_bytes <= self._under_way_limit:
                self.pump(BEGUN_PER_END)

        return done

    def _end(self, request: PromotionRequest, result: TierResult) -> None:
        assert request.fill is not None
        shards = self._tier.contents(request.source).shards if result is TierResult.DONE else ()
        del self.under_way[request]
        self.under_way_bytes -= request.nbytes
        self._hold(request, -request.nbytes)
        self._withdraw(request)
        if self._end_fill(request.fill, shards):
            self.promoted_blocks += 1
            self.promoted_bytes += request.source.nbytes
            self._settle(request)
        elif result is not TierResult.DONE and request not in self._given_up:
            self._failed(request, result.value)
        if request in self._given_up:
            self._given_up.remove(request)
            self._given_up_bytes -= request.nbytes
        if result is TierResult.DONE:
            self._measure_speed(request.source.nbytes)
        elif result in (TierResult.DEADLINE, TierResult.FAILED):  # no more than this came since the last one did
            speed = request.source.nbytes / max(self._clock() - self._sample_began, 1e-4)
            self.bytes_per_second = min(self.bytes_per_second or speed, speed)

    def _end_fill(self, fill: FillTicket, shards: Sequence[TierShard]) -> bool:
        """End it; ``shards``: what was read, nothing where that is not all there. True where the block is READY."""
        whole = bool(shards) and all(shard.checksum for shard in shards)
        firsts, sums = np.zeros(fill.slots.shape, np.uint16), np.zeros(fill.slots.shape, np.uint64)
        if whole:
            firsts[0], sums[0] = [shard.first_block for shard in shards], [shard.checksum for shard in shards]
        return bool(self._cache.end_fill(fill, np.array([whole]), firsts, sums))

    def _failed(self, request: PromotionRequest, reason: str) -> None:
        self.failures[reason] += 1
        source, miss = request.source.id, MISSES.get(reason, MissReason.TIER_FAILED)
        self._settle(request, miss)
        if not request.forgotten:
            self._cache.note_misses(request.namespace, source.group, source.key, miss)

    def _settle(self, request: PromotionRequest, miss: MissReason | None = None) -> None:
        """Count the key for those who asked for it, once: as found, or as a miss."""
        counters, askers = request.namespace.counters, request.askers
        request.askers = 0
        if not askers:
            return
        if miss is not None:
            counters.misses[miss] += askers
        elif self._shared:
            counters.found_shared += askers
        else:
            counters.found_disk += askers

    def _measure_speed(self, nbytes: int) -> None:
        now = self._clock()
        self._sample_bytes += nbytes
        seconds = now - self._sample_began
        if seconds >= SPEED_SAMPLE_S or not self.under_way:
            speed, before = self._sample_bytes / max(seconds, 1e-4), self.bytes_per_second
            self.bytes_per_second = OLD_SPEED_WEIGHT * before + (1 - OLD_SPEED_WEIGHT) * speed if before else speed
            self._sample_began, self._sample_bytes = now, 0

    def _enter_queue(self, request: PromotionRequest) -> None:
        self._queue.put(request.session, request)
        self.queued_bytes += request.nbytes
        self._hold(request, request.nbytes)

    def _leave_queue(self, request: PromotionRequest) -> None:
        if self._queue.remove(request.session, request):
            self.queued_bytes -= request.nbytes
            self._hold(request, -request.nbytes)

    def _hold(self, request: PromotionRequest, nbytes: int) -> None:
        self._held[request.session] += nbytes
        if not self._held[request.session]:
            del self._held[request.session]

    def _withdraw(self, request: PromotionRequest) -> None:
        key, requests = request.source.id.key, self.requested(request.namespace, request.source.id.group)
        if requests.get(key) is request:
            del requests[key]
