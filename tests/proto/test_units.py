"""Sizes and durations are read as people write them and shown so that they can be read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffd_proto.units import (
    MAX_SIZE_BYTES,
    UnitError,
    exact_duration,
    exact_size,
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_size,
    percent,
)


def assert_refused(parse: Callable[[Any], object], *texts: object) -> None:
    """Each with one short sentence."""
    for text in texts:
        with pytest.raises(UnitError) as refusal:
            parse(text)
        assert "\n" not in str(refusal.value)
        assert 10 < len(str(refusal.value)) < 250


def test_sizes_are_read() -> None:
    for text, size_bytes in (
        ("20GiB", 20 * 2**30),
        (" 512MiB ", 512 * 2**20),
        ("20Gi", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("4KiB", 4096),
        (4096, 4096),
        (MAX_SIZE_BYTES, MAX_SIZE_BYTES),
    ):
        assert parse_size(text) == size_bytes, text
    assert_refused(parse_size, "", "GiB", "20 bananas", "20G", -1, "1e3", "1,5GiB", "٢GiB", True, 1.5, None)
    assert_refused(parse_size, "9" * 5000, 2**63, 10**5000)


def test_durations_are_read() -> None:
    for text, seconds in (("500ms", 0.5), ("30s", 30.0), (30, 30.0), (0.25, 0.25), ("2m", 120.0)):
        assert parse_duration(text) == seconds, text
    assert_refused(parse_duration, "", "soon", "5 bananas", "-1s", float("nan"), float("inf"), "nan", False, None, [])
    assert_refused(parse_duration, "9" * 20, 10**400)


@given(st.integers(0, MAX_SIZE_BYTES))
def test_an_exact_size_reads_back(size_bytes: int) -> None:
    assert parse_size(exact_size(size_bytes)) == size_bytes


@given(st.integers(0, 30 * 86_400_000_000))
def test_an_exact_duration_reads_back_to_the_microsecond(microseconds: int) -> None:
    assert round(parse_duration(exact_duration(microseconds / 1e6)) * 1e6) == microseconds


@given(st.integers(0, 2**62))
def test_a_shown_size_has_at_most_four_digits_and_is_near_the_truth(size_bytes: int) -> None:
    number, unit = format_size(size_bytes).split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit]
    assert float(number) * factor == pytest.approx(size_bytes, rel=0.006)
    assert len(number) <= 4 or unit == "TiB"


def test_numbers_are_shown_as_people_read_them() -> None:
    for shown, expected in (
        (format_size(1023), "1023 B"),
        (format_size(1024), "1.00 KiB"),
        (format_size(2**30 - 1), "1.00 GiB"),
        (format_rate(12_345_000_000), "11.5 GiB/s"),
        (format_count(12345), "12,345"),
        (format_count(12_345_678), "12.3 M"),
        (format_duration(0), "0 s"),
        (format_duration(float("inf")), "∞ s"),
        (format_duration(0.00085), "850 µs"),
        (format_duration(0.0123), "12.3 ms"),
        (format_duration(4.5), "4.50 s"),
        (format_duration(59.99), "1 min"),
        (format_duration(200), "3 min 20 s"),
        (format_duration(3 * 86400 + 4 * 3600), "3 d 4 h"),
        (format_duration(3600), "1 h"),
    ):
        assert shown == expected


def test_zero_and_hundred_percent_mean_exactly_that() -> None:
    shares = ((0, 0), (0, 5), (1, 10**6), (1, 3), (99_999, 100_000), (5, 5), (3, 2))
    words = ["-", "0 %", "<0.1 %", "33.3 %", "99.9 %", "100 %", "150.0 %"]
    assert [percent(*share) for share in shares] == words
