"""What users say of their requests' blocks: which should stay longer, which may go at once. Nothing is promised.

A mark bends the order in which blocks go, whatever the policy: those with a priority below 0 go first, those with one
above 0 are passed over for a while, as long as others can go. Marks are of keys, so a block that is stored after its
request ended has its mark too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from kvoffd.cache.namespace import Block, BlockState, Namespace

RETAINED_PART = 8
"""Of each namespace, blocks of one part in so many of the pool are passed over; the latest marks count."""
RETAINED_IN_ALL_PART = 4
"""The same of all namespaces together; those with the most lose their oldest marks."""
MAX_MARKS, MAX_MARKS_IN_ALL = 8_192, 32_768
"""Keys of one namespace, and of all, that are to stay, and as many that may go: 250 bytes each."""
MARKED_AT_ONCE = 1_000
"""Keys that are marked in one step."""
MAX_PASSED = 4096
"""Blocks that are passed over when room is wanted; behind them marks do not count."""
LOOKED_AT, LOOKED_AT_IN_ALL = 256, 1_024
"""Marks of blocks that may go that are looked at when room is wanted, of a namespace and of all."""
STORED_WITHIN_S = 60.0
"""A mark that says that a block may go waits so long for the block."""

Name = tuple[Namespace, int, bytes]


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

    def set_in_steps(
        self, namespace: Namespace, group: int, keys: bytes, priority: int, retain_s: float
    ) -> Iterator[int]:
        """As ``set`` with keys end to end, others being served in between; yields how many it marked."""
        size = MARKED_AT_ONCE * namespace.key_bytes
        starts = range(0, len(keys), size)
        for start in reversed(starts) if priority < 0 else starts:
            split = namespace.split(group, keys[start : start + size])
            self.set(namespace, group, split, priority, retain_s)
            yield len(split)

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
            by_namespace, mark = self._late, _Mark(priority, self._clock() + retain_s)
            most = self._pool_bytes // RETAINED_PART // max(1, namespace.block_bytes(group))
        else:  # the end of the prompt is used by nobody else: it goes first
            names.reverse()
            by_namespace, mark = self._first, _Mark(priority, self._clock() + STORED_WITHIN_S)
            most = MAX_MARKS
        marks = by_namespace.setdefault(namespace, {})
        marks.update(dict.fromkeys(names, mark))
        _forget_oldest(marks, len(marks) - min(most, MAX_MARKS))
        if priority > 0:
            self._bound_retained()
        if (excess := sum(map(len, by_namespace.values())) - MAX_MARKS_IN_ALL) > 0:
            _forget_oldest(max(by_namespace.values(), key=len), excess)

    def _bound_retained(self) -> None:
        """Keep the marks of what is to stay within their part of the pool: as if all blocks were their largest."""
        each = {
            namespace: max(1, *map(namespace.block_bytes, range(len(namespace.groups)))) for namespace in self._late
        }
        held = {namespace: len(marks) * each[namespace] for namespace, marks in self._late.items()}
        excess = sum(held.values()) - self._pool_bytes // RETAINED_IN_ALL_PART
        while excess > 0:
            largest = max(held, key=held.__getitem__)
            count = min(len(self._late[largest]), -(-excess // each[largest]))
            _forget_oldest(self._late[largest], count)
            if not self._late[largest]:
                del self._late[largest]
            held[largest] -= count * each[largest]
            excess -= count * each[largest]

    def used(self, blocks: Iterable[Block]) -> None:
        """A request asked for these blocks: they may not go at once."""
        if self._first:
            for block in blocks:
                self._first.get(block.namespace, {}).pop((block.namespace, block.group, block.key), None)

    def forget(self, namespace: Namespace) -> None:
        self._late.pop(namespace, None)
        self._first.pop(namespace, None)

    def order(self, candidates: Iterator[Block]) -> Iterator[Block]:
        """The candidates as marks have them; what is to stay comes last."""
        now = self._clock()
        given: set[Block] = set()
        for block in self._that_may_go(now):
            given.add(block)
            yield block
        passed: list[tuple[int, Block]] = []
        for block in candidates:
            if block in given:
                continue
            if len(passed) < MAX_PASSED and (found := self._late.get(block.namespace)):
                name = block.namespace, block.group, block.key
                if (mark := found.get(name)) is not None:
                    if mark.until > now:
                        passed.append((mark.priority, block))
                        continue
                    del found[name]
            yield block
        yield from (block for _, block in sorted(passed, key=itemgetter(0)))

    def _that_may_go(self, now: float) -> list[Block]:
        found: list[tuple[int, Block]] = []
        left = LOOKED_AT_IN_ALL
        for namespace, marks in list(self._first.items()):
            looked_at = list(islice(marks.items(), min(LOOKED_AT, left)))
            left -= len(looked_at)
            for name, mark in looked_at:
                _, group, key = name
                block = namespace.index[group].get(key)
                if block is not None and block.state is BlockState.READY:
                    found.append((mark.priority, block))
                elif mark.until <= now:
                    del marks[name]
            if not marks:
                del self._first[namespace]
        return [block for _, block in sorted(found, key=itemgetter(0))]


def _forget_oldest(marks: dict[Name, _Mark], count: int) -> None:
    for name in list(islice(marks, max(0, count))):
        del marks[name]
