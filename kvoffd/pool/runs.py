"""Free runs of slots of one size, found by length. Pure."""

from __future__ import annotations


class RunIndex:
    """Runs of free slots: joined when they touch, found by length in about constant time.

    A run is a start offset and a length in slots. Runs are kept in buckets by the bits of their length, so that the
    search for a run looks at one bucket and not at all runs.
    """

    def __init__(self) -> None:
        self._length: dict[int, int] = {}  # by start offset
        self._start: dict[int, int] = {}  # by end offset, exclusive
        self._buckets: dict[int, dict[int, None]] = {}  # by bits of the length; inner dicts are ordered sets of starts

    def __bool__(self) -> bool:
        return bool(self._length)

    def best(self, wanted: int) -> int | None:
        """Start of a run: from the tightest bucket whose runs all hold ``wanted`` slots, else from the longest ones."""
        bits = (wanted - 1).bit_length() + 1  # every run of that many bits has at least 2 ** (bits - 1) >= wanted slots
        fitting = [b for b in self._buckets if b >= bits]
        if fitting:
            return next(iter(self._buckets[min(fitting)]))
        if not self._buckets:
            return None
        return next(iter(self._buckets[max(self._buckets)]))

    def take_front(self, start: int, most: int, slot_bytes: int) -> int:
        """Takes up to ``most`` slots off a run's front; returns how many."""
        length = self._remove(start, slot_bytes)
        taken = min(length, most)
        if taken < length:
            self._insert(start + taken * slot_bytes, length - taken, slot_bytes)
        return taken

    def add(self, start: int, length: int, slot_bytes: int, floor: int, ceiling: int) -> None:
        """Adds free slots, joined with the runs that touch them inside [floor, ceiling), their region."""
        end = start + length * slot_bytes
        if start > floor and (before := self._start.get(start)) is not None:
            length += self._remove(before, slot_bytes)
            start = before
        if end < ceiling and end in self._length:
            length += self._remove(end, slot_bytes)
        self._insert(start, length, slot_bytes)

    def remove(self, start: int, slot_bytes: int) -> None:
        """Forgets the run that begins at ``start``."""
        self._remove(start, slot_bytes)

    def _insert(self, start: int, length: int, slot_bytes: int) -> None:
        self._length[start] = length
        self._start[start + length * slot_bytes] = start
        self._buckets.setdefault(length.bit_length(), {})[start] = None

    def _remove(self, start: int, slot_bytes: int) -> int:
        length = self._length.pop(start)
        del self._start[start + length * slot_bytes]
        bucket = self._buckets[length.bit_length()]
        del bucket[start]
        if not bucket:
            del self._buckets[length.bit_length()]
        return length
