"""The interval of a figure is as wide as what was measured scatters."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.intervals import interval, ratio_text


def test_the_interval_of_a_mean_is_that_of_the_textbook() -> None:
    measured = np.random.default_rng(7).normal(10.0, 2.0, 400)
    low, high = interval(measured, np.mean)
    half = 1.96 * measured.std() / np.sqrt(len(measured))
    assert (low, high) == pytest.approx((measured.mean() - half, measured.mean() + half), abs=0.03)


def test_rows_are_drawn_whole() -> None:
    pairs = np.array([[1.0, 2.0], [3.0, 6.0], [5.0, 10.0]])
    assert interval(pairs, lambda rows: float(rows[:, 1].sum() / rows[:, 0].sum())) == (2.0, 2.0)


def test_a_ratio_that_never_changes_has_no_width() -> None:
    assert ratio_text(np.log([1.5] * 8), np.median) == "1.500 (1.500 to 1.500)"
