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

READ_FAILURES = frozenset(
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
"""Table for ``translate``: what a lookup found absent may be in the tier that was down."""
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
MAX_UNCOUNTED_BYTES = 32 << 20
"""Limit of the memory of prompts that wait for a report. Beyond it the oldest is counted without one."""
PART_BYTES = 1024
"""Memory of one group of such a lookup besides its keys, about."""


class AskedKeys:
    """Keys of one group in one lookup.

    While the lookup runs, tiers ``mark`` keys. Then ``found`` records the rest. Until the prompt is counted, ``missed``
    and ``set`` correct keys by what tiers answer and read.

    Attributes:
        reported: whether they are counted once the engine reports the prompt's outcome, not at once.
        reasons: by key the ``MissReason``, or one of FOUND, CAME, IN_A_TIER and UNANSWERED_YET. Once the prompt is
            counted by its outcome, FOUND for covered keys, and the ``MissReason`` of all others.
        chain: None until the lookup has found what it can.
        prompt_hash: 32 bits that name its prompt, the same for all its lookups; not that of ``BlockTable.prompt``.
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
        """Record a reason for keys ``first`` to ``end``, which ``found`` sets later: TIER_DOWN only for keys that may
        be in that tier, others for all."""
        self._marks.append((first, end, reason))

    def tier_is_down(self, name: str) -> None:
        if name not in self.down:
            self.down += (name,)

    def tier_answered(self, name: str) -> None:
        """Take back that a tier is down: it has said which keys it lacks."""
        self.down = tuple(down for down in self.down if down != name)

    def found(self, chain: Chain, reasons: bytes) -> None:
        """Record what the lookup found."""
        self.chain, self.reasons = chain, bytearray(reasons)
        for first, end, reason in self._marks:
            before = self.reasons[first:end]
            is_down = reason == MissReason.TIER_DOWN
            self.reasons[first:end] = before.translate(_WHILE_DOWN) if is_down else bytes([reason]) * len(before)
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


def settle_prompt(
    parts: Sequence[AskedKeys], outcome: PromptUse | None, reasons_now: Callable[[Chain, int], bytes]
) -> list[tuple[Chain, int]]:
    """Decide the reasons of a prompt's keys that were missed, and count all of its keys. Returns its chains, each with
    the number of leading keys that the engine had itself.

    Without an outcome, found keys were not needed. ``reasons_now``: returns the reasons of a chain's keys from one on,
    as the block table remembers them by now.

    With one, a group has up to four parts. Of 8 keys, ``own`` 2, ``covered`` 5 and ``coming`` 2::

        key       0    1    2    3    4    5    6    7
        is        own own  loaded         coming    behind
        counts as      covered            missed    missed

    A key behind, which a tier had and then failed to bring up for a later lookup, gets that failure's reason.
    """
    if outcome is None:
        for part in parts:
            count_misses(part.namespace, part.reasons)
            found = sum(map(part.reasons.count, (FOUND, CAME, IN_A_TIER, UNANSWERED_YET)))
            part.namespace.counters.covered_keys += found
        return [(_chain_of(part, 0), 0) for part in parts]
    # Keys by group that are still to be found in its parts: several lookups may have had parts of the prompt.
    own, covered, coming = (Counter(dict(enumerate(each))) for each in (outcome.own, outcome.covered, outcome.coming))
    bounds: list[tuple[AskedKeys, int, int]] = []
    """Each part, the end of its covered keys, and of those behind them that were in the pool or coming."""
    chains: list[tuple[Chain, int]] = []
    for part in parts:
        assert part.chain is not None
        index, count = part.chain.group.index, len(part.reasons)
        own_end, covered_end = _take(own, index, count), _take(covered, index, count)
        chains.append((_chain_of(part, own_end), own_end))
        coming_end = covered_end + _take(coming, index, count - covered_end)
        part.namespace.counters.covered_keys += covered_end
        if outcome.unloaded is None and IN_A_TIER in part.reasons[coming_end:]:
            _set_failed_reads(part.reasons, coming_end, reasons_now(part.chain, coming_end))
        bounds.append((part, covered_end, coming_end))
    tables = _tables(outcome, b"".join([part.reasons[covered_end:] for part, covered_end, _ in bounds]))
    for part, covered_end, coming_end in bounds:
        reasons = part.reasons
        reasons[:covered_end] = bytes([FOUND]) * covered_end
        reasons[covered_end:coming_end] = reasons[covered_end:coming_end].translate(tables.coming)
        reasons[coming_end:] = reasons[coming_end:].translate(tables.behind)
        count_misses(part.namespace, reasons[covered_end:])
    return chains


def _take(left: Counter[int], index: int, count: int) -> int:
    """Take up to ``count`` of what is left of a group. Returns how many."""
    taken = min(count, left[index])
    left[index] -= taken
    return taken


def _chain_of(part: AskedKeys, own: int) -> Chain:
    """Return the chain of a part's keys, with what is known of it by now. ``own``: leading keys of the engine's own."""
    assert part.chain is not None
    return part.chain._replace(findable=_findable(part.reasons, own))


def _set_failed_reads(reasons: bytearray, first: int, now: bytes) -> None:
    """Set the reasons of keys from ``first`` on that a tier had, and that a later lookup of the prompt did not get."""
    for at, reason in enumerate(now, first):
        if reasons[at] == IN_A_TIER and reason in READ_FAILURES:
            reasons[at] = reason


class _Tables(NamedTuple):
    """Tables for ``bytes.translate`` that make a ``MissReason`` of FOUND, CAME, IN_A_TIER and UNANSWERED_YET."""

    coming: bytes
    """Table for keys that were in the pool or coming when the engine began to compute."""
    behind: bytes
    """Table for those behind them."""


def _tables(outcome: PromptUse, reasons: bytes) -> _Tables:
    """Return the tables for a prompt's keys. ``reasons``: those of all keys that are not covered.

    A key that was there, and was not loaded, was left out by choice if nothing was lacking. Else something before it
    was, without which it is useless: it is AFTER_GAP. The reasons of coming keys, where a later line overrides:

    | the engine reports         | FOUND                   | CAME                    | IN_A_TIER | UNANSWERED_YET |
    |----------------------------|-------------------------|-------------------------|-----------|----------------|
    | neither                    | NOT_LOADED or AFTER_GAP | NOT_LOADED or AFTER_GAP | TIER_LATE | UNANSWERED     |
    | ``not_awaited`` TIER_LATE  | AFTER_GAP               | TIER_LATE               | TIER_LATE | TIER_LATE      |
    | ``not_awaited`` UNANSWERED | AFTER_GAP               | UNANSWERED              | TIER_LATE | UNANSWERED     |
    | ``not_awaited`` EXCLUDED   | AFTER_GAP               | EXCLUDED                | EXCLUDED  | EXCLUDED       |
    | ``unloaded``               | that                    | that                    | that      | that           |

    Keys behind have those of the first line, or ``unloaded``. In a tier they are AFTER_GAP unless all keys may come.
    With ``not_awaited`` TIER_LATE, coming keys that were absent (ABSENT_REASONS) are TIER_LATE too.
    """
    there, may_come = (sum(map(reasons.count, values)) for values in ((FOUND, CAME), (IN_A_TIER, UNANSWERED_YET)))
    all_there = there == len(reasons) and outcome.not_awaited is None
    all_may_come = there + may_come == len(reasons) and outcome.not_awaited is None
    coming = bytearray(range(256))
    coming[FOUND] = coming[CAME] = MissReason.NOT_LOADED if all_there else MissReason.AFTER_GAP
    coming[IN_A_TIER] = MissReason.TIER_LATE
    coming[UNANSWERED_YET] = MissReason.UNANSWERED
    behind = coming.copy()
    if not all_may_come:  # it was not read because of a gap before it, behind which it is useless
        behind[IN_A_TIER] = MissReason.AFTER_GAP
    if (why := outcome.not_awaited) is not None:
        coming[CAME] = coming[UNANSWERED_YET] = why
        coming[IN_A_TIER] = MissReason.TIER_LATE if why is MissReason.UNANSWERED else why  # it was answered since
        if why is MissReason.TIER_LATE:  # a later lookup of the prompt than the counted one found these
            for reason in ABSENT_REASONS:
                coming[reason] = why
    if outcome.unloaded is not None:
        for value in (FOUND, CAME, IN_A_TIER, UNANSWERED_YET):
            coming[value] = behind[value] = outcome.unloaded
    return _Tables(bytes(coming), bytes(behind))


def _findable(reasons: bytearray, own: int) -> int:
    """Return the index of the first key that no pool of any size would have had; of all keys if there is none. The
    first ``own`` are the engine's."""
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
        self._nbytes += _memory_of(asked)
        dropped = []
        while self._nbytes > MAX_UNCOUNTED_BYTES:
            dropped.append(self.take(*next(iter(self._by_lease))))
        return dropped

    def take(self, session: int, lease_id: int) -> list[AskedKeys]:
        """Remove a prompt and return its keys, in the order of its lookups; none if it is unknown or was counted."""
        parts = self._by_lease.pop((session, lease_id), [])
        self._nbytes -= _memory_of(parts)
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


def _memory_of(parts: Iterable[AskedKeys]) -> int:
    """Return the memory of parts, about. A reason and a block for each key take no more than the keys again."""
    return sum(PART_BYTES + 2 * len(part.chain.keys) for part in parts if part.chain is not None)
