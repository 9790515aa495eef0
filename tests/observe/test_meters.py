"""Windows of counters, and durations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffd.observe.meters import (
    HOUR_S,
    MAX_STEPS,
    MINUTE_S,
    STEP_S,
    WINDOWS_S,
    CounterSteps,
    CounterWindows,
    DurationHistogram,
    RecentDurations,
)
from tests.kit.clock import Clock


def test_quantiles_lie_where_prometheus_finds_them() -> None:
    histogram = DurationHistogram((0.1, 0.2, 0.4))
    assert histogram.counted().quantile(0.5) == 0.0
    for seconds in (0.05, 0.15, 0.15, 0.3):
        histogram.observe(seconds)
    counted = histogram.counted()
    assert (counted.count, counted.buckets) == (4, {"0.1": 1, "0.2": 3, "0.4": 4, "+Inf": 4})
    assert counted.quantile(0.25) == pytest.approx(0.1)
    assert counted.quantile(0.5) == pytest.approx(0.15)
    assert counted.quantile(1.0) == pytest.approx(0.4)
    histogram.observe(9.0)
    assert histogram.counted().quantile(0.99) == pytest.approx(0.4), "no larger bound is known"


def test_durations_are_recent_for_as_long_as_their_window_is() -> None:
    clock, histogram = Clock(), DurationHistogram((0.1, 0.2))
    recent = RecentDurations(histogram, clock)
    histogram.observe(0.15)
    assert recent.in_last(MINUTE_S).buckets == {"0.1": 0, "0.2": 1, "+Inf": 1}
    for _ in range(100):
        clock.now += 1
        recent.sample()
    assert (recent.in_last(MINUTE_S).count, recent.in_last(HOUR_S).count) == (0, 1)


def test_windows_forget_what_is_older_than_they_are_long() -> None:
    for window_s in WINDOWS_S:
        clock = Clock()
        windows = CounterWindows(clock)
        count = 0
        step_s = window_s / 7200
        for number in range(10_000):  # one a step at first, then ten
            clock.now += step_s
            count += 10 if number > 200 else 1
            windows.sample({"keys": count})
        seconds, gained = windows.gained(window_s, {"keys": count})
        assert window_s <= seconds <= window_s * 1.06
        assert gained["keys"] == pytest.approx(10 * seconds / step_s, rel=0.1)


def test_what_is_counted_late_is_in_the_windows_in_which_it_was() -> None:
    clock = Clock()
    windows = CounterWindows(clock)
    for _ in range(1000):
        clock.now += 0.5
        windows.sample({"keys": 3})
    windows.date_back("late", 7, 100.0)
    for seconds, in_hour in ((0, 7), (3450, 7), (300, 0)):
        for _ in range(seconds):
            clock.now += 1.0
            windows.sample({"keys": 3, "late": 7})
        gained = [windows.gained(window_s, {"keys": 3, "late": 7})[1]["late"] for window_s in WINDOWS_S]
        assert gained == [0, in_hour, 7]
    windows.date_back("late", 2, 30.0)
    assert [windows.gained(window_s, {"keys": 3, "late": 9})[1]["late"] for window_s in WINDOWS_S] == [2, 2, 9]


@given(st.lists(st.tuples(st.floats(0.1, 400), st.integers(0, 5)), max_size=60))
def test_windows_never_gain_more_than_there_was(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    windows = CounterWindows(clock)
    count, history = 0, [(clock.now, 0)]
    for pause_s, more in steps:
        clock.now += pause_s
        count += more
        windows.sample({"keys": count})
        history.append((clock.now, count))
        for window_s in WINDOWS_S:
            seconds, gained = windows.gained(window_s, {"keys": count})
            began = clock.now - seconds
            assert gained["keys"] == count - max(n for at, n in history if at <= began + 1e-6)


def test_an_hour_in_steps_is_bounded_and_reading_it_changes_nothing() -> None:
    clock = Clock()
    steps = CounterSteps(clock)
    for second in range(3 * int(HOUR_S)):
        clock.now += 1
        steps.sample({"keys": 2 * second, "idle": 7})
    count = {"keys": 2 * 3 * int(HOUR_S), "idle": 7}
    found = steps.last_hour(count)
    assert len(found) == MAX_STEPS + 1
    assert found == steps.last_hour(count)
    assert all(step.gained == {"keys": 20} and step.seconds == STEP_S for step in found[1:-1])
    assert [step.until for step in found] == sorted(step.until for step in found)
    assert sum(step.seconds for step in found) <= HOUR_S + STEP_S
    assert (found[-1].seconds, found[-1].gained) == (0.0, {"keys": 2}), "the unfinished one"
    clock.now += HOUR_S  # the loop stood still
    (only,) = steps.last_hour(count)
    assert (only.seconds, only.gained) == (HOUR_S, {"keys": 2}), "older ones are of no hour"
