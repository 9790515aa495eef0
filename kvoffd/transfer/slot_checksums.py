"""Checksums of a transfer's slots: compared before a load copies them, taken while a store does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from kvoffd.transfer.outcome import Outcome

# How soon a deadline or an abandon is noticed: a millisecond or less.
_STEP_BYTES = 8 << 20


class SlotChecksums:
    """Reads slots end to end. One that is being stored has its checksum taken, one that is loaded has it compared.

    Args:
        digests: hashes slots of the pool, given as below, one after the other; never to 0.
        slots: offset and length in bytes of each.
        expected: what each must hash to; None where that is to be found out.
        whole_after: ``Plan.whole_after`` of a store; where it is empty, no slot is whole before all are.
        pool_address: where the offsets of a store's slots begin in memory, for a copier that takes checksums itself.
    """

    def __init__(
        self,
        digests: Callable[[Sequence[tuple[int, int]]], list[int]],
        slots: Sequence[tuple[int, int]],
        expected: Sequence[int] | None = None,
        whole_after: Sequence[int] = (),
        pool_address: int | None = None,
    ) -> None:
        self._digests = digests
        self._slots = slots
        self._expected = expected
        self._whole_after = whole_after
        self._pool_address = pool_address
        self._begins = list(accumulate((length for _, length in slots), initial=0))
        self.sums = [0] * len(slots)
        """What the slots hash to; 0 for those that were not read, as the transfer ended before."""

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def whole(self, in_place: int) -> int:
        """How many slots, from the first on, are whole once so many bytes of the plan are in place."""
        return bisect_right(self._whole_after, in_place)

    def nbytes(self, first: int = 0, stop: int | None = None) -> int:
        """Bytes of the slots from ``first`` on, before ``stop``."""
        return self._begins[len(self) if stop is None else stop] - self._begins[first]

    def at_addresses(self) -> list[tuple[int, int]]:
        """Address and length in bytes of each slot; empty where the address of the pool was not given."""
        if self._pool_address is None:
            return []
        return [(self._pool_address + offset, length) for offset, length in self._slots]

    def enter(self, sums: Sequence[int], ending: Callable[[], Outcome | None]) -> Outcome | None:
        """Take over what the slots hash to from a copier that read them anyway; read those of which it says 0.

        Where it says nothing at all, read every one. Returns as ``run`` does.
        """
        if not sums:
            return self.run(ending)
        self.sums[:] = sums
        for index in [index for index, found in enumerate(sums) if not found]:
            if (early := self.run(ending, index, index + 1)) is not None:
                return early
        return self._judge(0, len(self))

    def run(self, ending: Callable[[], Outcome | None], first: int = 0, stop: int | None = None) -> Outcome | None:
        """Read the slots from ``first`` on, before ``stop``, unless ``ending`` says that the transfer must end now.

        Returns how the transfer must end: CORRUPT where one of them is not what it must be; None when it may go on.
        """
        begin, stop = first, len(self) if stop is None else stop
        while begin < stop:
            if begin > first and (early := ending()) is not None:
                return early
            end = min(stop, max(begin + 1, bisect_right(self._begins, self._begins[begin] + _STEP_BYTES) - 1))
            self.sums[begin:end] = self._digests(self._slots[begin:end])
            begin = end
        return self._judge(first, stop)

    def _judge(self, first: int, stop: int) -> Outcome | None:
        wrong = self._expected is not None and self.sums[first:stop] != list(self._expected[first:stop])
        return Outcome.CORRUPT if wrong else None
