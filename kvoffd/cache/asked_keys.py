"""Keys that prompts asked for, and how they are counted: as covered (loaded or not needed) or as missed, each once.

An engine looks a prompt up before it knows how much of it its own prefix cache has. If it reports the outcome later,
keys are counted then: those before the first token that it computes were loaded, or were not needed; the others were
missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_table import FOUND
from kvoffd.cache.namespace import MissReason, Namespace
from kvoffd.cache.policy import Chain

NOT_FOR_SPACE = (
    MissReason.UNKNOWN,
    MissReason.COMPUTING,
    MissReason.PARTIAL,
    MissReason.INVALIDATED,
    MissReason.CORRUPT,
)
"""Reasons of keys that no pool of any size would have had."""
TAKEN_AT_ONCE = 64
"""Prompts of a session that is gone which are counted in one step."""
MAX_UNCOUNTED_BYTES, PART_BYTES = 32 << 20, 1024
"""Limit of the memory of prompts that wait for a report, and what each lookup of a group takes besides its keys, about.
Beyond the limit the oldest prompt is counted without a report."""


class AskedKeys:
    """Keys of one group in one lookup.

    Attributes:
        reported: whether they are counted when the engine reports the prompt's outcome, not at once.
        reasons: by key the ``MissReason``, or FOUND.
        chain: None until the lookup has found what it can.
    """

    __slots__ = ("chain", "namespace", "reasons", "reported")

    def __init__(self, namespace: Namespace, *, reported: bool) -> None:
        self.namespace, self.reported = namespace, reported
        self.reasons = bytearray()
        self.chain: Chain | None = None

    def found(self, chain: Chain, reasons: bytes) -> None:
        """Record what the lookup found."""
        self.chain = chain
        if self.reported:
            self.reasons = bytearray(reasons)
        else:
            count_misses(self.namespace, reasons)

    def missed(self, first: int, reasons: bytes) -> None:
        """Record that keys which follow one another and were to come from a tier did not."""
        if self.reported:
            self.reasons[first : first + len(reasons)] = reasons
        else:
            count_misses(self.namespace, reasons)


class PromptOutcome(NamedTuple):
    """An engine's report of what it did with a prompt.

    Attributes:
        own: by group, leading keys that its own prefix cache had.
        covered: by group, leading keys of tokens that it did not compute.
        unloaded: reason why it did not load what was found behind these; None: AFTER_GAP if another key was missing.
    """

    own: Sequence[int]
    covered: Sequence[int]
    unloaded: MissReason | None


def count_misses(namespace: Namespace, reasons: bytes | bytearray) -> None:
    """Count keys by the reason why they were missed; those that were found are not."""
    if not reasons:
        return
    if reasons.count(first := reasons[0]) == len(reasons):  # 6 µs less than below
        if first != FOUND:
            namespace.counters.misses[MissReason(first)] += len(reasons)
        return
    for number, count in enumerate(np.bincount(np.frombuffer(reasons, np.uint8)).tolist()[:FOUND]):
        if count:
            namespace.counters.misses[MissReason(number)] += count


def count_prompt(parts: Sequence[AskedKeys], outcome: PromptOutcome | None) -> Iterator[tuple[Chain, int]]:
    """Count a prompt's keys. Yield its chains, each with the number of leading keys that the engine had itself.

    Without an outcome, found keys were not needed.
    """
    own, covered = Counter[int](), Counter[int]()
    if outcome is not None:
        own.update(dict(enumerate(outcome.own)))
        covered.update(dict(enumerate(outcome.covered)))
    rest: list[tuple[AskedKeys, bytearray]] = []
    for part in parts:
        assert part.chain is not None
        group, count = part.chain.group, len(part.reasons)
        covered_by_engine = min(count, own[group.index])
        yield part.chain._replace(findable=_findable(part.reasons, covered_by_engine)), covered_by_engine
        part.namespace.counters.covered_keys += min(count, covered[group.index])
        rest.append((part, part.reasons[covered[group.index] :]))
        own[group.index] = max(0, own[group.index] - count)
        covered[group.index] = max(0, covered[group.index] - count)
    has_gap = any(reasons.count(FOUND) < len(reasons) for _, reasons in rest)
    unloaded = MissReason.AFTER_GAP if has_gap else MissReason.NOT_LOADED
    if outcome is not None and outcome.unloaded is not None:
        unloaded = outcome.unloaded
    for part, reasons in rest:
        count_misses(part.namespace, reasons)
        if found := reasons.count(FOUND):
            counters = part.namespace.counters
            if outcome is None:
                counters.covered_keys += found
            else:
                counters.misses[unloaded] += found


def _findable(reasons: bytearray, own: int) -> int:
    """Return how many keys come before the first, behind the engine's own, that had not been stored when it was asked
    for, or was dropped for another reason than space."""
    return min((at for reason in NOT_FOR_SPACE if (at := reasons.find(reason, own)) >= 0), default=len(reasons))


class UncountedPrompts:
    """Prompts whose engine has not reported their outcome, the oldest first."""

    def __init__(self) -> None:
        self._by_lease: dict[tuple[int, int], list[AskedKeys]] = {}
        self._leases_of: dict[int, dict[int, None]] = {}
        """Lease ids by session."""
        self._ended: dict[int, None] = {}
        """Sessions that are gone and have prompts."""
        self._nbytes = 0

    def add(self, session: int, lease_id: int, asked: Sequence[AskedKeys]) -> list[list[AskedKeys]]:
        """Add the keys of a lookup to a prompt. Return the prompts that must be counted without a report."""
        if not asked:
            return []
        self._by_lease.setdefault((session, lease_id), []).extend(asked)
        self._leases_of.setdefault(session, {})[lease_id] = None
        self._nbytes += _nbytes(asked)
        dropped = []
        while self._nbytes > MAX_UNCOUNTED_BYTES:
            dropped.append(self.take(*next(iter(self._by_lease))))
        return dropped

    def take(self, session: int, lease_id: int) -> list[AskedKeys]:
        """Remove a prompt and return its keys, in the order of its lookups; none if it is unknown or was counted."""
        parts = self._by_lease.pop((session, lease_id), [])
        self._nbytes -= _nbytes(parts)
        if (leases := self._leases_of.get(session)) is not None:
            leases.pop(lease_id, None)
            if not leases:
                del self._leases_of[session]
        return parts

    def session_ended(self, session: int) -> None:
        """Leave the prompts of a session that is gone to ``take_some``."""
        if session in self._leases_of:
            self._ended[session] = None

    @property
    def has_ended(self) -> bool:
        """Whether ``take_some`` has any."""
        return bool(self._ended)

    def take_some(self) -> list[list[AskedKeys]]:
        """Remove some prompts of sessions that are gone."""
        session = next(iter(self._ended))
        some = list(islice(self._leases_of.get(session, ()), TAKEN_AT_ONCE))
        taken = [self.take(session, lease_id) for lease_id in some]
        if session not in self._leases_of:
            del self._ended[session]
        return taken


def _nbytes(parts: Iterable[AskedKeys]) -> int:
    return sum(PART_BYTES + 2 * len(part.chain.keys) for part in parts if part.chain is not None)
