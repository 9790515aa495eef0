"""The tiers below the pool as a whole: lookups find their blocks, blocks move up and down, invalid ones are removed."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import FREE, IN_A_TIER, READY, UNANSWERED_YET, WRITING, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.prompt_tokens import LoadedKeys, Source
from kvoffd.cache.tickets import Lease, LoadTicket
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.calls import call_each
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiering.promotions import SLOWER, Asker, Coming, Fill, FillQueue, Promotions
from kvoffd.tiering.writer import Writer, block_group_of
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import ABSENT, ASKED, PEER, PRESENT, Tier
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import COMING, PENDING, SHARED, GroupSpec

logger = logging.getLogger(__name__)

ANSWER_S = 0.02
"""Estimate of a store's answer time, for engines that wait. The ask deadline covers the worst case, and may be longer
than any engine waits."""
FAILED_S = 10.0
"""Time for which prompts whose blocks could not be read name the tier: their reports come about a second later."""
LOGGED_S = 600.0
"""Interval after which a tier's error is logged again."""
MAX_LOGGED = 1024
"""Remembered kinds of tier errors, by server, with the time when they were logged."""

_ANSWER_TABLES = tuple(bytes(one == state for one in range(256)) for state in (ABSENT, PRESENT, ASKED))
"""Tables for ``translate``: 1 for one answer of a tier, 0 for others."""
SETTLED = bytes([READY, *COMING])
"""States of keys that are in the pool, or on their way, and need no action."""


@dataclass(slots=True)
class _Lookup:
    lease: Lease
    asked: Sequence[AskedKeys] | None
    """Keys by group of the request, for counting those that do not come; None if they were counted before."""
    sources: Sequence[Promotions]
    """Sources that it can use now, in the order in which they are asked."""
    left_bytes: int
    """Pool bytes that may still be promoted for it: more than leases may pin would evict its own beginning."""
    free_bytes: float
    """Pool bytes that it may ask a source for: keys that got no space in their patience do not wait for it again."""
    queues: list[FillQueue] = field(default_factory=list)
    """Queues that it waits for and that have no space yet, of all sources."""

    @property
    def namespace(self) -> Namespace:
        return self.lease.namespace

    def mark(self, some: _Range, places: Sequence[int], reason: int) -> None:
        """Record a reason for some keys, by ascending indices, unless they were counted before."""
        if self.asked is None or not places:
            return
        if places[-1] - places[0] == len(places) - 1:
            self.asked[some.number].mark(some.start + places[0], some.start + places[-1] + 1, reason)
            return
        for at in places:
            self.asked[some.number].mark(some.start + at, some.start + at + 1, reason)

    def asker(self, some: _Range, at: int) -> list[Asker]:
        """Return where a key is counted if it does not come; nothing if it was counted before."""
        return [(self.asked[some.number], some.start + at)] if self.asked is not None else []


class _Range:
    """Keys of one group of a lookup, and what is known of them by index."""

    def __init__(
        self,
        block_group: BlockGroup,
        keys: Sequence[bytes],
        states: memoryview,
        coming: Mapping[bytes, Fill],
        number: int,
        start: int,
    ) -> None:
        self.group, self.keys, self.states, self.coming = block_group, keys, states, coming
        """``states``: the lookup's answer. ``coming``: fills that exist already."""
        self.number, self.start = number, start
        """Positions of the group in the request, and of the first key in the group."""
        free = len(states) if not any(states) else 0
        self.unfound = list(range(free)) or [at for at, state in enumerate(states) if state == FREE]
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if coming:
            self.unfound = [at for at in self.unfound if keys[at] not in coming]
        self.there: dict[int, Promotions] = {}
        """Sources that have a key."""
        self.asked: list[int] = []
        """Keys that a store is being asked for."""
        self.question: object = None
        """The question to a store, if this lookup asked it for all keys in one."""
        self.found_by: dict[str, None] = {}
        """Names of the tiers that have a key, or are being asked for it."""

    def look(self, sources: Sequence[Promotions], *, prefix: bool) -> None:
        """Ask each of these sources for the keys that no earlier one has."""
        for source in sources:
            if not self.unfound:
                return
            every, tier = len(self.unfound) == len(self.keys), source.tier
            keys = self.keys if every else list(map(self.keys.__getitem__, self.unfound))
            found, question = tier.find(self.group, keys, prefix=prefix)
            self.question = question if every else None
            if any(found):
                absent, present, asked = (compress(self.unfound, found.translate(one)) for one in _ANSWER_TABLES)
                self.found_by[tier.name] = None
                self.there.update(dict.fromkeys(present, source))
                self.asked += asked
                self.unfound = list(absent)


class Tiering:
    """Manages the sources below the pool of one cache: its ``TierHooks``, and the ``TierListener`` of all tiers.

    ``pump`` begins requested promotions once the replies are sent; ``tick`` is for deadlines and the cold end.

    Attributes:
        is_unshared: whether a namespace, by its fingerprint, became stale here: other nodes' blocks of the same keys
            may be stale too, so stores are neither read nor written for it.
        is_behind: whether other nodes may have cleared a namespace, by its fingerprint, unheard of here: then disks are
            not read for it.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
        is_unshared: Callable[[bytes], bool] = lambda fingerprint: False,
    ) -> None:
        self._cache, self._clock = cache, clock
        self._coming: Coming = {}
        self._engines_busy, self.is_unshared = engines_busy, is_unshared
        self.is_behind: Callable[[bytes], bool] = lambda fingerprint: False
        self.sources: list[Promotions] = []
        """The disks of this node, then shared stores in the order of asking."""
        self._disk_settings, self._disk_tiers = settings, list[Tier]()
        self._numbered: list[Promotions] = []
        """The sources in the order in which they were added."""
        self.writers = [self._make_writer(self._disk_tiers, settings, lambda: self.disks, shared=False)]
        """The writer of the disks, then those of the stores."""
        self._answers_due = 0.0
        self._uncounted: dict[Namespace, dict[int, dict[bytes, tuple[Asker, ...]]]] = {}
        """Lookups by tag and key that a store is being asked for: they count it once the store has answered."""
        self._uncounted_runs: dict[object, Asker] = {}
        """Lookups all of whose keys are in one question to a store, by the question: the first key's asker."""
        self._awaits: dict[Lease, dict[Fill, None]] = {}
        """Fills that each lease waits for."""
        self._unused = np.zeros(len(cache.blocks.state), np.uint8)
        """[blocks] 1 plus the index in ``_numbered`` of the source from which the block was promoted, if it was not
        loaded since; otherwise 0."""
        self._to_spare: list[tuple[BlockGroup, list[bytes]]] = []
        """Blocks that left the pool since the last tick: see ``Tier.spare``."""
        self._events = events
        self._logged: dict[tuple[str, str], float] = {}
        """Logged errors by tier and kind, with the time; the tiers count them."""

    @property
    def disks(self) -> list[Promotions]:
        """The sources that are disks."""
        return self.sources[: len(self._disk_tiers)]

    @property
    def stores(self) -> Iterable[tuple[Promotions, Writer]]:
        """The sources that nodes share, with their writers."""
        return zip(self.sources[len(self._disk_tiers) :], self.writers[1:], strict=True)

    @property
    def disk_writer(self) -> Writer:
        return self.writers[0]

    def add_store(self, tier: Tier, settings: TieringSettings) -> Promotions:
        """Add a store that nodes share, for blocks that neither the pool nor the earlier sources have."""
        number, source = len(self._numbered), self._make_source(tier, settings, shared=True)
        self._numbered.append(source)
        self.sources.append(source)
        self.writers.append(
            self._make_writer([tier], settings, lambda: self._numbered[number : number + 1], shared=True)
        )
        return source

    def add_disk(self, tier: Tier) -> Promotions:
        """Add a disk, before the stores. What fills may use of the pool is divided between all disks."""
        source = self._make_source(tier, self._disk_settings, shared=False)
        self._numbered.append(source)
        self.sources.insert(len(self._disk_tiers), source)
        self._disk_tiers.append(tier)
        whole_bytes = source.most_bytes
        for one in self.disks:
            one.most_bytes = whole_bytes // len(self._disk_tiers)
        return source

    def _make_source(self, tier: Tier, settings: TieringSettings, *, shared: bool) -> Promotions:
        parts = self._cache, self._clock, self._coming, self.sources, self._promoted
        return Promotions(tier, settings, *parts, shared=shared)

    def _make_writer(
        self, tiers: list[Tier], settings: TieringSettings, sources: Callable[[], list[Promotions]], *, shared: bool
    ) -> Writer:
        return Writer(
            *(self._cache, tiers, self._clock, settings),
            idle=lambda: not any(source.waiting_blocks for source in sources()),
            engines_busy=self._engines_busy,
            leaves_out=self.is_unshared if shared else lambda fingerprint: False,
        )

    def renew(self, source: Promotions, settings: TieringSettings) -> Promotions:
        """Replace an idle source whose tier serves another peer from now on, of which nothing is known yet."""
        number, new = self._numbered.index(source), self._make_source(source.tier, settings, shared=source.shared)
        self._unused[self._unused == 1 + number] = 0
        self.sources[self.sources.index(source)] = self._numbered[number] = new
        return new

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self, lease: Lease, groups: Sequence[tuple[int, bytes]], states: list[bytes], asked: Sequence[AskedKeys] | None
    ) -> list[bytes]:
        namespace, lease.wait_s = lease.namespace, 0.0
        sources = self._sources_for(lease, asked)
        every = [namespace.group(group) for group, _ in groups]
        if not sources or not groups or not every[0].lengths:
            return states
        ready_bytes = sum(one.count(READY) * group.block_bytes for one, group in zip(states, every, strict=True))
        # Earlier lookups under the same lease may have found the beginning of the prompt.
        held_bytes = max(ready_bytes, int(self._cache.blocks.pages[lease.blocks].sum()) * PAGE_BYTES)
        held_bytes += sum(fill.queue.block_bytes for fill in self._awaits.get(lease, ()) if not fill.is_settled)
        free_bytes = inf if asked is not None else self._cache.leases.leasable_bytes
        left_bytes = self._cache.leases.most_bytes - sum(one.given_up_bytes for one in self.sources) - held_bytes
        lookup = _Lookup(lease, asked, sources, left_bytes, free_bytes)
        answer, asking = list(map(bytearray, states)), False
        for number, limit in _whole_prefixes_first(namespace, groups, answer):
            start = run_end(answer[number]) if limit is None else 0
            keys: list[bytes] = np.frombuffer(groups[number][1], namespace.key_type)[start:limit].tolist()
            block_group = block_group_of(every[number])
            shown, coming = memoryview(answer[number])[start:limit], self._coming.get(block_group.tag, {})
            part = _Range(block_group, keys, shown, coming, number, start)
            if limit is None:
                asking |= self._find_run(lookup, part)
            else:
                self._find_window(lookup, part, wait=asking)
            if asked is not None:
                for name in part.found_by:
                    asked[number].tier_has_some(name)
        if lease.coming:
            awaits = self._awaits.get(lease, {})
            answers_s = max(0.0, self._answers_due - self._clock()) if lease.asking else 0.0
            lease.wait_s = max(answers_s, *(source.wait_s(awaits) for source in self.sources))
        return list(map(bytes, answer))

    def _sources_for(self, lease: Lease, asked: Sequence[AskedKeys] | None) -> list[Promotions]:
        """Return the available sources that a lookup under a lease may use, in the order in which they are asked.

        If it names a peer that is available: that peer, disks and stores. Else all but the peers of networks. In
        ``asked`` those that are down are recorded, except peers that the lookup does not name.
        """
        fingerprint, named = lease.namespace.fingerprint, lease.peer
        sources = [one for one in self.sources if not one.tier.only_named or one.name == named]
        if sources and self.is_unshared(fingerprint):
            sources = [one for one in sources if not one.shared]
        if asked is not None:
            for source in sources:
                if source.tier.is_down() and (not source.name.startswith(PEER) or source.name == named):
                    _record_down(source.tier, asked)
        sources = [one for one in sources if one.tier.available()]
        if sources and not sources[0].shared and self.is_behind(fingerprint):
            sources = [one for one in sources if one.shared]
        if named and any(one.name == named for one in sources):
            sources = [one for one in sources if one.name == named or not one.name.startswith(PEER)]
        return sources

    def _find_run(self, lookup: _Lookup, part: _Range) -> bool:
        """Extend the run from the first of these keys; return whether any of it is being asked for."""
        states, end = bytes(part.states), len(part.keys)
        if WRITING in states:  # an engine may never finish what it is writing
            writing = (at for at, state in enumerate(states) if state == WRITING)
            end = next((at for at in writing if part.keys[at] not in part.coming), end)
            part.unfound = [at for at in part.unfound if at < end]
        remaining = part.unfound
        if not any(source.shared for source in lookup.sources):  # disks mostly lack the first key
            part.unfound = remaining[:1]
            part.look(lookup.sources, prefix=True)
            remaining = remaining[1:] if part.there else []
            part.unfound += remaining
        if remaining:
            part.look(lookup.sources, prefix=True)
        end = min([end, *part.unfound[:1]])
        if end < len(part.keys):
            part.asked = [at for at in part.asked if at < end]
        if part.asked:
            self._mark_asked(lookup, part, prefix=True)
        places = set(part.there)
        if part.coming:
            coming = (at for at in range(end) if part.keys[at] in part.coming)
            places |= {at for at in coming if states[at] != READY}  # else it was stored while its fill was queued
        self._request(lookup, part, sorted(at for at in places if at < end))
        return bool(part.asked)

    def _find_window(self, lookup: _Lookup, part: _Range, *, wait: bool) -> None:
        """Promote the last whole window of these keys once all answers are known; ``wait``: more keys may follow.

        Stores are not asked if the disks have the whole window at the end.
        """
        spec = lookup.namespace.groups[part.group.number]
        window = range(0)
        for shared in (False, True):
            part.look([source for source in lookup.sources if source.shared is shared], prefix=False)
            there = [
                state in SETTLED or key in part.coming or at in part.there
                for at, (key, state) in enumerate(zip(part.keys, part.states, strict=True))
            ]
            window = last_window(there, spec)
            if not wait and window.stop == len(part.keys):
                break
        if part.asked:
            self._mark_asked(lookup, part, prefix=False)
        if not (wait or part.asked):
            self._request(lookup, part, [at for at in window if part.states[at] not in SETTLED])

    def _mark_asked(self, lookup: _Lookup, part: _Range, *, prefix: bool) -> None:
        """Have the lookup wait for the answers about keys that a store is being asked for."""
        lookup.lease.asking += len(part.asked)
        block_bytes = lookup.namespace.group(part.group.number).block_bytes
        lookup.lease.asking_bytes += min(len(part.asked) * block_bytes, lookup.left_bytes)
        lookup.lease.coming += len(part.asked)
        self._answers_due, keys = self._clock() + ANSWER_S, part.keys
        if len(part.asked) == len(keys):
            part.states[:] = bytes([SHARED]) * len(keys)
        else:
            keys = [keys[at] for at in part.asked]
            for at in part.asked:
                part.states[at] = SHARED
        if lookup.asked is None:
            return
        lookup.mark(part, part.asked, UNANSWERED_YET)
        if prefix and part.question is not None:
            self._uncounted_runs[part.question] = lookup.asked[part.number], part.start
        else:
            uncounted = self._uncounted.setdefault(lookup.namespace, {}).setdefault(part.group.tag, {})
            for key, at in zip(keys, part.asked, strict=True):
                uncounted[key] = (*uncounted.get(key, ()), *lookup.asker(part, at))

    def _request(self, lookup: _Lookup, part: _Range, places: Sequence[int]) -> None:
        """Request keys that are in a tier or coming, up to the first that cannot be requested; set their states."""
        if not places:
            return
        slower, lease, queues = self._slower_sources(lookup, part, places), lookup.lease, dict[Promotions, FillQueue]()
        group, together = part.group, lookup.queues
        block_bytes = lease.namespace.group(part.group.number).block_bytes
        for number, at in enumerate(places):
            key = part.keys[at]
            if (fill := self._coming.get(part.group.tag, {}).get(key)) is None:
                source = part.there[at]
                if source in slower:
                    lookup.mark(part, places[number:], MissReason.SKIPPED)
                    return
                if lookup.left_bytes < block_bytes:
                    lookup.mark(part, places[number:], MissReason.LEASE_LIMIT)
                    return
                if lookup.free_bytes < block_bytes and not self._may_wait(lookup, part, key):
                    return
                if (queue := queues.get(source)) is None:
                    queue = queues[source] = FillQueue(lease, lease, group, source, block_bytes, together=together)
                if (fill := source.enqueue(queue, key)) is None:
                    lookup.mark(part, places[number:], MissReason.TIER_LATE)
                    return
                if len(queue.fills) == 1:
                    lookup.queues.append(queue)
                lookup.free_bytes -= block_bytes
            elif not (fill.queue.is_reserved or fill.queue.together is lookup.queues):
                self._take_over(lookup, fill.queue)
            if lease not in fill.leases:
                lookup.left_bytes -= block_bytes
                lease.coming += 1
                self._awaits.setdefault(lease, {})[fill] = fill.leases[lease] = None
            part.found_by[fill.queue.source.tier.name] = None
            fill.askers += lookup.asker(part, at)
            part.states[at] = SHARED if fill.queue.source.shared else PENDING

    def _may_wait(self, lookup: _Lookup, part: _Range, key: bytes) -> bool:
        """Return whether a repeated lookup may begin to wait for space: a store had not answered to the first one, or
        the key had space then."""
        reason = self._cache.life.reasons_of(lookup.namespace.group(part.group.number), key)[0]
        if lookup.lease.session == NO_SESSION or reason in (MissReason.NO_SPACE, MissReason.QUOTA):
            return False
        lookup.free_bytes = inf
        return True

    def _take_over(self, lookup: _Lookup, queue: FillQueue) -> None:
        """Have a queue get its space together with the others of the last lookup that waits for it: an engine repeats
        lookups under new leases."""
        if lookup.lease.session == NO_SESSION or queue.is_prefetch:
            return
        if queue in queue.together:
            queue.together.remove(queue)
        lookup.queues.append(queue)
        queue.together, queue.last_lease = lookup.queues, lookup.lease

    def _slower_sources(self, lookup: _Lookup, part: _Range, places: Sequence[int]) -> set[Promotions]:
        """Return the sources whose keys take longer to read than to compute: these are not read, unless for a hint."""
        if lookup.lease.session == NO_SESSION:
            return set()
        counts = Counter(part.there[at] for at in places if at in part.there)
        slower = {
            source for source, count in counts.items() if source.is_slower(lookup.namespace, part.group.number, count)
        }
        for source in slower:
            source.failures[SLOWER] += counts[source]
        return slower

    def lease_ended(self, lease: Lease) -> None:
        unawaited: dict[FillQueue, None] = {}
        for fill in self._awaits.pop(lease, ()):
            del fill.leases[lease]
            if not (fill.leases or fill.is_settled or fill.ticket):
                unawaited[fill.queue] = None
        for queue in unawaited:
            queue.source.drop_unawaited(queue)

    def loaded(self, tickets: Sequence[LoadTicket]) -> LoadedKeys | None:
        if not (self._numbered and tickets):
            return None
        largest = max(tickets, key=lambda ticket: len(ticket.blocks) * ticket.group.weight)
        numbers = self._unused[largest.blocks]
        for ticket in tickets:
            self._unused[ticket.blocks] = 0
        if not numbers.any():
            return None
        found = np.unique(numbers[numbers > 0]).tolist()
        sources = {number: _source_of(self._numbered[number - 1]) for number in found}
        return LoadedKeys(largest.group.tokens, numbers.tobytes(), sources)

    def _promoted(self, source: Promotions, block: int) -> None:
        at = 1 + self.sources.index(source) - len(self._disk_tiers)
        self.writers[max(0, at)].was_read(block)
        self._unused[block] = 1 + self._numbered.index(source)

    def used(self, blocks: BlockIds) -> None:
        if writers := [writer for writer in self.writers if writer.available]:
            for group, members in self._cache.life.by_group(blocks):
                for writer in writers:
                    writer.used(group, members)

    def stored(self, blocks: BlockIds) -> None:
        self._unused[blocks] = 0  # a dropped block may have had the same number
        for writer in self.writers:
            writer.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        unused, self._unused[blocks] = self._unused[blocks], 0
        for number in unused[unused > 0].tolist():
            self._numbered[number - 1].unused_blocks += 1
        # The disks' hands spare evicted blocks, from the next tick on: an engine's store waits for this call.
        for group, members in self._cache.life.by_group(blocks):
            if group.dead:
                continue
            keys = self._cache.blocks.split_keys(members, group.key_bytes)
            for writer in self.writers:
                writer.evicted(group, members, keys)
            if self._disk_tiers:
                self._to_spare.append((block_group_of(group), keys))

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        writers = [writer for writer in self.writers if writer.waiting and writer.available]
        if not writers:
            return None
        found, numbers = np.zeros(len(blocks), np.bool_), blocks.tolist()
        for writer in writers:
            found |= np.fromiter(map(writer.waiting.__contains__, numbers), np.bool_, len(numbers))
        return found

    def settled(self, blocks: BlockIds) -> npt.NDArray[np.bool_]:
        if not any(writer.mode is not WriteMode.NEVER and writer.available for writer in self.writers):
            return np.zeros(len(blocks), np.bool_)
        waiting = self.waiting(blocks)
        return np.ones(len(blocks), np.bool_) if waiting is None else ~waiting

    def remove(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        single_keys, block_group = namespace.split(group, keys), block_group_of(namespace.group(group))
        coming = self._coming.get(block_group.tag, {})
        for fill in [coming[key] for key in single_keys if key in coming]:
            fill.queue.source.invalidate(fill, why)
        for source in self.sources:
            # Other nodes use a store's blocks; bytes that are wrong here are not wrong there.
            if not source.shared or why is not MissReason.CORRUPT:
                source.tier.remove(block_group, single_keys, why.name.lower())

    def cancel_promotions(self, namespace: Namespace) -> None:
        for keys in list(self._coming.values()):
            for fill in list(keys.values()):
                if fill.queue.namespace is not namespace:
                    break  # all keys of a tag belong to one namespace
                fill.queue.source.invalidate(fill, MissReason.INVALIDATED)

    # --- what the daemon calls -------------------------------------------------------------------

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove all blocks of a namespace, open or not, or of all, from the disks; return how many.

        The cache's event for a cleared namespace covers them.
        """
        return sum(tier.remove_all(fingerprint) for tier in self._disk_tiers)

    def pump(self) -> None:
        """Begin requested promotions, and continue writing. Call it after the replies are sent."""
        call_each([source.pump for source in self.sources if source.queued_blocks])
        call_each([writer.pump for writer in self.writers if writer.waiting])

    @property
    def has_queued_promotions(self) -> bool:
        """Whether promotions are queued."""
        for source in self.sources:  # noqa: SIM110 - after each lookup, and a generator takes twice as long
            if source.queued_blocks:
                return True
        return False

    def stop(self) -> None:
        """Begin nothing more."""
        for source in self.sources:
            source.stop()
        for writer in self.writers:
            writer.stop()

    def tick(self) -> None:
        """Handle deadlines and the cold end of the pool. Called a few times a second."""
        reads, writes = [source.tick for source in self.sources], [writer.tick for writer in self.writers]
        call_each((self._spare_evicted, *reads, *writes))

    def background(self) -> bool:
        """End some more of what is overdue, if a tick left any; return whether there is more."""
        more = False
        for source in self.sources:
            if source.ends_more:
                source.end_overdue()
                more |= source.ends_more
        return more

    def _spare_evicted(self) -> None:
        left_pool, self._to_spare = self._to_spare, []
        for block_group, keys in left_pool:
            for tier in self._disk_tiers:
                tier.spare(block_group, keys)

    @property
    def failing(self) -> list[str]:
        """Names of the tiers that failed to read a block within ``FAILED_S``."""
        since = self._clock() - FAILED_S
        return [one.tier.name for one in self.sources if one.failed_at >= since]

    def count_missed(self, names: Sequence[str], keys: int) -> None:
        """Count keys that a prompt missed, at each of the tiers of these names, which were down."""
        for source in self.sources:
            if source.tier.name in names:
                source.tier.counters.missed_keys += keys

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Cancel the promotions of a namespace that was forgotten. Its blocks on disks and in stores stay."""
        self.cancel_promotions(namespace)
        self._uncounted.pop(namespace, None)

    # --- what the tiers call: see TierListener ----------------------------------------------------

    def blocks_stored(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.stored(namespace, block_group.number, list(keys), MEDIUM_STORAGE)

    def blocks_removed(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.removed(namespace, block_group.number, list(keys), MEDIUM_STORAGE)

    def _namespace_of(self, block_group: BlockGroup) -> Namespace | None:
        """Return the namespace of a group if it is open and was not reset since."""
        namespace = self._cache.namespaces.get(block_group.fingerprint)
        return namespace if namespace is not None and namespace.generation == block_group.generation else None

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged, (tier.name, kind), now, MAX_LOGGED)

    def answered(
        self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool], question: object
    ) -> None:
        """Count the keys that lookups reported as being asked for."""
        run = self._uncounted_runs.pop(question, None)
        is_down = tier.is_down() and not tier.name.startswith(PEER)
        if (namespace := self._cache.namespaces.get(block_group.fingerprint)) is None:
            return
        if namespace.generation != block_group.generation:
            found = [False] * len(keys)
        if run is not None and run[0].namespace is namespace:  # else another one has its fingerprint now
            (asked, first), gap = run, sum(found)
            namespace.counters.found_shared += gap
            _record_answer(tier, asked, is_down=is_down)
            asked.set(first, bytes([IN_A_TIER]) * gap)
            self._cache.prompts.tier_lacks(asked, first + gap, len(keys) - gap)
        by_tag = self._uncounted.get(namespace, {})
        if not (uncounted := by_tag.get(block_group.tag)):
            return
        askers = [uncounted.pop(key, ()) for key in keys]
        if not uncounted:
            del by_tag[block_group.tag]
        namespace.counters.found_shared += sum(map(len, compress(askers, found)))
        for asked, position, count in _runs(compress(askers, found)):
            asked.set(position, bytes([IN_A_TIER]) * count)
        for asked, position, count in _runs(its for its, there in zip(askers, found, strict=True) if not there):
            _record_answer(tier, asked, is_down=is_down)
            self._cache.prompts.tier_lacks(asked, position, count)


def _runs(askers: Iterable[Sequence[Asker]]) -> Iterator[tuple[AskedKeys, int, int]]:
    """Yield the askers of keys joined to runs: the keys of a lookup, the position of a first one, and their number."""
    runs: dict[AskedKeys, tuple[int, int]] = {}
    for its in askers:
        for asked, position in its:
            first, count = runs.get(asked, (position, 0))
            if first + count != position:
                yield asked, first, count
                first, count = position, 0
            runs[asked] = first, count + 1
    for asked, (first, count) in runs.items():
        yield asked, first, count


def _record_down(tier: Tier, asked: Sequence[AskedKeys]) -> None:
    """Record that a tier which may have keys of a lookup fails."""
    for one in asked:
        one.mark(0, sys.maxsize, MissReason.TIER_DOWN)
        one.tier_is_down(tier.name)


def _record_answer(tier: Tier, asked: AskedKeys, *, is_down: bool) -> None:
    """Record that a tier has answered, or that a question to it failed."""
    if is_down:
        asked.tier_is_down(tier.name)
    else:
        asked.tier_answered(tier.name)


def run_end(states: bytes | bytearray) -> int:
    """Return the length of the unbroken run from the start that is ready, or will be."""
    return len(states) - len(states.lstrip(SETTLED))


def _source_of(source: Promotions) -> Source:
    if not source.shared:
        return Source("disk", "disk")
    return Source("peer" if source.name.startswith(PEER) else "store", source.name)


def last_window(there: Sequence[bool], spec: GroupSpec) -> range:
    """Return the indices of the last whole window whose keys all exist.

    An engine with a sliding window needs only its last blocks, and uses the last place where they all exist; one with a
    recurrent state needs one block.
    """
    needed = max(1, -(-spec.window_tokens // spec.tokens_per_block)) if spec.tokens_per_block else len(there)
    run = 0
    for place in reversed(range(len(there))):
        run = run + 1 if there[place] else 0
        if run == needed or (run and not place):
            return range(place, place + run)
    return range(0)


def _whole_prefixes_first(
    namespace: Namespace, groups: Sequence[tuple[int, bytes]], states: Sequence[bytearray]
) -> Iterator[tuple[int, int | None]]:
    """Yield the groups of a lookup by index, with the number of keys that a window may need; None for whole prefixes.

    Groups that need the whole prefix come first: ``states`` then tell its length, which limits the windows.
    """
    limit_tokens: int | None = None
    windows: list[int] = []
    for number, (group, _) in enumerate(groups):
        spec = namespace.groups[group]
        if spec.window_tokens or "mamba" in spec.kind:
            windows.append(number)
            continue
        yield number, None
        end = run_end(states[number]) * spec.tokens_per_block
        limit_tokens = end if limit_tokens is None else min(end, limit_tokens)
    for number in windows:
        tokens = namespace.groups[groups[number][0]].tokens_per_block
        whole = limit_tokens is None or not tokens
        yield number, len(states[number]) if whole else min(len(states[number]), (limit_tokens or 0) // tokens)
