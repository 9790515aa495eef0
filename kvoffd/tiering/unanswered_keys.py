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


class UnansweredKeys:
    """Keys that are UNANSWERED_YET, and the lookups that asked for them: these count them once they are answered."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._by_key: dict[Namespace, dict[tuple[Tier, int], dict[bytes, tuple[Asker, ...]]]] = {}
        """Lookups by namespace, by the store that is asked and the tag, and by key."""
        self._runs: dict[object, Asker] = {}
        """Lookups all of whose keys are in one question to a store, by the question: the first key's asker."""

    def add_run(self, question: object, asked: AskedKeys, first: int) -> None:
        """Add the keys of a lookup from ``first`` on, all of which one question to a store is about."""
        self._runs[question] = asked, first

    def add(self, tier: Tier, tag: int, keys: Sequence[bytes], asked: AskedKeys, positions: Iterable[int]) -> None:
        """Add keys of a lookup that a store is being asked for, and their positions in it."""
        by_key = self._by_key.setdefault(asked.namespace, {}).setdefault((tier, tag), {})
        for key, position in zip(keys, positions, strict=True):
            by_key[key] = (*by_key.get(key, ()), (asked, position))

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
        if run is not None and run[0].namespace is namespace:  # else another one has its fingerprint now
            (asked, first), gap = run, sum(found)
            namespace.counters.found_shared += gap
            _record_answer(tier, asked, is_down=is_down)
            asked.set(first, bytes([IN_A_TIER]) * gap)
            self._cache.prompts.tier_lacks(asked, first + gap, len(keys) - gap)
        by_tier, tier_and_tag = self._by_key.get(namespace, {}), (tier, block_group.tag)
        if not (by_key := by_tier.get(tier_and_tag)):
            return
        askers = [by_key.pop(key, ()) for key in keys]
        if not by_key:
            del by_tier[tier_and_tag]
        namespace.counters.found_shared += sum(map(len, compress(askers, found)))
        for asked, position, count in _runs(compress(askers, found)):
            asked.set(position, bytes([IN_A_TIER]) * count)
        for asked, position, count in _runs(compress(askers, map(not_, found))):
            _record_answer(tier, asked, is_down=is_down)
            self._cache.prompts.tier_lacks(asked, position, count)


def _runs(askers: Iterable[Sequence[Asker]]) -> Iterator[tuple[AskedKeys, int, int]]:
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
