"""The budget of bytes that may be written to disks per day."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

DAY_S = 86_400.0
SAVED_SHARE = 1 / 8
"""Part of a day's bytes that may accumulate and be written at once."""
PERSISTED_AHEAD_SHARE = 1 / 8
"""Part of those bytes by which the persisted amount is ahead of the spent one."""


class Spent(NamedTuple):
    """Bytes that a write took out of a budget."""

    first_filling: int
    of_day: int


class WriteBudget:
    """Bytes that may be written per day, because flash wears out; 0 is no limit. No 24 hours exceed it, except for the
    first filling of a tier.

    It is a token bucket: bytes accumulate at a rate, up to a bound, and a write waits until they cover it. A block
    larger than the bound waits until the bucket is full, and then makes it negative. The rate is that of a day less the
    bound, so that a full bucket and a day's rate are a day's bytes.

    Attributes:
        first_filling_bytes: bytes that may be written besides: the disks' sizes less all ever written.
    """

    def __init__(self, per_day_bytes: int, clock: Callable[[], float]) -> None:
        self._clock, self._per_day_bytes = clock, per_day_bytes
        self._bound = self._level = per_day_bytes * SAVED_SHARE
        """The most bytes in the bucket, and those in it at ``_filled_at``. A bound of 0: no limit."""
        self._rate = (per_day_bytes - self._bound) / DAY_S
        """Bytes per second."""
        self._filled_at = clock()
        self._persisted, self._persisted_at = 0.0, clock()
        """The last amount to persist, and when. A successor that begins with it accumulates from then on."""
        self.first_filling_bytes = 0

    def restore(self, spent_bytes: float, seconds: float) -> None:
        """Continue from the bytes that an earlier daemon had spent ``seconds`` ago, with this limit or another."""
        spent_bytes = min(spent_bytes, self._per_day_bytes)  # whatever it was allowed, a day later it is no more spent
        self._level = min(self._bound, self._bound - spent_bytes + self._rate * max(0.0, seconds))

    def amount_to_persist(self) -> float | None:
        """Return the amount to persist, rounded up so that a killed daemon spends none twice; None if the last one
        still covers what is spent, less what would have accumulated since."""
        now, spent = self._clock(), self.spent_bytes
        if spent <= self._persisted - self._rate * (now - self._persisted_at):
            return None
        self._persisted, self._persisted_at = spent + self._bound * PERSISTED_AHEAD_SHARE, now
        return self._persisted

    def take(self, nbytes: int) -> Spent | None:
        """Take this many bytes out of the budget; return None if they may not be written now.

        A write that is larger than the rest of the first filling takes nothing more.
        """
        if not self.allows(nbytes):
            return None
        fills = self.first_filling_bytes > 0
        spent = Spent(min(self.first_filling_bytes, nbytes), 0) if fills else Spent(0, nbytes)
        self.first_filling_bytes -= spent.first_filling
        self._level -= spent.of_day
        return spent

    def allows(self, nbytes: int) -> bool:
        """Return whether this many bytes may be written now."""
        return bool(self.first_filling_bytes) or not self._bound or self._fill() >= min(nbytes, self._bound)

    def refund(self, spent: Spent) -> None:
        """Give back what was taken for a block of which nothing was written."""
        self.first_filling_bytes += spent.first_filling
        self._level += spent.of_day

    @property
    def left_share(self) -> float:
        """Part of the accumulable bytes that is left; 1 without a limit."""
        return max(0.0, self._fill() / self._bound) if self._bound and not self.first_filling_bytes else 1.0

    @property
    def spent_bytes(self) -> float:
        """Spent bytes not accumulated again yet; 0 without a limit."""
        return self._bound - self._fill() if self._bound else 0.0

    @property
    def left_bytes(self) -> int | None:
        """Bytes that may be written now; None without a limit."""
        return max(0, int(self._fill())) + self.first_filling_bytes if self._bound else None

    def _fill(self) -> float:
        """Add what has accumulated; return the bytes in the bucket."""
        now = self._clock()
        self._level = min(self._bound, self._level + self._rate * max(0.0, now - self._filled_at))
        self._filled_at = now
        return self._level
