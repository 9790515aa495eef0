"""Latencies: the count is for ever, the distribution is of the last minutes."""

from __future__ import annotations

import pytest

from kvoffd.observe.latency import LatencyRecorder
from kvoffd_proto.messages import LatencyStats


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_nothing_observed_is_all_zeros() -> None:
    assert LatencyRecorder().summary() == LatencyStats(0, 0.0, 0.0, 0.0)


def test_quantiles_are_nearest_ranks() -> None:
    recorder = LatencyRecorder()
    for milliseconds in range(1000, 0, -1):
        recorder.observe(milliseconds / 1000)
    assert recorder.summary() == LatencyStats(1000, 0.5, 0.99, 1.0)


def test_one_observation_is_every_quantile() -> None:
    recorder = LatencyRecorder()
    recorder.observe(0.25)
    assert recorder.summary() == LatencyStats(1, 0.25, 0.25, 0.25)


def test_only_the_last_ones_are_kept_but_all_are_counted() -> None:
    recorder = LatencyRecorder(capacity=10)
    recorder.observe(99.0)
    for _ in range(10):
        recorder.observe(1.0)
    assert recorder.summary() == LatencyStats(11, 1.0, 1.0, 1.0)


def test_old_ones_leave_the_distribution_but_not_the_count() -> None:
    clock = Clock()
    recorder = LatencyRecorder(window_s=60.0, clock=clock)
    recorder.observe(9.0)
    clock.now += 59
    recorder.observe(1.0)
    assert recorder.summary().maximum == 9.0
    clock.now += 2
    assert recorder.summary() == LatencyStats(2, 1.0, 1.0, 1.0)
    clock.now += 60
    assert recorder.summary() == LatencyStats(2, 0.0, 0.0, 0.0)


def test_a_clock_that_was_set_back_gives_no_negative_latency() -> None:
    recorder = LatencyRecorder()
    recorder.observe(-1.0)
    assert recorder.summary().maximum == 0.0


def test_a_recorder_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        LatencyRecorder(capacity=0)
