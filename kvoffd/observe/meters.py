"""Increases of counters in the last minute, hour and day, and histograms of durations."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from kvoffd_proto.stats import Histogram

_BINS = 20
LOOKUP_BOUNDS_S = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
MINUTE_S, HOUR_S, DAY_S = WINDOWS_S = 60.0, 3600.0, 86_400.0
"""Periods of the traffic report, besides the daemon's lifetime."""


class CounterWindows:
    """Increases of a set of counters over each of ``WINDOWS_S``, from samples. For one thread.

    A window keeps about ``_BINS`` samples, so its start moves in steps of a twentieth. A sample that equals the
    previous one takes no memory. All counters start at 0.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        start: tuple[float, Mapping[str, float]] = clock(), {}
        self._kept = {window_s: deque([start]) for window_s in WINDOWS_S}

    def sample(self, values: Mapping[str, float]) -> None:
        """Record the counters. Call it at least about once a second."""
        now = self._clock()
        for window_s, kept in self._kept.items():
            at, before = kept[-1]
            if now - at < window_s / _BINS:
                continue
            kept.append((now, before if before == values else values))
            while kept[1][0] <= now - window_s:  # the last sample from before the window stays: ``gained`` begins there
                kept.popleft()

    def date_back(self, name: str, count: int, age_s: float) -> None:
        """Count events, which the next sample will include, at the time when they were: ``age_s`` seconds ago.

        Each sample since then is raised by them: a window that begins at one of these does not show them as new.
        """
        since = self._clock() - age_s
        for kept in self._kept.values():
            for at, (time_s, values) in enumerate(kept):
                if time_s > since:
                    kept[at] = time_s, {**values, name: values.get(name, 0) + count}

    def gained(self, window_s: float, values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Return the window's seconds, fewer than ``window_s`` at first, and the counters' increases in it."""
        now, kept = self._clock(), self._kept[window_s]
        before_window = [sample for sample in kept if sample[0] <= now - window_s]
        at, before = before_window[-1] if before_window else kept[0]
        return now - at, {name: value - before.get(name, 0) for name, value in values.items()}


STEP_S = 10.0
MAX_STEPS = int(HOUR_S / STEP_S)
"""Steps that are kept: those of an hour."""


class CounterStep(NamedTuple):
    """Increases of counters in a period of ``seconds`` that ended at ``until``, of the clock. Without those of 0."""

    until: float
    seconds: float
    gained: Mapping[str, float]


class CounterSteps:
    """Increases of a set of counters in the last hour, in steps of ``STEP_S``. For one thread.

    It keeps ``MAX_STEPS`` steps. All counters start at 0.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._before: Mapping[str, float] = {}
        """The counters at ``_since``, where the unfinished step began."""
        self._steps: deque[CounterStep] = deque(maxlen=MAX_STEPS)

    def sample(self, values: Mapping[str, float]) -> None:
        """Record the counters, and end the step if it is ``STEP_S`` long. Call it at least about once a second."""
        if self._clock() - self._since >= STEP_S:
            self._steps.append(self._unfinished(values))
            self._since, self._before = self._clock(), values

    def last_hour(self, values: Mapping[str, float]) -> list[CounterStep]:
        """Return the steps of the last hour, oldest first; the last one is not finished. Changes nothing."""
        begin = self._clock() - HOUR_S
        return [*(one for one in self._steps if one.until > begin), self._unfinished(values)]

    def _unfinished(self, values: Mapping[str, float]) -> CounterStep:
        now, before = self._clock(), self._before
        gained = {name: more for name, value in values.items() if (more := value - before.get(name, 0))}
        return CounterStep(now, now - self._since, gained)


class DurationHistogram:
    """Counts durations since the daemon's start by upper bounds, in seconds. For one thread."""

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


class RecentDurations:
    """The durations of a histogram in each of ``WINDOWS_S``. For one thread."""

    def __init__(self, counted: DurationHistogram, clock: Callable[[], float]) -> None:
        self._all, self._windows = counted, CounterWindows(clock)

    def sample(self) -> None:
        """Call it at least about once a second."""
        self._windows.sample(self._all.counted().buckets)

    def in_last(self, window_s: float) -> Histogram:
        """Return the durations of the last ``window_s`` seconds, without their sum."""
        _, gained = self._windows.gained(window_s, self._all.counted().buckets)
        return Histogram({bound: int(count) for bound, count in gained.items()})
