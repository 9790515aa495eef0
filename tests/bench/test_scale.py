"""What a block costs in memory is what is promised, and the program that measures it at all sizes works."""

from __future__ import annotations

import pytest

from tests.bench.scale import child, page

MANY = 96_000


@pytest.mark.nightly
def test_a_block_costs_no_more_than_is_promised() -> None:
    many, sharded = child("memory", f"{MANY}x1"), child("memory", "20000x8")
    for one in (many, sharded):
        assert max(one["filled"], one["churned"]) <= one["allowed"]
    assert many["left_out"] > 0.9 * MANY, "the second half was measured in a full pool"
    disk = child("disk", f"{MANY}x1")
    assert disk["bytes"] <= disk["allowed"]
    assert "| 1000x2 " in page({"memory": [many], "restart": [child("restart", "1000x2")], "disk": [disk]})
