"""Tokens of prompts by source: computed, in the engine's own cache, or loaded, from the pool or from below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvoffd.cache.namespace import UNKNOWN_TOKENS

MAX_UNCOUNTED_BYTES, LOAD_BYTES = 4 << 20, 896
"""Limit of the memory of loads that wait for their prompt's report, and what each takes besides a byte for each key,
about. Beyond the limit the oldest is forgotten: its tokens count as the pool's."""


class Source(NamedTuple):
    """A place where loaded keys were before.

    Attributes:
        kind: one of PROMPT_SOURCES of the statistics.
        name: name for operators: that of the store or the peer, else the kind.
    """

    kind: str
    name: str


POOL = Source("pool", "pool")


class LoadedKeys(NamedTuple):
    """Keys of one group that a load read. Some may have come up from a tier, and were not loaded before.

    Attributes:
        tokens_per_key: 0 if unknown.
        numbers: [keys] the source of each, in the order of the prompt.
        sources: the sources by these numbers; the pool's is 0.
    """

    tokens_per_key: int
    numbers: bytes
    sources: Mapping[int, Source]

    def tokens(self) -> int:
        """Return the tokens for which its keys count among groups."""
        return len(self.numbers) * (self.tokens_per_key or UNKNOWN_TOKENS)


class PromptTokens(NamedTuple):
    """An engine's report of a prompt's tokens: ``total`` of the prompt, leading ones in its ``own`` cache, those
    ``loaded`` after these, and those that another connector loaded. It computed the rest."""

    total: int
    own: int
    loaded: int
    other: int

    def by_source(self, keys: LoadedKeys | None) -> dict[Source, int]:
        """Return the tokens by source, without zeros; ``keys``: those loaded, None if the pool had all."""
        found = {Source("engine", "engine"): self.own, Source("other", "other"): self.other}
        found |= {POOL: self.loaded} if keys is None else self._split(keys)
        computed = {Source("computed", "computed"): self.total - sum(found.values())}
        return {source: tokens for source, tokens in (computed | found).items() if tokens}

    def _split(self, keys: LoadedKeys) -> dict[Source, int]:
        """Divide the loaded tokens among the sources of their keys, of which the last one has the last token.

        This is exact if there is a key for each token. Of a sliding window the keys at the end stand for all tokens.
        """
        numbers, each = np.frombuffer(keys.numbers, np.uint8), keys.tokens_per_key
        weights = np.ones(len(numbers), np.int64)
        if each and self.loaded:
            end = self.own + self.loaded
            # A key weighs as many tokens as its block has of the loaded ones. Blocks begin at multiples of ``each``,
            # and the last one has the last token.
            starts = ((end - 1) // each - np.arange(len(numbers))[::-1]) * each
            weights = np.maximum(0, np.minimum(starts + each, end) - np.maximum(starts, self.own))
        found, weighed, total = dict[Source, int](), 0, int(weights.sum())
        for number in np.unique(numbers).tolist():
            weighed += int(weights[numbers == number].sum())
            source = keys.sources.get(number, POOL)
            tokens = self.loaded * weighed // total - sum(found.values())  # so that all add up to ``loaded``
            found[source] = found.get(source, 0) + tokens
        return found


class UncountedLoads:
    """Sources of loads whose prompts were not reported yet, those of the oldest prompt first. The load of a long prompt
    is divided into several, as no message has all of its keys."""

    def __init__(self) -> None:
        self._by_lease: dict[tuple[int, int], dict[tuple[int, bytes], LoadedKeys]] = {}
        """Loads under each lease by group and first key, in the order in which they ended."""
        self._nbytes = 0

    def add(self, session: int, lease_id: int, first: tuple[int, bytes], keys: LoadedKeys) -> None:
        """Add a load under a lease, unless it was added: all ranks load the same keys. ``first``: the group's index,
        and the first key."""
        loads = self._by_lease.setdefault((session, lease_id), {})
        if first in loads:
            return
        loads[first] = keys
        self._nbytes += LOAD_BYTES + len(keys.numbers)
        while self._nbytes > MAX_UNCOUNTED_BYTES:
            self.take(*next(iter(self._by_lease)))

    def take(self, session: int, lease_id: int) -> LoadedKeys | None:
        """Remove the loads under a lease. Returns the keys of the group with the most tokens; None if the pool had all
        of them, or if the lease is unknown."""
        loads = self._by_lease.pop((session, lease_id), {})
        of_groups: dict[int, LoadedKeys] = {}
        for (group, _), (tokens_per_key, numbers, sources) in loads.items():
            self._nbytes -= LOAD_BYTES + len(numbers)
            if (before := of_groups.get(group)) is not None:
                numbers, sources = before.numbers + numbers, {**before.sources, **sources}
            of_groups[group] = LoadedKeys(tokens_per_key, numbers, sources)
        most = max(of_groups.values(), key=LoadedKeys.tokens, default=None)
        return most if most is not None and any(most.numbers) else None
