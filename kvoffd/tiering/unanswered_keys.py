"""Keys that lookups reported as being asked for, until the stores have answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import TypeAlias

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.tiering.promotions import Asker
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import Tier


@dataclass(slots=True)
class _Run:
    """All keys of a lookup from ``first`` on, asked of one store in one question, or of each of several peers."""

    asked: AskedKeys
    first: int
    unanswered: int
    """Number of questions that are not answered."""
    found: int = 0
    """Leading keys that a store has, by the answers so far. Answers to such a question name no keys behind a gap."""


@dataclass(slots=True, eq=False)
class _ScatteredKeys:
    """Some keys of a lookup, asked of one store or of several peers, in questions that other keys share."""

    asked: AskedKeys
    unanswered: dict[int, int] | None
    """Number of peers that have not answered, by the position of a key that none has; None for one store."""

    def record_answer(self, position: int, *, is_there: bool) -> bool:
        """Record a store's answer about the key at a position. Return whether it decides: it is the first that has the
        key, or the last."""
        if self.unanswered is None:
            return True
        if not (left := self.unanswered.pop(position, 0)):
            return False  # another one has it
        if is_there or left == 1:
            return True
        self.unanswered[position] = left - 1
        return False


_AskersOfKeys: TypeAlias = dict[bytes, tuple[tuple[_ScatteredKeys, int], ...]]
"""Lookups that ask for a key, by key, each with the key's position in it."""


class UnansweredKeys:
    """Keys that are UNANSWERED_YET, and the lookups that asked for them: these count them once they are answered.

    A lookup's keys are in one of two places: as a run if each question is about exactly these keys, as mostly, so that
    an answer costs the same for one key or a thousand; else one by one.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._runs: dict[object, _Run] = {}
        """Runs by question: see ``Found``."""
        self._scattered: dict[Namespace, dict[tuple[Tier, int], _AskersOfKeys]] = {}
        """Other keys by namespace, and by the store that is asked and the group's tag."""

    def add_run(self, questions: Sequence[object], asked: AskedKeys, first: int) -> None:
        """Add the keys of a lookup from ``first`` on, all of which each of these questions is about."""
        self._runs.update(dict.fromkeys(questions, _Run(asked, first, len(questions))))

    def add_scattered(
        self, tiers: Sequence[Tier], tag: int, keys: Sequence[bytes], asked: AskedKeys, positions: Sequence[int]
    ) -> None:
        """Add keys of a lookup that each of these stores is being asked for, and their positions in it."""
        its_keys = _ScatteredKeys(asked, dict.fromkeys(positions, len(tiers)) if len(tiers) > 1 else None)
        for tier in tiers:
            askers = self._scattered.setdefault(asked.namespace, {}).setdefault((tier, tag), {})
            for key, position in zip(keys, positions, strict=True):
                askers[key] = (*askers.get(key, ()), (its_keys, position))

    def forget(self, namespace: Namespace) -> None:
        """Drop the keys of a namespace that was forgotten. Runs stay until their answers come."""
        self._scattered.pop(namespace, None)

    def answered(
        self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool], question: object
    ) -> None:
        """Have lookups count the keys that a store has answered about: see ``TierListener``."""
        run = self._runs.pop(question, None)
        if (namespace := self._cache.namespaces.get(block_group.fingerprint)) is None:
            return
        if namespace.generation != block_group.generation:
            found = [False] * len(keys)
        if run is not None and run.asked.namespace is namespace:  # else another one has its fingerprint now
            self._answer_run(run, tier, found)
        by_tier, tier_and_tag = self._scattered.get(namespace, {}), (tier, block_group.tag)
        if askers := by_tier.get(tier_and_tag):
            answered = [askers.pop(key, ()) for key in keys]
            if not askers:
                del by_tier[tier_and_tag]
            self._answer_scattered(namespace, answered, tier, found)

    def _answer_run(self, run: _Run, tier: Tier, found: Sequence[bool]) -> None:
        """Count a run's keys by a store's answer about all of them: the leading ones that it has."""
        _record_reply(tier, run.asked)
        if more := max(0, sum(found) - run.found):
            run.asked.namespace.counters.found_shared += more
            run.asked.set(run.first + run.found, bytes([IN_A_TIER]) * more)
            run.found += more
        run.unanswered -= 1
        if not run.unanswered and run.found < len(found):
            self._cache.prompts.tier_lacks(run.asked, run.first + run.found, len(found) - run.found)

    def _answer_scattered(
        self,
        namespace: Namespace,
        answered: Sequence[tuple[tuple[_ScatteredKeys, int], ...]],
        tier: Tier,
        found: Sequence[bool],
    ) -> None:
        """Count keys by a store's answer. ``answered``: by key, the lookups that ask for it."""
        # To a lookup that found all of its keys it does not matter whether the tier is down.
        for asked in {one.asked: None for of_key in compress(answered, map(not_, found)) for one, _ in of_key}:
            _record_reply(tier, asked)
        decided = [
            [(one.asked, position) for one, position in of_key if one.record_answer(position, is_there=is_there)]
            for of_key, is_there in zip(answered, found, strict=True)
        ]
        namespace.counters.found_shared += sum(map(len, compress(decided, found)))
        for asked, position, count in _joined(compress(decided, found)):
            asked.set(position, bytes([IN_A_TIER]) * count)
        for asked, position, count in _joined(compress(decided, map(not_, found))):
            self._cache.prompts.tier_lacks(asked, position, count)


def _joined(askers: Iterable[Sequence[Asker]]) -> Iterator[tuple[AskedKeys, int, int]]:
    """Yield the askers of keys joined to runs: the keys of a lookup, the position of a first one, and their number."""
    runs: dict[AskedKeys, tuple[int, int]] = {}
    for askers_of_key in askers:
        for asked, position in askers_of_key:
            first, count = runs.get(asked, (position, 0))
            if first + count != position:
                yield asked, first, count
                first, count = position, 0
            runs[asked] = first, count + 1
    for asked, (first, count) in runs.items():
        yield asked, first, count


def _record_reply(tier: Tier, asked: AskedKeys) -> None:
    """Record that a tier has answered, or that a question to it failed. A peer that fails is like one without the keys:
    its pool went with it."""
    if tier.is_down() and not tier.is_peer:
        asked.tier_is_down(tier.name)
    else:
        asked.tier_answered(tier.name)
