"""The table of restarts is measured and printed, with a small prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.restarts import Bench, Case, most_bytes, table

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

CASE = Case(tokens=1024, count=2, layers=2)
RATE = 500.0


def test_a_row_says_how_much_was_loaded_and_how_long_the_device_takes() -> None:
    with Bench(CASE, Path("/var/tmp"), RATE, rounds=1) as bench:
        found = bench.run({"engine"})
    one = found["engine"]
    assert one.loaded == 2 * 1024
    assert 0 < one.device_s < one.loaded_s < one.first_token_s
    (row,) = table({CASE: found}, RATE).splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[1:4] == ["2 of 1,024", "8", "engine restarted, from the pool"]
    assert (cells[5], cells[9]) == ("100%", "4.10")


def test_a_model_has_as_many_layers_as_there_is_memory_for() -> None:
    assert Case.within(4 << 30, 32_768, 1) == Case(32_768, 1, 32)
    assert Case.within(4 << 30, 131_072, 8) == Case(131_072, 8, 1)
    assert most_bytes(Path("/var/tmp")) > 0
