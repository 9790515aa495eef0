"""The ways through the daemon get no longer unnoticed."""

from __future__ import annotations

import pytest

from tests.tools.ways import WAYS, go

MOST = {
    "lookup": (26, 15),
    "store": (42, 29),
    "store-end": (19, 13),
    "load": (16, 11),
    "load-end": (22, 14),
    "reset": (38, 21),
    "disk-write": (65, 43),
    "promotion": (97, 61),
    "redis-promotion": (143, 98),
}
"""Functions of each way, and changes of file. Lower them with the way; raise them if the code reads better so."""


@pytest.mark.parametrize("name", WAYS)
def test_a_way_has_no_more_functions_and_changes_of_file_than_before(name: str) -> None:
    way = go(name)
    functions, changes = MOST[name]
    shown = "\n".join(way.lines())
    assert len(way.functions) <= functions, shown
    assert way.changes <= changes, shown
