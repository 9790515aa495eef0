"""Which blocks are written to a tier, and when: never in the way of a reply, nor of an eviction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

from kvoffd.cache.namespace import Block, BlockState
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.transfers import Demotion, TierTransfers, tier_block
from kvoffd.tiers.tier import AskedTier, Tier, TierResult

MAX_WRITING_BYTES = 16 * 2**20
"""Bound on the bytes that are being written, beside a sixteenth of the pool."""
MAX_LOOKED_AT = 512
"""Blocks that wait, or that a lookup found, that are looked at in one go."""
MAX_BEGUN = 64
"""Blocks whose writing is begun in one go."""
MAX_COLD_BLOCKS = 1024
"""Blocks at the cold end of the policy's order that are looked at in one tick."""
MIN_SWEPT_BLOCKS = 1024
"""Blocks that may wait before those that have left the pool are removed from among them."""
DAY_S = 86_400.0
LEAST_CHANCE, LEAST_OF_MEAN = 0.1, 0.5
"""To come back while a full tier would keep it, of a block that is worth a write: so much, or so much of what those had
lately that were to be written, if that is less."""
SAVED_SHARE = 1 / 8
"""Share of a day's bytes that may be saved up and written at once."""


class _TokenBucket:
    """Fills at a rate up to a bound. What is larger than the bound takes it below 0, which is filled up first."""

    def __init__(self, bytes_per_second: float, bound: float, now: float) -> None:
        self._rate = bytes_per_second
        self._bound = bound
        self._level = bound
        self._filled_at = now

    def level(self, now: float) -> float:
        self._level = min(self._bound, self._level + self._rate * max(0.0, now - self._filled_at))
        self._filled_at = now
        return self._level

    def allows(self, nbytes: int, now: float) -> bool:
        return self.level(now) >= min(nbytes, self._bound)

    def take(self, nbytes: int) -> None:
        self._level -= nbytes


class WriteBudget:
    """Bytes that may be written in a day, since flash wears out; 0 is no limit. No 24 hours see more."""

    def __init__(self, per_day_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        now = clock()
        saved = per_day_bytes * SAVED_SHARE
        self._day = _TokenBucket((per_day_bytes - saved) / DAY_S, saved, now) if per_day_bytes else None

    def take(self, nbytes: int) -> bool:
        """Take so many bytes out of the budget, or none."""
        if self._day is None:
            return True
        if not self._day.allows(nbytes, self._clock()):
            return False
        self._day.take(nbytes)
        return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken and not written."""
        if self._day is not None:
            self._day.take(-nbytes)

    @property
    def spent(self) -> bool:
        """Whether it is the day's bytes that do not suffice for anything now."""
        return self._day is not None and self._day.level(self._clock()) <= 0

    @property
    def left_bytes(self) -> int | None:
        """What the day's budget allows to write now; None where it has no limit."""
        return max(0, int(self._day.level(self._clock()))) if self._day is not None else None


class Demoter:
    """Writes blocks to a tier: first those that wait for it in order, then those at the cold end of the policy's order
    when room in the pool is short.

    They are written ahead of their eviction, so that no eviction waits: a block that is evicted before its turn is
    gone. What the policy expects not to come back does not take the place of others in a tier that is full, unless all
    is to be written (``WriteMode.ALWAYS``).

    Args:
        idle: whether nobody waits for the tier to read.
        engines_busy: whether engines copy. They go first: writing takes memory bandwidth, cores and time of the
            interpreter from them. What ``settings`` call a trickle, or one block, is written all the same.
        left_out: fingerprints of namespaces of which nothing is written.
    """

    def __init__(
        self,
        cache: BlockCache,
        transfers: TierTransfers,
        tier: Tier,
        clock: Callable[[], float],
        settings: TieringSettings,
        idle: Callable[[], bool],
        engines_busy: Callable[[], bool],
        left_out: Collection[bytes] = (),
    ) -> None:
        self._policy = cache.policy
        self._slots = cache.slots
        self._transfers = transfers
        self._tier = tier
        self.mode = settings.mode
        self._is_asked = isinstance(tier, AskedTier)
        self._modes_of_use = {WriteMode.REUSE, WriteMode.ALWAYS} if self._is_asked else {WriteMode.REUSE}
        """In which blocks are offered when they are used; what is asked may have lost what it had."""
        self.budget = WriteBudget(settings.per_day_bytes, clock)
        self._under_way_limit = min(cache.slots.pool_bytes // 16, MAX_WRITING_BYTES)
        """Bytes that may be read out of the pool at once, and are pinned that long."""
        self._cold_bytes = cache.slots.pool_bytes // 16
        """How much of the cold end is kept written, while less than twice of it is free."""
        self._idle = idle
        self._engines_busy = engines_busy
        self._left_out = left_out
        self._trickle_bytes = self._trickle_left = settings.trickle_bytes
        self._waiting: dict[Block, None] = {}
        self._sweep_at = MIN_SWEPT_BLOCKS
        self._cold: dict[Block, None] = {}
        self._not_worth: set[Block] = set()
        """Those at the cold end that are not worth a write."""
        self._under_way: dict[Block, Demotion] = {}
        self.under_way_bytes = 0
        self.written_blocks = 0
        self.written_bytes = 0
        self.over_budget = 0
        """Times that something was to be written and the budget did not allow it."""
        self.spared_blocks = 0
        """Blocks that were to be written and were not worth it."""
        self._least_chance = 0.0
        self._read_bytes = self._offered_bytes = 0.0
        """Of late: what was read, and what was written or spared."""
        self._read_before = 0

    @property
    def waiting_blocks(self) -> int:
        return len(self._waiting)

    def stored(self, blocks: Iterable[Block]) -> None:
        if self.mode is WriteMode.ALWAYS:
            self._waiting.update(dict.fromkeys(blocks))

    def used(self, blocks: Sequence[Block]) -> None:
        """Note blocks of one group that a lookup found."""
        if self.mode not in self._modes_of_use or not blocks:
            return
        index = self._tier.index(blocks[0].namespace.fingerprint, blocks[0].group)
        self._waiting.update(dict.fromkeys([block for block in blocks[:MAX_LOOKED_AT] if block.key not in index]))
        self._waiting.update(dict.fromkeys(blocks[MAX_LOOKED_AT:]))  # looked at when it is their turn

    def stop(self) -> None:
        """Begin nothing any more."""
        self.mode = WriteMode.NEVER
        self._waiting.clear()
        self._cold.clear()

    def tick(self, read_bytes: int) -> None:
        """Look at the cold end, and go on. ``read_bytes``: what was read from the tier so far."""
        self._judge(read_bytes)
        self._cold.clear()
        self._sweep()
        if self.mode is not WriteMode.NEVER and self._slots.free_bytes < 2 * self._cold_bytes:
            nbytes, before = 0, self._not_worth
            self._not_worth = set()
            for block in islice(self._policy.candidates(), MAX_COLD_BLOCKS):
                if not self._in_tier(block):
                    if self._is_worth(block):
                        self._cold[block] = None
                    else:
                        self._not_worth.add(block)
                        if block not in before:
                            self._spare(block)
                nbytes += block.slot_bytes
                if nbytes >= self._cold_bytes:
                    break
        self._trickle_left = self._trickle_bytes
        self.pump()

    def pump(self) -> None:
        """Begin to write what may be written now, of very much a part."""
        busy, some, most = self._engines_busy(), self._take_some(), len(self._under_way) + MAX_BEGUN
        while self.under_way_bytes < self._under_way_limit and (not busy or self._trickle_left > 0):
            if len(self._under_way) == most or (block := next(some, None)) is None:
                return
            nbytes = tier_block(block).nbytes
            if not self.budget.take(nbytes):
                self._over_budget(block)
                return
            demotion = self._transfers.begin_demotion(block)
            if demotion is None:
                continue
            if not self._tier.write(demotion.copy, demotion.offsets, self._on_done(demotion)):
                self.budget.give_back(nbytes)
                self._transfers.end_demotion(demotion)
                if self._under_way:  # there were too many at once
                    self._waiting[block] = None
                return
            self._under_way[block] = demotion
            self.under_way_bytes += nbytes
            self._trickle_left -= nbytes if busy else 0

    def _sweep(self) -> None:
        """Remove waiting blocks that left the pool before their turn: where a tier hangs, no turn comes."""
        if len(self._waiting) > self._sweep_at:
            self._waiting = {block: None for block in self._waiting if block.state is BlockState.READY}
            self._sweep_at = 2 * len(self._waiting) + MIN_SWEPT_BLOCKS

    def _take_some(self) -> Iterator[Block]:
        """Those to be written of the next few, each taken out as it comes. Of a dict the first one is looked for behind
        all that are gone, so that to take one by one out of many would be slow."""
        for blocks in (self._waiting, self._cold):
            if blocks is self._cold and self.mode is WriteMode.REUSE and not self._idle():
                return
            for block in list(islice(blocks, MAX_LOOKED_AT)):
                blocks.pop(block, None)
                if block.state is not BlockState.READY or self._in_tier(block):
                    continue
                if blocks is self._cold or self._is_worth(block):
                    yield block
                else:
                    self._spare(block)
            if blocks:
                return

    def _in_tier(self, block: Block) -> bool:
        """Whether the tier has the block, is being given it, or is not to have it.

        Disks are not worn by what benches store; a store that nodes share has a bench of its own.
        """
        fingerprint = block.namespace.fingerprint
        return (
            block in self._under_way
            or fingerprint in self._left_out
            or (block.namespace.of_bench and not self._is_asked)
            or block.key in self._tier.index(fingerprint, block.group)
        )

    def _is_worth(self, block: Block) -> bool:
        """Whether a block may come back before the tier, which is full, would have evicted it."""
        within = self._tier.full_bytes if self.mode is not WriteMode.ALWAYS else 0
        return not within or self._policy.return_chance(block, within) >= self._least_chance

    def _spare(self, block: Block) -> None:
        self.spared_blocks += 1
        self._offered_bytes += tier_block(block).nbytes

    def _judge(self, read_bytes: int) -> None:
        """See how often what was to be written was read: where nothing comes back often, little is worth a write."""
        self._read_bytes += read_bytes - self._read_before
        self._read_before = read_bytes
        if self._offered_bytes > self._tier.full_bytes > 0:
            self._read_bytes /= 2
            self._offered_bytes /= 2
        mean = self._read_bytes / max(1.0, self._offered_bytes)
        self._least_chance = min(LEAST_CHANCE, LEAST_OF_MEAN * mean)

    def _over_budget(self, block: Block) -> None:
        self.over_budget += 1
        if self.budget.spent:
            self._waiting.clear()  # they will wait again when they are used again, or as the next to be evicted
            self._cold.clear()
        else:
            self._waiting[block] = None

    def _on_done(self, demotion: Demotion) -> Callable[[TierResult], None]:
        def done(result: TierResult) -> None:
            if result is TierResult.DONE:
                self.written_blocks += 1
                self.written_bytes += demotion.copy.nbytes
                self._offered_bytes += demotion.copy.nbytes
            elif result is TierResult.PRESENT:
                self.budget.give_back(demotion.copy.nbytes)
                self._trickle_left += demotion.copy.nbytes
            del self._under_way[demotion.block]
            self.under_way_bytes -= demotion.copy.nbytes
            if not self._transfers.end_demotion(demotion) and result in (TierResult.DONE, TierResult.PRESENT):
                self._tier.forget([demotion.copy.id])
            self.pump()

        return done
