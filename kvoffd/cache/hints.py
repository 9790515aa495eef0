"""What users say of their requests' blocks: which should stay longer, which may go at once. Nothing is promised.

A mark bends the order in which blocks go, whatever the policy: those with a priority below 0 go first, those with one
above 0 are passed over for a while, as long as others can go. Marks are of keys, so a block that is stored after its
request ended has its mark too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from operator import itemgetter
from typing import NamedTuple

from kvoffd.cache.namespace import Block, BlockState, Namespace

RETAINED_PART = 8
"""Of each namespace, blocks of one part in so many of the pool are passed over; the latest marks count."""
MAX_MARKS = 65_536
"""Keys of one namespace that are to stay, and as many that may go."""
MAX_PASSED = 4096
"""Blocks that are passed over when room is wanted; behind them marks do not count."""
LOOKED_AT = 256
"""Marks of blocks that may go that are looked at when room is wanted."""
STORED_WITHIN_S = 60.0
"""A mark that says that a block may go waits so long for the block."""

Name = tuple[Namespace, int, bytes]
Spaces = Mapping[Namespace, tuple[dict[bytes, Block], ...]]


class _Mark(NamedTuple):
    priority: int
    until: float


class Hints:
    """Marks of keys, by namespace, group and key."""

    def __init__(self, pool_bytes: int, clock: Callable[[], float]) -> None:
        self._pool_bytes = pool_bytes
        self._clock = clock
        self._late: dict[Namespace, dict[Name, _Mark]] = {}
        self._first: dict[Namespace, dict[Name, _Mark]] = {}

    def __bool__(self) -> bool:
        return bool(self._late or self._first)

    def set(self, namespace: Namespace, group: int, keys: Sequence[bytes], priority: int, retain_s: float) -> None:
        """Mark the keys of a request, root first, anew; a priority of 0 takes marks away."""
        names = [(namespace, group, key) for key in keys]
        for by_namespace in (self._late, self._first):
            known = by_namespace.get(namespace, {})
            for name in names:
                known.pop(name, None)
            if not known:
                by_namespace.pop(namespace, None)
        if not names or not priority:
            return
        if priority > 0:
            marks, mark = self._late.setdefault(namespace, {}), _Mark(priority, self._clock() + retain_s)
            most = self._pool_bytes // RETAINED_PART // max(1, namespace.block_bytes(group))
        else:  # the end of the prompt is used by nobody else: it goes first
            names.reverse()
            marks, mark = self._first.setdefault(namespace, {}), _Mark(priority, self._clock() + STORED_WITHIN_S)
            most = MAX_MARKS
        marks.update(dict.fromkeys(names, mark))
        for name in list(islice(marks, max(0, len(marks) - min(most, MAX_MARKS)))):
            del marks[name]

    def used(self, blocks: Iterable[Block]) -> None:
        """A request asked for these blocks: they may not go at once."""
        if self._first:
            for block in blocks:
                self._first.get(block.namespace, {}).pop((block.namespace, block.group, block.key), None)

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self._late.pop(namespace, None)
        self._first.pop(namespace, None)

    def order(self, candidates: Iterator[Block], spaces: Spaces, worth: float) -> Iterator[Block]:
        """The candidates as marks have them; what is to stay comes last, where room is wanted at any cost."""
        now = self._clock()
        given: set[Block] = set()
        for block in self._that_may_go(spaces, now):
            given.add(block)
            yield block
        passed: list[tuple[int, Block]] = []
        for block in candidates:
            if block in given:
                continue
            if len(passed) < MAX_PASSED and (found := self._late.get(block.namespace)):
                mark = found.get((block.namespace, block.group, block.key))
                if mark is not None and mark.until > now:
                    passed.append((mark.priority, block))
                    continue
            yield block
        if worth == inf:
            yield from (block for _, block in sorted(passed, key=itemgetter(0)))

    def _that_may_go(self, spaces: Spaces, now: float) -> list[Block]:
        found: list[tuple[int, Block]] = []
        for namespace, marks in list(self._first.items()):
            for name, mark in list(islice(marks.items(), LOOKED_AT)):
                _, group, key = name
                block = spaces[namespace][group].get(key)
                if block is not None and block.state is BlockState.READY:
                    found.append((mark.priority, block))
                elif mark.until <= now:
                    del marks[name]
            if not marks:
                del self._first[namespace]
        return [block for _, block in sorted(found, key=itemgetter(0))]
