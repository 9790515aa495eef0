"""Percentages that do not lie."""

from __future__ import annotations

from kvoffd_proto.units import percent


def test_zero_and_hundred_mean_exactly_that() -> None:
    shares = ((0, 0), (0, 5), (1, 10**6), (1, 3), (99_999, 100_000), (5, 5), (3, 2))
    words = ["-", "0 %", "<0.1 %", "33.3 %", "99.9 %", "100 %", "150.0 %"]
    assert [percent(*share) for share in shares] == words
