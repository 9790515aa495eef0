"""Hints of clients about blocks: the ones to evict last for a while, and the ones to evict first.

The policy orders all other blocks, and most retained ones too: a retained block leaves its order only when it would be
evicted. Then it is set aside until the hint lapses or a request finds it. So a hint costs nothing until the pool needs
space, no block is pinned, and no scan is needed when a hint lapses. A restart forgets all hints.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from itertools import count, groupby, islice
from math import inf
from sys import float_info

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, BlockTable
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import BATCH, Chain, Policy

RETAINED_SHARE = 0.25
"""Part of the pool, and of a namespace's quota, that hints may retain."""
AWAITED_S = 60.0
"""Time for which a hint also applies to blocks that are still to be stored: engines store the last ones after it."""
MAX_AWAITED = 1 << 16
"""Limit of such blocks; the oldest are forgotten first."""
SET_ASIDE_AT_ONCE, SOON = 2048, 64
"""Next blocks to be evicted that one step examines, at most 1/SOON of the pool's slot numbers; and blocks that
evictions may set aside between two steps."""
ENDED_AT_ONCE = 1024
"""Lapsed hints that one step ends, or awaited keys it forgets."""
MAX_ENDED = 1024
"""Extra entries of ``_deadlines``, over two per live hint, before it is rebuilt."""
RELEASED = 1
"""Number of the hint of all released blocks."""


@dataclass(slots=True, eq=False)
class Retention:
    """Blocks that one hint retains in one namespace."""

    namespace: Namespace
    priority: int
    deadline: float
    number: int = 0
    nbytes: int = 0
    """Pool bytes of its blocks; 0 once it has lapsed."""
    aside: dict[int, None] = field(default_factory=dict)
    """Its blocks that the policy would have evicted, in the policy's order."""


class HintedOrder:
    """The order of eviction: released blocks, those set aside until their hint lapsed, the policy's, retained ones by
    priority.

    Methods with a name of ``Policy``'s do the same.

    Args:
        groups: groups whose blocks have slots, by number.
        quotas: limits of pool bytes by fingerprint.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: BlockTable,
        groups: Mapping[int, Group],
        quotas: Mapping[bytes, int],
        clock: Callable[[], float],
        pool_bytes: int,
    ) -> None:
        self._policy, self._blocks, self._groups, self._quotas = policy, blocks, groups, quotas
        self._clock, self._most_bytes = clock, int(RETAINED_SHARE * pool_bytes)
        self._hint_of = np.zeros(len(blocks.state), np.uint32)
        """[slots] number of the block's hint; 0, or the number of a hint that has ended, if it has none."""
        self._retentions: dict[int, Retention] = {}
        """Hints by number that have blocks and have not lapsed."""
        self._lapsed: dict[int, Retention] = {}
        """Hints that have lapsed and have blocks aside."""
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = count(RELEASED + 1)
        self._released: dict[int, None] = {}
        """Released blocks, which have left the policy, in the order in which they are evicted."""
        self._awaited: dict[tuple[int, bytes], tuple[float, Retention | None]] = {}
        """Hints of blocks that are still to be stored, by group and key, after the time until which they apply. None
        for a release."""
        self.retained_bytes = 0
        self._may_set_aside, self._has_moved = SET_ASIDE_AT_ONCE, False
        """Blocks that evictions may set aside before the next step, and whether retained ones may be next to go."""

    # --- hints -----------------------------------------------------------------------------------

    def retain(self, namespace: Namespace, priority: int, ttl_s: float) -> Retention:
        """Return a hint for ``apply``."""
        return Retention(namespace, priority, self._clock() + ttl_s, next(self._numbers))

    def apply(self, hint: Retention | None, group: Group, ready: BlockIds, absent: Sequence[bytes]) -> None:
        """Retain READY blocks, root first, or release them if ``hint`` is None. ``absent``: keys whose blocks may still
        be stored."""
        until = self._clock() + AWAITED_S
        for key in absent:
            self._awaited.pop((group.number, key), None)
            self._awaited[group.number, key] = until, hint
        for oldest in list(islice(self._awaited, max(0, len(self._awaited) - MAX_AWAITED))):
            del self._awaited[oldest]
        self._apply(hint, group, ready)

    def _apply(self, hint: Retention | None, group: Group, blocks: BlockIds) -> None:
        """Retain or release READY blocks, root first."""
        if hint is not None:
            self._retain(hint, group, blocks)
            return
        group.namespace.counters.released_blocks += len(blocks)
        blocks = blocks[::-1]
        if (inner := blocks[~self._unmark(group, blocks)]).size:
            self._policy.remove(group, inner, self._blocks.keys(inner, group.key_bytes))
        self._hint_of[blocks] = RELEASED
        self._released.update(dict.fromkeys(blocks.tolist()))

    def _retain(self, hint: Retention, group: Group, blocks: BlockIds) -> None:
        self.end_lapsed()
        if hint.deadline <= self._clock():
            return
        namespace, each, limit = hint.namespace, group.block_bytes, self._most_bytes - self.retained_bytes
        if (quota := self._quotas.get(namespace.fingerprint)) is not None:
            limit = min(limit, int(RETAINED_SHARE * quota) - namespace.retained_bytes)
        held = np.array([one is not None and one.deadline >= hint.deadline for one in self._live_of(blocks)], np.bool_)
        blocks = blocks[~held]  # of several hints, the one that lasts longest counts
        has_other = self._are_retained(blocks)
        fits = has_other | (np.cumsum(~has_other) * each <= limit)
        namespace.counters.unretained_blocks += len(blocks) - int(fits.sum())
        namespace.counters.retained_blocks += int((fits & ~has_other).sum())
        blocks = blocks[fits][::-1]
        self._insert(group, blocks[self._unmark(group, blocks)])
        if blocks.size and hint.number not in self._retentions:
            self._retentions[hint.number] = hint
            heapq.heappush(self._deadlines, (hint.deadline, hint.number))
            if len(self._deadlines) > 2 * len(self._retentions) + MAX_ENDED:
                self._deadlines = sorted((one.deadline, number) for number, one in self._retentions.items())
        self._hint_of[blocks] = hint.number
        self._count(hint, len(blocks) * each)
        self._has_moved = True

    def end_lapsed(self) -> None:
        """End hints whose time is over."""
        now = self._clock()
        for _ in range(ENDED_AT_ONCE):
            if not self._deadlines or self._deadlines[0][0] > now:
                return
            _, number = heapq.heappop(self._deadlines)
            if (hint := self._retentions.pop(number, None)) is None:
                continue
            self._count(hint, -hint.nbytes)
            if hint.aside:
                self._lapsed[number] = hint

    def tick(self) -> None:
        """End hints whose time is over, and forget keys whose blocks did not come."""
        self.end_lapsed()
        now = self._clock()
        for oldest, (until, _) in list(islice(self._awaited.items(), ENDED_AT_ONCE)):
            if until > now:
                break
            del self._awaited[oldest]

    def set_aside_some(self) -> bool:
        """Set aside some of what is evicted soon, so that no eviction has to set aside much. Returns whether more may
        remain."""
        self._may_set_aside = SET_ASIDE_AT_ONCE
        if not (self._has_moved and self._retentions):
            return False
        soon = self._policy.first(min(SET_ASIDE_AT_ONCE, len(self._hint_of) // SOON))
        retained = self._are_retained(soon)
        self._set_aside(soon[retained])
        self._has_moved = bool(retained.any())
        return self._has_moved

    def _count(self, hint: Retention, nbytes: int) -> None:
        hint.nbytes += nbytes
        hint.namespace.retained_bytes += nbytes
        self.retained_bytes += nbytes

    def _live_of(self, blocks: BlockIds) -> list[Retention | None]:
        """Return each block's hint that has not lapsed."""
        return [self._retentions.get(number) for number in self._hint_of[blocks].tolist()]

    def _are_retained(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        retained, numbers = np.zeros(len(blocks), np.bool_), self._hint_of[blocks]
        hinted = np.flatnonzero(numbers)
        retained[hinted] = [number in self._retentions for number in numbers[hinted].tolist()]
        return retained

    def _unmark(self, group: Group, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Remove the hints of blocks. Returns which of the blocks are not in the policy: they were set aside or
        released."""
        outside, numbers = np.zeros(len(blocks), np.bool_), self._hint_of[blocks]
        for at in np.flatnonzero(numbers).tolist():
            block, number = int(blocks[at]), int(numbers[at])
            if number == RELEASED:
                outside[at] = self._released.pop(block, 0) is None  # a lookup may name a key twice
                continue
            of = self._retentions if number in self._retentions else self._lapsed
            if (hint := of.get(number)) is not None:
                outside[at] = block in hint.aside
                hint.aside.pop(block, None)
                if of is self._retentions:
                    self._count(hint, -group.block_bytes)
                if not (hint.nbytes or hint.aside):
                    del of[number]
        self._hint_of[blocks] = 0
        return outside

    # --- as Policy -------------------------------------------------------------------------------

    @property
    def _has_hints(self) -> bool:
        return bool(self._retentions or self._lapsed or self._released)

    def requested(self, chains: Sequence[Chain]) -> None:
        """As the policy's. A block that was set aside or released is in the policy's order again."""
        if self._has_hints:
            self.end_lapsed()
            for group, _, ready, _ in chains:
                if self._hint_of[ready].any():
                    self._found(group, ready)
        self._policy.requested(chains)

    def _found(self, group: Group, ready: BlockIds) -> None:
        retained = self._are_retained(ready)
        group.namespace.counters.retained_found_keys += int(retained.sum())
        others, back = ready[~retained], []
        for block, hint in zip(ready[retained].tolist(), self._live_of(ready[retained]), strict=True):
            if hint is not None and block in hint.aside:
                del hint.aside[block]
                back.append(block)
        self._insert(group, np.concatenate([np.array(back, np.uint32), others[self._unmark(group, others)]])[::-1])

    def _insert(self, group: Group, blocks: BlockIds) -> None:
        if blocks.size:
            self._policy.insert(group, blocks, self._blocks.keys(blocks, group.key_bytes))

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._policy.insert(group, blocks, keys)
        if not self._awaited:
            return
        split = np.frombuffer(keys, group.namespace.key_type).tolist()
        hints = [self._awaited.pop((group.number, key), None) for key in split]
        for hint in {one[1] for one in hints if one is not None}:
            members = np.array([one is not None and one[1] is hint for one in hints], np.bool_)
            self._apply(hint, group, blocks[members][::-1])

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._has_moved = True
        if self._has_hints and (outside := self._unmark(group, blocks)).any():
            keys = np.frombuffer(keys, group.namespace.key_type)[~outside].tobytes()
            blocks = blocks[~outside]
        self._policy.remove(group, blocks, keys)

    def make_newest(self, blocks: BlockIds) -> None:
        """Move blocks to the end of the policy's order. Retained ones keep their hints."""
        hints = list(zip(blocks.tolist(), self._live_of(blocks), strict=True))
        others = [block for block, hint in hints if hint is None]
        retained = [block for block, hint in hints if hint is not None and block not in hint.aside]
        for order, numbers in ((self, others), (self._policy, retained)):  # ``self.remove`` would end a hint
            for group, members in self._blocks.by_group(np.array(numbers, np.uint32), self._groups):
                keys = self._blocks.keys(members, group.key_bytes)
                order.remove(group, members, keys)
                order.insert(group, members, keys)

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Sequence[tuple[int, float]]:
        """As the policy's; keys of blocks that a hint retains are always admitted."""
        runs = self._policy.admit(group, keys, starts)
        if not self._awaited:
            return runs
        scores = [score for length, score in runs for _ in range(length)]
        for at, key in enumerate(np.frombuffer(keys, group.namespace.key_type).tolist()):
            if self._awaited.get((group.number, key), (0.0, None))[1] is not None:
                scores[at] = inf
        return [(len(list(run)), score) for score, run in groupby(scores)]

    @property
    def lowest(self) -> float:
        if self._released or self._lapsed:
            return -inf
        return min(self._policy.lowest, float_info.max) if self._retentions else self._policy.lowest

    def first(self, count: int, below: float = inf) -> BlockIds:
        self.end_lapsed()
        return self._first(count, below)

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        """Yield all of these in batches. Any change of the order ends the iteration."""
        self.end_lapsed()
        given, most = 0, BATCH
        while (found := self._first(most, below)).size > given:
            yield found[given:]
            given, most = len(found), 4 * most

    def _first(self, count: int, below: float) -> BlockIds:
        if not self._has_hints:
            return self._policy.first(count, below)
        lapsed = (one.aside for one in self._lapsed.values())
        early = _first_of(chained(self._released, chained.from_iterable(lapsed)), count)
        order, left = [early], count - len(early)
        while left:
            found = self._policy.first(left, below)
            retained = self._are_retained(found)
            if not (self._may_set_aside and retained.any()):  # rarely too many to look behind them: they go too
                order.append(found)
                left -= len(found)
                break
            few = found[retained][: self._may_set_aside]
            self._may_set_aside -= len(few)
            self._set_aside(few)
        if left and below == inf:
            live = sorted(self._retentions.values(), key=lambda one: (one.priority, one.deadline))
            order.append(_first_of(chained(*[one.aside for one in live]), left))
        return np.concatenate(order)

    def _set_aside(self, blocks: BlockIds) -> None:
        """Take retained blocks out of the policy, which would evict them next."""
        for block, number in zip(blocks.tolist(), self._hint_of[blocks].tolist(), strict=True):
            self._retentions[number].aside[block] = None
        for group, members in self._blocks.by_group(blocks, self._groups):
            self._policy.remove(group, members, self._blocks.keys(members, group.key_bytes))


def _first_of(blocks: Iterable[int], count: int) -> BlockIds:
    return np.fromiter(islice(blocks, count), np.uint32)
