"""Prefetches of hints: keys that tiers bring up for nobody yet. Nothing is pinned for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvoffd.cache.block_life import BlockLife
from kvoffd.cache.block_table import NO_BLOCKS
from kvoffd.cache.hooks import TierHooks
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.states import READY
from kvoffd.cache.tickets import Lease

MAX_PREFETCHES = 256
"""Prefetches that may wait for tiers. Of further ones those do nothing whose session has as many as any other."""
ASKED_AT_ONCE = 4
"""Prefetches that a tick asks for again."""
NO_LEASE = NO_SESSION = 0
"""Lease and session of a prefetch: ids that no other has."""


class Prefetches:
    """Prefetches that wait for tiers: leases that pin nothing, and their keys."""

    def __init__(self, life: BlockLife, clock: Callable[[], float], ttl_s: float) -> None:
        self._life, self._clock, self._ttl_s = life, clock, ttl_s
        self._groups: dict[Lease, Sequence[tuple[int, bytes]]] = {}
        self._session_of: dict[Lease, int] = {}
        """Session whose hint each one is."""

    def add(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]], session: int) -> int:
        """Promote what tiers have of these keys. Returns how many are READY."""
        states = self._states_of(namespace, groups)
        ready = sum(of_group.count(READY) for of_group in states)
        tiers = self._life.tiers
        if tiers is not None and ready < sum(map(len, states)) and self._make_place(session):
            lease = Lease(NO_LEASE, NO_SESSION, namespace, self._clock() + self._ttl_s, NO_BLOCKS)
            self._groups[lease], self._session_of[lease] = groups, session
            self._ask(tiers, lease, states)
            if ready and lease in self._groups:  # else nothing comes up, and ``_ask`` has ended it
                self._make_ready_newest(namespace, groups)
        return ready

    def _make_place(self, session: int) -> bool:
        """Have a place for one more of a session. Where all are taken, the session with the most loses its last one,
        unless this one would have as many. Returns whether there is one now."""
        if len(self._groups) < MAX_PREFETCHES:
            return True
        counts = Counter(self._session_of.values())
        ((largest, most),) = counts.most_common(1)
        if counts[session] + 1 >= most:
            return False
        self._end(next(lease for lease, its in reversed(self._session_of.items()) if its == largest))
        return True

    def tick(self) -> None:
        """End prefetches whose blocks have come, and ask again for those of stores that have not answered, in turns."""
        left = ASKED_AT_ONCE
        for lease, groups in list(self._groups.items()):
            tiers, is_overdue = self._life.tiers, lease.deadline <= self._clock()
            if tiers is None or not lease.coming or is_overdue or not lease.namespace.groups:
                self._end(lease)
            elif lease.asking and left:
                left -= 1
                self._groups[lease] = self._groups.pop(lease)
                self._ask(tiers, lease, self._states_of(lease.namespace, groups))

    def _make_ready_newest(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> None:
        """Move READY blocks to the end of the order of eviction, the tail first, as a lookup does: what comes up is to
        follow them there."""
        for index, keys in groups:
            ready = self._life.blocks.lookup(namespace.groups[index], keys, lease=False).ready
            self._life.order.make_newest(np.array([*dict.fromkeys(ready.tolist())], np.uint32))

    def _states_of(self, namespace: Namespace, groups: Sequence[tuple[int, bytes]]) -> list[bytes]:
        return [self._life.blocks.find(namespace.groups[index], keys)[0] for index, keys in groups]

    def _ask(self, tiers: TierHooks, lease: Lease, states: list[bytes]) -> None:
        """Request what the pool lacks of a prefetch's keys, or end it if nothing more comes."""
        lease.forget_unanswered()
        before = lease.certain
        tiers.find(lease, self._groups[lease], states, None)
        lease.namespace.counters.prefetched_keys += max(0, lease.certain - before)
        if not lease.coming:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._groups[lease], self._session_of[lease]
        if self._life.tiers is not None:
            self._life.tiers.lease_ended(lease)
