"""Hints of clients about blocks: the ones to evict last for a while, and the ones to evict first.

The policy orders all other blocks, and most retained ones too: a retained block leaves its order only when it would be
evicted. Then it is set aside until the hint lapses or a request finds it. So a hint costs nothing until the pool needs
space, no block is pinned, and no scan is needed when a hint lapses. A restart forgets all hints.

A hint harms only its giver: it ends no retention of another giver, releases no block for which another giver's prompt
has asked, and takes nothing of what a higher priority, or another session within its share, retains.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as chained
from itertools import groupby, islice, pairwise
from math import inf
from sys import float_info

import numpy as np
import numpy.typing as npt

from kvoffd.cache.askers import Askers
from kvoffd.cache.awaited_keys import AwaitedKeys
from kvoffd.cache.block_table import NO_BLOCKS, BlockIds, BlockTable
from kvoffd.cache.namespace import Group, Namespace
from kvoffd.cache.policy import BATCH, Admission, Chain, Policy

RETAINED_SHARE = 0.25
"""Part of the pool, and of a namespace's quota, that hints may retain."""
AWAITED_S = 60.0
"""Time for which a hint also retains blocks that are still to be stored: engines store the last ones after it."""
MOST_TOGETHER, LEAST_RETENTIONS = 256, 64
"""Most blocks of one retention, which end together; and retentions at least into which all that hints may retain is
divided, if blocks are so large that this gives smaller ones."""
SET_ASIDE_AT_ONCE = 2048
"""Next blocks to be evicted that one step examines, and those that evictions may set aside between two steps."""
SOON_DIVISOR = 64
"""A step examines no more blocks than 1/64 of the pool's slot numbers."""
LAPSED_AT_ONCE, DISPLACED_AT_ONCE = 128, 1024
"""Lapsed retentions that one step ends, and others that one hint displaces."""
MAX_ENDED = 1024
"""Extra entries of ``_deadlines``, over two per live retention, before it is rebuilt."""
MAX_NUMBER = 2**32 - 1
"""Largest number of a retention, and of a part of the released blocks. After it all are numbered again."""
NUMBERED_AT_ONCE = 1 << 20
"""Slots of one part of that."""
ANY = 0
"""Giver of a wish that hints of several givers made, or one of an unknown giver: no release ends it."""


@dataclass(slots=True, eq=False)
class Wish:
    """A hint's priority and time for blocks that it retains.

    Attributes:
        session: session whose share its blocks count for.
        giver: who may release them; ANY for nobody.
        payer: giver of the first of its hints, for whose limit of awaited keys it counts.
        filling: the retention that takes the next blocks.
    """

    namespace: Namespace
    session: int
    giver: int
    payer: int
    priority: int
    deadline: float
    filling: Retention | None = None

    def joined(self, other: Wish) -> Wish:
        """Return the wish to do both, which is one of the two where it includes the other."""
        priority, deadline = max(self.priority, other.priority), max(self.deadline, other.deadline)
        giver = self.giver if self.giver == other.giver else ANY
        if (giver, priority, deadline) == (self.giver, self.priority, self.deadline):
            return self
        counts_alike = (other.payer, other.session) == (self.payer, self.session)
        if counts_alike and (giver, priority, deadline) == (other.giver, other.priority, other.deadline):
            return other
        return Wish(self.namespace, self.session, giver, self.payer, priority, deadline)


@dataclass(slots=True, eq=False)
class Retention:
    """Some blocks that are retained for the same wish."""

    wish: Wish
    number: int
    left: int
    """Blocks that it may still take."""
    nbytes: int = 0
    """Pool bytes of its blocks; 0 once it has ended."""
    aside: dict[int, bool] = field(default_factory=dict)
    """Its blocks that the policy would have evicted, in the policy's order; all values are True."""


class HintedOrder:
    """The order of eviction: released blocks, those set aside whose retention has ended, the policy's, retained ones by
    priority.

    | a READY block that                          | is in                            | by ``_hint_of``     |
    |---------------------------------------------|----------------------------------|---------------------|
    | has no hint, or had one that ended in time  | the policy's order               | 0, or an old number |
    | is retained, and not next to be evicted     | the policy's order               | its retention       |
    | is retained, and would have been evicted    | ``aside`` of its retention       | its retention       |
    | was set aside, and its retention has ended  | the same, of one in ``_ended``   | its retention       |
    | is released                                 | its part of ``_released``        | its part            |

    Methods with a name of ``Policy``'s do the same.

    Args:
        quotas: limits of pool bytes by fingerprint.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: BlockTable,
        quotas: Mapping[bytes, int],
        clock: Callable[[], float],
        pool_bytes: int,
    ) -> None:
        self._policy, self._blocks, self._quotas = policy, blocks, quotas
        self._clock, self._most_bytes = clock, int(RETAINED_SHARE * pool_bytes)
        self._hint_of = np.zeros(len(blocks.state), np.uint32)
        """[slots] number of the block's retention, or of its part of ``_released``; 0, or the number of one that has
        ended, for none."""
        self._retentions: dict[int, Retention] = {}
        """Retentions by number that have blocks and have not ended."""
        self._ranked: dict[tuple[int, int], dict[int, Retention]] = {}
        """The same by priority and session, oldest first."""
        self._ended: dict[int, Retention] = {}
        """Retentions that have ended and have blocks aside."""
        self._deadlines: list[tuple[float, int]] = []
        self._last_number = 0
        self._listed: npt.NDArray[np.uint32] | None = None
        """The keys of ``_retentions``; None if they have changed since they were asked for."""
        self._released: dict[int, dict[int, bool]] = {}
        """Released blocks, which have left the policy, in the order in which they are evicted; all values are True.
        Each release makes a part, with a number: one large table would be copied as it grows, in milliseconds."""
        self._awaited = AwaitedKeys()
        self._askers = Askers(len(blocks.state))
        self.retained_bytes = 0
        self._retained_bytes_of = Counter[int]()
        """Retained bytes by session."""
        self._set_aside_left = SET_ASIDE_AT_ONCE
        """Blocks that evictions may set aside before the next step."""
        self._retained_may_be_next = False
        """Whether retained blocks may be among the next to be evicted: the order has changed since it was looked at."""

    # --- hints -----------------------------------------------------------------------------------

    def asked(self, group: Group, keys: bytes, states: bytes, ready: BlockIds, giver: int) -> None:
        """Record that a prompt asked for keys with these states, and for the READY ones' blocks; see ``Askers``. What
        another giver released is in the policy's order again."""
        if self._released:
            others = ready[~self._askers.are_alone(ready, giver)]
            if (released := others[self._have(self._released, others)]).size:
                self._insert(group, released[self._unmark(group, released)][::-1])
        self._askers.asked(group, keys, states, ready, giver)

    def share(self, blocks: BlockIds) -> None:
        """Record that others than one giver's prompts use READY blocks. What was released is in the policy's order
        again."""
        self._askers.share(blocks)
        if self._released:
            for group, members in self._blocks.by_group(blocks[self._have(self._released, blocks)]):
                self._insert(group, members[self._unmark(group, members)])

    def wish(self, namespace: Namespace, session: int, giver: int, priority: int, ttl_s: float) -> Wish:
        """Return what ``retain`` needs for a hint."""
        return Wish(namespace, session, giver, giver, priority, self._clock() + ttl_s)

    def retain(self, wish: Wish, group: Group, ready: BlockIds, absent: Sequence[bytes]) -> None:
        """Retain READY blocks, root first, and those of other keys if they are stored within AWAITED_S."""
        joined: dict[Wish, Wish] = {}

        def join(old: Wish, new: Wish) -> Wish:
            """Return one wish for all keys that had the same."""
            if (found := joined.get(old)) is None:
                joined[old] = found = old.joined(new)
            return found

        keys = [(group.number, key) for key in absent]
        most = self._most_bytes // max(1, group.block_bytes)
        over = self._awaited.add(keys, wish, self._clock() + AWAITED_S, most, join)
        group.namespace.counters.unretained_blocks += over
        self._retain(wish, group, ready)

    def release(self, giver: int, group: Group, blocks: BlockIds) -> None:
        """End what this giver retained of READY blocks, root first. Release those for which no other has asked."""
        blocks = blocks[::-1]
        own = np.array([one is None or one.wish.giver == giver != ANY for one in self._retentions_of(blocks)], np.bool_)
        alone = self._askers.are_alone(blocks, giver)
        released, others = blocks[own & alone], blocks[own & ~alone]
        ended = others[self.are_retained(others)]
        self._insert(group, ended[self._unmark(group, ended)])
        if (inner := released[~self._unmark(group, released)]).size:
            self._policy.remove(group, inner, self._blocks.keys(inner, group.key_bytes))
        if released.size:
            self._have_numbers(1)
            self._last_number += 1
            self._hint_of[released] = self._last_number
            self._released[self._last_number] = dict.fromkeys(released.tolist(), True)
        group.namespace.counters.released_blocks += len(released)

    def _retain(self, wish: Wish, group: Group, blocks: BlockIds) -> None:
        """Retain READY blocks: those that another wish retains for both, the others as far as they fit."""
        self.end_lapsed()
        if wish.deadline <= self._clock():
            return
        self._have_numbers(len(blocks))  # each new retention takes a block at least
        are_retained, counters = self.are_retained(blocks), group.namespace.counters
        retained, wanted = blocks[are_retained], blocks[~are_retained]
        wishes: dict[Wish, Wish] = {}
        for number, at in _by_number(self._hint_of[retained]):
            old, members = self._retentions[number].wish, retained[at]
            if (both := wishes.setdefault(old, old.joined(wish))) is not old:  # else the old one includes this
                self._insert(group, members[self._unmark(group, members)][::-1])
                self._put(both, group, members)
        if (quota := self._quotas.get(wish.namespace.fingerprint)) is not None:
            wanted = self._fitting(wish, wanted, group.block_bytes, int(RETAINED_SHARE * quota), wish.namespace)
        wanted = self._fitting(wish, wanted, group.block_bytes, self._most_bytes, self)
        counters.unretained_blocks += int((~are_retained).sum()) - len(wanted)
        counters.retained_blocks += len(wanted)
        self._insert(group, wanted[self._unmark(group, wanted)][::-1])
        self._put(wish, group, wanted)

    def _put(self, wish: Wish, group: Group, blocks: BlockIds) -> None:
        """Retain blocks that are in the policy's order and have no other hint."""
        most = max(1, min(MOST_TOGETHER, self._most_bytes // (LEAST_RETENTIONS * max(1, group.block_bytes))))
        while blocks.size:
            one = wish.filling
            if one is None or not one.left or self._retentions.get(one.number) is not one:
                self._last_number += 1
                one = wish.filling = Retention(wish, self._last_number, most)
                self._retentions[one.number] = one
                self._listed = None
                self._ranked.setdefault((wish.priority, wish.session), {})[one.number] = one
                heapq.heappush(self._deadlines, (wish.deadline, one.number))
            some, blocks = blocks[: one.left], blocks[one.left :]
            one.left -= len(some)
            self._hint_of[some] = one.number
            self._count(one, len(some) * group.block_bytes)
            self._retained_may_be_next = True
        if len(self._deadlines) > 2 * len(self._retentions) + MAX_ENDED:
            self._deadlines = sorted((one.wish.deadline, number) for number, one in self._retentions.items())

    def _have_numbers(self, count: int) -> None:
        """Have this many numbers left. If there are fewer, all retentions and parts of ``_released`` get the lowest, in
        the same order, and blocks with a number of none of them get 0: a look at all slots, once in 4 billion numbers.
        """
        if self._last_number + count <= MAX_NUMBER:
            return
        live = sorted([*self._retentions, *self._ended, *self._released])
        numbers, new = np.array(live, np.uint32), {old: number for number, old in enumerate(live, 1)}
        for first in range(0, len(self._hint_of), NUMBERED_AT_ONCE):
            hints = self._hint_of[first : first + NUMBERED_AT_ONCE]
            hinted = np.flatnonzero(hints)
            at, are_live = np.searchsorted(numbers, hints[hinted]), np.isin(hints[hinted], numbers)
            hints[hinted] = np.where(are_live, at + 1, 0)
        for one in (*self._retentions.values(), *self._ended.values()):
            one.number = new[one.number]
        for known in (self._retentions, self._ended, *self._ranked.values()):
            every = list(known.values())
            known.clear()
            known.update((one.number, one) for one in every)
        self._released = {new[old]: part for old, part in self._released.items()}
        self._deadlines = sorted((one.wish.deadline, number) for number, one in self._retentions.items())
        self._last_number, self._listed = len(live), None

    def _fitting(
        self, wish: Wish, blocks: BlockIds, block_bytes: int, most_bytes: int, within: Namespace | HintedOrder
    ) -> BlockIds:
        """Return the first blocks that may be retained ``within`` a namespace, or ``self`` for the whole pool, after
        others were displaced."""
        target = most_bytes - len(blocks) * block_bytes
        if within.retained_bytes > target:
            self._displace(wish, max(0, target), within, max(0, most_bytes - within.retained_bytes))
        return blocks[: max(0, most_bytes - within.retained_bytes) // max(1, block_bytes)]

    def _displace(self, wish: Wish, target: int, within: Namespace | HintedOrder, free: int) -> None:
        """End retentions for a wish, until those of a namespace, or all, have at most ``target`` bytes.

        They are of lower priority, and of its session or of one that has more than its share. Of such a session they
        may be of any priority while the wish's own session has less than its share, ``free`` bytes included: it gets
        these in any case.
        """
        share = self._most_bytes // len({*self._retained_bytes_of, wish.session})
        left, may_take = DISPLACED_AT_ONCE, share - self._retained_bytes_of.get(wish.session, 0) - free
        for priority, session in sorted(self._ranked):
            own, lower = session == wish.session, priority < wish.priority
            if own and not lower:
                continue
            for one in list(islice(reversed(self._ranked[priority, session].values()), left)):
                if within.retained_bytes <= target:
                    return
                has_more = self._retained_bytes_of[session] > share
                if not own and not (has_more and (lower or one.nbytes <= may_take)):
                    break
                left -= 1
                if within in (self, one.wish.namespace):
                    if not own:  # what was its own leaves the session's bytes as they were
                        may_take -= one.nbytes
                    self._end(one)

    def _end(self, one: Retention) -> None:
        """End a retention. Of its blocks, those that stayed for it alone go first from now on."""
        self._unlist(one)
        self._count(one, -one.nbytes)
        if one.aside:
            self._ended[one.number] = one

    def _unlist(self, one: Retention) -> None:
        del self._retentions[one.number]
        self._listed = None
        rank = one.wish.priority, one.wish.session
        del self._ranked[rank][one.number]
        if not self._ranked[rank]:
            del self._ranked[rank]

    def end_lapsed(self) -> bool:
        """End some retentions whose time is over. Returns whether more may be."""
        now = self._clock()
        for _ in range(LAPSED_AT_ONCE):
            if not self._deadlines or self._deadlines[0][0] > now:
                return False
            _, number = heapq.heappop(self._deadlines)
            if (one := self._retentions.get(number)) is not None:
                self._end(one)
        return True

    def tick(self) -> None:
        """End retentions whose time is over, and forget keys whose blocks did not come."""
        self.end_lapsed()
        self._awaited.expire(self._clock())

    def background(self) -> bool:
        """End some retentions whose time is over, and set aside some of what is evicted soon, so that no eviction has
        to do much of either. Returns whether more may remain."""
        self._set_aside_left = SET_ASIDE_AT_ONCE
        if not self._retentions:
            return False
        more = self.end_lapsed()
        if not self._retained_may_be_next:
            return more
        soon = self._policy.first(min(SET_ASIDE_AT_ONCE, len(self._hint_of) // SOON_DIVISOR))
        retained = self.are_retained(soon)
        self._set_aside(soon[retained])
        self._retained_may_be_next = bool(retained.any())
        return more or self._retained_may_be_next

    def _count(self, one: Retention, nbytes: int) -> None:
        wish = one.wish
        one.nbytes += nbytes
        wish.namespace.retained_bytes += nbytes
        self.retained_bytes += nbytes
        self._retained_bytes_of[wish.session] += nbytes
        if not self._retained_bytes_of[wish.session]:
            del self._retained_bytes_of[wish.session]

    def _retentions_of(self, blocks: BlockIds) -> list[Retention | None]:
        """Return each block's retention, if it has one that has not ended."""
        return [self._retentions.get(number) for number in self._hint_of[blocks].tolist()]

    @property
    def retentions(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Numbers of hints, [slots] of each block and, ascending, those that retain their blocks now."""
        if self._listed is None:
            self._listed = np.fromiter(self._retentions, np.uint32, len(self._retentions))
        return self._hint_of, self._listed

    def are_retained(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which blocks a hint retains."""
        return self._have(self._retentions, blocks)

    def _have(self, hints: Mapping[int, object], blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each block's number is among those of ``hints``."""
        found = np.zeros(len(blocks), np.bool_)
        if not hints:  # then most pages of the table were never read, and each would be a fault
            return found
        numbers = self._hint_of[blocks]
        hinted = np.flatnonzero(numbers)
        found[hinted] = [number in hints for number in numbers[hinted].tolist()]
        return found

    def _unmark(self, group: Group, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Remove the hints of blocks. Returns which of the blocks are not in the policy: they were set aside or
        released."""
        outside, numbers = np.zeros(len(blocks), np.bool_), self._hint_of[blocks]
        hinted = np.flatnonzero(numbers)
        for number, at in _by_number(numbers[hinted]):
            at = hinted[at]
            members = blocks[at].tolist()
            if (part := self._released.get(number)) is not None:  # a lookup may name a key, and so a block, twice
                outside[at] = [part.pop(block, False) for block in members]
                if not part:
                    del self._released[number]
                continue
            one = self._retentions.get(number) or self._ended.get(number)
            if one is not None:
                if one.aside:
                    outside[at] = [one.aside.pop(block, False) for block in members]
                if one.nbytes:  # it has not ended
                    self._count(one, -group.block_bytes * len(members))
                    if not one.nbytes:
                        self._unlist(one)
                elif not one.aside:
                    del self._ended[number]
        self._hint_of[blocks] = 0
        return outside

    # --- as Policy -------------------------------------------------------------------------------

    @property
    def _has_hints(self) -> bool:
        return bool(self._retentions or self._ended or self._released)

    def requested(self, chains: Sequence[Chain]) -> None:
        """As the policy's. A block that was set aside or released is in the policy's order again."""
        if self._has_hints:
            self.end_lapsed()
            for group, _, ready, *_ in chains:
                if self._hint_of[ready].any():
                    self._return_to_policy(group, ready)
        self._policy.requested(chains)

    def _return_to_policy(self, group: Group, found: BlockIds) -> None:
        """Return found blocks to the policy's order if they have left it. Those that are retained stay retained."""
        are_retained = self.are_retained(found)
        group.namespace.counters.retained_found_keys += int(are_retained.sum())
        retained, others, outside = found[are_retained], found[~are_retained], list[int]()
        for number, at in _by_number(self._hint_of[retained]):
            if aside := self._retentions[number].aside:
                outside += [block for block in retained[at].tolist() if aside.pop(block, False)]
        self._insert(group, np.concatenate([np.array(outside, np.uint32), others[self._unmark(group, others)]])[::-1])

    def _insert(self, group: Group, blocks: BlockIds) -> None:
        if blocks.size:
            self._policy.insert(group, blocks, self._blocks.keys(blocks, group.key_bytes))

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._policy.insert(group, blocks, keys)
        self._askers.stored(group, blocks, keys)
        if not self._awaited:
            return
        split = np.frombuffer(keys, group.namespace.key_type).tolist()
        wishes = [self._awaited.take((group.number, key)) for key in split]
        for wish in dict.fromkeys(one for one in wishes if one is not None):
            members = np.array([one is wish for one in wishes], np.bool_)
            self._retain(wish, group, blocks[members][::-1])

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._retained_may_be_next = True
        if self._has_hints and (outside := self._unmark(group, blocks)).any():
            keys = np.frombuffer(keys, group.namespace.key_type)[~outside].tobytes()
            blocks = blocks[~outside]
        self._policy.remove(group, blocks, keys)

    def follow(self, before: int, blocks: BlockIds) -> None:
        """As the policy's, for those that the policy has: not for blocks that were set aside or released. Nothing moves
        if that is true of the one before them."""
        if self._has_hints:
            if self._is_outside(before):
                return
            if self._hint_of[blocks].any():
                blocks = blocks[[not self._is_outside(block) for block in blocks.tolist()]]
        self._policy.follow(before, blocks)

    def _is_outside(self, block: int) -> bool:
        """Return whether the policy does not have a READY block: it was set aside or released."""
        number = int(self._hint_of[block])
        one = self._retentions.get(number) or self._ended.get(number)
        return number in self._released or (one is not None and block in one.aside)

    def make_newest(self, blocks: BlockIds) -> None:
        """Move blocks to the end of the policy's order. Retained ones keep their hints."""
        hints = list(zip(blocks.tolist(), self._retentions_of(blocks), strict=True))
        others = [block for block, hint in hints if hint is None]
        retained = [block for block, hint in hints if hint is not None and block not in hint.aside]
        # ``self.remove`` ends hints, so that retained blocks move in the policy alone. ``self.insert`` is for blocks
        # that became READY: who asked for the others since is known, and must stay known.
        for order, numbers in ((self, others), (self._policy, retained)):
            for group, members in self._blocks.by_group(np.array(numbers, np.uint32)):
                order.remove(group, members, self._blocks.keys(members, group.key_bytes))
                self._insert(group, members)

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        """As the policy's; keys of blocks that a hint retains are always admitted, with those before them in their
        chains, without which no lookup finds them. Of what earlier stores of the prompt offered nothing is known."""
        runs, lowest = self._policy.admit(group, keys, starts)
        if self._awaited:
            scores = [score for length, score in runs for _ in range(length)]
            split = np.frombuffer(keys, group.namespace.key_type).tolist()
            for begin, end in pairwise((*starts, len(split))):
                while end > begin and self._awaited.get((group.number, split[end - 1])) is None:
                    end -= 1
                scores[begin:end] = [inf] * (end - begin)
            runs = [(len(list(run)), score) for score, run in groupby(scores)]
        if self._released or self._ended:
            lowest = -inf
        elif self._retentions:  # may go for keys with an infinite score only
            lowest = min(lowest, float_info.max)
        return Admission(runs, lowest)

    def first(self, count: int, below: float = inf) -> BlockIds:
        if not self._has_hints:
            return self._policy.first(count, below)
        self.end_lapsed()
        return self._first(count, below)

    def _first(self, count: int, below: float) -> BlockIds:
        ended = (one.aside for one in self._ended.values())
        early = _first_of(chained.from_iterable(chained(self._released.values(), ended)), count)
        order, left = [early], count - len(early)
        while left:
            found = self._policy.first(left, below)
            retained = self.are_retained(found)
            if not (self._set_aside_left and retained.any()):  # rarely, too many were set aside: retained ones go too
                order.append(found)
                left -= len(found)
                break
            # Set those aside that are retained, as many as this step may, and look again.
            few = found[retained][: self._set_aside_left]
            self._set_aside_left -= len(few)
            self._set_aside(few)
        if left and below == inf:
            ranked = (self._ranked[rank].values() for rank in sorted(self._ranked))
            order.append(_first_of(chained.from_iterable(one.aside for one in chained.from_iterable(ranked)), left))
        return np.concatenate(order)

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        """Yield all that ``first`` returns in batches. Any change of the order ends the iteration."""
        self.end_lapsed()  # once, as it changes the order
        first = self._first if self._has_hints else self._policy.first
        given, most = NO_BLOCKS, BATCH
        while (found := first(most, below)).size > given.size:
            # What was set aside may have moved others in the order of ``arc``.
            same = np.array_equal(found[: given.size], given)
            yield found[given.size :] if same else found[~np.isin(found, given)]
            given, most = found if same else np.union1d(given, found), 4 * most

    def _set_aside(self, blocks: BlockIds) -> None:
        """Take retained blocks out of the policy, which would evict them next."""
        for number, at in _by_number(self._hint_of[blocks]):
            self._retentions[number].aside.update(dict.fromkeys(blocks[at].tolist(), True))
        for group, members in self._blocks.by_group(blocks):
            self._policy.remove(group, members, self._blocks.keys(members, group.key_bytes))


def _by_number(numbers: npt.NDArray[np.uint32]) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each number and where it is."""
    if not numbers.size:
        return
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    begins = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist()]
    for number, begin, end in zip(ordered[begins].tolist(), begins, [*begins[1:], len(order)], strict=True):
        yield number, order[begin:end]


def _first_of(blocks: Iterable[int], count: int) -> BlockIds:
    return np.fromiter(islice(blocks, count), np.uint32)
