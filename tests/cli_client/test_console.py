"""Percentages that do not lie."""

from __future__ import annotations

import pytest

from kvoffd_client.cli.console import percent


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        (0, 0, "-"),
        (0, 5, "0 %"),
        (1, 10**6, "<0.1 %"),
        (1, 3, "33.3 %"),
        (99_999, 100_000, "99.9 %"),
        (5, 5, "100 %"),
        (3, 2, "150.0 %"),
    ],
)
def test_zero_and_hundred_mean_exactly_that(part: int, whole: int, expected: str) -> None:
    assert percent(part, whole) == expected
