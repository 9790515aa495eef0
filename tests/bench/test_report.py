"""Numbers of a bench."""

from __future__ import annotations

import json

import pytest

from kvoffd_client.bench.report import Report, Result, median_percentile, percentile


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_of_a_hundred(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_percentile_of_one_value() -> None:
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_one_disturbed_round_does_not_count() -> None:
    assert median_percentile([[1, 2, 3], [2, 3, 4], [900, 900, 900]], 0.5) == 3


def test_the_object_has_the_promised_shape() -> None:
    found = json.loads(json.dumps(Report("lookup", "floor", [Result("a", 3.0, "µs", 2.0)]).to_object()))
    assert set(found) == {"bench", "machine", "results"}
    assert found["results"] == [{"case": "a", "value": 3.0, "unit": "µs", "floor": 2.0, "ratio": 1.5}]
    assert found["machine"]["cpus"] >= 1
