"""Retentions: which blocks hints keep in the pool, for whom, until when, and how many at most.

What a retention does to the order of eviction is in hints.py. A restart forgets all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffd.cache.awaited_keys import AwaitedKeys
from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import Group, Namespace

RETAINED_SHARE = 0.25
"""Part of the pool, and of a namespace's quota, that hints may retain."""
AWAITED_S = 60.0
"""Time for which a hint also retains blocks that are still to be stored: engines store the last ones after it."""
MOST_TOGETHER, LEAST_RETENTIONS = 256, 64
"""Blocks of one retention, which end together: at most 256, and at most 1/64 of the bytes that hints may retain, so
that large blocks have that many retentions at least."""
LAPSED_AT_ONCE, DISPLACED_AT_ONCE = 32, 1024
"""Lapsed retentions that one step ends, and others that one hint displaces."""
MAX_ENDED = 1024
"""Extra entries of ``_deadlines``, over two per live retention, before it is rebuilt."""
MAX_NUMBER = 2**32 - 1
"""Largest number of a hint. After it all are numbered again."""
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
    """Pool bytes of its blocks."""


class Retentions:
    """The retentions that have blocks and have not ended.

    Between two calls:

    * A block is retained if ``hint_of`` has the number of one of them. Other numbers there are ``HintedOrder``'s, or of
      some that have ended: an end looks at no block.
    * ``nbytes`` of each are the bytes of the blocks that have its number, and not 0. ``retained_bytes``, those of each
      namespace and those of each session are their sums.
    * Each is in ``_ranked``, and in ``_deadlines`` with the deadline of its wish.

    A block is added only while all of them have at most RETAINED_SHARE of the pool, and those of a namespace that part
    of its quota.

    Args:
        quotas: limits of pool bytes by fingerprint.
        on_end: called with the number of one whose time is over, or that is displaced.

    Attributes:
        hint_of: [slots] number of the block's hint, or an old one; 0 if it had none.
        live: all of them by number; only methods here change it.
        awaited: keys whose blocks are retained once they are stored.
    """

    def __init__(
        self,
        slots: int,
        quotas: Mapping[bytes, int],
        clock: Callable[[], float],
        pool_bytes: int,
        on_end: Callable[[int], None],
    ) -> None:
        self._quotas, self._clock, self._on_end = quotas, clock, on_end
        self._most_bytes = int(RETAINED_SHARE * pool_bytes)
        self.hint_of = np.zeros(slots, np.uint32)
        self.awaited = AwaitedKeys()
        self.retained_bytes = 0
        self._bytes_of = Counter[int]()
        """Retained bytes by session."""
        self.live: dict[int, Retention] = {}
        self._ranked: dict[tuple[int, int], dict[int, Retention]] = {}
        """``live`` by priority and session, oldest first."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap of deadlines and numbers, also of some that have ended."""
        self._last_number = 0
        self._listed: npt.NDArray[np.uint32] | None = None
        """The keys of ``live``; None if they have changed since they were asked for."""

    # --- which blocks ----------------------------------------------------------------------------

    def of(self, blocks: BlockIds) -> list[Retention | None]:
        """Return each block's retention, if a hint retains it."""
        return [self.live.get(number) for number in self.hint_of[blocks].tolist()]

    def are_retained(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return which blocks a hint retains."""
        return self.have(self.live, blocks)

    def have(self, numbers: Mapping[int, object], blocks: BlockIds) -> npt.NDArray[np.bool_]:
        """Return whether each block's number is among these ``numbers`` of hints."""
        found = np.zeros(len(blocks), np.bool_)
        if not numbers:  # then most pages of the table were never read, and each would be a fault
            return found
        hints = self.hint_of[blocks]
        hinted = np.flatnonzero(hints)
        found[hinted] = [number in numbers for number in hints[hinted].tolist()]
        return found

    def by_hint(self, blocks: BlockIds) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        """Yield the number of each hint that some of the blocks have, or had, and where in ``blocks`` these are."""
        hints = self.hint_of[blocks]
        hinted = np.flatnonzero(hints)
        if not hinted.size:
            return
        order = hinted[np.argsort(hints[hinted], kind="stable")]
        ordered = hints[order]
        begins = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist()]
        for number, begin, end in zip(ordered[begins].tolist(), begins, [*begins[1:], len(order)], strict=True):
            yield number, order[begin:end]

    @property
    def numbers(self) -> npt.NDArray[np.uint32]:
        """The numbers in ``hint_of`` of all retained blocks, ascending, as in ``live``: each new one is higher."""
        if self._listed is None:
            self._listed = np.fromiter(self.live, np.uint32, len(self.live))
        return self._listed

    def by_priority(self) -> Iterator[int]:
        """Iterate over the numbers, those of the lowest priority first."""
        return chained.from_iterable(self._ranked[rank] for rank in sorted(self._ranked))

    # --- begin and end ---------------------------------------------------------------------------

    def wish(self, namespace: Namespace, session: int, giver: int, priority: int, ttl_s: float) -> Wish:
        """Return what a hint wants for the blocks that it retains."""
        return Wish(namespace, session, giver, giver, priority, self._clock() + ttl_s)

    def await_keys(self, wish: Wish, group: Group, keys: Sequence[bytes]) -> None:
        """Retain the blocks of keys that are stored within AWAITED_S, as far as that many may be awaited."""
        joined: dict[Wish, Wish] = {}

        def join(old: Wish, new: Wish) -> Wish:
            """Return the same object for all keys that had the same: ``HintedOrder.insert`` retains those together."""
            if (found := joined.get(old)) is None:
                joined[old] = found = old.joined(new)
            return found

        most = self._most_bytes // max(1, group.block_bytes)
        numbered = [(group.number, key) for key in keys]
        over = self.awaited.add(numbered, wish, self._clock() + AWAITED_S, most, join)
        group.namespace.counters.unretained_blocks += over

    def stop_awaiting(self, giver: int, group: Group, keys: Sequence[bytes]) -> None:
        """Await no more those of the keys that this giver alone wants to be retained."""
        for key in keys:
            found = self.awaited.get((group.number, key))
            if found is not None and found.wish.giver == giver != ANY:
                self.awaited.take((group.number, key))

    def is_over(self, wish: Wish) -> bool:
        """Return whether a wish's time is over."""
        return wish.deadline <= self._clock()

    def to_extend(self, wish: Wish, retained: BlockIds) -> Iterator[tuple[Wish, BlockIds]]:
        """Yield the wish to do both, and which of some retained blocks to put under it: those for which a wish is more
        than they are retained for."""
        wishes: dict[Wish, Wish] = {}
        for number, at in self.by_hint(retained):
            old = self.live[number].wish
            if (both := wishes.setdefault(old, old.joined(wish))) is not old:
                yield both, retained[at]

    def fitting(self, wish: Wish, group: Group, blocks: BlockIds) -> BlockIds:
        """Return the first of a group's blocks that may be retained besides what is, after others were displaced."""
        # Whose ``retained_bytes`` are limited, and to how much: the namespace's by its quota, then all by the pool.
        limits: list[tuple[Namespace | Retentions, int]] = [(self, self._most_bytes)]
        if (quota := self._quotas.get(wish.namespace.fingerprint)) is not None:
            limits.insert(0, (wish.namespace, int(RETAINED_SHARE * quota)))
        for limited, most_bytes in limits:
            others_bytes = max(0, most_bytes - len(blocks) * group.block_bytes)
            if limited.retained_bytes > others_bytes:
                self._displace(wish, limited, others_bytes, max(0, most_bytes - limited.retained_bytes))
            blocks = blocks[: max(0, most_bytes - limited.retained_bytes) // max(1, group.block_bytes)]
        return blocks

    def _displace(self, wish: Wish, limited: Namespace | Retentions, others_bytes: int, free_bytes: int) -> None:
        """End retentions for a wish, until ``limited`` (its namespace, or all retentions) retains at most
        ``others_bytes``.

        They are of lower priority, and of its session or of one that has more than its share. Of such a session they
        may be of any priority if they fit into what the wish's own session lacks of its share. It gets the
        ``free_bytes`` in any case, so it does not lack these.
        """
        share = self._most_bytes // len({*self._bytes_of, wish.session})
        left = DISPLACED_AT_ONCE
        lacks = share - self._bytes_of.get(wish.session, 0) - free_bytes  # of the wish's session
        for priority, session in sorted(self._ranked):  # the lowest priority first
            is_own, is_lower = session == wish.session, priority < wish.priority
            if is_own and not is_lower:
                continue
            for one in list(islice(reversed(self._ranked[priority, session].values()), left)):  # the newest first
                if limited.retained_bytes <= others_bytes:
                    return
                if not is_own and (self._bytes_of[session] <= share or not (is_lower or one.nbytes <= lacks)):
                    break
                left -= 1
                if limited in (self, one.wish.namespace):
                    if not is_own:  # what was its own leaves the session's bytes as they were
                        lacks -= one.nbytes
                    self._end(one)

    def put(self, wish: Wish, group: Group, blocks: BlockIds) -> None:
        """Retain blocks of a group, which no hint has. As many numbers as blocks must be left (``has_numbers``): each
        new retention takes a block at least."""
        most = max(1, min(MOST_TOGETHER, self._most_bytes // (LEAST_RETENTIONS * max(1, group.block_bytes))))
        while blocks.size:
            one = wish.filling
            if one is None or not one.left or self.live.get(one.number) is not one:  # none, or it is full, or has ended
                one = wish.filling = Retention(wish, self.new_number(), most)
                self.live[one.number] = one
                self._listed = None
                self._ranked.setdefault((wish.priority, wish.session), {})[one.number] = one
                heapq.heappush(self._deadlines, (wish.deadline, one.number))
            some, blocks = blocks[: one.left], blocks[one.left :]
            one.left -= len(some)
            self.hint_of[some] = one.number
            self._count(one, len(some) * group.block_bytes)
        if len(self._deadlines) > 2 * len(self.live) + MAX_ENDED:
            self._list_deadlines()

    def remove(self, number: int, nbytes: int) -> None:
        """Count blocks of these bytes out, which have lost this number, if it is a retention's."""
        if (one := self.live.get(number)) is not None:
            self._count(one, -nbytes)
            if not one.nbytes:
                self._unlist(one)

    def end_lapsed(self) -> bool:
        """End some whose time is over. Returns whether more may be."""
        now = self._clock()
        for _ in range(LAPSED_AT_ONCE):
            if not self._deadlines or self._deadlines[0][0] > now:
                return False
            _, number = heapq.heappop(self._deadlines)
            if (one := self.live.get(number)) is not None:
                self._end(one)
        return True

    def tick(self) -> None:
        """End some whose time is over, and forget keys whose blocks did not come."""
        self.end_lapsed()
        self.awaited.expire(self._clock())

    def _end(self, one: Retention) -> None:
        self._unlist(one)
        self._count(one, -one.nbytes)
        self._on_end(one.number)

    def _unlist(self, one: Retention) -> None:
        del self.live[one.number]
        self._listed = None
        rank = one.wish.priority, one.wish.session
        del self._ranked[rank][one.number]
        if not self._ranked[rank]:
            del self._ranked[rank]

    def _count(self, one: Retention, nbytes: int) -> None:
        wish = one.wish
        one.nbytes += nbytes
        wish.namespace.retained_bytes += nbytes
        self.retained_bytes += nbytes
        self._bytes_of[wish.session] += nbytes
        if not self._bytes_of[wish.session]:
            del self._bytes_of[wish.session]

    # --- numbers ---------------------------------------------------------------------------------

    def has_numbers(self, count: int) -> bool:
        """Return whether this many numbers are left; otherwise call ``renumber``."""
        return self._last_number + count <= MAX_NUMBER

    def new_number(self) -> int:
        """Return a number that no hint has had since the last ``renumber``."""
        self._last_number += 1
        return self._last_number

    def renumber(self, others: Iterable[int]) -> dict[int, int]:
        """Give all retentions, and the hints with these ``others`` numbers, the lowest numbers, in the same order.
        Returns the new ones by the old ones. Blocks with any other get 0: a look at all slots, once in 4 billion
        numbers."""
        live = sorted({*self.live, *others})
        numbers, new = np.array(live, np.uint32), {old: number for number, old in enumerate(live, 1)}
        for first in range(0, len(self.hint_of), NUMBERED_AT_ONCE):
            hints = self.hint_of[first : first + NUMBERED_AT_ONCE]
            hinted = np.flatnonzero(hints)
            at, are_live = np.searchsorted(numbers, hints[hinted]), np.isin(hints[hinted], numbers)
            hints[hinted] = np.where(are_live, at + 1, 0)
        for one in self.live.values():
            one.number = new[one.number]
        for known in (self.live, *self._ranked.values()):
            every = list(known.values())
            known.clear()
            known.update((one.number, one) for one in every)
        self._list_deadlines()
        self._last_number, self._listed = len(live), None
        return new

    def _list_deadlines(self) -> None:
        self._deadlines = sorted((one.wish.deadline, number) for number, one in self.live.items())
