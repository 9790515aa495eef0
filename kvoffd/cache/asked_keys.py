"""Keys that prompts asked for, and how they are counted: as covered (loaded or not needed) or as missed, each once.

An engine looks a prompt up before it knows how much of it its own prefix cache has. If it reports the outcome later,
keys are counted then: those before the first token that it computes were loaded, or were not needed; the others were
missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvoffd.cache.block_table import CAME, FOUND, IN_A_TIER, UNANSWERED_YET
from kvoffd.cache.namespace import ABSENT_REASONS, MissReason, Namespace
from kvoffd.cache.policy import Chain

OF_READS = frozenset(
    {
        MissReason.TIER_FAILED,
        MissReason.TIER_LATE,
        MissReason.CORRUPT,
        MissReason.NO_SPACE,
        MissReason.QUOTA,
    }
)
"""Reasons why a block that a tier had did not come, as the block table remembers them."""
_WHILE_DOWN = bytes(MissReason.TIER_DOWN if reason in ABSENT_REASONS else reason for reason in range(256))
NOT_FOR_SPACE = (
    MissReason.UNKNOWN,
    MissReason.COMPUTING,
    MissReason.PARTIAL,
    MissReason.INVALIDATED,
    MissReason.CORRUPT,
    MissReason.TIER_DOWN,
)
"""Reasons of keys that no pool of any size would have had, or of which that is not known."""
TAKEN_AT_ONCE = 64
"""Prompts of a session that is gone which are counted in one step."""
MAX_UNCOUNTED_BYTES, PART_BYTES = 32 << 20, 1024
"""Limit of the memory of prompts that wait for a report, and what each lookup of a group takes besides its keys, about.
Beyond the limit the oldest prompt is counted without a report."""


class AskedKeys:
    """Keys of one group in one lookup.

    Attributes:
        reported: whether they are counted once the engine reports the prompt's outcome, not at once.
        reasons: by key the ``MissReason``, or one of FOUND, CAME, IN_A_TIER and UNANSWERED_YET. Once the prompt is
            counted by its outcome, FOUND for covered keys, and the ``MissReason`` of all others.
        chain: None until the lookup has found what it can.
        prompt_hash: 32 bits that name its prompt, the same for all its lookups; no ``BlockTable.prompt``.
        down: names of the tiers that may have had some of the keys, and failed or were not asked because they had.
        sources: names of the tiers that had some of the keys, or were asked for them.
    """

    __slots__ = ("_marks", "chain", "down", "namespace", "prompt_hash", "reasons", "reported", "sources")

    def __init__(self, namespace: Namespace, *, reported: bool) -> None:
        self.namespace, self.reported = namespace, reported
        self.reasons = bytearray()
        self.chain: Chain | None = None
        self.prompt_hash = 0
        self.down: tuple[str, ...] = ()
        self.sources: tuple[str, ...] = ()
        self._marks: list[tuple[int, int, int]] = []

    def mark(self, first: int, end: int, reason: int) -> None:
        """Record a reason for keys ``first`` to ``end``, before ``found`` is called; TIER_DOWN for absent ones only."""
        self._marks.append((first, end, reason))

    def tier_is_down(self, name: str) -> None:
        if name not in self.down:
            self.down += (name,)

    def tier_answered(self, name: str) -> None:
        """Take back that a tier is down: it has said which keys it lacks."""
        self.down = tuple(down for down in self.down if down != name)

    def tier_has_some(self, name: str) -> None:
        if name not in self.sources:
            self.sources += (name,)

    def found(self, chain: Chain, reasons: bytes) -> None:
        """Record what the lookup found."""
        self.chain, self.reasons = chain, bytearray(reasons)
        for first, end, reason in self._marks:
            its = self.reasons[first:end]
            is_down = reason == MissReason.TIER_DOWN
            self.reasons[first:end] = its.translate(_WHILE_DOWN) if is_down else bytes([reason]) * len(its)
        self._marks.clear()
        if not self.reported:
            count_misses(self.namespace, self.reasons)
            self.reasons.clear()

    def missed(self, first: int, reasons: bytes) -> None:
        """Record that keys which follow one another and might have come from a tier did not."""
        if self.down:
            reasons = reasons.translate(_WHILE_DOWN)
        self.set(first, reasons)

    def set(self, first: int, reasons: bytes) -> None:
        """Record what is known by now of keys which follow one another: also CAME and IN_A_TIER."""
        if self.reported:
            self.reasons[first : first + len(reasons)] = reasons
        else:
            count_misses(self.namespace, reasons)

    def reason_of(self, key: bytes) -> int | None:
        """Return the entry of a key in ``reasons``; None if it was not asked for."""
        if self.chain is None or not key:
            return None
        keys, size, at = self.chain.keys, len(key), -1
        while (at := keys.find(key, at + 1)) >= 0:
            if at % size == 0:
                return self.reasons[at // size] if at // size < len(self.reasons) else None
        return None


class PromptUse(NamedTuple):
    """An engine's report of what it did with a prompt.

    Attributes:
        own: by group, leading keys that its own prefix cache had.
        covered: by group, leading keys of tokens that it did not compute.
        unloaded: reason why it did not load what was found behind these; None: it depends on the key.
        coming: by group, keys behind the covered ones without a gap that were in the pool or coming when it began to
            compute.
        not_awaited: reason why it did not load those that were coming: TIER_LATE, UNANSWERED or EXCLUDED.
    """

    own: Sequence[int]
    covered: Sequence[int]
    unloaded: MissReason | None
    coming: Sequence[int] = ()
    not_awaited: MissReason | None = None


def count_misses(namespace: Namespace, reasons: bytes | bytearray) -> None:
    """Count keys by the reason why they were missed; those that were found, or may still come, are not."""
    if not reasons:
        return
    if reasons.count(first := reasons[0]) == len(reasons):  # 6 µs less than below
        if first < UNANSWERED_YET:
            namespace.counters.misses[MissReason(first)] += len(reasons)
        return
    for number, count in enumerate(np.bincount(np.frombuffer(reasons, np.uint8)).tolist()[:UNANSWERED_YET]):
        if count:
            namespace.counters.misses[MissReason(number)] += count


def count_prompt(
    parts: Sequence[AskedKeys], outcome: PromptUse | None, reasons_now: Callable[[Chain, int], bytes]
) -> list[tuple[Chain, int]]:
    """Count a prompt's keys, and decide the reasons of those that were missed. Returns its chains, each with the number
    of leading keys that the engine had itself.

    Without an outcome, found keys were not needed. ``reasons_now``: returns the reasons of a chain's keys from one on,
    as the block table remembers them by now.
    """
    own, covered, coming = Counter[int](), Counter[int](), Counter[int]()
    if outcome is not None:
        own.update(dict(enumerate(outcome.own)))
        covered.update(dict(enumerate(outcome.covered)))
        coming.update(dict(enumerate(outcome.coming)))
    rest: list[tuple[AskedKeys, int, int]] = []
    chains: list[tuple[Chain, int]] = []
    for part in parts:
        assert part.chain is not None
        group, count = part.chain.group, len(part.reasons)
        count_own = min(count, own[group.index])
        chains.append((part.chain._replace(findable=_findable(part.reasons, count_own)), count_own))
        begin = min(count, covered[group.index])
        part.namespace.counters.covered_keys += begin
        end = min(count, begin + coming[group.index])
        rest.append((part, begin, end))
        own[group.index] = max(0, own[group.index] - count)
        covered[group.index] -= begin
        coming[group.index] -= end - begin
    if outcome is None:
        for part, begin, _ in rest:
            count_misses(part.namespace, its := part.reasons[begin:])
            part.namespace.counters.covered_keys += sum(map(its.count, (FOUND, CAME, IN_A_TIER, UNANSWERED_YET)))
        return chains
    for part, _, end in rest:
        if outcome.unloaded is None and IN_A_TIER in part.reasons[end:] and part.chain is not None:
            _take_failed_reads(part.reasons, end, reasons_now(part.chain, end))
    tables = _tables(outcome, b"".join([part.reasons[begin:] for part, begin, _ in rest]))
    for part, begin, end in rest:
        its = part.reasons
        its[:begin] = bytes([FOUND]) * begin
        its[begin:end] = its[begin:end].translate(tables[0])
        its[end:] = its[end:].translate(tables[1])
        count_misses(part.namespace, its[begin:])
    return chains


def _take_failed_reads(reasons: bytearray, first: int, now: bytes) -> None:
    """Set the reasons of keys from ``first`` on that a tier had, and that a later lookup of the prompt did not get."""
    for at, reason in enumerate(now, first):
        if reasons[at] == IN_A_TIER and reason in OF_READS:
            reasons[at] = reason


def _tables(outcome: PromptUse, reasons: bytes) -> tuple[bytes, bytes]:
    """Return the tables that make reasons of FOUND, CAME, IN_A_TIER and UNANSWERED_YET: for keys that were in the pool
    or coming when the engine began to compute, and for those behind them. ``reasons``: those of all keys not covered.
    """
    there, may_come = (sum(map(reasons.count, values)) for values in ((FOUND, CAME), (IN_A_TIER, UNANSWERED_YET)))
    has_gap = there < len(reasons) or outcome.not_awaited is not None
    is_behind = there + may_come < len(reasons) or outcome.not_awaited is not None
    last = MissReason.AFTER_GAP if has_gap else MissReason.NOT_LOADED
    awaited, known = bytearray(range(256)), bytearray(range(256))
    known[FOUND] = known[CAME] = awaited[FOUND] = awaited[CAME] = last
    known[IN_A_TIER] = awaited[IN_A_TIER] = MissReason.TIER_LATE
    known[UNANSWERED_YET] = awaited[UNANSWERED_YET] = MissReason.UNANSWERED
    if is_behind:  # nobody had it read: the gap had ended the prompt's use
        known[IN_A_TIER] = MissReason.AFTER_GAP
    if (why := outcome.not_awaited) is not None:
        awaited[CAME] = awaited[UNANSWERED_YET] = why
        awaited[IN_A_TIER] = MissReason.TIER_LATE if why is MissReason.UNANSWERED else why  # it was answered since
        if why is MissReason.TIER_LATE:  # a later lookup of the prompt than the counted one found these
            for reason in ABSENT_REASONS:
                awaited[reason] = why
    if outcome.unloaded is not None:
        for value in (FOUND, CAME, IN_A_TIER, UNANSWERED_YET):
            known[value] = awaited[value] = outcome.unloaded
    return bytes(awaited), bytes(known)


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
