"""Lookups in the tiers: which keys that the pool lacks they have, and which of these are to be promoted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf

import numpy as np

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import FREE, READY, UNANSWERED_YET, WRITING
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Group, MissReason, Namespace
from kvoffd.cache.prefetches import NO_SESSION
from kvoffd.cache.tickets import Lease
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.tiering.fills import Coming, Fill, FillQueue
from kvoffd.tiering.promotions import SLOWER, Promotions
from kvoffd.tiering.unanswered_keys import UnansweredKeys
from kvoffd.tiering.writer import block_group_of
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import ABSENT, ASKED, PEER, PRESENT, Tier
from kvoffd_proto.messages import COMING, PENDING, SHARED, GroupSpec

ANSWER_S = 0.02
"""Estimate of a store's answer time, for engines that wait. The ask deadline covers the worst case, and may be longer
than any engine waits."""

PEERS_AT_ONCE = 4
"""Peers that are asked about a key at once, first those that had something last; if none of them has it, the next."""

_ANSWER_TABLES = tuple(bytes(one == state for one in range(256)) for state in (ABSENT, PRESENT, ASKED))
"""Tables for ``translate``: 1 for one answer of a tier, 0 for others."""
READY_OR_COMING = bytes([READY, *COMING])
"""States of keys that are in the pool, or on their way, and need no action."""


@dataclass(slots=True)
class _Lookup:
    lease: Lease
    asked: Sequence[AskedKeys] | None
    """Keys by group of the request, for counting those that do not come; None if they were counted before."""
    sources: Sequence[Promotions]
    """Sources that it can use now, in the order in which they are asked."""
    left_bytes: int
    """Pool bytes that may still be promoted for it: what leases may pin, less what it has. Negative if its READY keys
    are more than that: anything else would evict its own beginning."""
    free_bytes: float
    """Pool bytes that it may request; inf for any number, which may wait for space. A repeated lookup has a limit: keys
    that got no space in their patience do not wait again."""
    asking_bytes: int = 0
    """Pool bytes of the keys that stores are being asked for."""
    queues: list[FillQueue] = field(default_factory=list)
    """Queues that it waits for and that have no space yet, of all sources."""
    worth_reading: set[Promotions] = field(default_factory=set)
    """Sources that are read for one of its groups: one group without the others cannot be loaded."""

    def mark(self, part: _Range, places: Sequence[int], reason: int) -> None:
        """Record a reason for some keys, by ascending indices, unless they were counted before."""
        if self.asked is None or not places:
            return
        if places[-1] - places[0] == len(places) - 1:  # as mostly: all in one call
            self.asked[part.number].mark(part.start + places[0], part.start + places[-1] + 1, reason)
            return
        for at in places:
            self.asked[part.number].mark(part.start + at, part.start + at + 1, reason)


class _Range:
    """Keys of one group of a lookup, and what is known of them by index."""

    def __init__(
        self,
        group: Group,
        block_group: BlockGroup,
        keys: Sequence[bytes],
        states: memoryview,
        fills: Mapping[bytes, Fill],
        number: int,
        start: int,
    ) -> None:
        self.group, self.block_group, self.keys, self.states, self.fills = group, block_group, keys, states, fills
        """``block_group``: of the group, for tiers. ``states``: the lookup's answer. ``fills``: those that exist
        already, of any keys of the group."""
        self.number, self.start = number, start
        """Positions of the group in the request, and of the first key in the group."""
        self.unfound: list[int] = []
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if any(states):
            self.unfound = [at for at, state in enumerate(states) if state == FREE]
        else:  # as mostly
            self.unfound = list(range(len(states)))
        if fills:
            self.unfound = [at for at in self.unfound if keys[at] not in fills]
        self.there: dict[int, Promotions] = {}
        """Sources that have a key."""
        self.asking: dict[int, tuple[Tier, ...]] = {}
        """Stores that are being asked for a key: one, or several peers."""
        self.questions: list[object] = []
        """The questions to these stores, if this lookup asked each of them for all keys in one."""
        self.found_by: dict[str, None] = {}
        """Names of the tiers that have a key, or are being asked for it."""

    def look(self, sources: Sequence[Promotions], *, prefix: bool) -> None:
        """Ask each of these sources for the keys that no earlier one has, and some peers at once."""
        for step in _steps_of(sources):
            if not self.unfound:
                return
            every = len(self.unfound) == len(self.keys)
            keys = self.keys if every else list(map(self.keys.__getitem__, self.unfound))
            answers = [source.tier.find(self.block_group, keys, prefix=prefix) for source in step]
            answered = [(source, *answer) for source, answer in zip(step, answers, strict=True) if any(answer.states)]
            self.questions = [question for _, _, question in answered] if every else []
            self.found_by.update((source.tier.name, None) for source, _, _ in answered)
            if len(answered) == 1:
                (source, found, _) = answered[0]
                absent, present, asked = (compress(self.unfound, found.translate(one)) for one in _ANSWER_TABLES)
                self.there.update(dict.fromkeys(present, source))
                self.asking.update(dict.fromkeys(asked, (source.tier,)))
                self.unfound = list(absent)
            elif answered:
                self._take_answers([(source, found) for source, found, _ in answered])
            if None in self.questions or len(self.asking) < len(self.keys):  # not all of them about all keys
                self.questions = []

    def _take_answers(self, answers: Sequence[tuple[Promotions, bytes]]) -> None:
        """Take what several peers answered about the unfound keys: the first one that has a key gives it, although
        others have not answered yet."""
        states = np.frombuffer(b"".join(found for _, found in answers), np.uint8).reshape(len(answers), -1)
        places, has = np.array(self.unfound), states == PRESENT
        is_there = has.any(axis=0)
        first = has.argmax(axis=0)
        for number, (source, _) in enumerate(answers):
            self.there.update(dict.fromkeys(places[is_there & (first == number)].tolist(), source))
        bits = 1 << np.arange(len(answers))
        asked_of = np.where(is_there, 0, ((states == ASKED) * bits[:, None]).sum(axis=0))
        for some in set(asked_of.tolist()) - {0}:
            tiers = tuple(source.tier for (source, _), bit in zip(answers, bits.tolist(), strict=True) if some & bit)
            self.asking.update(dict.fromkeys(places[asked_of == some].tolist(), tiers))
        self.unfound = places[~is_there & (asked_of == 0)].tolist()


class TierLookups:
    """Finds the keys of lookups in the tiers, and has those be promoted that their engines can use.

    A key has two states here: one that the reply has, for the engine, and one in ``AskedKeys``, by which it is counted.

    | it is                         | in the reply  | in ``AskedKeys``                                           |
    |-------------------------------|---------------|------------------------------------------------------------|
    | in the pool                   | READY         | FOUND                                                      |
    | on a disk, and coming         | PENDING       | IN_A_TIER; once its fill is settled CAME, or why not       |
    | in a store, and coming        | SHARED        | the same                                                   |
    | being asked of a store        | SHARED        | UNANSWERED_YET; once it has answered IN_A_TIER, or why not |
    | being stored by an engine     | WRITING       | the ``MissReason``                                         |
    | nothing of these              | ABSENT (FREE) | the ``MissReason``                                         |

    PENDING and SHARED together are COMING: the engine may wait, and asks again. ``FoundKeys.with_coming`` makes the
    second state from the first, ``mark`` and the answers of stores (``UnansweredKeys``) correct it.

    Args:
        sources: the disks of this node, then shared stores in the order of asking.
        coming: the fills that lookups may wait for, of all sources.
        unanswered: has the keys that stores are being asked for.
        is_unshared: whether a namespace, by its fingerprint, became stale here: other nodes' blocks of the same keys
            may be stale too, so stores are not read for it.

    Attributes:
        is_behind: whether other nodes may have cleared a namespace, by its fingerprint, unheard of here: then disks are
            not read for it.
    """

    def __init__(
        self,
        cache: Cache,
        sources: Sequence[Promotions],
        coming: Coming,
        unanswered: UnansweredKeys,
        is_unshared: Callable[[bytes], bool],
    ) -> None:
        self._cache, self._sources, self._coming = cache, sources, coming
        self._unanswered, self._is_unshared = unanswered, is_unshared
        self.is_behind: Callable[[bytes], bool] = lambda fingerprint: False
        self._awaits: dict[Lease, dict[Fill, None]] = {}
        """Fills that each lease waits for."""

    # --- what the cache calls: see TierHooks -----------------------------------------------------

    def find(
        self, lease: Lease, groups: Sequence[tuple[int, bytes]], states: list[bytes], asked: Sequence[AskedKeys] | None
    ) -> list[bytes]:
        namespace, lease.wait_s = lease.namespace, 0.0
        sources = self._sources_for(lease, asked)
        every = [namespace.groups[index] for index, _ in groups]
        if not sources or not groups or not every[0].lengths:
            return states
        ready_bytes = sum(one.count(READY) * group.block_bytes for one, group in zip(states, every, strict=True))
        # Earlier lookups under the same lease may have found the beginning of the prompt.
        held_bytes = max(ready_bytes, int(self._cache.blocks.pages[lease.blocks].sum()) * PAGE_BYTES)
        held_bytes += sum(fill.queue.group.block_bytes for fill in self._awaits.get(lease, ()) if not fill.is_settled)
        free_bytes = inf if asked is not None else self._cache.leases.leasable_bytes
        left_bytes = self._cache.leases.most_bytes - sum(one.reads.given_up_bytes for one in self._sources) - held_bytes
        lookup = _Lookup(lease, asked, sources, left_bytes, free_bytes)
        answer, may_grow = list(map(bytearray, states)), False
        for number, window_end in _whole_prefixes_first(namespace, groups, answer):
            start = run_end(answer[number]) if window_end is None else 0
            keys: list[bytes] = np.frombuffer(groups[number][1], namespace.key_type)[start:window_end].tolist()
            group, block_group = every[number], block_group_of(every[number])
            shown, fills = memoryview(answer[number])[start:window_end], self._coming.get(block_group.tag, {})
            part = _Range(group, block_group, keys, shown, fills, number, start)
            if window_end is None:
                may_grow |= self._find_run(lookup, part)
            else:
                self._find_window(lookup, part, may_grow=may_grow)
            if asked is not None:
                for name in part.found_by:
                    asked[number].tier_has_some(name)
        lease.asking_bytes = min(lookup.asking_bytes, max(0, lookup.left_bytes))
        if lease.coming:
            awaits = self._awaits.get(lease, {})
            answers_s = ANSWER_S if lease.asking else 0.0  # it was asked in this call: see ``Lease.ask_again``
            lease.wait_s = max(answers_s, *(source.wait_s(awaits) for source in self._sources))
        return list(map(bytes, answer))

    def lease_ended(self, lease: Lease) -> None:
        unawaited: dict[FillQueue, None] = {}
        for fill in self._awaits.pop(lease, ()):
            del fill.leases[lease]
            if not (fill.leases or fill.is_settled or fill.ticket):
                unawaited[fill.queue] = None
        for queue in unawaited:
            queue.source.drop_unawaited(queue)

    # --- one lookup ------------------------------------------------------------------------------

    def _sources_for(self, lease: Lease, asked: Sequence[AskedKeys] | None) -> list[Promotions]:
        """Return the available sources that a lookup under a lease may use, in the order in which they are asked.

        If it names a peer that is available: that peer, disks and stores. Else all but the peers of networks, and those
        peers first that had something last. Those that are down are recorded in ``asked``, except peers that it does
        not name.
        """
        fingerprint, named = lease.namespace.fingerprint, lease.peer
        # A place that has no peer has no name, and neither has a lookup that names none.
        sources = [one for one in self._sources if not one.tier.only_named or (named and one.name == named)]
        if sources and self._is_unshared(fingerprint):
            sources = [one for one in sources if not one.shared]
        if asked is not None:
            for source in sources:
                if source.tier.is_down() and (not source.name.startswith(PEER) or source.name == named):
                    _record_down(source.tier, asked)
        sources = [one for one in sources if one.tier.available()]
        if sources and not sources[0].shared and self.is_behind(fingerprint):
            sources = [one for one in sources if one.shared]
        if named and any(one.name == named for one in sources):
            return [one for one in sources if one.name == named or not one.name.startswith(PEER)]
        if len(sources) > PEERS_AT_ONCE:  # a stable order: others than peers come first
            sources.sort(key=lambda one: -one.tier.found_at if one.name.startswith(PEER) else -inf)
        return sources

    def _find_run(self, lookup: _Lookup, part: _Range) -> bool:
        """Extend the run from the first of these keys; return whether any of it is being asked for."""
        states, end = bytes(part.states), len(part.keys)
        if WRITING in states:  # an engine may never finish what it is writing
            writing = (at for at, state in enumerate(states) if state == WRITING)
            end = next((at for at in writing if part.keys[at] not in part.fills), end)
            part.unfound = [at for at in part.unfound if at < end]
        remaining = part.unfound
        if not any(source.shared for source in lookup.sources):
            # Disks mostly lack the first key, and to look for one is faster than for all.
            part.unfound = remaining[:1]
            part.look(lookup.sources, prefix=True)
            remaining = remaining[1:] if part.there else []
            part.unfound += remaining
        if remaining:
            part.look(lookup.sources, prefix=True)
        end = min([end, *part.unfound[:1]])
        if end < len(part.keys):
            part.asking = {at: tiers for at, tiers in part.asking.items() if at < end}
        if part.asking:
            self._await_answers(lookup, part, prefix=True)
        places = set(part.there)
        if part.fills:
            has_fill = (at for at in range(end) if part.keys[at] in part.fills)
            places |= {at for at in has_fill if states[at] != READY}  # else it was stored while its fill was queued
        self._request(lookup, part, sorted(at for at in places if at < end))
        return bool(part.asking)

    def _find_window(self, lookup: _Lookup, part: _Range, *, may_grow: bool) -> None:
        """Promote the last whole window of these keys once all answers are known.

        Stores are not asked if the disks have the whole window at the end. ``may_grow``: more keys may follow, because
        stores are being asked about the prefix.
        """
        spec = part.group.namespace.specs[part.group.index]
        window = range(0)
        for shared in (False, True):
            part.look([source for source in lookup.sources if source.shared is shared], prefix=False)
            there = [
                state in READY_OR_COMING or key in part.fills or at in part.there
                for at, (key, state) in enumerate(zip(part.keys, part.states, strict=True))
            ]
            window = last_window(there, spec)
            if not may_grow and window.stop == len(part.keys):
                break
        if part.asking:
            self._await_answers(lookup, part, prefix=False)
        if not (may_grow or part.asking):
            self._request(lookup, part, [at for at in window if part.states[at] not in READY_OR_COMING])

    def _await_answers(self, lookup: _Lookup, part: _Range, *, prefix: bool) -> None:
        """Have the lookup wait for the answers about keys that a store is being asked for."""
        lookup.lease.asking += len(part.asking)
        lookup.asking_bytes += len(part.asking) * part.group.block_bytes
        lookup.lease.coming += len(part.asking)
        if len(part.asking) == len(part.keys):
            part.states[:] = bytes([SHARED]) * len(part.keys)
        else:
            for at in part.asking:
                part.states[at] = SHARED
        if lookup.asked is None:
            return
        lookup.mark(part, sorted(part.asking), UNANSWERED_YET)
        asked = lookup.asked[part.number]
        if prefix and part.questions:
            self._unanswered.add_run(part.questions, asked, part.start)
            return
        for tiers in dict.fromkeys(part.asking.values()):
            places = [at for at, one in part.asking.items() if one == tiers]
            keys = [part.keys[at] for at in places]
            self._unanswered.add(tiers, part.block_group.tag, keys, asked, [part.start + at for at in places])

    def _request(self, lookup: _Lookup, part: _Range, places: Sequence[int]) -> None:
        """Request keys that are in a tier or coming, up to the first that cannot be requested; set their states."""
        if not places:
            return
        slower, lease, queues = self._skip_slower(lookup, part, places), lookup.lease, dict[Promotions, FillQueue]()
        group, block_bytes, together = part.block_group, part.group.block_bytes, lookup.queues
        for number, at in enumerate(places):
            key = part.keys[at]
            if (fill := self._coming.get(group.tag, {}).get(key)) is None:
                source = part.there[at]
                if source in slower:
                    lookup.mark(part, places[number:], MissReason.SKIPPED)
                    return
                if lookup.left_bytes < block_bytes:
                    lookup.mark(part, places[number:], MissReason.LEASE_LIMIT)
                    return
                if lookup.free_bytes < block_bytes:
                    if not self._may_wait_for_space(lookup, part, key):
                        return
                    lookup.free_bytes = inf
                if (queue := queues.get(source)) is None:
                    queue = queues[source] = FillQueue(lease, lease, part.group, group, source, together=together)
                if (fill := source.enqueue(queue, key)) is None:
                    lookup.mark(part, places[number:], MissReason.TIER_LATE)
                    return
                if len(queue.fills) == 1:
                    lookup.queues.append(queue)
                lookup.free_bytes -= block_bytes
            elif not (fill.queue.is_reserved or fill.queue.together is lookup.queues):
                self._wait_together(lookup, fill.queue)
            if lease not in fill.leases:
                lookup.left_bytes -= block_bytes
                lease.coming += 1
                self._awaits.setdefault(lease, {})[fill] = fill.leases[lease] = None
            part.found_by[fill.queue.source.tier.name] = None
            if lookup.asked is not None:  # else it was counted before
                fill.askers.append((lookup.asked[part.number], part.start + at))
            part.states[at] = SHARED if fill.queue.source.shared else PENDING

    def _may_wait_for_space(self, lookup: _Lookup, part: _Range, key: bytes) -> bool:
        """Return whether a repeated lookup may begin to wait for space: a store had not answered to the first one, or
        the key had space then."""
        reason = self._cache.life.reasons_of(part.group, key)[0]
        return lookup.lease.session != NO_SESSION and reason not in (MissReason.NO_SPACE, MissReason.QUOTA)

    def _wait_together(self, lookup: _Lookup, queue: FillQueue) -> None:
        """Have a queue get its space together with the others of this lookup, the last one that waits for it: an engine
        repeats lookups under new leases."""
        if lookup.lease.session == NO_SESSION or queue.is_prefetch:
            return
        if queue in queue.together:
            queue.together.remove(queue)
        lookup.queues.append(queue)
        queue.together, queue.last_lease = lookup.queues, lookup.lease

    def _skip_slower(self, lookup: _Lookup, part: _Range, places: Sequence[int]) -> set[Promotions]:
        """Return the sources whose keys take longer to read than to compute, and count these keys.

        They are not read, unless for a hint.
        """
        if lookup.lease.session == NO_SESSION:
            return set()
        counts = Counter(part.there[at] for at in places if at in part.there)
        slower = {
            source
            for source, count in counts.items()
            if source not in lookup.worth_reading and source.is_slower(part.group, count)
        }
        lookup.worth_reading |= counts.keys() - slower
        for source in slower:
            source.failures[SLOWER] += counts[source]
        return slower


def _steps_of(sources: Sequence[Promotions]) -> Iterator[Sequence[Promotions]]:
    """Divide sources into those that are asked at once: some peers, or any other one alone."""
    step: list[Promotions] = []
    for source in sources:
        if not source.name.startswith(PEER):
            yield [source]
            continue
        step.append(source)
        if len(step) == PEERS_AT_ONCE:
            yield step
            step = []
    if step:
        yield step


def _record_down(tier: Tier, asked: Sequence[AskedKeys]) -> None:
    """Record that a tier which may have keys of a lookup fails."""
    for one in asked:
        one.mark(0, sys.maxsize, MissReason.TIER_DOWN)
        one.tier_is_down(tier.name)


def run_end(states: bytes | bytearray) -> int:
    """Return the length of the unbroken run from the start that is ready, or will be."""
    return len(states) - len(states.lstrip(READY_OR_COMING))


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
    """Yield the groups of a lookup by index, with the end of the keys that a window may need; None for one that needs
    the whole prefix.

    Groups that need the whole prefix come first: ``states`` then tell its length, which limits the windows.
    """
    limit_tokens: int | None = None
    windows: list[int] = []
    for number, (group, _) in enumerate(groups):
        spec = namespace.specs[group]
        if spec.window_tokens or "mamba" in spec.kind:
            windows.append(number)
            continue
        yield number, None
        end = run_end(states[number]) * spec.tokens_per_block
        limit_tokens = end if limit_tokens is None else min(end, limit_tokens)
    for number in windows:
        tokens = namespace.specs[groups[number][0]].tokens_per_block
        whole = limit_tokens is None or not tokens
        yield number, len(states[number]) if whole else min(len(states[number]), (limit_tokens or 0) // tokens)
