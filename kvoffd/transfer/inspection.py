"""Checksums of a transfer's slots: compared before a load copies them, taken while a store does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from kvoffd.transfer.outcome import Outcome

# How soon a deadline or an abandon is noticed: a millisecond or less.
_STEP_BYTES = 8 << 20


class Inspection:
    """Reads slots end to end. One that is being stored has its checksum taken, one that is loaded has it compared.

    Args:
        digest: hashes so many bytes from an offset of the pool on; never 0.
        slots: offset and length in bytes of each.
        expected: what each must hash to; None where that is to be found out.
        whole_after: ``Plan.whole_after`` of a store; where it is empty, no slot is whole before all are.
    """

    def __init__(
        self,
        digest: Callable[[int, int], int],
        slots: Sequence[tuple[int, int]],
        expected: Sequence[int] | None = None,
        whole_after: Sequence[int] = (),
    ) -> None:
        self._digest = digest
        self._slots = slots
        self._expected = expected
        self._whole_after = whole_after
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
        return sum(length for _, length in self._slots[first:stop])

    def run(self, ending: Callable[[], Outcome | None], first: int = 0, stop: int | None = None) -> Outcome | None:
        """Read the slots from ``first`` on, before ``stop``, unless ``ending`` says that the transfer must end now.

        Returns how the transfer must end: CORRUPT where a slot is not what it must be; None when it may go on.
        """
        unseen = 0
        for number, (offset, length) in enumerate(self._slots[first:stop], first):
            if unseen >= _STEP_BYTES:
                unseen = 0
                if (early := ending()) is not None:
                    return early
            unseen += length
            self.sums[number] = self._digest(offset, length)
        return Outcome.CORRUPT if self._expected is not None and self.sums != list(self._expected) else None
