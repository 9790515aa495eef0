"""The order of eviction, with what hints want first and last; see ``HintAction``.

The policy orders most blocks, retained ones too: a retained block leaves its order only when it would be evicted. Then
it is set aside until the hint lapses or a request finds it. So a hint costs nothing until the pool needs space, no
block is pinned, and no scan is needed when a hint lapses.

A hint harms only its giver: it ends no retention of another giver, releases no block for which another giver's prompt
has asked, and takes nothing of what a higher priority, or another session within its share, retains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain as chained
from itertools import groupby, islice, pairwise
from math import inf
from sys import float_info

import numpy as np
import numpy.typing as npt

from kvoffd.cache.askers import Askers
from kvoffd.cache.block_table import NO_BLOCKS, BlockIds, BlockTable
from kvoffd.cache.namespace import Group
from kvoffd.cache.policy import BATCH, Admission, Chain, Policy
from kvoffd.cache.retentions import ANY, Retentions, Wish

SET_ASIDE_AT_ONCE = 1024
"""Retained blocks that evictions may set aside between two steps. The next step examines as many of the next blocks
to be evicted as they have left of that."""
SOON_DIVISOR = 64
"""A step examines no more blocks than 1/64 of the pool's slot numbers."""
PASSED_AT_ONCE = 2048
"""Pinned blocks that one eviction, or the step behind it, passes over."""


class HintedOrder:
    """The order of eviction: released blocks, those set aside whose retention has ended, the policy's, retained ones by
    priority. Pinned blocks that an eviction passed over are not in it until they are unpinned.

    Each READY block is either in the policy's order or in one part of ``_outside``. Its number is in ``hint_of`` of the
    retentions:

    | a READY block that                          | is in                       | and its number is |
    |---------------------------------------------|-----------------------------|-------------------|
    | has no hint, or had one that ended in time  | the policy's order          | 0, or an old one  |
    | is retained, and not next to be evicted     | the policy's order          | its retention's   |
    | is retained, and would have been evicted    | the part of its retention   | its retention's   |
    | was set aside, and its retention has ended  | the same, one of ``_ended`` | that retention's  |
    | is released                                 | a part of ``_released``     | the part's        |
    | is pinned, and was passed over              | a part of ``passed_over``   | the part's        |

    Methods with a name of ``Policy``'s do the same.

    Attributes:
        passed_over: numbers of the parts of pinned blocks that were passed over; while there are any, ``unpinned`` is
            to be called.
    """

    def __init__(
        self,
        policy: Policy,
        blocks: BlockTable,
        quotas: Mapping[bytes, int],
        clock: Callable[[], float],
        pool_bytes: int,
    ) -> None:
        self._policy, self._blocks = policy, blocks
        self.retentions = Retentions(len(blocks.state), quotas, clock, pool_bytes, self._retention_ended)
        self._askers = Askers(len(blocks.state))
        self._outside: dict[int, dict[int, bool]] = {}
        """Blocks that have left the policy's order, in the order in which they go, by number; no part is empty, and all
        values are True. Many small tables: a large one would be copied as it grows, in milliseconds."""
        self._released: dict[int, None] = {}
        """Numbers of the parts of released blocks, one for each release, in that order."""
        self._ended: dict[int, None] = {}
        """Those of retentions that have ended, in the order of their ends."""
        self.passed_over: dict[int, None] = {}
        self._more_pinned = False
        """Whether an eviction, or the step behind it, met more pinned blocks than it passed over."""
        self._set_aside_left = SET_ASIDE_AT_ONCE
        """Blocks that may be set aside before the end of the next step."""
        self._retained_may_be_next = False
        """Whether retained blocks may be among the next to be evicted: the order has changed since it was looked at."""

    # --- hints -----------------------------------------------------------------------------------

    def record_askers(self, group: Group, keys: bytes, states: bytes, ready: BlockIds, giver: int) -> None:
        """Record that a prompt of this giver asked for keys with these states, and for the READY ones' blocks; see
        ``Askers``. The policy hears of the prompt later, by ``requested``. What another giver released returns to the
        policy's order."""
        if self._released:
            others = ready[~self._askers.are_alone(ready, giver)]
            self._return_to_policy(group, others[self.retentions.have(self._released, others)])
        self._askers.asked(group, keys, states, ready, giver)

    def share(self, blocks: BlockIds) -> None:
        """Record that others than one giver's prompts use READY blocks. What was released is in the policy's order
        again."""
        self._askers.share(blocks)
        if self._released:
            for group, members in self._blocks.by_group(blocks[self.retentions.have(self._released, blocks)]):
                self._return_to_policy(group, members)

    def retain(self, wish: Wish, group: Group, ready: BlockIds, absent: Sequence[bytes]) -> None:
        """Retain READY blocks, root first, and those of other keys if they are stored within AWAITED_S."""
        self.retentions.await_keys(wish, group, absent)
        self._retain(wish, group, ready)

    def _retain(self, wish: Wish, group: Group, blocks: BlockIds) -> None:
        """Retain READY blocks: those that another wish retains for both, the others as far as they fit."""
        self.retentions.end_lapsed()
        if self.retentions.is_over(wish):
            return
        self._have_numbers(len(blocks))
        are_retained, counters = self.retentions.are_retained(blocks), group.namespace.counters
        for both, members in self.retentions.to_extend(wish, blocks[are_retained]):
            self._retain_for(both, group, members)
        wanted = self.retentions.fitting(wish, group, blocks[~are_retained])
        counters.unretained_blocks += int((~are_retained).sum()) - len(wanted)
        counters.retained_blocks += len(wanted)
        self._retain_for(wish, group, wanted)

    def _retain_for(self, wish: Wish, group: Group, blocks: BlockIds) -> None:
        """Retain READY blocks, root first, for this wish alone."""
        self._return_to_policy(group, blocks)
        self.retentions.put(wish, group, blocks)
        self._retained_may_be_next = True

    def release(self, giver: int, group: Group, blocks: BlockIds, absent: Sequence[bytes]) -> None:
        """End what this giver retained of READY blocks, root first, and of other keys. Release the blocks for which no
        other has asked."""
        self.retentions.stop_awaiting(giver, group, absent)
        retentions = self.retentions.of(blocks)
        may_end = np.array([one is None or one.wish.giver == giver != ANY for one in retentions], np.bool_)
        alone = self._askers.are_alone(blocks, giver)
        shared, released = blocks[may_end & ~alone], blocks[may_end & alone][::-1]  # the tail goes first
        self._return_to_policy(group, shared[self.retentions.are_retained(shared)])
        self._take_from_policy(group, released)
        self._add_part(self._released, released)
        group.namespace.counters.released_blocks += len(released)

    def _retention_ended(self, number: int) -> None:
        """A retention ended. Of its blocks, those that stayed for it alone go first from now on."""
        if number in self._outside:
            self._ended[number] = None

    # --- what is not in the policy's order -------------------------------------------------------
    #
    # ``_remove_hints``, ``_return_to_policy`` and ``_take_from_policy`` end the blocks' hints. ``_take_from_part``,
    # ``_give_to_policy`` and ``_set_aside`` only move them: retained ones stay retained.

    def _add_part(self, known: dict[int, None], blocks: BlockIds) -> None:
        """Note blocks that have left the policy's order, and have no hint, as a part."""
        if blocks.size:
            self._have_numbers(1)
            number = self.retentions.new_number()
            self.retentions.hint_of[blocks] = number
            self._outside[number] = dict.fromkeys(blocks.tolist(), True)
            known[number] = None

    def _have_numbers(self, count: int) -> None:
        """Have this many numbers left."""
        if self.retentions.has_numbers(count):
            return
        new = self.retentions.renumber(self._outside)
        self._outside = {new[number]: part for number, part in self._outside.items()}
        for known in (self._released, self._ended, self.passed_over):
            numbers = [new[number] for number in known]
            known.clear()
            known.update(dict.fromkeys(numbers))

    def _is_outside(self, block: int) -> bool:
        """Return whether the policy does not have a READY block."""
        return block in self._outside.get(int(self.retentions.hint_of[block]), ())

    def _take_from_part(self, number: int, blocks: BlockIds) -> list[bool]:
        """Take blocks out of a part, if there is one with this number. Returns which of them it had. A lookup may name
        a key, and so a block, twice."""
        if (part := self._outside.get(number)) is None:
            return [False] * len(blocks)
        taken = [part.pop(block, False) for block in blocks.tolist()]
        if not part:
            del self._outside[number]
            for known in (self._released, self._ended, self.passed_over):
                known.pop(number, None)
        return taken

    def _remove_hints(self, group: Group, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Remove the hints of blocks. Returns which of the blocks are not in the policy's order, and in no part now."""
        outside = np.zeros(len(blocks), np.bool_)
        for number, at in self.retentions.by_hint(blocks):
            outside[at] = self._take_from_part(number, blocks[at])
            self.retentions.remove(number, group.block_bytes * len(at))
        self.retentions.hint_of[blocks] = 0
        return outside

    def _return_to_policy(self, group: Group, blocks: BlockIds) -> None:
        """Remove the hints of READY blocks, root first, all of which are in the policy's order then."""
        self._give_to_policy(group, blocks[self._remove_hints(group, blocks)])

    def _give_to_policy(self, group: Group, blocks: BlockIds) -> None:
        """Give blocks, root first, to the policy, which does not have them."""
        if blocks.size:
            tail_first = blocks[::-1]
            self._policy.insert(group, tail_first, self._blocks.keys(tail_first, group.key_bytes))

    def _take_from_policy(self, group: Group, blocks: BlockIds) -> None:
        """Remove the hints of READY blocks, none of which is in the policy's order then, nor in a part."""
        if (inner := blocks[~self._remove_hints(group, blocks)]).size:
            self._policy.remove(group, inner, self._blocks.keys(inner, group.key_bytes))

    def _set_aside(self, blocks: BlockIds) -> None:
        """Take retained blocks out of the policy, which would evict them next."""
        for number, at in self.retentions.by_hint(blocks):
            self._outside.setdefault(number, {}).update(dict.fromkeys(blocks[at].tolist(), True))
        for group, members in self._blocks.by_group(blocks):
            self._policy.remove(group, members, self._blocks.keys(members, group.key_bytes))

    def pass_over(self, pinned: BlockIds) -> None:
        """Take some of these pinned blocks, which ``first`` returned, out of the order until ``unpinned``: each
        eviction would look at them again. Retained ones are set aside."""
        self._more_pinned = len(pinned) > PASSED_AT_ONCE
        self._pass_over(pinned[:PASSED_AT_ONCE])

    def _pass_over(self, pinned: BlockIds) -> None:
        are_retained = self.retentions.are_retained(pinned)
        retained, others = pinned[are_retained], pinned[~are_retained]
        self._set_aside(retained[[not self._is_outside(block) for block in retained.tolist()]])
        for group, members in self._blocks.by_group(others):
            self._take_from_policy(group, members)
        self._add_part(self.passed_over, others)

    def unpinned(self, blocks: BlockIds) -> None:
        """Return blocks that are not pinned any more, root first, to the policy's order, if they were passed over."""
        for group, members in self._blocks.by_group(blocks[self.retentions.have(self.passed_over, blocks)]):
            self._return_to_policy(group, members)

    # --- steps of time ---------------------------------------------------------------------------

    def background(self) -> bool:
        """End some retentions whose time is over, set aside some of what is evicted soon, and pass over what is pinned
        of it, so that no eviction has to do much of that. Returns whether more may remain."""
        left, self._set_aside_left = self._set_aside_left, SET_ASIDE_AT_ONCE
        if self._more_pinned:
            soon = self._policy.first(PASSED_AT_ONCE)
            pinned = soon[self._blocks.pins[soon] != 0]
            self._pass_over(pinned)
            self._more_pinned = len(pinned) > PASSED_AT_ONCE // 2  # then those behind them are likely to be pinned too
        if not self.retentions.live:
            return self._more_pinned
        more = self.retentions.end_lapsed() or self._more_pinned
        if self._retained_may_be_next and left:
            soon = self._policy.first(min(left, len(self._blocks.state) // SOON_DIVISOR))
            retained = self.retentions.are_retained(soon)
            self._set_aside(soon[retained])
            # More are likely behind those that were looked at if some of these were retained, or if they were fewer
            # than usual, since evictions have set some aside.
            self._retained_may_be_next = left < SET_ASIDE_AT_ONCE or bool(retained.any())
        return more or self._retained_may_be_next

    # --- as Policy -------------------------------------------------------------------------------

    @property
    def _has_hints(self) -> bool:
        return bool(self.retentions.live or self._outside)

    def requested(self, chains: Sequence[Chain]) -> None:
        """As the policy's. A block that was set aside, released or passed over is in the policy's order again."""
        if self._has_hints:
            self.retentions.end_lapsed()
            for group, _, ready, *_ in chains:
                if self.retentions.hint_of[ready].any():
                    self._return_found(group, ready)
        self._policy.requested(chains)

    def _return_found(self, group: Group, found: BlockIds) -> None:
        """Return found blocks to the policy's order if they have left it. Those that are retained stay retained."""
        are_retained = self.retentions.are_retained(found)
        group.namespace.counters.retained_found_keys += int(are_retained.sum())
        outside = np.zeros(len(found), np.bool_)
        outside[~are_retained] = self._remove_hints(group, found[~are_retained])
        for number, at in self.retentions.by_hint(found):  # only retained ones have a hint by now
            outside[at] = self._take_from_part(number, found[at])
        self._give_to_policy(group, found[outside])

    def insert(self, group: Group, blocks: BlockIds, keys: bytes, *, by_several: bool = False) -> None:
        """As the policy's. ``by_several``: prompts of others than one giver use the blocks, whoever asked for them."""
        self._policy.insert(group, blocks, keys)
        if by_several:
            self._askers.share(blocks)
        else:
            self._askers.stored(group, blocks, keys)
        awaited = self.retentions.awaited
        if not awaited:
            return
        split = np.frombuffer(keys, group.namespace.key_type).tolist()
        wishes = [awaited.take((group.number, key)) for key in split]
        for wish in dict.fromkeys(one for one in wishes if one is not None):
            members = np.array([one is wish for one in wishes], np.bool_)
            self._retain(wish, group, blocks[members][::-1])  # root first

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        self._retained_may_be_next = True  # others move up
        if self._has_hints and (outside := self._remove_hints(group, blocks)).any():
            keys = np.frombuffer(keys, group.namespace.key_type)[~outside].tobytes()
            blocks = blocks[~outside]
        self._policy.remove(group, blocks, keys)

    def follow(self, before: int, blocks: BlockIds) -> None:
        """As the policy's, for those that the policy has. Nothing moves if it does not have the one before them."""
        if self._has_hints:
            if self._is_outside(before):
                return
            if self.retentions.hint_of[blocks].any():
                blocks = blocks[[not self._is_outside(block) for block in blocks.tolist()]]
        self._policy.follow(before, blocks)

    def make_newest(self, blocks: BlockIds) -> None:
        """Move READY blocks, root first, to the end of the policy's order, if that is by use. Retained ones keep their
        hints, and stay where they are if they were set aside."""
        self._retained_may_be_next = True
        for group, members in self._blocks.by_group(blocks):
            are_inside = np.array([not self._is_outside(block) for block in members.tolist()], np.bool_)
            are_retained = self.retentions.are_retained(members)
            self._remove_hints(group, members[~are_retained])
            # The policy alone hears of it: who asked for the blocks is known, and must stay known.
            inside = members[are_inside][::-1]
            self._policy.remove(group, inside, self._blocks.keys(inside, group.key_bytes))
            are_set_aside = are_retained & ~are_inside
            self._give_to_policy(group, members[~are_set_aside])

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        """As the policy's; keys of blocks that a hint retains are always admitted, with those before them in their
        chains, without which no lookup finds them. Of what earlier stores of the prompt offered nothing is known."""
        runs, lowest = self._policy.admit(group, keys, starts)
        if awaited := self.retentions.awaited:
            scores = [score for length, score in runs for _ in range(length)]
            split = np.frombuffer(keys, group.namespace.key_type).tolist()
            for begin, end in pairwise((*starts, len(split))):
                while end > begin and awaited.get((group.number, split[end - 1])) is None:
                    end -= 1
                scores[begin:end] = [inf] * (end - begin)
            runs = [(len(list(run)), score) for score, run in groupby(scores)]
        if self._released or self._ended:
            lowest = -inf
        elif self.retentions.live:  # retained blocks go for keys with an infinite score, so this must be below that
            lowest = min(lowest, float_info.max)
        return Admission(runs, lowest)

    def first(self, count: int, below: float = inf) -> BlockIds:
        if not self._has_hints:
            return self._policy.first(count, below)
        self.retentions.end_lapsed()
        return self._first(count, below)

    def _first(self, count: int, below: float) -> BlockIds:
        early = self._first_of(chained(self._released, self._ended), count)
        order, left = [early], count - len(early)
        while left:
            found = self._policy.first(left, below)
            retained = self.retentions.are_retained(found)
            if not (self._set_aside_left and retained.any()):  # rarely, too many were set aside: retained ones go too
                order.append(found)
                left -= len(found)
                break
            # Set those aside that are retained, as many as this step may, and look again.
            few = found[retained][: self._set_aside_left]
            self._set_aside_left -= len(few)
            self._set_aside(few)
        if left and below == inf:  # under a limit, retained blocks stay, whatever their score is
            order.append(self._first_of(self.retentions.by_priority(), left))
        return np.concatenate(order)

    def _first_of(self, numbers: Iterable[int], count: int) -> BlockIds:
        """Return the first blocks of parts with these numbers."""
        parts = (self._outside.get(number, ()) for number in numbers)
        return np.fromiter(islice(chained.from_iterable(parts), count), np.uint32)

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        """Yield all that ``first`` returns in batches. Nobody else may change the order until the last one; ``_first``
        does, as it sets retained blocks aside."""
        self.retentions.end_lapsed()  # once, as it changes the order
        first = self._first if self._has_hints else self._policy.first
        given, most = NO_BLOCKS, BATCH
        while (found := first(most, below)).size > given.size:
            # What was set aside may have moved others in the order of ``arc``.
            same = np.array_equal(found[: given.size], given)
            yield found[given.size :] if same else found[~np.isin(found, given)]
            given, most = found if same else np.union1d(given, found), 4 * most
