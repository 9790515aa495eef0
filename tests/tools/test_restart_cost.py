"""The program that deploy/README.md names for the cost of a restart."""

from __future__ import annotations

from tests.tools.restart_cost import measure


def test_every_block_that_was_left_behind_is_taken_over() -> None:
    assert " 256 blocks in " in measure(0.25, 1 << 20)
