"""What lies below the pool, as one: lookups find what it holds, blocks go up and down, what is invalidated goes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvoffd.cache.block_table import FREE, READY, WRITING, BlockIds
from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import CacheListener
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.system.newest import put_newest
from kvoffd.tiering import TieringSettings
from kvoffd.tiering.promoter import SLOWER, Coming, Fill, Promoter
from kvoffd.tiering.writer import Writer
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Space, Tier, make_space
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.messages import COMING, PENDING, SHARED, GroupSpec

logger = logging.getLogger(__name__)

MOST_KEYS = 8192
"""Keys that one lookup may find below the pool, of each of its groups as many: the first that are missing, or the last
of a window. The next lookup of the same request goes on behind what is up by then. Each takes some microseconds of the
loop."""
ANSWER_S = 0.02
"""An answer of a store is expected after so long at most: engines that wait for it compare that with what computing
takes. The deadline for asking is for the worst case, and may be longer than any engine waits."""
DUE_S = 10.0
"""Within which a lookup that was told of keys being asked for comes again, or never."""
LOGGED_S = 600.0
"""An error of a tier is logged again after so long."""
WAITING_S, MOST_WAITING_KEYS = 3.0, 2**18
"""How long, and of how many keys, it is known which lookups wait for them: by then their requests wait no longer."""
MOST_LOGGED = 1024
"""Kinds of errors of tiers, each of every server, of which it is known when they were logged."""
MOST_UNSHARED = 32_768
"""Namespaces that are not shared: those that there are, and the latest others."""

SETTLED = bytes([READY, *COMING])
"""States of keys that are there, or will be, without anything to be done about it."""


class Level:
    """One level below the pool, with its bounds and counts: the disks of this node together, or one store."""

    def __init__(self, tiers: list[Tier], promoter: Promoter, writer: Writer) -> None:
        self.tiers, self.promoter, self.writer = tiers, promoter, writer
        """``tiers``: disks come while the daemon serves."""

    @property
    def shared(self) -> bool:
        """Whether other nodes use it too."""
        return self.promoter.shared

    @property
    def available(self) -> bool:
        return any(tier.available() for tier in self.tiers)

    def tick(self) -> None:
        for tier in self.tiers:
            tier.tick()
        if not self.available:
            self.promoter.try_again()
        self.promoter.tick()
        self.writer.tick(self.promoter.promoted_bytes)


class _Lookup(NamedTuple):
    namespace: Namespace
    session: int
    again: bool
    levels: Sequence[Level]
    """Those that are of use to it now, in the order in which they are asked."""
    waits: _Waits


class _Waits(NamedTuple):
    """What the lookups under one lease wait for, since when."""

    session: int
    namespace: Namespace
    since: float
    fills: list[Fill]
    asked: list[tuple[int, bytes]]
    """By tag and key, what stores were asked for."""


class _Range:
    """Some keys of one group of a lookup, and what is known of them by their places."""

    def __init__(self, space: Space, keys: Sequence[bytes], states: memoryview, coming: Mapping[bytes, Fill]) -> None:
        self.space, self.keys, self.states, self.coming = space, keys, states, coming
        """``states``: to be answered with. ``coming``: what is on its way already."""
        free = len(states) if not any(states) else 0
        self.left = list(range(free)) or [at for at, state in enumerate(states) if state == FREE]
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if coming:
            self.left = [at for at in self.left if keys[at] not in coming]
        self.there: dict[int, tuple[Level, Tier]] = {}
        self.asked: list[int] = []
        """Keys that a store is being asked for."""

    def look(self, levels: Sequence[Level], *, prefix: bool) -> None:
        """Ask each tier of some levels for what none before it has."""
        for level in levels:
            for tier in level.tiers:
                if not self.left:
                    return
                found = tier.find(self.space, [self.keys[at] for at in self.left], prefix=prefix)
                if any(found):
                    answers = list(zip(self.left, found, strict=True))
                    source = level, tier
                    self.left = [at for at, one in answers if one == ABSENT]
                    self.asked += [at for at, one in answers if one == ASKED]
                    self.there.update([(at, source) for at, one in answers if one == PRESENT])


class Tiering:
    """Looks after the levels below the pool for one cache: its ``TierHooks``.

    ``pump`` begins what lookups asked for, once their replies are out; ``tick`` is for deadlines and the cold end.

    Attributes:
        disks: the level of this node's disks, which may have none.
        stores: a level for each store that nodes share, in the order in which they are asked.
        unshared: fingerprints of namespaces whose blocks here became stale: what others have under the same keys may be
            stale too.
        reports: the ``TierListener`` of all the tiers.
    """

    def __init__(
        self,
        cache: Cache,
        events: CacheListener,
        clock: Callable[[], float],
        settings: TieringSettings,
        engines_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache, self._clock, self._engines_busy = cache, clock, engines_busy
        self._coming: Coming = {}
        self._spaces: dict[tuple[Namespace, int], Space] = {}
        self._groups: dict[int, tuple[Namespace, int]] = {}
        """By tag."""
        self.unshared: dict[bytes, None] = {}
        self.disks = self._level([], settings, shared=False)
        self.stores: list[Level] = []
        self._answers_due = 0.0
        self._uncounted: dict[Namespace, Counter[tuple[int, bytes]]] = {}
        """By tag and key that is being asked for: lookups that were told so and have not counted it yet."""
        self._due: dict[tuple[int, bytes], tuple[Namespace, int, float]] = {}
        """The same of keys that were found, until they are asked for again, or nobody does: since when."""
        self._waiting: dict[int, _Waits] = {}
        """By lease."""
        self._waiting_keys = 0
        self._evicted: list[tuple[Space, list[bytes]]] = []
        self.reports = Reports(self, events, clock)

    @property
    def levels(self) -> list[Level]:
        return [self.disks, *self.stores]

    def share(self, tier: Tier, settings: TieringSettings) -> None:
        """Use a store that nodes share, for what the pool and the levels before it do not have."""
        self.stores.append(self._level([tier], settings, shared=True))

    def _level(self, tiers: list[Tier], settings: TieringSettings, *, shared: bool) -> Level:
        promoter = Promoter(self._cache, self._clock, settings.deadline_s, self._coming, shared=shared)
        writer = Writer(
            *(self._cache, tiers, self._clock, settings, self.space),
            shared=shared,
            idle=lambda: not promoter.busy,
            engines_busy=self._engines_busy,
            left_out=self.unshared if shared else (),
        )
        return Level(tiers, promoter, writer)

    def space(self, namespace: Namespace, group: int) -> Space:
        """As it is now. It has no lengths while a rank of the world has not registered."""
        found = self._spaces.get((namespace, group))
        if found is None or found.generation != namespace.generation or not found.lengths:
            if found is not None:
                self._groups.pop(found.tag, None)
            ranks = range(namespace.world_size)
            whole = all(namespace.shard_bytes(rank) is not None for rank in ranks)
            lengths = [namespace.shard_length(rank, group) for rank in ranks] if whole else []
            found = make_space(namespace.fingerprint, namespace.generation, group, lengths)
            self._spaces[namespace, group] = found
            self._groups[found.tag] = namespace, group
        return found

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self,
        namespace: Namespace,
        session: int,
        lease_id: int,
        groups: Sequence[tuple[int, bytes]],
        states: Sequence[bytes],
        again: bool,
    ) -> list[bytes]:
        levels = [level for level in self.levels if level.available]
        if namespace.fingerprint in self.unshared:
            levels = [level for level in levels if not level.shared]
        if not levels or not groups or not self.space(namespace, groups[0][0]).lengths:
            return list(states)
        waits = self._end_waiting(lease_id) or _Waits(session, namespace, self._clock(), [], [])
        lookup = _Lookup(namespace, session, again, levels, waits)
        answer, most, asking = list(map(bytearray, states)), MOST_KEYS // len(groups), False
        for number, limit in _whole_prefixes_first(namespace, groups, answer):
            group, keys = groups[number]
            start = run_end(answer[number]) if limit is None else max(0, limit - most)
            stop = start + most if limit is None else limit
            names = namespace.split(group, keys[start * namespace.key_bytes : stop * namespace.key_bytes])
            space = self.space(namespace, group)
            some = _Range(space, names, memoryview(answer[number])[start:stop], self._coming.get(space.tag, {}))
            if limit is None:
                asking |= self._find_run(lookup, some)
            else:
                self._find_window(lookup, some, wait=asking)
        if more := len(waits.fills) + len(waits.asked):
            self._waiting[lease_id] = waits
            self._waiting_keys += more
            while self._waiting_keys > MOST_WAITING_KEYS:
                self._end_waiting(next(iter(self._waiting)))
        return list(map(bytes, answer))

    def _find_run(self, lookup: _Lookup, some: _Range) -> bool:
        """Find how far the run goes from the first of these keys on; returns whether any of it is being asked for."""
        states, end = bytes(some.states), len(some.keys)
        if WRITING in states:  # what an engine is writing may never be whole
            writing = (at for at, state in enumerate(states) if state == WRITING)
            end = next((at for at in writing if some.keys[at] not in some.coming), end)
            some.left = [at for at in some.left if at < end]
        every = some.left
        if not any(level.shared for level in lookup.levels):  # then mostly the first one is not there
            some.left = every[:1]
            some.look(lookup.levels, prefix=True)
            every = every[1:] if some.there else []
            some.left += every
        some.look(lookup.levels, prefix=True)
        end = min([end, *some.left[:1]])
        some.asked = [at for at in some.asked if at < end]
        self._mark_asked(lookup, some)
        places = set(some.there)
        if some.coming:
            places |= {at for at in range(end) if some.keys[at] in some.coming}
        self._request(lookup, some, sorted(at for at in places if at < end))
        return bool(some.asked)

    def _find_window(self, lookup: _Lookup, some: _Range, *, wait: bool) -> None:
        """Bring up the last whole window of these keys, once all is known; ``wait``: how many count is not known.

        Stores are not asked where the disks have all of the window at the end.
        """
        spec = lookup.namespace.groups[some.space.group]
        window = range(0)
        for shared in (False, True):
            some.look([level for level in lookup.levels if level.shared is shared], prefix=False)
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
        for at in some.asked:
            some.states[at] = SHARED
        if some.asked:
            self._answers_due = self._clock() + ANSWER_S
            names = [(some.space.tag, some.keys[at]) for at in some.asked]
            lookup.waits.asked.extend(names)
            if not lookup.again:
                self._uncounted.setdefault(lookup.namespace, Counter()).update(names)

    def _request(self, lookup: _Lookup, some: _Range, places: Sequence[int]) -> None:
        """Request keys that are there or come, up to the first that cannot come up, and mark them."""
        slower = self._slower_levels(lookup.namespace, some, places)
        asker = not lookup.again
        for at in places:
            key = some.keys[at]
            if (fill := self._coming.get(some.space.tag, {}).get(key)) is None:
                level, tier = some.there[at]
                no_space = level.promoter.no_space_until.get(lookup.namespace, 0.0) > self._clock()
                if level in slower or (lookup.again and no_space):
                    return
                fill = level.promoter.request(lookup.session, lookup.namespace, some.space, key, tier)
                if fill is None:
                    return
            fill.askers += asker
            lookup.waits.fills.append(fill)
            if self._due:
                fill.askers += self._take_due(some.space, key)
            some.states[at] = SHARED if fill.promoter.shared else PENDING

    def _slower_levels(self, namespace: Namespace, some: _Range, places: Sequence[int]) -> set[Level]:
        """The levels from which what is there takes longer to read than to compute: none of that is read."""
        sources = [some.there[at] for at in places if at in some.there]
        slower = {
            level
            for level, count in Counter(level for level, _ in sources).items()
            if level.promoter.is_slower(namespace, some.space.group, count)
        }
        for at in places if slower else ():
            if at in some.there and some.there[at][0] in slower:
                some.there[at][0].promoter.failures[SLOWER] += 1
                namespace.counters.misses[MissReason.SKIPPED] += self._take_due(some.space, some.keys[at])
        return slower

    def released(self, session: int, lease_ids: Iterable[int], not_awaited: MissReason | None) -> None:
        for lease_id in lease_ids:
            if (waits := self._waiting.get(lease_id)) is None or waits.session != session:
                continue
            self._end_waiting(lease_id)
            if not_awaited is None:
                continue
            for fill in waits.fills:
                fill.promoter.not_awaited(fill, not_awaited)
            for name in waits.asked:
                self._not_awaited(waits.namespace, name, not_awaited)

    def _end_waiting(self, lease_id: int) -> _Waits | None:
        """Forget what the lookups under a lease wait for, and return it."""
        if (waits := self._waiting.pop(lease_id, None)) is not None:
            self._waiting_keys -= len(waits.fills) + len(waits.asked)
        return waits

    def _not_awaited(self, namespace: Namespace, name: tuple[int, bytes], why: MissReason) -> None:
        """One of the lookups that count a key for which stores were asked waits no longer."""
        uncounted = self._uncounted.get(namespace, Counter())
        if uncounted[name]:
            uncounted[name] -= 1
            namespace.counters.misses[MissReason.TIER_LATE] += 1
        elif (due := self._due.get(name)) is not None and due[1]:
            self._due[name] = namespace, due[1] - 1, due[2]
            namespace.counters.found_shared += 1
            namespace.counters.misses[why] += 1
        elif (fill := self._coming.get(name[0], {}).get(name[1])) is not None:
            fill.promoter.not_awaited(fill, why)

    def used(self, blocks: BlockIds) -> None:
        for group, alike in self._cache.by_group(blocks):
            for level in self.levels:
                level.writer.used(group, alike)

    def stored(self, blocks: BlockIds) -> None:
        for level in self.levels:
            level.writer.stored(blocks)

    def evicted(self, blocks: BlockIds) -> None:
        # What leaves the pool is spared by the disks' hands. That waits for the next tick: a store waits for this call.
        for group, alike in self._cache.by_group(blocks):
            for level in self.levels:
                level.writer.evicted(group, alike)
            if self.disks.tiers and not group.dead:
                keys = group.namespace.split(group.group, self._cache.blocks.keys(alike, group.key_bytes))
                self._evicted.append((self.space(group.namespace, group.group), keys))

    def forget(self, namespace: Namespace, group: int, keys: bytes, why: MissReason) -> None:
        names, space = namespace.split(group, keys), self.space(namespace, group)
        coming = self._coming.get(space.tag, {})
        for fill in [coming[key] for key in names if key in coming]:
            fill.promoter.forget(fill)
        for level in self.levels:
            # Others use what a store has; bytes that are wrong here are not wrong there.
            for tier in level.tiers if not level.shared or why is not MissReason.CORRUPT else ():
                tier.remove(space, names, why.name.lower())

    def forget_all(self, namespace: Namespace) -> int:
        # The event of the cache that the namespace is cleared tells of the disks' blocks too.
        self._forget_fills(namespace)
        return self.remove_all(namespace.fingerprint)

    def remove_all(self, fingerprint: bytes | None) -> int:
        """Remove what the disks have of a namespace, open or not, or of all; returns how many blocks that were. Of
        stores what is known of it."""
        return sum(tier.remove_all(fingerprint) for level in self.levels for tier in level.tiers)

    # --- what the daemon calls -------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """How long it will take until what lookups wait for is up, as far as that is known."""
        return max(self._answers_due - self._clock(), *(level.promoter.wait_s for level in self.levels), 0.0)

    def pump(self) -> None:
        """Begin what was requested, and go on writing. For when the replies are out."""
        for level in self.levels:
            level.promoter.pump()
        for level in self.levels:
            level.writer.pump()

    def stop(self) -> None:
        """Begin nothing any more."""
        for level in self.levels:
            level.promoter.stop()
            level.writer.stop()

    def tick(self) -> None:
        """A few times a second: deadlines, the cold end of the pool."""
        evicted, self._evicted = self._evicted, []
        for space, keys in evicted:
            for tier in self.disks.tiers:
                tier.used(space, keys)
        for level in self.levels:
            level.tick()
        self._settle_due()

    def namespace_forgotten(self, namespace: Namespace) -> None:
        """Nobody has the namespace open, and the pool nothing of it. What disks and stores have of it stays."""
        self._forget_fills(namespace)
        self._uncounted.pop(namespace, None)
        self._due = {name: due for name, due in self._due.items() if due[0] is not namespace}
        for lease_id in [one for one, waits in self._waiting.items() if waits.namespace is namespace]:
            self._end_waiting(lease_id)
        for level in self.levels:
            level.promoter.no_space_until.pop(namespace, None)
        for group in range(len(namespace.groups)):
            if (space := self._spaces.pop((namespace, group), None)) is not None:
                self._groups.pop(space.tag, None)

    def unshare(self, fingerprint: bytes) -> None:
        """Share nothing of a namespace until ``reshare``."""
        put_newest(self.unshared, fingerprint, None, MOST_UNSHARED, lambda one: one in self._cache.namespaces)

    def reshare(self, fingerprint: bytes) -> None:
        self.unshared.pop(fingerprint, None)

    def answered(self, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Count what lookups were told of as being asked for. What was found is counted when it is requested."""
        namespace = self._cache.namespaces.get(space.fingerprint)
        if namespace is None or not (uncounted := self._uncounted.get(namespace)):
            return
        lookups = [uncounted.pop((space.tag, key), 0) for key in keys]
        if not any(lookups):
            return
        current, absent, now = self.space(namespace, space.group).tag == space.tag, list[bytes](), self._clock()
        for key, count, there in zip(keys, lookups, found, strict=True):
            if there and current and count:
                self._due[space.tag, key] = namespace, count + self._take_due(space, key), now
            else:
                absent += [key] * count
        self._cache.count_misses(namespace, space.group, b"".join(absent))

    def _take_due(self, space: Space, key: bytes) -> int:
        """How many lookups still count a key that was found."""
        return self._due.pop((space.tag, key))[1] if (space.tag, key) in self._due else 0

    def _settle_due(self) -> None:
        """Count what was found and nobody asked for again: a key before it was not there, or the request went away."""
        late = self._clock() - WAITING_S
        for lease_id in [one for one, _ in takewhile(lambda item: item[1].since <= late, self._waiting.items())]:
            self._end_waiting(lease_id)
        late = self._clock() - DUE_S
        for name in [name for name, _ in takewhile(lambda item: item[1][2] <= late, self._due.items())]:
            namespace, count, _ = self._due.pop(name)
            namespace.counters.found_shared += count

    def _forget_fills(self, namespace: Namespace) -> None:
        for keys in list(self._coming.values()):
            for fill in list(keys.values()):
                if fill.namespace is not namespace:
                    break  # all of a tag are of one
                fill.promoter.forget(fill)

    def namespace_of(self, tag: int) -> tuple[Namespace, int] | None:
        """The namespace that is open, and the group, whose blocks have this tag now."""
        found = self._groups.get(tag)
        return None if found is None or self.space(*found).tag != tag else found


class Reports:
    """What the tiers tell of themselves, as their ``TierListener``: KV events of disks' blocks, lines in the log."""

    def __init__(self, tiering: Tiering, events: CacheListener, clock: Callable[[], float]) -> None:
        self._tiering, self._events, self._clock = tiering, events, clock
        self._logged: dict[tuple[str, str], float] = {}
        """Tiers and kinds of their errors that were logged, and when; the tiers count them."""

    def stored(self, tier: Tier, space: Space, keys: Sequence[bytes]) -> None:
        if (found := self._tiering.namespace_of(space.tag)) is not None:
            self._events.stored(*found, list(keys), MEDIUM_STORAGE)

    def removed(self, tier: Tier, tag: int, keys: Sequence[bytes]) -> None:
        if (found := self._tiering.namespace_of(tag)) is not None:
            self._events.removed(*found, list(keys), MEDIUM_STORAGE)

    def answered(self, tier: Tier, space: Space, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        self._tiering.answered(space, keys, found)

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        now = self._clock()
        if now - self._logged.get((tier.name, kind), -LOGGED_S) >= LOGGED_S:
            logger.warning("%s: %s", tier.name, sentence)
            put_newest(self._logged, (tier.name, kind), now, MOST_LOGGED)


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
