"""Brings blocks up from a tier when they were asked for: a bounded queue, a bounded number under way, a deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvoffd.cache.namespace import Namespace
from kvoffd.tiering.transfers import Promotion, TierTransfers
from kvoffd.tiers.tier import Tier, TierBlock, TierResult

MAX_BATCH = 64
"""Blocks whose slots are taken together, so that neighbours in the queue are neighbours in the pool."""
SPEED_SAMPLE_S = 0.05
"""Reading is timed over at least this long."""
SPEED_MEMORY = 0.7
"""Weight of what was measured before."""


@dataclass(slots=True, eq=False)
class PromotionRequest:
    """A block that was asked for."""

    namespace: Namespace
    source: TierBlock
    nbytes: int
    """Of its slots in the pool."""
    deadline: float
    promotion: Promotion | None = None
    """None while it waits."""


class Promoter:
    """What is wanted waits in order; ``pump`` begins as much as the bound on bytes under way allows.

    Args:
        under_way_bytes: pool bytes that promotions may hold at once. A larger block goes alone. What was given up and
            has not ended, as on a device that hangs, may hold as much again: others go on meanwhile.
        wanted_bytes: bytes that may be under way and wait, together; what is asked for beyond is absent.
        deadline_s: what is not up after so many seconds is absent again.
    """

    def __init__(
        self,
        exchange: TierTransfers,
        tier: Tier,
        clock: Callable[[], float],
        under_way_bytes: int,
        wanted_bytes: int,
        deadline_s: float,
    ) -> None:
        self._exchange = exchange
        self._tier = tier
        self._clock = clock
        self._under_way_limit = under_way_bytes
        self._wanted_limit = wanted_bytes
        self._deadline_s = deadline_s
        self._wanted: dict[tuple[Namespace, int], dict[bytes, PromotionRequest]] = {}
        self._queue: dict[PromotionRequest, None] = {}
        self._moving: dict[PromotionRequest, None] = {}
        self._given_up: set[PromotionRequest] = set()
        self._given_up_bytes = 0
        self.queued_bytes = 0
        self.under_way_bytes = 0
        self.promoted_blocks = 0
        self.promoted_bytes = 0
        self.failures: Counter[str] = Counter()
        """Blocks that were wanted and did not come up, by reason: a result of the tier, ``no_room``, ``overdue``."""
        self._stopped = False
        self._speed = 0.0
        self._sample_began = 0.0
        self._sample_bytes = 0

    @property
    def busy(self) -> bool:
        """Whether anything is wanted and not there yet."""
        return bool(self._queue or self._moving or self._given_up)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that are wanted, and neither there nor given up."""
        return len(self._queue) + len(self._moving)

    @property
    def bytes_per_second(self) -> float:
        """Speed at which blocks came up lately; 0 before the first did."""
        return self._speed

    @property
    def wait_s(self) -> float:
        """How long it will take until all that is wanted is up, by that speed; 0 where that is not known."""
        awaited = self.queued_bytes + self.under_way_bytes - self._given_up_bytes
        return awaited / self._speed if self._speed else 0.0

    def coming(self, namespace: Namespace, group: int) -> dict[bytes, PromotionRequest]:
        """By key, what is wanted of a group. Not to be changed."""
        return self._wanted.get((namespace, group), {})

    def want(self, namespace: Namespace, source: TierBlock) -> bool:
        """Queue a block that the pool does not have. False where it cannot be brought up now."""
        group = source.id.group
        if source.id.key in self.coming(namespace, group):
            return True
        if not self._exchange.fits(namespace, source):
            return False
        nbytes = sum(namespace.slot_bytes(rank, group) for rank in range(namespace.world_size))
        held = self.queued_bytes + self.under_way_bytes
        if held and held + nbytes > self._wanted_limit:
            return False
        wanted = PromotionRequest(namespace, source, nbytes, self._clock() + self._deadline_s)
        self._wanted.setdefault((namespace, group), {})[source.id.key] = wanted
        self._queue[wanted] = None
        self.queued_bytes += nbytes
        return True

    def forget(self, namespace: Namespace, group: int, key: bytes) -> None:
        """It is not wanted any more. What is under way ends by itself and leaves nothing, if the cache dropped it."""
        wanted = self._wanted.get((namespace, group), {}).get(key)
        if wanted is not None:
            self._unlist(wanted)
            if wanted in self._queue:
                self._leave_queue(wanted)

    def forget_all(self, namespace: Namespace) -> None:
        """Nothing of the namespace is wanted any more."""
        for (space, group), listed in list(self._wanted.items()):
            if space is namespace:
                for key in list(listed):
                    self.forget(namespace, group, key)

    def pump(self) -> None:
        """Begin what may begin now."""
        while self._queue and not self._stopped:
            batch, namespace, group = self._next_batch()
            if not batch:
                return
            begun = {
                promotion.source.id.key: promotion
                for promotion in self._exchange.begin_promotion(namespace, group, [one.source for one in batch])
            }
            full = False
            for wanted in batch:
                self._leave_queue(wanted)
                promotion = begun.get(wanted.source.id.key)
                if promotion is None:  # the pool has it by now, or no room
                    self._unlist(wanted)
                    if wanted.source.id.key not in namespace.index[group]:
                        self.failures["no_room"] += 1
                    continue
                full = full or not self._begin(wanted, promotion)
                if full and wanted.promotion is None:
                    self._put_back(wanted, promotion)
            if full:
                return

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopped = True

    def tick(self) -> None:
        """Give up what is overdue, in the queue or under way."""
        now = self._clock()
        for wanted in [one for one in self._queue if one.deadline <= now]:
            self._leave_queue(wanted)
            self._unlist(wanted)
            self.failures["overdue"] += 1
        for wanted in [one for one in self._moving if one.deadline <= now and one not in self._given_up]:
            # The tier may still write into its slots: they stay until it says that it does not.
            self._given_up.add(wanted)
            self._given_up_bytes += wanted.nbytes
            self._unlist(wanted)
            self.failures["overdue"] += 1
            assert wanted.promotion is not None
            self._exchange.give_up(wanted.promotion)
        self.pump()

    # --- inside ----------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[list[PromotionRequest], Namespace, int]:
        """The first that wait, of one group, as many as may be under way now."""
        first = next(iter(self._queue))
        room = self._under_way_limit - self.under_way_bytes + min(self._given_up_bytes, self._under_way_limit)
        batch: list[PromotionRequest] = []
        for wanted in self._queue:
            same = wanted.namespace is first.namespace and wanted.source.id.group == first.source.id.group
            alone = not (batch or self._moving)
            if not same or len(batch) == MAX_BATCH or (wanted.nbytes > room and not alone):
                break
            batch.append(wanted)
            room -= wanted.nbytes
        return batch, first.namespace, first.source.id.group

    def _begin(self, wanted: PromotionRequest, promotion: Promotion) -> bool:
        """Have the tier read into the slots; False where it does not now."""
        source = wanted.source
        if not self._tier.read(source.id, promotion.offsets, wanted.deadline, self._on_done(wanted)):
            return False
        if not self._moving:
            self._sample_began, self._sample_bytes = self._clock(), 0
        wanted.promotion = promotion
        self._moving[wanted] = None
        self.under_way_bytes += wanted.nbytes
        return True

    def _put_back(self, wanted: PromotionRequest, promotion: Promotion) -> None:
        """The tier does not read it now: it waits for its turn again, unless it has left the tier or that hangs."""
        source = wanted.source
        self._exchange.end_promotion(promotion, ok=False)
        fingerprint, group, key = source.id
        if key in self._tier.readable(fingerprint, group):
            self._queue[wanted] = None
            self.queued_bytes += wanted.nbytes
        else:
            self._unlist(wanted)
            hangs = key in self._tier.index(fingerprint, group)
            self.failures[(TierResult.DEADLINE if hangs else TierResult.GONE).value] += 1

    def _on_done(self, wanted: PromotionRequest) -> Callable[[TierResult], None]:
        def done(result: TierResult) -> None:
            self._end(wanted, result)
            self.pump()

        return done

    def _end(self, wanted: PromotionRequest, result: TierResult) -> None:
        assert wanted.promotion is not None
        del self._moving[wanted]
        self.under_way_bytes -= wanted.nbytes
        self._unlist(wanted)
        if self._exchange.end_promotion(wanted.promotion, result is TierResult.DONE):
            self.promoted_blocks += 1
            self.promoted_bytes += wanted.source.nbytes
        elif result is not TierResult.DONE and wanted not in self._given_up:
            self.failures[result.value] += 1
        if wanted in self._given_up:
            self._given_up.remove(wanted)
            self._given_up_bytes -= wanted.nbytes
        if result is TierResult.DONE:
            self._time(wanted.source.nbytes)

    def _time(self, nbytes: int) -> None:
        now = self._clock()
        self._sample_bytes += nbytes
        seconds = now - self._sample_began
        if seconds >= SPEED_SAMPLE_S or not self._moving:
            speed = self._sample_bytes / max(seconds, 1e-4)
            self._speed = SPEED_MEMORY * self._speed + (1 - SPEED_MEMORY) * speed if self._speed else speed
            self._sample_began, self._sample_bytes = now, 0

    def _leave_queue(self, wanted: PromotionRequest) -> None:
        del self._queue[wanted]
        self.queued_bytes -= wanted.nbytes

    def _unlist(self, wanted: PromotionRequest) -> None:
        listed = self._wanted.get((wanted.namespace, wanted.source.id.group))
        if listed is not None and listed.get(wanted.source.id.key) is wanted:
            del listed[wanted.source.id.key]
