"""What a block costs in memory is what is promised, and the program that measures it at all sizes works."""

from __future__ import annotations

from tests.bench.scale.__main__ import bound_of, child, page

FEW, MANY, SHARDED = "24000x1", "96000x1", "20000x8"
"""Four times as many: what doubles when it is full is as full at both."""


def test_a_block_costs_no_more_than_is_promised() -> None:
    filled = [child("fill", case, samples=20) for case in (FEW, MANY, SHARDED)]
    for one in filled[1:]:
        for measured in (one["filled"], one["churned"]):
            assert measured["without_ghosts"] <= bound_of(one["shards"])
    many = filled[1]
    assert many["evicted"] + many["declined"] > many["blocks"], "the second half was measured in a full pool"
    text = page({"fill": filled, "restart": [child("restart", "1000x2", samples=20)]})
    for row in ("| 24,000 | 1 ", "| 96,000 | 1 ", "| 20,000 | 8 ", "| 1,000  | 2 "):
        assert row in text
