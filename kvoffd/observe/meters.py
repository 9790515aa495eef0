"""Meters: how often something happens, and how long it takes. Each is used by one thread."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from kvoffd_proto.stats import Histogram

_BINS = 20
LOOKUP_BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
MINUTE_S, HOUR_S = WINDOWS_S = 60.0, 3600.0
"""What traffic is shown over, beside the daemon's life."""


class RateMeter:
    """Mean rate over the last ``window_s`` seconds (over its life where that is shorter). For one thread.

    Amounts are collected in twenty bins, so the window's beginning moves in steps of a twentieth.
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._bin_s = window_s / _BINS
        self._clock = clock
        self._start = clock()
        self._amounts = [0.0] * _BINS
        self._newest = 0

    def add(self, amount: float = 1.0) -> None:
        """Add ``amount`` to the bin of this moment."""
        self._advance()
        self._amounts[self._newest % _BINS] += amount

    def per_second(self) -> float:
        """Return the mean rate over the window."""
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


class CounterWindows:
    """What a set of counters gained over each of ``WINDOWS_S``, from samples of them. For one thread.

    For each window at most ``_BINS`` samples are kept, so that a window's beginning moves in steps of a twentieth. A
    sample that equals the one before costs no memory of its own.

    Args:
        values: the counters at the beginning, by name.
    """

    def __init__(self, values: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept = {window_s: deque([(clock(), values)]) for window_s in WINDOWS_S}

    def sample(self, values: Mapping[str, float]) -> None:
        """Take note of the counters. To be called about once a second, or more often."""
        now = self._clock()
        for window_s, kept in self._kept.items():
            at, before = kept[-1]
            if now - at < window_s / _BINS:
                continue
            kept.append((now, before if before == values else values))
            while kept[1][0] <= now - window_s:
                kept.popleft()

    def gained(self, window_s: float, values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return how many seconds the window has, fewer than ``window_s`` at first, and what was gained in it."""
        now = self._clock()
        kept = self._kept[window_s]
        while len(kept) > 1 and kept[1][0] <= now - window_s:
            kept.popleft()
        at, before = kept[0]
        return now - at, {name: value - before.get(name, 0) for name, value in values.items()}


class DurationHistogram:
    """Counts durations by upper bounds, in seconds, since the daemon's start. For one thread."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def counted(self) -> Histogram:
        totals = accumulate(self._counts)
        return Histogram(dict(zip([*map(str, self._bounds_s), "+Inf"], totals, strict=True)), self._sum_s)
