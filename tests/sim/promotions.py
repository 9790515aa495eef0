"""What tiers bring up for lookups, seen from outside: whom it is held for, what is read, and what is given up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.states import READY
from kvoffd.cache.tickets import Lease
from kvoffd.server.service import Service
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.promotions import Fill
from kvoffd.tiering.read_speed import SILENCE_S
from kvoffd.tiers.header import Block
from kvoffd.tiers.tier import ReadEnd, Result
from kvoffd_proto import messages as m
from tests.sim.clock import Broken

if TYPE_CHECKING:
    from tests.sim.tiers import SimTiers

ROUNDED_S = 0.002
"""Replies have whole milliseconds."""
PAUSES_S = 3.0
"""The daemon may be late by this: it is paused, and looks a few times a second."""


class PromotionWatch:
    """One life of the daemon."""

    def __init__(self, service: Service, counts: Counter[str]) -> None:
        self._counts = counts
        self._service, self._cache, self._clock = service, service.cache, service.clock
        self._awaited: dict[Fill, dict[Lease, bool]] = {}
        """By block that comes up, the leases of the lookups that were answered with it, and whether they surely wait
        for it: a store may be asked for a block once more."""
        self._held: dict[int, set[Lease]] = {}
        """By block that came up, the leases that have to keep it."""
        self._reads: dict[Fill, int] = {}
        """What is being read, numbered as it was begun."""
        self._ends = defaultdict[PromotionSource, dict[int, float]](dict)
        """When reads ended that were not given up, by their numbers."""
        self._came_at = defaultdict[PromotionSource, float](float)
        self._largest_bytes = defaultdict[PromotionSource, int](int)
        self._given_up: set[Fill] = set()
        self._begun = 0

    def _waiting(self, leases: Iterable[Lease]) -> list[Lease]:
        return [lease for lease in leases if lease.active]

    # --- what happens ----------------------------------------------------------------------------

    def answered(self, request: m.Lookup, reply: m.LookupReply, tiers: SimTiers) -> None:
        """A lookup was answered. See whether the time that it was told can be true where a tier is silent."""
        lease, coming = self._cache.leases.by_id.get(request.lease_id), tiers.tiering.promotions.unsettled
        if lease is None:
            return
        block_bytes: dict[PromotionSource, int] = {}
        for part, states in zip(request.groups, reply.states, strict=True):
            block_group = block_group_of(lease.namespace.group(part.group))
            for key, state in zip(lease.namespace.split(part.group, part.keys), states, strict=True):
                fill = coming.get(block_group.tag, {}).get(key)
                if state in m.COMING and fill is not None:
                    surely = state == m.PENDING or not reply.asking
                    awaited = self._awaited.setdefault(fill, {})
                    awaited[lease] = surely or awaited.get(lease, False)
                    if surely:
                        block_bytes[fill.queue.source] = fill.queue.group.block_bytes
        for source, nbytes in block_bytes.items():
            if source.reads.under_way:
                silent_s = self._clock() - max(self._came_at[source], next(iter(source.reads.under_way)).begun_at)
                least_s = silent_s * nbytes / self._largest_bytes[source] / max(1.0, tiers.bend)
                if silent_s >= SILENCE_S and reply.wait_ms / 1000 < least_s - ROUNDED_S:
                    raise Broken(f"a tier is silent for {silent_s:.1f} s, and its blocks are expected at once")

    def begun(self, on_end: ReadEnd) -> None:
        """A tier has begun to read a block."""
        fill = _fill_of(on_end)
        source = fill.queue.source
        self._begun += 1
        self._reads[fill] = self._begun
        self._largest_bytes[source] = max(self._largest_bytes[source], fill.queue.block_group.nbytes)

    def watched(self, on_end: ReadEnd) -> ReadEnd:
        """What a tier is to call that is about to read a block."""
        fill = _fill_of(on_end)
        is_prefetched = any(lease.session == NO_SESSION for lease in fill.leases)  # for a hint, which has no answer
        leases = self._awaited.get(fill)
        # Of many leases that end at once, some are taken away in the background.
        is_ending = any(lease in some for some in self._cache.leases._to_unpin for lease in leases or ())
        if leases is not None and not (is_prefetched or is_ending or self._waiting(leases)):
            raise Broken("a block is read that nobody waits for any more")

        def ended(result: Result, block: Block | None) -> None:
            assert fill.ticket is not None
            number = int(fill.ticket.blocks[0])
            on_end(result, block)
            self._ended(fill, result, number)

        return ended

    def _ended(self, fill: Fill, result: Result, block: int) -> None:
        source, number, now = fill.queue.source, self._reads.pop(fill), self._clock()
        if fill not in self._given_up:
            self._ends[source][number] = now
        self._given_up.discard(fill)
        if result is Result.DONE:
            self._came_at[source] = now
        leases = [lease for lease, surely in self._awaited.pop(fill, {}).items() if surely]
        if self._cache.blocks.state[block] == READY:
            waiting = [lease for lease in self._waiting(leases) if self._may_hold(lease, fill.queue.group.block_bytes)]
            self._held.setdefault(block, set()).update(waiting)
            self._counts["promoted_awaited"] += bool(waiting)

    def _may_hold(self, lease: Lease, block_bytes: int) -> bool:
        """Whether leases may pin another block, for this one's session."""
        keys = self._cache.leases.of(lease.session).keys
        return keys < self._cache.leases._max_keys and self._cache.leases.leasable_bytes >= block_bytes

    def dropped(self, blocks: BlockIds, *, evicted: bool) -> None:
        """Blocks leave the pool. Those that came up for a lookup are not to be evicted while its lease lives."""
        for block in blocks.tolist():
            if self._waiting(self._held.pop(block, set())) and evicted:
                raise Broken("a block is evicted while it is awaited")

    # --- after each tick -------------------------------------------------------------------------

    def check_given_up(self, source: PromotionSource) -> None:
        """What is overdue is given up, and nothing else."""
        now, patience_s = self._clock(), source.patience_s
        for fill in source.reads.given_up.keys() - self._given_up:
            number = self._reads[fill]
            ends = (at for other, at in self._ends[source].items() if other < number)
            if now - max([fill.begun_at, *ends]) < patience_s:
                raise Broken("a read is given up although those before it have only just ended")
            self._given_up.add(fill)
            self._counts["read_given_up"] += 1
        if source.reads.under_way:
            first = next(iter(source.reads.under_way))
            last_at = max(self._ends[source].values(), default=0.0)
            if now - max(first.begun_at, last_at) > 2 * patience_s + PAUSES_S:
                raise Broken("a read that is overdue is not given up")
        kept_s = 2 * patience_s + PAUSES_S
        self._ends[source] = {number: at for number, at in self._ends[source].items() if now - at <= kept_s}


def _fill_of(on_end: ReadEnd) -> Fill:
    """The block that is read, of which ``PromotionSource`` has to be told."""
    fill: Fill = on_end.args[0]  # type: ignore[attr-defined]
    return fill
