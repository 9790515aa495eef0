"""What lies below the pool, as one: lookups find what it holds, blocks go up and down, what is invalidated goes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import FREE, READY, WRITING, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.tickets import Lease, LoadTicket
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.promotions import SLOWER, Asker, Coming, Fill, Promotions, Wanted
from kvoffd.tiering.writer import Writer, block_group_of
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Tier
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import COMING, PENDING, SHARED, GroupSpec

logger = logging.getLogger(__name__)

ANSWER_S = 0.02
"""A guess of how long a store takes to answer, for engines that wait for it. The deadline for asking is for the worst
case, and may be longer than any engine waits."""
LOGGED_S = 600.0
"""An error of a tier is logged again after so long."""
MOST_LOGGED = 1024
"""Kinds of errors of tiers, each of every server, of which it is known when they were logged."""

SETTLED = bytes([READY, *COMING])
"""States of keys that are there, or will be, without anything to be done about it."""


@dataclass(slots=True)
class _Lookup:
    lease: Lease
    asked: Sequence[AskedKeys] | None
    """By group of the request, where keys that do not come are counted; None if they were counted before."""
    sources: Sequence[Promotions]
    """Those that are of use to it now, in the order in which they are asked."""
    left_bytes: int
    """What may come up for it: more than leases may pin would evict its own beginning."""

    @property
    def namespace(self) -> Namespace:
        return self.lease.namespace

    def asker(self, some: _Range, at: int) -> list[Asker]:
        """Return where a key is counted if it does not come; nothing if it was counted before."""
        return [(self.asked[some.number], some.start + at)] if self.asked is not None else []


class _Range:
    """Some keys of one group of a lookup, and what is known of them by their places."""

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
        """``states``: to be answered with. ``coming``: what is on its way already."""
        self.number, self.start = number, start
        """Positions of the group in the request, and of the first key in the group."""
        free = len(states) if not any(states) else 0
        self.left = list(range(free)) or [at for at, state in enumerate(states) if state == FREE]
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if coming:
            self.left = [at for at in self.left if keys[at] not in coming]
        self.there: dict[int, tuple[Promotions, Tier]] = {}
        self.asked: list[int] = []
        """Keys that a store is being asked for."""

    def look(self, sources: Sequence[Promotions], *, prefix: bool) -> None:
        """Ask each tier of some sources for what none before it has."""
        for source in sources:
            for tier in source.tiers:
                if not self.left:
                    return
                found = tier.find(self.group, [self.keys[at] for at in self.left], prefix=prefix)
                if any(found):
                    answers = list(zip(self.left, found, strict=True))
                    both = source, tier
                    self.left = [at for at, one in answers if one == ABSENT]
                    self.asked += [at for at, one in answers if one == ASKED]
                    self.there.update([(at, both) for at, one in answers if one == PRESENT])


class Tiering:
    """Looks after the sources below the pool for one cache: its ``TierHooks``, and the ``TierListener`` of all tiers.

    ``pump`` begins what lookups asked for, once their replies are out; ``tick`` is for deadlines and the cold end.

    Attributes:
        is_unshared: whether a namespace's blocks here became stale, by its fingerprint: what others have under the same
            keys may be stale too, so no store is asked for it or given anything of it.
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
        self.sources: list[Promotions] = []
        """The disks of this node together, which may be none, and then stores that nodes share, in the order in which
        they are asked."""
        self.writers: list[Writer] = []
        """In the same order."""
        self._add([], settings, shared=False)
        self._answers_due = 0.0
        self._uncounted: dict[Namespace, dict[tuple[int, bytes], list[Asker]]] = {}
        """By tag and key that a store is being asked for: where it is counted once the store has answered."""
        self._awaits: dict[Lease, dict[Fill, None]] = {}
        """What comes up for each lease."""
        self._unused = np.zeros(len(cache.blocks.state), np.uint8)
        """By block: 1 and the number of its source if it was promoted and not loaded since, else 0."""
        self._evicted: list[tuple[BlockGroup, list[bytes]]] = []
        self._events = events
        self._logged: dict[tuple[str, str], float] = {}
        """Tiers and kinds of their errors that were logged, and when; the tiers count them."""

    @property
    def disks(self) -> Promotions:
        return self.sources[0]

    @property
    def disk_writer(self) -> Writer:
        return self.writers[0]

    @property
    def stores(self) -> list[Promotions]:
        return self.sources[1:]

    def share(self, tier: Tier, settings: TieringSettings) -> None:
        """Use a store that nodes share, for what the pool and the sources before it do not have."""
        self._add([tier], settings, shared=True)

    def _add(self, tiers: list[Tier], settings: TieringSettings, *, shared: bool) -> None:
        cache, clock = self._cache, self._clock
        source = Promotions(tiers, settings, cache, clock, self._coming, self._promoted, shared=shared)
        writer = Writer(
            *(cache, tiers, clock, settings),
            shared=shared,
            idle=lambda: not source.waiting_blocks,
            engines_busy=self._engines_busy,
            leaves_out=self.is_unshared if shared else lambda fingerprint: False,
        )
        self.sources.append(source)
        self.writers.append(writer)

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self, lease: Lease, groups: Sequence[tuple[int, bytes]], states: list[bytes], asked: Sequence[AskedKeys] | None
    ) -> list[bytes]:
        namespace = lease.namespace
        sources = [source for source in self.sources if source.available]
        if sources and self.is_unshared(namespace.fingerprint):
            sources = [source for source in sources if not source.shared]
        every = [self._cache.group(namespace, group) for group, _ in groups]
        if not sources or not groups or not every[0].lengths:
            return states
        ready_bytes = sum(one.count(READY) * group.block_bytes for one, group in zip(states, every, strict=True))
        # Other requests of the same lookup may have found the beginning of its prompt.
        held_bytes = max(ready_bytes, int(self._cache.blocks.pages[lease.blocks].sum()) * PAGE_BYTES)
        held_bytes += sum(fill.wanted.block_bytes for fill in self._awaited_by(lease))
        lookup = _Lookup(lease, asked, sources, self._cache.most_leased_bytes - held_bytes)
        answer, asking = list(map(bytearray, states)), False
        for number, limit in _whole_prefixes_first(namespace, groups, answer):
            start = run_end(answer[number]) if limit is None else 0
            names: list[bytes] = np.frombuffer(groups[number][1], namespace.key_type)[start:limit].tolist()
            block_group = block_group_of(every[number])
            shown, coming = memoryview(answer[number])[start:limit], self._coming.get(block_group.tag, {})
            some = _Range(block_group, names, shown, coming, number, start)
            if limit is None:
                asking |= self._find_run(lookup, some)
            else:
                self._find_window(lookup, some, wait=asking)
        lease.coming = lease.asking + len(self._awaited_by(lease))
        if lease.coming:
            awaits = self._awaits.get(lease, {})
            answers_s = max(0.0, self._answers_due - self._clock()) if lease.asking else 0.0
            lease.wait_s = max(answers_s, *(source.wait_s(awaits) for source in self.sources))
        return list(map(bytes, answer))

    def _awaited_by(self, lease: Lease) -> list[Fill]:
        """What comes up for a lease."""
        return [fill for fill in self._awaits.get(lease, ()) if not fill.withdrawn]

    def _find_run(self, lookup: _Lookup, some: _Range) -> bool:
        """Find how far the run goes from the first of these keys on; returns whether any of it is being asked for."""
        states, end = bytes(some.states), len(some.keys)
        if WRITING in states:  # what an engine is writing may never be whole
            writing = (at for at, state in enumerate(states) if state == WRITING)
            end = next((at for at in writing if some.keys[at] not in some.coming), end)
            some.left = [at for at in some.left if at < end]
        every = some.left
        if not any(source.shared for source in lookup.sources):  # then mostly the first one is not there
            some.left = every[:1]
            some.look(lookup.sources, prefix=True)
            every = every[1:] if some.there else []
            some.left += every
        some.look(lookup.sources, prefix=True)
        end = min([end, *some.left[:1]])
        some.asked = [at for at in some.asked if at < end]
        self._mark_asked(lookup, some)
        places = set(some.there)
        if some.coming:
            coming = (at for at in range(end) if some.keys[at] in some.coming)
            places |= {at for at in coming if states[at] != READY}  # or it was stored while its fill was queued
        self._request(lookup, some, sorted(at for at in places if at < end))
        return bool(some.asked)

    def _find_window(self, lookup: _Lookup, some: _Range, *, wait: bool) -> None:
        """Bring up the last whole window of these keys, once all is known; ``wait``: how many count is not known.

        Stores are not asked where the disks have all of the window at the end.
        """
        spec = lookup.namespace.groups[some.group.number]
        window = range(0)
        for shared in (False, True):
            some.look([source for source in lookup.sources if source.shared is shared], prefix=False)
            there = [
                state in SETTLED or key in some.coming or at in some.there
                for at, (key, state) in enumerate(zip(some.keys, some.states, strict=True))
            ]
            window = last_window(there, spec)
            if not wait and window.stop == len(some.keys):
                break
        self._mark_asked(lookup, some)
        if not (wait or some.asked):
            self._request(lookup, some, [at for at in window if some.states[at] not in SETTLED])

    def _mark_asked(self, lookup: _Lookup, some: _Range) -> None:
        lookup.lease.asking += len(some.asked)
        for at in some.asked:
            some.states[at] = SHARED
        if some.asked:
            self._answers_due = self._clock() + ANSWER_S
            if lookup.asked is not None:
                uncounted = self._uncounted.setdefault(lookup.namespace, {})
                for at in some.asked:
                    uncounted.setdefault((some.group.tag, some.keys[at]), []).extend(lookup.asker(some, at))

    def _request(self, lookup: _Lookup, some: _Range, places: Sequence[int]) -> None:
        """Request keys that are there or come, up to the first that cannot come up, and mark them."""
        if not places:
            return
        slower, lease, wants = self._slower_sources(lookup, some, places), lookup.lease, dict[Promotions, Wanted]()
        block_bytes = self._cache.group(lease.namespace, some.group.number).block_bytes
        for at in places:
            key = some.keys[at]
            if (fill := self._coming.get(some.group.tag, {}).get(key)) is None:
                source, tier = some.there[at]
                no_space = source.no_space_until.get(lease.session, 0.0) > self._clock()
                if source in slower or (lookup.asked is None and no_space):
                    return
                if (wanted := wants.get(source)) is None:
                    wanted = wants[source] = Wanted(lease, some.group, source, block_bytes)
                if lookup.left_bytes < block_bytes or (fill := source.request(wanted, key, tier)) is None:
                    return
            lookup.left_bytes -= block_bytes * (lease not in fill.leases)
            self._awaits.setdefault(lease, {})[fill] = fill.leases[lease] = None
            fill.askers += lookup.asker(some, at)
            some.states[at] = SHARED if fill.wanted.source.shared else PENDING

    def _slower_sources(self, lookup: _Lookup, some: _Range, places: Sequence[int]) -> set[Promotions]:
        """The sources from which what is there takes longer to read than to compute: none of that is read."""
        pairs = [some.there[at] for at in places if at in some.there]
        slower = {
            source
            for source, count in Counter(source for source, _ in pairs).items()
            if source.is_slower(lookup.namespace, some.group.number, count)
        }
        for source, _ in pairs if slower else ():
            if source in slower:
                source.failures[SLOWER] += 1
        return slower

    def lease_ended(self, lease: Lease) -> None:
        left: dict[Wanted, None] = {}
        for fill in self._awaits.pop(lease, ()):
            del fill.leases[lease]
            if not (fill.leases or fill.withdrawn or fill.ticket):
                left[fill.wanted] = None
        for wanted in left:
            wanted.source.drop_unawaited(wanted)

    def loaded(self, tickets: Sequence[LoadTicket]) -> None:
        for ticket in tickets:
            self._unused[ticket.blocks] = 0

    def _promoted(self, source: Promotions, block: int) -> None:
        at = self.sources.index(source)
        self.writers[at].is_there(block)
        self._unused[block] = 1 + at

    def used(self, blocks: BlockIds) -> None:
        if writers := [writer for writer in self.writers if writer.available]:
            for group, alike in self._cache.by_group(blocks):
                for writer in writers:
                    writer.used(group, alike)

    def stored(self, blocks: BlockIds) -> None:
        self._unused[blocks] = 0  # the number may be that of a block which was dropped
        for writer in self.writers:
            writer.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        unused, self._unused[blocks] = self._unused[blocks], 0
        for number in unused[unused > 0].tolist():
            self.sources[number - 1].unused_blocks += 1
        # What leaves the pool is spared by the disks' hands. That waits for the next tick: a store waits for this call.
        for group, alike in self._cache.by_group(blocks):
            if group.dead:
                continue
            keys = self._cache.blocks.split_keys(alike, group.key_bytes)
            for writer in self.writers:
                writer.evicted(group, alike, keys)
            if self.disks.tiers:
                self._evicted.append((block_group_of(group), keys))

    def waiting(self, blocks: BlockIds) -> npt.NDArray[np.bool_] | None:
        writers = [writer for writer in self.writers if writer.waiting and writer.available]
        if not writers:
            return None
        found, numbers = np.zeros(len(blocks), np.bool_), blocks.tolist()
        for writer in writers:
            found |= np.fromiter(map(writer.waiting.__contains__, numbers), np.bool_, len(numbers))
        return found

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        names, block_group = namespace.split(group, keys), block_group_of(self._cache.group(namespace, group))
        coming = self._coming.get(block_group.tag, {})
        for fill in [coming[key] for key in names if key in coming]:
            fill.wanted.source.forget(fill)
        for source in self.sources:
            # Others use what a store has; bytes that are wrong here are not wrong there.
            for tier in source.tiers if not source.shared or why is not MissReason.CORRUPT else ():
                tier.remove(block_group, names, why.name.lower())

    def forget_all(self, namespace: Namespace) -> int:
        # The event of the cache that the namespace is cleared tells of the disks' blocks too.
        self._forget_fills(namespace)
        return self.remove_all(namespace.fingerprint)

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove what the disks have of a namespace, open or not, or of all; returns how many blocks that were. Of
        stores what is known of it."""
        return sum(tier.remove_all(fingerprint) for source in self.sources for tier in source.tiers)

    # --- what the daemon calls -------------------------------------------------------------------

    def pump(self) -> None:
        """Begin what was requested, and go on writing. For when the replies are out."""
        for source in self.sources:
            if source.queued_blocks:
                source.pump()
        for writer in self.writers:
            if writer.waiting:
                writer.pump()

    @property
    def is_asked(self) -> bool:
        """Whether something waits to be brought up."""
        for source in self.sources:  # noqa: SIM110 - after each lookup, and a generator takes twice as long
            if source.queued_blocks:
                return True
        return False

    def stop(self) -> None:
        """Begin nothing any more."""
        for source, writer in zip(self.sources, self.writers, strict=True):
            source.stop()
            writer.stop()

    def tick(self) -> None:
        """A few times a second: deadlines, the cold end of the pool."""
        evicted, self._evicted = self._evicted, []
        for block_group, keys in evicted:
            for tier in self.disks.tiers:
                tier.used(block_group, keys)
        for source, writer in zip(self.sources, self.writers, strict=True):
            source.tick()
            writer.tick()

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Nobody has the namespace open, and the pool nothing of it. What disks and stores have of it stays."""
        self._forget_fills(namespace)
        self._uncounted.pop(namespace, None)

    # --- what the tiers call: see TierListener ----------------------------------------------------

    def blocks_stored(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.stored(namespace, block_group.number, list(keys), MEDIUM_STORAGE)

    def blocks_removed(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes]) -> None:
        if (namespace := self._namespace_of(block_group)) is not None:
            self._events.removed(namespace, block_group.number, list(keys), MEDIUM_STORAGE)

    def _namespace_of(self, block_group: BlockGroup) -> Namespace | None:
        """The namespace of a group, if it is open and was not reset since."""
        namespace = self._cache.namespaces.get(block_group.fingerprint)
        return namespace if namespace is not None and namespace.generation == block_group.generation else None

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged, (tier.name, kind), now, MOST_LOGGED)

    def answered(self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Count what lookups answered with as being asked for."""
        namespace = self._cache.namespaces.get(block_group.fingerprint)
        if namespace is None or not (uncounted := self._uncounted.get(namespace)):
            return
        askers = [uncounted.pop((block_group.tag, key), []) for key in keys]
        if not any(askers):
            return
        missed: list[int] = []
        for at, there in enumerate(found):
            if there and namespace.generation == block_group.generation:
                namespace.counters.found_shared += len(askers[at])
            elif askers[at]:
                missed.append(at)
        reasons = self._cache.reasons_of(namespace, block_group.number, b"".join([keys[at] for at in missed]))
        for at, reason in zip(missed, reasons, strict=True):
            for asked, position in askers[at]:
                asked.missed(position, reason)

    def _forget_fills(self, namespace: Namespace) -> None:
        for keys in list(self._coming.values()):
            for fill in list(keys.values()):
                if fill.wanted.namespace is not namespace:
                    break  # all of a tag are of one
                fill.wanted.source.forget(fill)


def run_end(states: bytes | bytearray) -> int:
    """Keys in the unbroken run from the start that are ready, or will be."""
    return len(states) - len(states.lstrip(SETTLED))


def last_window(there: Sequence[bool], spec: GroupSpec) -> range:
    """Places of the last whole window of which all keys are there.

    An engine with a sliding window needs its last blocks only, and takes the last place where all of them are there;
    one with a recurrent state needs one.
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
    """The groups of a lookup by their number, and of how many keys a window may be of use; None for whole pasts.

    Groups that need their whole past come first: by then ``states`` say how far these go, and windows only so far.
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
