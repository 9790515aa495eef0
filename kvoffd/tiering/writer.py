"""Which blocks are written to a tier, and when: in the background, ahead of their eviction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import CORRUPT, READY, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.policy import Group
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers.header import Block, BlockGroup, make_block_group
from kvoffd.tiers.tier import Result, Tier

_Noted: TypeAlias = dict[int, int]
"""Blocks, with the generation of their records: by its turn a number may be another block's."""

LATE, BUDGET, UNLIKELY = "late", "budget", "unlikely"
"""Why a block left the pool without having been written: before its turn, as engines copy or the tier is slow or away;
the day's bytes are spent; the tier is full, and little of its kind comes back."""

MAX_WRITING_BYTES = 16 * 2**20
"""Bound on the bytes that are being written, besides a sixteenth of the pool."""
MAX_WAITING = 1 << 17
"""Blocks that may wait to be written; later ones wait once others have left."""
WAITING_BYTES = 100
"""Memory of such a block, measured."""
MAX_LOOKED_AT = 512
"""Blocks that wait, or that a lookup found, that are looked at in one go."""
MAX_BEGUN = 64
"""Blocks whose writing is begun in one go."""
COLD_PART = 8
"""What is next to be evicted, one part of the pool in this many, is looked at once less than that is free."""
MAX_COLD_BLOCKS = 1024
"""Bound on these blocks in one tick."""
DAY_S = 86_400.0
STAYS = 2.0, 3.0, 4.0, 6.0, 8.0
"""How long what is written may stay on a full tier, in times of how long it would if all were written: about half of it
is, or less."""
WORTH = 0.99
"""The fewest writes are chosen with at least this part of the most hits."""
SAMPLE = 2048
"""Blocks by which that is chosen, the latest ones."""
WATCHED = 4
"""Chances are believed for a time if the policy has watched this many times as long."""
SAVED_SHARE = 1 / 8
"""Share of a day's bytes that may be saved up and written at once."""
NOTED_AHEAD_SHARE = 1 / 8
"""Share of those bytes that is noted as spent in advance."""


class WriteBudget:
    """Bytes that may be written in a day, since flash wears out; 0 is no limit. No 24 hours see more, except what fills
    a tier for the first time.

    What is larger than what may be saved up takes it below 0, which is filled up first.
    """

    def __init__(self, per_day_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._bound = self._level = per_day_bytes * SAVED_SHARE
        self._rate = (per_day_bytes - self._bound) / DAY_S
        self._filled_at = clock()
        self._noted, self._noted_at = 0.0, clock()
        self.first_filling_bytes = 0
        """Bytes that may be written besides: what tiers lack that were never full."""

    def restore(self, spent_bytes: float, seconds: float) -> None:
        """Go on from what an earlier daemon had spent so many seconds ago."""
        self._level = min(self._bound, self._bound - spent_bytes + self._rate * max(0.0, seconds))

    def to_note(self) -> float | None:
        """Bytes that a next daemon is to believe spent now, where it knows of less: somewhat more than there are, so
        that it spends none of them twice after a kill."""
        now, spent = self._clock(), self.spent_bytes
        if spent <= self._noted - self._rate * (now - self._noted_at):
            return None
        self._noted, self._noted_at = spent + self._bound * NOTED_AHEAD_SHARE, now
        return self._noted

    def take(self, nbytes: int) -> bool:
        """Take so many bytes out of the budget, or none."""
        if not self.allows(nbytes):
            return False
        if self.first_filling_bytes:
            self.first_filling_bytes = max(0, self.first_filling_bytes - nbytes)
        else:
            self._level -= nbytes
        return True

    def allows(self, nbytes: int) -> bool:
        """Whether as many bytes may be written now."""
        return bool(self.first_filling_bytes) or not self._bound or self._now() >= min(nbytes, self._bound)

    def give_back(self, nbytes: int) -> None:
        """Return bytes that were taken and not written."""
        if self.first_filling_bytes:
            self.first_filling_bytes += nbytes
        else:
            self._level += nbytes

    @property
    def left_share(self) -> float:
        """What is left of what may be saved up; 1 where nothing bounds it now."""
        return max(0.0, self._now() / self._bound) if self._bound and not self.first_filling_bytes else 1.0

    @property
    def spent_bytes(self) -> float:
        """What is not saved up again; 0 where there is no limit."""
        return self._bound - self._now() if self._bound else 0.0

    @property
    def left_bytes(self) -> int | None:
        """What it allows to write now; None where it has no limit."""
        return max(0, int(self._now())) + self.first_filling_bytes if self._bound else None

    def _now(self) -> float:
        now = self._clock()
        self._level = min(self._bound, self._level + self._rate * max(0.0, now - self._filled_at))
        self._filled_at = now
        return self._level


@dataclass(slots=True, eq=False)
class BlockWrite:
    """A block that is being written to a tier. ``pump`` pins it before the loop does anything else, so that its number
    and bytes stay its own."""

    group: Group
    block: BlockIds
    copy: Block
    offsets: list[int]
    """By rank, the pool offset in bytes of the slot to be read."""

    @property
    def number(self) -> int:
        return int(self.block[0])


def block_group_of(group: Group) -> BlockGroup:
    """As it is now. It has no lengths while a rank of the world has not registered."""
    return make_block_group(group.namespace.fingerprint, group.namespace.generation, group.index, group.lengths)


def writes_of(cache: Cache, group: Group, block_group: BlockGroup, blocks: BlockIds) -> list[BlockWrite]:
    """How READY blocks are to be written; without those that lack a checksum to keep with them, or have wrong bytes."""
    slots = cache.blocks.slots(blocks, len(group.sizes))
    records = cache.table.records[slots]
    bad = ((records["checksum"] == 0) | (cache.blocks.shard[slots] & CORRUPT != 0)).any(axis=1)
    keys = cache.blocks.split_keys(blocks, group.key_bytes)
    columns = bad, records["first_block"], records["checksum"], cache.slots.offsets(slots)
    return [
        BlockWrite(group, blocks[at : at + 1], Block(block_group, key, tuple(firsts), tuple(sums)), offsets)
        for at, (key, is_bad, firsts, sums, offsets) in enumerate(
            zip(keys, *(column.tolist() for column in columns), strict=True)
        )
        if not is_bad
    ]


class Selection:
    """Which part of what leaves the pool is worth a write to a full tier: the likeliest to come back.

    The less is written, the longer it stays, and the more of it is asked for in that time. So the chances of the latest
    blocks are taken for each of ``STAYS``, and the hits added up of as large a part of them, the likeliest, as can stay
    as long.
    """

    def __init__(self) -> None:
        self._chances = np.empty((0, len(STAYS)))
        self._unseen = 0
        """Number of these chances that came since the last choice."""
        self._accessed = self._offered = 0.0
        """Bytes of late: what was asked for, and what left the pool for the tier or was left out."""
        self._stay = 0
        self._least = 0.0

    def note_traffic(self, accessed_bytes: int, tier_bytes: int) -> None:
        """Note what was asked for since the last call."""
        self._accessed += accessed_bytes
        if self._accessed > WATCHED * tier_bytes:
            self._accessed, self._offered = self._accessed / 2, self._offered / 2

    def note_present(self, nbytes: int) -> None:
        """Note a block of these that another node had written."""
        self._offered = max(0.0, self._offered - nbytes)

    def lifetimes(self, tier_bytes: int) -> list[int]:
        """For each of ``STAYS``, the bytes that are asked for while a block stays."""
        each = tier_bytes * max(1.0, self._accessed / max(1.0, self._offered))
        return [int(each * stay) for stay in STAYS]

    def note(self, chances: npt.NDArray[np.float64], nbytes: int, believed: int) -> None:
        """Note blocks of this size that are next to be evicted: their chances to come back within ``lifetimes``, of
        which the first ones are ``believed``."""
        self._offered += nbytes * len(chances)
        self._chances = np.concatenate([self._chances, chances])[-SAMPLE:]
        self._unseen += len(chances)
        if 16 * self._unseen >= len(self._chances):
            self._choose(max(1, believed))

    def _choose(self, believed: int) -> None:
        self._unseen = 0
        ordered = np.sort(self._chances[:, :believed], axis=0)[::-1]
        parts = [max(1, int(len(ordered) / stay)) for stay in STAYS[:believed]]
        hits = [float(ordered[:part, at].sum()) for at, part in enumerate(parts)]
        self._stay = max(at for at, some in enumerate(hits) if some >= WORTH * max(hits))
        chances = ordered[:, self._stay]
        # Of those that are alike and would be too many none is taken, unless all are.
        fitting = chances[chances > chances[min(parts[self._stay], len(chances) - 1)]]
        self._least = float(fitting[-1] if len(fitting) else chances[0])

    def deciding(self, chances: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
        """The chances of blocks that decide, and the least one that is enough."""
        return chances[:, self._stay], self._least


class _Left(NamedTuple):
    """Blocks that left the pool since the last tick."""

    group: Group
    keys: Sequence[bytes]
    reasons: Sequence[str]


class Writer:
    """Writes blocks to some tiers, all disks or one store, ahead of their eviction, so that no eviction waits.

    While a tier has space, what is stored is written in that order: the root of a chain before its tail. Once all are
    full, what is next to be evicted is judged, and written if it is likely to come back (``WriteMode.AUTO``). Blocks
    that wait are evicted after others that are as cold (``Victims``). One that is evicted before its turn is lost.

    Args:
        tiers: where to; of several, each block goes to one that has space and little to do.
        shared: they are a store of several nodes.
        idle: whether nobody waits for the tiers to read.
        engines_busy: whether engines copy. They go first: writing takes memory bandwidth, cores and time of the
            interpreter from them. While they copy, or wait for the tiers, only what ``settings`` call a trickle is
            written, or one block.
        leaves_out: whether nothing is written of a namespace, by its fingerprint.
    """

    def __init__(
        self,
        cache: Cache,
        tiers: Sequence[Tier],
        clock: Callable[[], float],
        settings: TieringSettings,
        *,
        shared: bool,
        idle: Callable[[], bool],
        engines_busy: Callable[[], bool],
        leaves_out: Callable[[bytes], bool] = lambda fingerprint: False,
    ) -> None:
        self._cache, self._tiers = cache, tiers
        self._generations = cache.table.records["generation"]
        self.mode = settings.mode
        self._shared = shared
        self.budget = WriteBudget(settings.per_day_bytes, clock)
        self._refused_above = inf
        """While more writes are under way nothing is begun: the tiers took no more, and to look at what waits costs."""
        self._under_way_limit = min(cache.slots.pool_bytes // 16, MAX_WRITING_BYTES)
        """Bytes that may be read out of the pool at once, and are pinned that long."""
        self._cold_bytes = cache.slots.pool_bytes // COLD_PART
        self._idle, self._engines_busy, self._leaves_out = idle, engines_busy, leaves_out
        self._trickle_bytes = self._trickle_left = settings.trickle_bytes
        self.waiting: _Noted = {}
        """Blocks that are to be written, in that order."""
        self._passed: dict[int, tuple[int, str]] = {}
        """Blocks at the cold end that are not to be written, with the generations of their records, and why."""
        self._left: list[_Left] = []
        self.under_way: dict[int, BlockWrite] = {}
        """By block."""
        self.under_way_bytes = 0
        self.written_blocks = self.written_bytes = 0
        self.not_written: Counter[str] = Counter()
        """Blocks that left the pool and that no tier has, by reason."""
        self._judges = False
        """Whether the tiers were full at the last tick, and blocks must be likely to come back."""
        self._selection = Selection()
        self._accessed_before = cache.policy.accessed_bytes
        """Bytes that were asked for up to the last tick."""

    @property
    def available(self) -> bool:
        return any(tier.available() for tier in self._tiers)

    @property
    def waiting_blocks(self) -> int:
        return len(self.waiting)

    def stored(self, blocks: BlockIds) -> None:
        if self._tiers and self.mode is not WriteMode.NEVER and not self._judges:
            self._wait(blocks)

    def is_there(self, block: int) -> None:
        """Note that a block was read from one of the tiers: it does not wait to be written."""
        self.waiting.pop(block, None)

    def used(self, group: Group, blocks: BlockIds) -> None:
        """Note blocks that a lookup found, while a tier is available."""
        if self.mode is not WriteMode.NEVER and not self._judges:
            self._wait(self._lacking(group, blocks[:MAX_LOOKED_AT])[0])
            self._wait(blocks[MAX_LOOKED_AT:])  # looked at when it is their turn

    def evicted(self, group: Group, blocks: BlockIds, keys: Sequence[bytes]) -> None:
        """Note blocks that are about to leave the pool. A store waits for this."""
        if self.mode is WriteMode.NEVER or not self._takes(group):
            for block in blocks.tolist() if self.waiting else ():
                self.waiting.pop(block, None)
            return
        reasons, otherwise = [], LATE if self.budget.allows(sum(group.lengths)) else BUDGET
        for block, generation in zip(blocks.tolist(), self._generations[blocks].tolist(), strict=True):
            self.waiting.pop(block, None)
            noted, reason = self._passed.pop(block, (0, otherwise))
            reasons.append(reason if noted == generation else otherwise)
        self._left.append(_Left(group, keys, reasons))

    def stop(self) -> None:
        """Begin nothing any more."""
        self.mode = WriteMode.NEVER
        self.waiting.clear()

    def tick(self) -> None:
        """Look at the cold end, and continue."""
        self._count_left()
        self._note_traffic()
        before, self._passed = self._passed, {}
        if self.mode is not WriteMode.NEVER and self._cache.slots.free_bytes < self._cold_bytes:
            self._look_at_cold_end(before)
        self._trickle_left = self._trickle_bytes
        self._refused_above = inf  # a disk may hang, and a store have space
        self.pump()

    def _count_left(self) -> None:
        """Count what left the pool and is in no tier."""
        left, self._left = self._left, []
        for group, keys, reasons in left:
            self.not_written += Counter(compress(reasons, self._wanted(group, keys)))

    def _look_at_cold_end(self, before: dict[int, tuple[int, str]]) -> None:
        """``before``: ``_passed`` as of the last tick."""
        left, left_bytes = MAX_COLD_BLOCKS, self._cold_bytes
        for batch in self._cache.policy.candidates():
            for group, alike in self._cache.by_group(batch):
                some = alike[: max(0, min(left, -(-left_bytes // group.block_bytes)))]
                left -= len(some)
                if not group.dead:
                    left_bytes -= len(some) * group.block_bytes
                blocks, keys = self._lacking(group, some)
                self._wait(blocks[self._judged_likely(group, blocks, keys, before)])
            if left <= 0 or left_bytes <= 0:
                return

    def _judged_likely(
        self, group: Group, blocks: BlockIds, keys: Sequence[bytes], before: dict[int, tuple[int, str]]
    ) -> npt.NDArray[np.bool_]:
        """Which of the blocks are to be written, all while a tier has space; note why the others are not."""
        if not self._judges or not keys:
            return np.ones(len(keys), np.bool_)
        policy, generations = self._cache.policy, self._generations[blocks].tolist()
        lifetimes, packed_keys = self._selection.lifetimes(self._lifetime_bytes), b"".join(keys)
        every = np.stack([policy.chance(group, packed_keys, one) for one in lifetimes], axis=1)
        known = [
            before.get(block, (0, ""))[0] == generation or self.waiting.get(block) == generation
            for block, generation in zip(blocks.tolist(), generations, strict=True)
        ]
        believed = sum(WATCHED * one <= policy.accessed_bytes for one in lifetimes)
        self._selection.note(every[~np.array(known)], sum(group.lengths), believed)
        chances, least = self._selection.deciding(every)
        passed = chances < max(least, 1 - self.budget.left_share)
        reasons = [UNLIKELY if chance < least else BUDGET for chance in chances[passed].tolist()]
        noted = zip(blocks[passed].tolist(), self._generations[blocks[passed]].tolist(), reasons, strict=True)
        self._passed |= {block: (generation, reason) for block, generation, reason in noted}
        return ~passed

    def pump(self) -> None:
        """Begin to write what may be written now, of very much a part, once there is space for more than a few."""
        if not self.waiting:
            return
        if 2 * self.under_way_bytes > self._under_way_limit or len(self.under_way) > self._refused_above:
            return
        self._refused_above = inf
        if not self.available:  # else each reply would wait for blocks to be looked at
            return
        begun: list[BlockIds] = []
        try:
            self._begin_some(begun, self._engines_busy() or not self._idle())
        finally:
            if begun:
                self._cache.blocks.pin(np.concatenate(begun))

    def _begin_some(self, begun: list[BlockIds], busy: bool) -> None:
        targets = self._targets()
        for _ in range(0, MAX_LOOKED_AT, MAX_BEGUN):
            if not self.waiting or (busy and self._trickle_left <= 0):
                return
            for write in self._choose():
                full = self.under_way_bytes >= self._under_way_limit or (busy and self._trickle_left <= 0)
                if full or len(begun) == MAX_BEGUN:
                    return
                if not self._begin(write, targets, busy):
                    return
                del self.waiting[write.number]
                begun.append(write.block)

    def _targets(self) -> list[Tier]:
        """The tiers, the one that is to be written to first: with room, little to do, and the least in use."""
        if len(self._tiers) == 1:
            return list(self._tiers)
        figures = [(tier, tier.stats()) for tier in self._tiers]
        figures.sort(
            key=lambda one: (bool(one[0].lifetime_bytes), one[1].queued_writes, one[1].used_bytes / one[1].size_bytes)
        )
        return [tier for tier, _ in figures]

    def _choose(self) -> list[BlockWrite]:
        """Those of the next few that are to be written; the others do not wait any more."""
        some = dict(islice(self.waiting.items(), MAX_BEGUN))
        chosen: dict[int, BlockWrite] = {}
        for group, alike in self._cache.by_group(self._still_ready(some)):
            blocks, _ = self._lacking(group, alike)
            if blocks.size:
                block_group = block_group_of(group)
                chosen |= {write.number: write for write in writes_of(self._cache, group, block_group, blocks)}
        for block in some:
            if block not in chosen:
                del self.waiting[block]
        return [chosen[block] for block in some if block in chosen]

    def _begin(self, write: BlockWrite, targets: Sequence[Tier], busy: bool) -> bool:
        """Begin to write a block; False where no more can be begun now. Then it is the next one still."""
        nbytes = write.copy.group.nbytes
        if not self.budget.take(nbytes):
            self.waiting.clear()  # they will wait again when they are used again, or as the next to be evicted
            return False
        if not any(tier.write(write.copy, write.offsets, partial(self._on_end, write)) for tier in targets):
            self.budget.give_back(nbytes)
            if self.under_way:  # there were too many at once
                self._refused_above = len(self.under_way) / 2
            else:
                self.waiting.pop(write.number, None)
            return False
        self.under_way[write.number] = write
        self.under_way_bytes += nbytes
        self._trickle_left -= nbytes if busy else 0
        return True

    def _wait(self, blocks: BlockIds) -> None:
        blocks = blocks[: MAX_WAITING - len(self.waiting)]
        self.waiting.update(zip(blocks.tolist(), self._generations[blocks].tolist(), strict=True))

    def _still_ready(self, noted: _Noted) -> BlockIds:
        blocks = np.fromiter(noted, np.uint32, len(noted))
        same = self._generations[blocks] == np.fromiter(noted.values(), np.uint64, len(noted))
        ready: BlockIds = blocks[same & (self._cache.blocks.state[blocks] == READY)]
        return ready

    def _takes(self, group: Group) -> bool:
        """Whether blocks of a group are written at all. Disks are not worn by what benches store; a store that nodes
        share has a bench of its own."""
        namespace = group.namespace
        bench = namespace.of_bench and not self._shared
        return bool(self._tiers) and not (group.dead or bench or self._leaves_out(namespace.fingerprint))

    def _wanted(self, group: Group, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which keys no tier has or is being given, and one is to have."""
        wanted = np.full(len(keys), self._takes(group))
        for tier in self._tiers if keys else ():
            wanted &= tier.wants(block_group_of(group), keys)
        return wanted

    def _lacking(self, group: Group, blocks: BlockIds) -> tuple[BlockIds, list[bytes]]:
        """Those of the blocks, and their keys, that are ``_wanted`` and not under way."""
        if not blocks.size or not self._takes(group):
            return blocks[:0], []
        keys = self._cache.blocks.split_keys(blocks, group.key_bytes)
        wanted = self._wanted(group, keys) & [block not in self.under_way for block in blocks.tolist()]
        return blocks[wanted], [keys[at] for at in np.flatnonzero(wanted).tolist()]

    @property
    def _lifetime_bytes(self) -> int:
        """Bytes of writes that a block survives; 0 while there is space."""
        each = [tier.lifetime_bytes for tier in self._tiers]
        return sum(each) if all(each) else 0

    def _note_traffic(self) -> None:
        """See whether the tiers are full, and how much is asked for and written."""
        tier_bytes = self._lifetime_bytes
        full = tier_bytes > 0 and self.mode is WriteMode.AUTO
        if full and not self._judges:
            self.waiting.clear()  # they wait again when they are next to be evicted
        self._judges = full
        before, self._accessed_before = self._accessed_before, self._cache.policy.accessed_bytes
        if full:
            self._selection.note_traffic(self._accessed_before - before, tier_bytes)

    def _on_end(self, write: BlockWrite, result: Result) -> None:
        nbytes = write.copy.group.nbytes
        if result is Result.DONE:
            self.written_blocks += 1
            self.written_bytes += nbytes
        elif result is Result.PRESENT:
            self.budget.give_back(nbytes)
            self._trickle_left += nbytes
            if self._judges:
                self._selection.note_present(nbytes)
        del self.under_way[write.number]
        self.under_way_bytes -= nbytes
        self._cache.unpin(write.block)
        self.pump()
