"""Leases: which blocks are pinned for the prompts that found them, for how long, and how many of the pool at most."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import NO_BLOCKS, BlockIds, FoundKeys
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import Lease, LeaseTotals, SessionLeases
from kvoffd.errors import KvoffdError, UnknownLease
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd_proto.errors import ErrorCode

ENDED_AT_ONCE = 256
"""Leases that one step ends, or unpins."""
UNPINNED_AT_ONCE = 4096
"""Blocks after which a step unpins no further lease."""
UNPINNED_FOR_LOOKUP = 4096
"""Ended leases and their blocks, each counted, that a lookup may unpin for itself, besides two for each of its own."""
CLAIM_S = 10.0
"""Time for which a session whose lookup was cut by the limit of leases counts as one that has some."""


class PinnedBytes(NamedTuple):
    """Bytes of pinned blocks at one time."""

    leased: int
    """Those of blocks that leases pin."""
    every: int
    """Those of all."""


class Leases:
    """Active leases, and those that have ended and whose blocks are still to be unpinned.

    An active lease is in ``by_id`` and in ``lease.siblings``, the leases of its session in its namespace, which are in
    ``by_session``. Each of its blocks is pinned as often as the lookup named its key, and counts as often in
    ``keys`` of its siblings; those that no lease had pinned count in ``nbytes`` of both. A session or namespace may end
    with very many leases: ``siblings`` loses all of them at once, and each step of ``unpin_some`` does the rest for
    some.

    Args:
        ttl_s: time after which a lease ends by itself.
        most_bytes: the most that all leases together may pin, promoted blocks included. While all pins together stay
            within half of it, a session gets what it asks for. Beyond that it gets no more than its equal part among
            the sessions that have leases, or were cut in the last CLAIM_S, and never more than what is left. What a
            lease has it keeps until its end. Blocks that others lease already count for these, and promoted ones
            (``hold``) are not subject to the equal parts.
        max_keys, max_leases: limits for one session.

    Attributes:
        by_id: active leases by id, in the order of their deadlines, and ended ones that ``unpin_some`` has not reached.
        by_session: the active ones of each session that has any, by namespace.
        withheld_bytes: bytes of blocks that will be promoted, and leases will pin, and of reads that were given up and
            have not ended; kept by the tiers.
        ended_at_once: leases that one step ends or unpins.
    """

    def __init__(
        self,
        life: BlockLife,
        clock: Callable[[], float],
        ttl_s: float,
        most_bytes: int,
        max_keys: int,
        max_leases: int,
    ) -> None:
        self._life, self._blocks, self._clock = life, life.blocks, clock
        self.ttl_s, self.most_bytes, self._max_keys, self._max_leases = ttl_s, most_bytes, max_keys, max_leases
        self._unrationed_bytes = most_bytes // 2
        """Bytes of all pins up to which a session may have more than its share."""
        self.by_id: dict[int, Lease] = {}
        self.withheld_bytes = 0
        self.ended_at_once = ENDED_AT_ONCE
        self.by_session: dict[int, dict[Namespace, SessionLeases]] = {}
        self._bytes_of = Counter[int]()
        """Sum of the leases' ``nbytes`` of each session that has any."""
        self._claims: dict[int, float] = {}
        """Sessions whose last lookup was cut by the limit of leases, with the time until which they count as sessions
        with leases."""
        self._to_unpin: deque[dict[Lease, None]] = deque()
        """Leases that have ended and whose blocks are still pinned, as they came together; none is empty."""
        self._count_to_unpin = 0
        """Number of these leases."""

    @property
    def pinnable_bytes(self) -> int:
        """Bytes that leases may still pin."""
        return self.most_bytes - self._blocks.pinned_bytes

    @property
    def pinned(self) -> PinnedBytes:
        """Bytes that are pinned now."""
        return PinnedBytes(self._blocks.leased_bytes, self._blocks.pinned_bytes)

    @property
    def leasable_bytes(self) -> int:
        """Bytes that leases may still pin, without those that are reserved for promotions."""
        return self.pinnable_bytes - self.withheld_bytes

    def of(self, session: int) -> LeaseTotals:
        """Return what the session has leased in all namespaces."""
        leases = keys = 0
        for siblings in self.by_session.get(session, {}).values():
            leases += len(siblings.leases)
            keys += siblings.keys
        return LeaseTotals(leases, keys, self._bytes_of[session])

    @property
    def count(self) -> int:
        """Number of active leases."""
        return sum(len(one.leases) for of_session in self.by_session.values() for one in of_session.values())

    def get(self, lease_id: int) -> Lease | None:
        """Return the active lease of this id, if there is one."""
        lease = self.by_id.get(lease_id)
        return lease if lease is not None and lease.active else None

    # --- what a lookup found --------------------------------------------------------------------

    def open(self, session: int, lease_id: int, namespace: Namespace) -> Lease:
        """Return the active lease of this id; else a new one, which ``give`` makes active.

        Raises UnknownLease if the lease is another session's or namespace's, and KvoffdError (TOO_MANY) if the session
        may have no more.
        """
        if (lease := self.get(lease_id)) is None:
            if self.of(session).leases >= self._max_leases:
                why = f"The session holds {self._max_leases} leases, its limit; release some."
                raise KvoffdError(why, ErrorCode.TOO_MANY)
            return Lease(lease_id, session, namespace, self._clock() + self.ttl_s, NO_BLOCKS)
        if lease.session != session or lease.namespace is not namespace:
            raise UnknownLease(f"The lease {lease_id} belongs to another session or namespace; choose a new lease id.")
        return lease

    def give(self, lease: Lease, found: list[FoundKeys], before: PinnedBytes, *, is_new: bool) -> list[FoundKeys]:
        """Give a lease the READY blocks. Returns what was found, without the blocks that it may not pin.

        All are pinned first, those of a new lease by the lookup: only then it is known what that takes. If it is too
        much, they are unpinned again, and as many are pinned as ``_cut`` allows. ``before``: ``pinned`` before the
        lookup.
        """
        ready = _ready_of(found)
        if is_new and (ready.size or lease.coming):  # it becomes active
            of_session = self.by_session.setdefault(lease.session, {})
            # The empty ``siblings`` with which it was made stay if it is the first of them.
            lease.siblings = of_session.setdefault(lease.namespace, lease.siblings)
            lease.siblings.leases[lease] = None
            self.by_id.pop(lease.lease_id, None)  # an ended one of the same id, whose place is too early for this one
            self.by_id[lease.lease_id] = lease
        if not ready.size:
            return found
        fresh = ready if is_new else self._lease_fresh(lease, ready)
        if self._may_lease(lease.session, len(fresh), before, self.pinned):
            self._claims.pop(lease.session, None)
        else:
            self._life.return_unpinned(self._blocks.end_lease(fresh))
            self._unpin_for(lease.session, fresh)
            found, before = self._cut(lease, found), self.pinned
            fresh = self._lease_fresh(lease, _ready_of(found))
        self._add(lease, fresh, self._blocks.leased_bytes - before.leased)
        if not lease.blocks.size and not lease.coming:  # the limit allowed no pin
            self.end_all([lease])
        return found

    def discard(self, lease: Lease, found: list[FoundKeys]) -> None:
        """End a new lease that was never given what its lookup ``found`` and leased."""
        self._life.return_unpinned(self._blocks.end_lease(_ready_of(found)))
        if self._life.tiers is not None:
            self._life.tiers.lease_ended(lease)

    def _unpin_for(self, session: int, wanted: BlockIds) -> None:
        """Unpin blocks of ended leases, which must not keep a new one small, until a session may pin the wanted ones.

        As many blocks, of as many leases at most, are mostly enough. Where active leases pin the same blocks, even all
        ended ones may not suffice. So it stops soon after that number and UNPINNED_FOR_LOOKUP, and the lookup gets
        fewer blocks.
        """
        nbytes, left = int(self._blocks.pages[wanted].sum()) * PAGE_BYTES, UNPINNED_FOR_LOOKUP + 2 * len(wanted)
        while self._to_unpin and left > 0:
            now = self.pinned
            if self._may_lease(session, 0, now, PinnedBytes(now.leased + nbytes, now.every + nbytes)):
                return
            left -= self.unpin_some()

    def _lease_fresh(self, lease: Lease, ready: BlockIds) -> BlockIds:
        """Pin the READY blocks that a lease does not have. Returns these."""
        fresh = ready[~np.isin(ready, lease.blocks)]
        self._blocks.lease(fresh)
        return fresh

    def _may_lease(
        self, session: int, keys: int, before: PinnedBytes, after: PinnedBytes, *, is_lookup: bool = True
    ) -> bool:
        """Return whether a session may lease this many keys more, which changes the pinned bytes so: within the limits,
        and for a lookup also within the session's share, as far as others need a part."""
        if keys + sum([one.keys for one in self.by_session.get(session, {}).values()]) > self._max_keys:
            return False
        # Other pins, as those of loads, may exceed the limit: then this is within it if it pins nothing new.
        if after.leased > self.most_bytes or after.every > max(self.most_bytes, before.every):
            return False
        newly_leased_bytes = after.leased - before.leased
        if not is_lookup or not newly_leased_bytes or after.every <= self._unrationed_bytes:
            return True
        return self._bytes_of[session] + newly_leased_bytes <= self._share_bytes(session)

    def _share_bytes(self, session: int) -> int:
        """Return the equal part of a session among those that have pinned something, or claim it, and itself."""
        now = self._clock()
        # Sessions that only wait for a tier, and have nothing pinned yet, do not count.
        sharers = {session, *(other for other, nbytes in self._bytes_of.items() if nbytes)}
        sharers.update(other for other, until in self._claims.items() if until > now)
        return self.most_bytes // len(sharers)

    def _cut(self, lease: Lease, found: list[FoundKeys]) -> list[FoundKeys]:
        """Return what was found with as many READY keys as the session may lease besides what the lease has: the first
        of each group, about the same part of each."""
        fresh = [~np.isin(of_group.ready, lease.blocks) for of_group in found]
        counts = [int(which.sum()) for which in fresh]
        # All fresh blocks in the order in which they are leased: by the part of their group's that comes before them.
        parts_before = np.concatenate([np.arange(count) / max(1, count) for count in counts])
        order = np.argsort(parts_before, kind="stable")
        group_numbers = np.repeat(np.arange(len(found)), counts)[order]
        blocks = np.concatenate([of_group.ready[which] for of_group, which in zip(found, fresh, strict=True)])[order]
        # Pinned bytes if each of them, and those before it, were leased.
        nbytes, now = self._blocks.pages[blocks].astype(np.int64) * PAGE_BYTES, self.pinned
        leased = now.leased + np.cumsum(nbytes * (self._blocks.leases[blocks] == 0))
        every = now.every + np.cumsum(nbytes * (self._blocks.pins[blocks] == 0))

        def is_too_much(at: int) -> bool:
            return not self._may_lease(lease.session, at + 1, now, PinnedBytes(int(leased[at]), int(every[at])))

        count = bisect_left(range(len(blocks)), True, key=is_too_much)  # what is too much is so with more blocks too
        if count < len(blocks):
            self._claims[lease.session] = self._clock() + CLAIM_S
        leasable = np.bincount(group_numbers[:count], minlength=len(found)).tolist()
        return [
            of_group.limited(which, keys, MissReason.LEASE_LIMIT)
            for of_group, which, keys in zip(found, fresh, leasable, strict=True)
        ]

    def hold(self, lease: Lease, blocks: BlockIds) -> None:
        """Pin READY blocks that were promoted for a lease, unless it has ended or leases may not pin more."""
        if not lease.active:
            return
        before = self.pinned
        self._blocks.lease(blocks)
        if self._may_lease(lease.session, len(blocks), before, self.pinned, is_lookup=False):
            self._add(lease, blocks, self._blocks.leased_bytes - before.leased)
        else:
            self._life.return_unpinned(self._blocks.end_lease(blocks))

    def _add(self, lease: Lease, fresh: BlockIds, newly_leased_bytes: int) -> None:
        lease.blocks = np.concatenate([lease.blocks, fresh]) if lease.blocks.size else fresh
        lease.nbytes += newly_leased_bytes
        lease.siblings.nbytes += newly_leased_bytes
        lease.siblings.keys += len(fresh)
        self._bytes_of[lease.session] += newly_leased_bytes

    # --- ends -----------------------------------------------------------------------------------

    def end(self, session: int, lease_ids: Iterable[int]) -> int:
        """End leases of a session; unknown ids are ignored. Returns how many ended."""
        found = [self.get(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        return self.end_all([lease for lease in found if lease is not None and lease.session == session])

    def end_session(self, session: int) -> int:
        """End all leases of a closed session. Returns how many."""
        self._claims.pop(session, None)
        self._bytes_of.pop(session, None)
        namespaces = self.by_session.pop(session, {})
        return self._unpin([siblings.end() for siblings in namespaces.values()])

    def end_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """End all leases on blocks of namespaces."""
        which, ended = set(namespaces), list[dict[Lease, None]]()
        for session, of_session in list(self.by_session.items()):
            for siblings in [of_session.pop(one) for one in which.intersection(of_session)]:
                self._bytes_of[session] -= siblings.nbytes
                ended.append(siblings.end())
            if not of_session:
                del self.by_session[session], self._bytes_of[session]
        self._unpin(ended)

    def end_overdue(self) -> int:
        """End leases whose time is over, at most ``ended_at_once``. Returns how many."""
        now = self._clock()
        overdue = itertools.takewhile(lambda lease: lease.deadline <= now, self.by_id.values())
        return self.end_all([lease for lease in itertools.islice(overdue, self.ended_at_once) if lease.active])

    def end_all(self, leases: Sequence[Lease]) -> int:
        """End active leases. Returns how many. If there are many, ``unpin_some`` unpins their blocks later."""
        for lease in leases:
            siblings = lease.siblings
            del siblings.leases[lease]
            siblings.keys -= len(lease.blocks)
            siblings.nbytes -= lease.nbytes
            self._bytes_of[lease.session] -= lease.nbytes
            if not siblings.leases:
                of_session = self.by_session[lease.session]
                del of_session[lease.namespace]
                if not of_session:
                    del self.by_session[lease.session], self._bytes_of[lease.session]
        return self._unpin([dict.fromkeys(leases)])

    def _unpin(self, ended: Iterable[dict[Lease, None]]) -> int:
        """Unpin the blocks of leases that have ended, later if they are many: then none of them is looked at now, which
        takes 3 ms for 64,000. Returns how many leases they are."""
        together = [leases for leases in ended if leases]
        self._to_unpin += together
        count = sum(map(len, together))
        self._count_to_unpin += count
        if 0 < self._count_to_unpin <= self.ended_at_once:
            self.unpin_some()
        return count

    @property
    def has_to_unpin(self) -> bool:
        """Whether leases have ended whose blocks are still pinned: ``unpin_some`` is to be called."""
        return bool(self._to_unpin)

    def unpin_some(self) -> int:
        """Unpin blocks of some leases that have ended. Returns the number of these leases and of their blocks, added
        up."""
        ended, unpinned = list[Lease](), 0
        while self._to_unpin and len(ended) < self.ended_at_once and unpinned < UNPINNED_AT_ONCE:
            lease, _ = self._to_unpin[0].popitem()
            if not self._to_unpin[0]:
                self._to_unpin.popleft()
            ended.append(lease)
            unpinned += len(lease.blocks)
        self._count_to_unpin -= len(ended)
        for lease in ended:
            if self.by_id.get(lease.lease_id) is lease:  # a new one may have got its id
                del self.by_id[lease.lease_id]
            if lease.covers_at_end and lease.blocks.size:
                lease.namespace.counters.covered_keys += len(lease.blocks)
            if self._life.tiers is not None:
                self._life.tiers.lease_ended(lease)
        if ended:
            blocks = ended[0].blocks if len(ended) == 1 else np.concatenate([lease.blocks for lease in ended])
            self._life.return_unpinned(self._blocks.end_lease(blocks))
        return len(ended) + unpinned


def _ready_of(found: Sequence[FoundKeys]) -> BlockIds:
    """Return the blocks of the READY keys of all groups."""
    return found[0].ready if len(found) == 1 else np.concatenate([NO_BLOCKS, *[each.ready for each in found]])
