"""Keys that lookups reported as being asked for, until the stores have answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import not_

from kvoffd.cache.asked_keys import AskedKeys
from kvoffd.cache.block_table import IN_A_TIER
from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.tiering.fills import Asker
from kvoffd.tiers.header import BlockGroup
from kvoffd.tiers.tier import PEER, Tier


class _Run:
    """Keys of a lookup from ``first`` on that questions to several stores are about: peers, or one store.

    Attributes:
        found: leading keys that a store has, by the answers so far.
        questions: number of those that are not answered.
    """

    __slots__ = ("asked", "first", "found", "questions")

    def __init__(self, asked: AskedKeys, first: int, questions: int) -> None:
        self.asked, self.first, self.questions, self.found = asked, first, questions, 0


class _LookupKeys:
    """Keys of a lookup that stores are being asked for: one store, or several peers.

    Args:
        open_questions: stores that have not answered, by the key's position; None for one store.
    """

    __slots__ = ("_open", "asked")

    def __init__(self, asked: AskedKeys, open_questions: dict[int, int] | None) -> None:
        self.asked, self._open = asked, open_questions

    def settle(self, position: int, *, is_there: bool) -> bool:
        """Record a store's answer about the key at a position; return whether it is the one that decides: the first
        that has the key, or the last."""
        if self._open is None:
            return True
        if not (left := self._open.pop(position, 0)):
            return False  # another one has it
        if is_there or left == 1:
            return True
        self._open[position] = left - 1
        return False


class UnansweredKeys:
    """Keys that are UNANSWERED_YET, and the lookups that asked for them: these count them once they are answered."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._by_key: dict[Namespace, dict[tuple[Tier, int], dict[bytes, tuple[tuple[_LookupKeys, int], ...]]]] = {}
        """Lookups by namespace, by the store that is asked and the tag, and by key, with the key's position."""
        self._runs: dict[object, _Run] = {}
        """Lookups all of whose keys are in one question to a store, or in one to each of several peers, by question."""

    def add_run(self, questions: Sequence[object], asked: AskedKeys, first: int) -> None:
        """Add the keys of a lookup from ``first`` on, all of which each of these questions is about."""
        self._runs.update(dict.fromkeys(questions, _Run(asked, first, len(questions))))

    def add(
        self, tiers: Sequence[Tier], tag: int, keys: Sequence[bytes], asked: AskedKeys, positions: Sequence[int]
    ) -> None:
        """Add keys of a lookup that each of these stores is being asked for, and their positions in it."""
        its_keys = _LookupKeys(asked, dict.fromkeys(positions, len(tiers)) if len(tiers) > 1 else None)
        for tier in tiers:
            by_key = self._by_key.setdefault(asked.namespace, {}).setdefault((tier, tag), {})
            for key, position in zip(keys, positions, strict=True):
                by_key[key] = (*by_key.get(key, ()), (its_keys, position))

    def forget(self, namespace: Namespace) -> None:
        """Drop the keys of a namespace that was forgotten."""
        self._by_key.pop(namespace, None)

    def answered(
        self, tier: Tier, block_group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool], question: object
    ) -> None:
        """Have lookups count the keys that a store has answered about: see ``TierListener``."""
        run = self._runs.pop(question, None)
        is_down = tier.is_down() and not tier.name.startswith(PEER)
        if (namespace := self._cache.namespaces.get(block_group.fingerprint)) is None:
            return
        if namespace.generation != block_group.generation:
            found = [False] * len(keys)
        if run is not None and run.asked.namespace is namespace:  # else another one has its fingerprint now
            _record_answer(tier, run.asked, is_down=is_down)
            if more := max(0, sum(found) - run.found):
                namespace.counters.found_shared += more
                run.asked.set(run.first + run.found, bytes([IN_A_TIER]) * more)
                run.found += more
            run.questions -= 1
            if not run.questions and run.found < len(keys):
                self._cache.prompts.tier_lacks(run.asked, run.first + run.found, len(keys) - run.found)
        by_tier, tier_and_tag = self._by_key.get(namespace, {}), (tier, block_group.tag)
        if not (by_key := by_tier.get(tier_and_tag)):
            return
        waiting = [by_key.pop(key, ()) for key in keys]
        if not by_key:
            del by_tier[tier_and_tag]
        for asked in {one.asked: None for of_key in compress(waiting, map(not_, found)) for one, _ in of_key}:
            _record_answer(tier, asked, is_down=is_down)
        askers = [
            [(one.asked, position) for one, position in of_key if one.settle(position, is_there=is_there)]
            for of_key, is_there in zip(waiting, found, strict=True)
        ]
        namespace.counters.found_shared += sum(map(len, compress(askers, found)))
        for asked, position, count in _joined(compress(askers, found)):
            asked.set(position, bytes([IN_A_TIER]) * count)
        for asked, position, count in _joined(compress(askers, map(not_, found))):
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


def _record_answer(tier: Tier, asked: AskedKeys, *, is_down: bool) -> None:
    """Record that a tier has answered, or that a question to it failed."""
    if is_down:
        asked.tier_is_down(tier.name)
    else:
        asked.tier_answered(tier.name)
