"""The ways through the daemon get no longer unnoticed."""

from __future__ import annotations

import pytest

from tests.tools.ways import WAYS, go

MOST = {
    "lookup": (25, 15),
    "store": (39, 28),
    "store-end": (17, 12),
    "load": (14, 10),
    "load-end": (20, 14),
    "reset": (36, 20),
    "disk-write": (69, 44),
    "promotion": (99, 62),
    "redis-promotion": (150, 98),
}
"""Functions of each way, and changes of file. Lower them with the way; raise them if the code reads better so."""


@pytest.mark.parametrize("name", WAYS)
def test_a_way_has_no_more_functions_and_changes_of_file_than_before(name: str) -> None:
    way = go(name)
    functions, changes = MOST[name]
    shown = "\n".join(way.lines())
    assert len(way.functions) <= functions, shown
    assert way.changes <= changes, shown
