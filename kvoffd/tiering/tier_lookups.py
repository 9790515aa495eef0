"""Lookups in the tiers: which keys that the pool lacks they have, and which of these are to be promoted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf

import numpy as np

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import UNANSWERED_YET
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import MissReason
from kvoffd.cache.states import FREE, READY, WRITING
from kvoffd.cache.tickets import Lease
from kvoffd.pool.allocator import PAGE_BYTES
from kvoffd.tiering.block_group import block_group_of
from kvoffd.tiering.promotion_source import PromotionSource
from kvoffd.tiering.promotions import SETTLED, Fill, LookupQueues, Promotions
from kvoffd.tiering.unanswered_keys import UnansweredKeys
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Tier
from kvoffd_proto.messages import COMING, SHARED, GroupSpec

ANSWER_S = 0.02
"""Estimate of a store's answer time, for engines that wait. The ask deadline covers the worst case, and may be longer
than any engine waits."""

PEERS_AT_ONCE = 4
"""Peers that are asked about a key at once, first those that had something last; if none of them has it, the next."""

_IS_ABSENT, _IS_PRESENT, _IS_ASKED = (
    bytes(state == wanted for state in range(256)) for wanted in (ABSENT, PRESENT, ASKED)
)
"""Tables for ``translate``, which make 1 of one answer of a tier, and 0 of the others."""
READY_OR_COMING = bytes([READY, *COMING])
"""States of keys that are in the pool, or on their way, and need no action."""


@dataclass(slots=True)
class CurrentLookup:
    """A lookup, until it is answered."""

    lease: Lease
    groups: Sequence[tuple[int, bytes]]
    """Groups of the request by index, each with its keys."""
    answer: Sequence[bytearray]
    """States of their keys, in the reply."""
    asked: Sequence[AskedKeys] | None
    """Counts of their keys; None if they were counted before."""
    steps: Sequence[Sequence[PromotionSource]]
    """Sources that it can use now, in the order in which they are asked: see ``TierLookups._steps_for``."""
    promotable_bytes: int
    """Pool bytes that may still be promoted for it: what leases may pin, less what it has. Negative if its READY keys
    are more than that: anything else would evict its own beginning."""
    may_wait: bool
    """Whether its new fills may wait for space. Those of a first lookup may. Those of a repeated one do not while their
    keys were last missed for want of space, since these have waited for it before. From the first other key on they
    may: it had space then, or a store had not answered about it. ``Promotions._refusal`` decides that."""
    queues: LookupQueues
    """The queues of its new fills, and of those that it has joined."""
    new_bytes: int = 0
    """Pool bytes of its new fills."""
    asking_bytes: int = 0
    """Pool bytes of the keys that stores are being asked for."""
    worth_reading: set[PromotionSource] = field(default_factory=set)
    """Sources that are read for one of its groups, and so for the later ones at any speed: one group without the others
    cannot be loaded."""


class LookupPart:
    """Consecutive keys of one group of a lookup, and what is known of them. A key is named by its index here, its
    *place*.

    Args:
        number: index of the group in the request.
        start, end: of the keys in the group.
    """

    def __init__(
        self, lookup: CurrentLookup, number: int, promotions: Promotions, *, start: int = 0, end: int | None = None
    ) -> None:
        (index, packed_keys), namespace = lookup.groups[number], lookup.lease.namespace
        self.group = namespace.groups[index]
        self.block_group = block_group_of(self.group)
        """The group, for tiers."""
        self.keys: list[bytes] = np.frombuffer(packed_keys, namespace.key_type)[start:end].tolist()
        self.key_before = packed_keys[max(0, start - 1) * namespace.key_bytes : start * namespace.key_bytes]
        """The key before the first of these; empty if that begins the prompt."""
        self.states = memoryview(lookup.answer[number])[start:end]
        """The answer for these keys, which is changed through this view."""
        self.fills: Mapping[bytes, Fill] = promotions.unsettled.get(self.block_group.tag, {})
        """Unsettled fills of any keys of the group; those that this lookup adds may be missing."""
        self.start = start
        self.asked = lookup.asked[number] if lookup.asked is not None else None
        """Counts of the group's keys; None if they were counted before."""
        self.unfound: list[int] = []
        """Keys that are neither in the pool nor on their way, nor in a tier that was asked."""
        if any(self.states):  # FREE is 0
            self.unfound = [place for place, state in enumerate(self.states) if state == FREE]
        else:  # as mostly, and so faster
            self.unfound = list(range(len(self.states)))
        if self.fills:
            self.unfound = [place for place in self.unfound if self.keys[place] not in self.fills]
        self.there: dict[int, PromotionSource] = {}
        """Sources that have a key."""
        self.asking: dict[int, tuple[Tier, ...]] = {}
        """Stores that are being asked for a key: one, or several peers."""
        self.whole_questions: list[object] = []
        """The questions to these stores, if each of them is about exactly these keys; else none. Of such a question
        ``UnansweredKeys`` has one entry instead of one for each key."""
        self.found_by: dict[str, None] = {}
        """Names of the tiers that have a key, or are being asked for it."""

    def mark(self, places: Sequence[int], reason: int) -> None:
        """Record a reason for some keys, by ascending places, unless they were counted before."""
        if self.asked is None or not places:
            return
        if places[-1] - places[0] == len(places) - 1:  # as mostly: all in one call
            self.asked.mark(self.start + places[0], self.start + places[-1] + 1, reason)
            return
        for place in places:
            self.asked.mark(self.start + place, self.start + place + 1, reason)

    def look(self, steps: Sequence[Sequence[PromotionSource]], *, prefix: bool) -> None:
        """Ask sources for the unfound keys, those of a step at once, until all keys are found. ``prefix``: this may end
        with the first key that no source has, which is then the only one in ``unfound``."""
        if prefix and len(self.unfound) > 1 and not any(step[0].shared for step in steps):
            # Disks mostly lack the first key, and to look for one is faster than for all.
            behind_first, self.unfound = self.unfound[1:], self.unfound[:1]
            self.look(steps, prefix=True)
            if self.unfound:  # the prefix ends here
                return
            self.unfound = behind_first
        for step in steps:
            if not self.unfound:
                return
            is_whole = len(self.unfound) == len(self.keys)
            keys = self.keys if is_whole else list(map(self.keys.__getitem__, self.unfound))
            answers = [(source, source.tier.find(self.block_group, keys, prefix=prefix)) for source in step]
            answers = [(source, answer) for source, answer in answers if any(answer.states)]  # ABSENT is 0
            self.found_by.update((source.tier.name, None) for source, _ in answers)
            if len(answers) == 1:
                source, (states, _) = answers[0]
                self.there.update(dict.fromkeys(compress(self.unfound, states.translate(_IS_PRESENT)), source))
                self.asking.update(dict.fromkeys(compress(self.unfound, states.translate(_IS_ASKED)), (source.tier,)))
                self.unfound = list(compress(self.unfound, states.translate(_IS_ABSENT)))
            elif answers:
                self._take_answers([source for source, _ in answers], [answer.states for _, answer in answers])
            if is_whole and len(self.asking) == len(self.keys):
                questions = [answer.question for _, answer in answers]
                self.whole_questions = [] if None in questions else questions

    def _take_answers(self, sources: Sequence[PromotionSource], answers: Sequence[bytes]) -> None:
        """Take what several peers answered about the unfound keys: the first one that has a key gives it, although
        others have not answered yet. Else all that are being asked for it may."""
        states = np.frombuffer(b"".join(answers), np.uint8).reshape(len(sources), -1)  # [peers, unfound keys]
        places, has = np.array(self.unfound), states == PRESENT
        is_there, first = has.any(axis=0), has.argmax(axis=0)
        for number, source in enumerate(sources):
            self.there.update(dict.fromkeys(places[is_there & (first == number)].tolist(), source))
        left = places[~is_there]
        # The peers that are being asked for a key as the bits of a number: keys with the same share a tuple of tiers.
        (asked_peers,) = np.packbits(states[:, ~is_there] == ASKED, axis=0, bitorder="little")
        for bits in set(asked_peers.tolist()) - {0}:
            tiers = tuple(source.tier for number, source in enumerate(sources) if bits >> number & 1)
            self.asking.update(dict.fromkeys(left[asked_peers == bits].tolist(), tiers))
        self.unfound = left[asked_peers == 0].tolist()


class TierLookups:
    """Finds the keys of lookups in the tiers, and has ``Promotions`` bring those up that their engines can use.

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

    A group of full attention needs a prefix of its keys; one with a sliding window or a recurrent state needs a window,
    the last keys before the end of what all others have. So prefixes are looked up first. While stores are being asked
    about one, it may still grow: windows are then looked for, and requested only once that is known.

    Args:
        sources: the disks of this node, then shared stores in the order of asking.
        promotions: what lookups wait for.
        unanswered: has the keys that stores are being asked for.
        is_unshared: whether a namespace, by its fingerprint, became stale here: other nodes' blocks of the same keys
            may be stale too, so stores are not read for it.

    Attributes:
        ask_if_behind: returns whether other nodes may have cleared a namespace, by its fingerprint, unheard of here:
            then disks are not read for it. Asks them at a namespace's first lookup.
    """

    def __init__(
        self,
        cache: Cache,
        sources: Sequence[PromotionSource],
        promotions: Promotions,
        unanswered: UnansweredKeys,
        is_unshared: Callable[[bytes], bool],
    ) -> None:
        self._cache, self._sources, self._promotions = cache, sources, promotions
        self._unanswered, self._is_unshared = unanswered, is_unshared
        self.ask_if_behind: Callable[[bytes], bool] = lambda fingerprint: False

    def find(
        self, lease: Lease, groups: Sequence[tuple[int, bytes]], states: list[bytes], asked: Sequence[AskedKeys] | None
    ) -> list[bytes]:
        """Return the states that a lookup reports: see ``TierHooks``."""
        namespace = lease.namespace
        lease.wait_s = 0.0
        steps = self._steps_for(lease, asked)
        if not steps or not groups or not namespace.groups[groups[0][0]].lengths:  # not all ranks have registered
            return states
        lookup = self._new_lookup(lease, groups, states, asked, steps)
        windows, parts = list[int](), list[LookupPart]()
        may_grow, prefix_tokens = False, inf
        for number, ((index, _), answer) in enumerate(zip(groups, lookup.answer, strict=True)):
            spec = namespace.specs[index]
            if spec.window_tokens or "mamba" in spec.kind:
                windows.append(number)
                continue
            parts.append(LookupPart(lookup, number, self._promotions, start=run_end(answer)))
            may_grow |= self._find_prefix(lookup, parts[-1])
            prefix_tokens = min(prefix_tokens, run_end(answer) * spec.tokens_per_block)
        for number in windows:
            spec = namespace.specs[groups[number][0]]
            is_limited = prefix_tokens < inf and spec.tokens_per_block
            end = int(prefix_tokens) // spec.tokens_per_block if is_limited else None
            parts.append(LookupPart(lookup, number, self._promotions, end=end))
            self._find_window(lookup, parts[-1], spec, may_grow=may_grow)
        lease.asking_bytes = min(lookup.asking_bytes, max(0, lookup.promotable_bytes))
        if lease.coming:
            answers_s = ANSWER_S if lease.asking else 0.0  # the caller took off what earlier lookups had asked for
            lease.wait_s = max(answers_s, self._promotions.wait_s(lease))
        for part in parts:
            if part.asked is not None:
                part.asked.sources = tuple(part.found_by)
        return list(map(bytes, lookup.answer))

    # --- one lookup ------------------------------------------------------------------------------

    def _steps_for(self, lease: Lease, asked: Sequence[AskedKeys] | None) -> list[list[PromotionSource]]:
        """Return the available sources that a lookup under a lease may use, in the order in which they are asked: the
        disks, then the stores, each alone; then the peers, PEERS_AT_ONCE at once.

        If it names a peer that is available, that is the only one. Else they are all but those of networks, and those
        that had something last come first. Sources that are down are recorded in ``asked``, except peers that it does
        not name.
        """
        fingerprint, named = lease.namespace.fingerprint, lease.peer
        is_unshared = any(source.shared for source in self._sources) and self._is_unshared(fingerprint)
        others, peers, named_peers = list[PromotionSource](), list[PromotionSource](), list[PromotionSource]()
        for source in self._sources:
            tier = source.tier
            is_named = bool(named) and tier.name == named  # a place without a peer has no name either
            if (tier.only_named and not is_named) or (source.shared and is_unshared):
                continue
            if asked is not None and (is_named or not tier.is_peer) and tier.is_down():
                _record_down(tier, asked)
            if not tier.available():
                continue
            if is_named:
                named_peers.append(source)
            elif tier.is_peer:
                peers.append(source)
            else:
                others.append(source)
        if others and not others[0].shared and self.ask_if_behind(fingerprint):  # disks come first
            others = [one for one in others if one.shared]
        if len(peers) > PEERS_AT_ONCE:
            peers.sort(key=lambda one: -one.tier.found_at)
        peers = named_peers or peers
        at_once = [peers[begin : begin + PEERS_AT_ONCE] for begin in range(0, len(peers), PEERS_AT_ONCE)]
        return [*([one] for one in others), *at_once]

    def _new_lookup(
        self,
        lease: Lease,
        groups: Sequence[tuple[int, bytes]],
        states: Sequence[bytes],
        asked: Sequence[AskedKeys] | None,
        steps: Sequence[Sequence[PromotionSource]],
    ) -> CurrentLookup:
        """Return a lookup of these groups, with what may still be promoted for it."""
        leases, known, pairs = self._cache.leases, lease.namespace.groups, zip(groups, states, strict=True)
        ready_bytes = sum(of_group.count(READY) * known[index].block_bytes for (index, _), of_group in pairs)
        # Earlier lookups under the same lease may have found the beginning of the prompt.
        held_bytes = max(ready_bytes, int(self._cache.blocks.pages[lease.blocks].sum()) * PAGE_BYTES)
        fills = self._promotions.fills_of_lease.get(lease, ())
        held_bytes += sum(fill.queue.group.block_bytes for fill in fills if fill.state not in SETTLED)
        promotable_bytes = leases.most_bytes - sum(one.reads.given_up_bytes for one in self._sources) - held_bytes
        answer, is_first = list(map(bytearray, states)), asked is not None
        return CurrentLookup(lease, groups, answer, asked, steps, promotable_bytes, is_first, LookupQueues(lease))

    def _find_prefix(self, lookup: CurrentLookup, part: LookupPart) -> bool:
        """Request the unbroken run from the first of these keys; return whether any of it is being asked for."""
        states, end = bytes(part.states), len(part.keys)
        if WRITING in states:  # what has no fill is being stored, which its engine may never finish
            writing = (place for place, state in enumerate(states) if state == WRITING)
            end = next((place for place in writing if part.keys[place] not in part.fills), end)
            part.unfound = [place for place in part.unfound if place < end]
        part.look(lookup.steps, prefix=True)
        end = min([end, *part.unfound[:1]])
        if end < len(part.keys):
            part.asking = {place: tiers for place, tiers in part.asking.items() if place < end}
        if part.asking:
            self._await_answers(lookup, part, prefix=True)
        places = set(part.there)
        if part.fills:
            has_fill = (place for place in range(end) if part.keys[place] in part.fills)
            places |= {place for place in has_fill if states[place] != READY}  # else it was stored while it was queued
        self._promotions.request(lookup, part, sorted(place for place in places if place < end))
        return bool(part.asking)

    def _find_window(self, lookup: CurrentLookup, part: LookupPart, spec: GroupSpec, *, may_grow: bool) -> None:
        """Request the last whole window of these keys once all answers are known.

        Stores are not asked if the disks have the whole window at the end. ``may_grow``: the prefix that ends with
        these keys may still grow, and others would be the last.
        """
        window = range(0)
        for shared in (False, True):  # the disks, then the stores too
            part.look([step for step in lookup.steps if step[0].shared is shared], prefix=False)
            there = [
                state in READY_OR_COMING or key in part.fills or place in part.there
                for place, (key, state) in enumerate(zip(part.keys, part.states, strict=True))
            ]
            window = last_window(there, spec)
            if not may_grow and window.stop == len(part.keys):
                break
        if part.asking:
            self._await_answers(lookup, part, prefix=False)
        elif not may_grow:
            self._promotions.request(
                lookup, part, [place for place in window if part.states[place] not in READY_OR_COMING]
            )

    def _await_answers(self, lookup: CurrentLookup, part: LookupPart, *, prefix: bool) -> None:
        """Have the lookup wait for the answers about keys that a store is being asked for. When it is repeated, the
        cache first takes off what is added to the lease here (``Lease.forget_unanswered``)."""
        count = len(part.asking)
        lookup.lease.asking += count
        lookup.lease.coming += count
        lookup.asking_bytes += count * part.group.block_bytes
        if count == len(part.keys):
            part.states[:] = bytes([SHARED]) * count
        else:
            for place in part.asking:
                part.states[place] = SHARED
        if part.asked is None:
            return
        part.mark(sorted(part.asking), UNANSWERED_YET)
        if prefix and part.whole_questions:  # their answers say that leading keys are there, and no others
            self._unanswered.add_run(part.whole_questions, part.asked, part.start)
            return
        for tiers in dict.fromkeys(part.asking.values()):
            places = [place for place, asked_tiers in part.asking.items() if asked_tiers == tiers]
            keys, positions = [part.keys[place] for place in places], [part.start + place for place in places]
            self._unanswered.add_scattered(tiers, part.block_group.tag, keys, part.asked, positions)


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
        if run == needed or (run and not place):  # at the prompt's beginning fewer are a whole window
            return range(place, place + run)
    return range(0)
