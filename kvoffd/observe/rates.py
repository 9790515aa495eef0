"""How much of something happens per second."""

from __future__ import annotations

import time
from collections.abc import Callable

_BINS = 20


class RateMeter:
    """Mean rate over the last ``window_s`` seconds (over its life where that is shorter). For one thread.

    Amounts are collected in twenty bins, so the window's beginning moves in steps of a twentieth.
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        if window_s <= 0:
            raise ValueError(f"A RateMeter's window must be longer than nothing, not {window_s} seconds.")
        self._bin_s = window_s / _BINS
        self._clock = clock
        self._start = clock()
        self._amounts = [0.0] * _BINS
        self._newest = 0

    def add(self, amount: float = 1.0) -> None:
        """Count ``amount`` as happening now."""
        self._advance()
        self._amounts[self._newest % _BINS] += amount

    def per_second(self) -> float:
        """The mean rate."""
        age = self._advance()
        oldest = max(self._newest - _BINS + 1, 0)
        # A meter that is younger than a bin would show wild rates.
        covered_s = max(age - oldest * self._bin_s, self._bin_s)
        return sum(self._amounts) / covered_s

    def _advance(self) -> float:
        """Empty the bins that left the window; return the meter's age in seconds."""
        age = max(self._clock() - self._start, 0.0)
        current = int(age / self._bin_s)
        for passed in range(self._newest + 1, min(current, self._newest + _BINS) + 1):
            self._amounts[passed % _BINS] = 0.0
        self._newest = max(current, self._newest)
        return age
