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

    def take(self, wanted: int, slot_bytes: int) -> tuple[int, int] | None:
        """Takes up to ``wanted`` slots off one run: their start and number; None when there is no run.

        The run is from the tightest bucket whose runs all hold that many, else from the one with the longest runs.
        """
        if not self._buckets:
            return None
        bits = (wanted - 1).bit_length() + 1  # a run of that many bits has at least 2 ** (bits - 1) >= wanted slots
        bits = min((b for b in self._buckets if b >= bits), default=0) or max(self._buckets)
        # The last one, since a dict finds its first item only behind all that were deleted before it.
        start, _ = self._buckets[bits].popitem()
        length = self._length.pop(start)
        del self._start[start + length * slot_bytes]
        if not self._buckets[bits]:
            del self._buckets[bits]
        taken = min(length, wanted)
        if taken < length:
            self._insert(start + taken * slot_bytes, length - taken, slot_bytes)
        return start, taken

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
