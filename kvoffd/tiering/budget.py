"""How much may be written: flash wears out, and a disk that writes reads slowly."""

from __future__ import annotations

from collections.abc import Callable

DAY_S = 86_400.0
SAVED_SHARE = 1 / 8
"""Of a day's bytes, how many may be saved up and written at once."""
RATE_SAVED_S = 0.25
"""Seconds of the rate that may be saved up."""


class _Bucket:
    """Fills at a rate up to a bound. Goes below nothing for what is larger than the bound; that is paid off."""

    def __init__(self, bytes_per_second: float, bound: float, now: float) -> None:
        self._rate = bytes_per_second
        self._bound = bound
        self._level = bound
        self._at = now

    def level(self, now: float) -> float:
        self._level = min(self._bound, self._level + self._rate * max(0.0, now - self._at))
        self._at = now
        return self._level

    def allows(self, nbytes: int, now: float) -> bool:
        return self.level(now) >= min(nbytes, self._bound)

    def take(self, nbytes: int) -> None:
        self._level -= nbytes


class WriteBudget:
    """Bytes per day and per second that may go down; 0 is no limit. No 24 hours see more than the day's bytes."""

    def __init__(self, per_day_bytes: int, per_second_bytes: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        now = clock()
        saved = per_day_bytes * SAVED_SHARE
        self._day = _Bucket((per_day_bytes - saved) / DAY_S, saved, now) if per_day_bytes else None
        self._second = _Bucket(per_second_bytes, per_second_bytes * RATE_SAVED_S, now) if per_second_bytes else None

    def take(self, nbytes: int) -> bool:
        """Take so many bytes out of both, or none."""
        now = self._clock()
        buckets = [bucket for bucket in (self._day, self._second) if bucket is not None]
        if not all(bucket.allows(nbytes, now) for bucket in buckets):
            return False
        for bucket in buckets:
            bucket.take(nbytes)
        return True

    def give_back(self, nbytes: int) -> None:
        """What was taken is not written after all."""
        for bucket in (self._day, self._second):
            if bucket is not None:
                bucket.take(-nbytes)

    @property
    def spent(self) -> bool:
        """Whether it is the day's bytes that do not suffice for anything now."""
        return self._day is not None and self._day.level(self._clock()) <= 0

    @property
    def left_bytes(self) -> int | None:
        """What the day's budget allows to write now; None where it has no limit."""
        return max(0, int(self._day.level(self._clock()))) if self._day is not None else None
