"""What a block costs in memory is what is promised, and the program that measures it at all sizes works."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench.scale.__main__ import child
from tests.bench.scale.page import bound_of, growth, page

FEW, MANY, SHARDED = 24000, 96000, 5000
"""Four times as many: what doubles when it is full is as full at both."""
SAMPLES = ("--samples", "20")


@pytest.fixture(scope="module")
def filled() -> list[dict[str, Any]]:
    """Results of pools of few blocks, of more, and of few of eight shards."""
    return [*child("fill", f"{FEW}x1", f"{MANY}x1", *SAMPLES), *child("fill", f"{SHARDED}x8", *SAMPLES)]


def test_a_block_costs_no_more_than_is_promised(filled: list[dict[str, Any]]) -> None:
    for one in filled[1:]:
        for measured in (one["filled"], one["churned"]):
            assert measured["without_ghosts"] <= bound_of(one["shards"])
    many = filled[1]
    assert many["evicted"] + many["declined"] > MANY, "the second half was measured in a full pool"


def test_the_page_has_each_case(filled: list[dict[str, Any]]) -> None:
    results = {"fill": filled, "restart": child("restart", "1000x2", *SAMPLES)}
    text = page(results)
    for row in (
        f"| {FEW:,} | 1 ",
        f"| {MANY:,} | 1 ",
        f"| {SHARDED:,}  | 8 ",
        "| 1,000  | 2 ",
    ):
        assert row in text


def test_what_grows_with_the_number_is_said_to() -> None:
    def result(blocks: int, nbytes: float) -> dict[str, Any]:
        seconds = [1e-4]
        times = {"answer_seconds": seconds, "lookup_seconds": seconds, "store_seconds": seconds}
        return {"blocks": blocks, "shards": 1, "filled": {"without_ghosts": nbytes}, **times}

    def holds(nbytes: float) -> bool:
        found = growth({"fill": [result(10_000, 500), result(1_000_000, nbytes)], "restart": []})
        assert all(one.holds for one in found[1:])
        return found[0].holds

    assert holds(745)
    assert not holds(755)
