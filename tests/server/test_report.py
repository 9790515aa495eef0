"""Statistics are copied by name from what counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvoffd.server.context import filled
from kvoffd_proto.messages import LatencyStats


def test_a_field_comes_from_the_first_source_that_has_it() -> None:
    first, second = SimpleNamespace(p50=1.0), SimpleNamespace(p50=2.0, p99=3.0, maximum=4.0)
    assert filled(LatencyStats, first, second, count=5, maximum=6.0) == LatencyStats(5, 1.0, 3.0, 6.0)


def test_a_field_that_nobody_counts_is_an_error() -> None:
    with pytest.raises(AttributeError, match=r"LatencyStats\.maximum"):
        filled(LatencyStats, SimpleNamespace(count=1, p50=1.0, p99=1.0))
