"""Which blocks are written to a tier, and when: never in the way of a reply, nor of an eviction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from kvoffd.cache.block_table import CORRUPT, READY, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.policy import Group
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers.tier import AskedTier, Tier, TierBlock, TierKey, TierResult, TierShard

_Noted: TypeAlias = dict[int, int]
"""Blocks, with the generation of their records: by its turn a number may be another block's."""

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


@dataclass(slots=True, eq=False)
class Write:
    """A block that is being written to a tier. It is pinned, so that its number and bytes stay its own."""

    group: Group
    block: BlockIds
    copy: TierBlock
    offsets: list[int]
    """By rank, the pool offset in bytes of the slot to be read."""

    @property
    def number(self) -> int:
        return int(self.block[0])


def writes_of(cache: Cache, group: Group, blocks: BlockIds) -> list[Write]:
    """How READY blocks are to be written; without those that lack a checksum to keep with them, or have wrong bytes."""
    slots = cache.blocks.slots(blocks, len(group.sizes))
    records = cache.table.records[slots]
    bad = ((records["checksum"] == 0) | (cache.blocks.shard[slots] & CORRUPT != 0)).any(axis=1)
    fingerprint, number, keys = group.namespace.fingerprint, group.group, cache.blocks.keys(blocks, group.key_bytes)
    columns = (bad, records["first_block"], records["checksum"], cache.slots.offsets(slots))
    rows = zip(group.namespace.split(number, keys), *(column.tolist() for column in columns), strict=True)
    return [
        Write(
            group,
            blocks[at : at + 1],
            TierBlock(TierKey(fingerprint, number, key), tuple(map(TierShard, group.lengths, firsts, sums))),
            offsets,
        )
        for at, (key, is_bad, firsts, sums, offsets) in enumerate(rows)
        if not is_bad
    ]


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
        cache: Cache,
        tier: Tier,
        clock: Callable[[], float],
        settings: TieringSettings,
        idle: Callable[[], bool],
        engines_busy: Callable[[], bool],
        left_out: Collection[bytes] = (),
    ) -> None:
        self._cache = cache
        self._generations = cache.table.records["generation"]
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
        self._waiting: _Noted = {}
        self._sweep_at = MIN_SWEPT_BLOCKS
        self._cold: _Noted = {}
        self._not_worth: set[tuple[int, int]] = set()
        """Those at the cold end that are not worth a write."""
        self.under_way: dict[int, Write] = {}
        """By block."""
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

    def stored(self, blocks: BlockIds) -> None:
        if self.mode is WriteMode.ALWAYS:
            self._wait(blocks)

    def used(self, group: Group, blocks: BlockIds) -> None:
        """Note blocks that a lookup found."""
        if self.mode in self._modes_of_use:
            some = blocks[:MAX_LOOKED_AT]
            if self._tier.index(group.namespace.fingerprint, group.group):
                some = np.array([block for block, _ in self._lacking(group, some)], np.uint32)
            self._wait(some)
            self._wait(blocks[MAX_LOOKED_AT:])  # looked at when it is their turn

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
        if self.mode is not WriteMode.NEVER and self._cache.slots.free_bytes < 2 * self._cold_bytes:
            self._look_at_cold_end()
        self._trickle_left = self._trickle_bytes
        self.pump()

    def _look_at_cold_end(self) -> None:
        left, left_bytes, before = MAX_COLD_BLOCKS, self._cold_bytes, self._not_worth
        self._not_worth = set()
        for batch in self._cache.policy.candidates():
            for group, alike in self._cache.by_group(batch):
                some = alike[: max(0, min(left, -(-left_bytes // group.block_bytes)))]
                left -= len(some)
                if not group.dead:
                    left_bytes -= len(some) * group.block_bytes
                lacking = self._lacking(group, some)
                for (block, _), worth in zip(lacking, self._are_worth(group, lacking), strict=True):
                    generation = int(self._generations[block])
                    if worth:
                        self._cold[block] = generation
                        continue
                    self._not_worth.add((block, generation))
                    if (block, generation) not in before:
                        self._spare(group)
            if left <= 0 or left_bytes <= 0:
                return

    def pump(self) -> None:
        """Begin to write what may be written now, of very much a part, once there is room for more than a few."""
        if 2 * self.under_way_bytes > self._under_way_limit:
            return
        begun: list[BlockIds] = []
        try:
            self._begin_some(begun, self._engines_busy())
        finally:
            if begun:
                self._cache.pin(np.concatenate(begun))

    def _begin_some(self, begun: list[BlockIds], busy: bool) -> None:
        for waiting in (self._waiting, self._cold):
            if waiting is self._cold and self.mode is WriteMode.REUSE and not self._idle():
                return
            for _ in range(0, MAX_LOOKED_AT, MAX_BEGUN):
                if not waiting or (busy and self._trickle_left <= 0):
                    break
                for write in self._choose(waiting):
                    full = self.under_way_bytes >= self._under_way_limit or (busy and self._trickle_left <= 0)
                    if full or len(begun) == MAX_BEGUN or not self._begin(write, waiting.pop(write.number), busy):
                        return
                    begun.append(write.block)
            if waiting:
                return

    def _choose(self, waiting: _Noted) -> list[Write]:
        """Those of the next few that are to be written; the others do not wait any more."""
        some = dict(islice(waiting.items(), MAX_BEGUN))
        chosen: dict[int, Write] = {}
        for group, alike in self._cache.by_group(self._still_ready(some)):
            lacking = self._lacking(group, alike)
            # What is at the cold end was judged there.
            worth = self._are_worth(group, lacking) if waiting is self._waiting else [True] * len(lacking)
            wanted = [block for (block, _), is_worth in zip(lacking, worth, strict=True) if is_worth]
            for _ in range(len(lacking) - len(wanted)):
                self._spare(group)
            chosen |= {write.number: write for write in writes_of(self._cache, group, np.array(wanted, np.uint32))}
        for block in some:
            if block not in chosen:
                del waiting[block]
        return [chosen[block] for block in some if block in chosen]

    def _begin(self, write: Write, generation: int, busy: bool) -> bool:
        """Begin to write a block; False where no more can be begun now."""
        nbytes = write.copy.nbytes
        if not self.budget.take(nbytes):
            self.over_budget += 1
            if self.budget.spent:
                self._waiting.clear()  # they will wait again when they are used again, or as the next to be evicted
                self._cold.clear()
            else:
                self._waiting[write.number] = generation
            return False
        if not self._tier.write(write.copy, write.offsets, self._on_done(write)):
            self.budget.give_back(nbytes)
            if self.under_way:  # there were too many at once
                self._waiting[write.number] = generation
            return False
        self.under_way[write.number] = write
        self.under_way_bytes += nbytes
        self._trickle_left -= nbytes if busy else 0
        return True

    def _wait(self, blocks: BlockIds) -> None:
        self._waiting.update(zip(blocks.tolist(), self._generations[blocks].tolist(), strict=True))

    def _still_ready(self, noted: _Noted) -> BlockIds:
        blocks = np.fromiter(noted, np.uint32, len(noted))
        same = self._generations[blocks] == np.fromiter(noted.values(), np.uint64, len(noted))
        ready: BlockIds = blocks[same & (self._cache.blocks.state[blocks] == READY)]
        return ready

    def _sweep(self) -> None:
        """Remove waiting blocks that left the pool before their turn: where a tier hangs, no turn comes."""
        if len(self._waiting) > self._sweep_at:
            ready = set(self._still_ready(self._waiting).tolist())
            self._waiting = {block: noted for block, noted in self._waiting.items() if block in ready}
            self._sweep_at = 2 * len(self._waiting) + MIN_SWEPT_BLOCKS

    def _lacking(self, group: Group, blocks: BlockIds) -> list[tuple[int, bytes]]:
        """The blocks, and their keys, that the tier does not have, is not being given, and is to have.

        Disks are not worn by what benches store; a store that nodes share has a bench of its own.
        """
        namespace = group.namespace
        bench = namespace.of_bench and not self._is_asked
        if group.dead or bench or namespace.fingerprint in self._left_out:
            return []
        index = self._tier.index(namespace.fingerprint, group.group)
        keys = namespace.split(group.group, self._cache.blocks.keys(blocks, group.key_bytes))
        pairs = zip(blocks.tolist(), keys, strict=True)
        return [(block, key) for block, key in pairs if key not in index and block not in self.under_way]

    def _are_worth(self, group: Group, lacking: Sequence[tuple[int, bytes]]) -> list[bool]:
        """Whether each may come back before the tier, which is full, would have evicted it."""
        within = self._tier.full_bytes if self.mode is not WriteMode.ALWAYS else 0
        if not within or not lacking:
            return [True] * len(lacking)
        chances = self._cache.policy.chance(group, b"".join([key for _, key in lacking]), within)
        return [chance >= self._least_chance for chance in chances.tolist()]

    def _spare(self, group: Group) -> None:
        self.spared_blocks += 1
        self._offered_bytes += sum(group.lengths)

    def _judge(self, read_bytes: int) -> None:
        """See how often what was to be written was read: where nothing comes back often, little is worth a write."""
        self._read_bytes += read_bytes - self._read_before
        self._read_before = read_bytes
        if self._offered_bytes > self._tier.full_bytes > 0:
            self._read_bytes /= 2
            self._offered_bytes /= 2
        mean = self._read_bytes / max(1.0, self._offered_bytes)
        self._least_chance = min(LEAST_CHANCE, LEAST_OF_MEAN * mean)

    def _on_done(self, write: Write) -> Callable[[TierResult], None]:
        nbytes = write.copy.nbytes

        def done(result: TierResult) -> None:
            if result is TierResult.DONE:
                self.written_blocks += 1
                self.written_bytes += nbytes
                self._offered_bytes += nbytes
            elif result is TierResult.PRESENT:
                self.budget.give_back(nbytes)
                self._trickle_left += nbytes
            del self.under_way[write.number]
            self.under_way_bytes -= nbytes
            dropped = self._cache.blocks.state[write.number] != READY or write.group.dead
            self._cache.unpin(write.block)
            if dropped and result in (TierResult.DONE, TierResult.PRESENT):  # it must not come back
                self._tier.forget([write.copy.id])
            self.pump()

        return done
