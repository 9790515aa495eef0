"""The ways through the code get no longer unnoticed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.kit.require import require
from tests.tools.ways import WAYS, go

MOST = {
    "lookup": (25, 15),
    "store": (36, 25),
    "store-end": (16, 10),
    "load": (14, 10),
    "load-end": (19, 12),
    "reset": (30, 20),
    "disk-write": (58, 39),
    "promotion": (80, 54),
    "redis-promotion": (131, 91),
    "connector-lookup": (87, 60),
}
"""Functions of each way, and changes of file. Lower them with the way; raise them if the code reads better so."""


NEED_VLLM = {"connector-lookup"}
OF_VLLM = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
"""vLLM, torch and their friends warn while they are imported; that is not ours to fix."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=OF_VLLM if one in NEED_VLLM else ()) for one in WAYS])
def test_a_way_has_no_more_functions_and_changes_of_file_than_before(name: str) -> None:
    if name in NEED_VLLM:
        require("vllm", find_spec("vllm"), "vLLM is not installed")
    way = go(name)
    functions, changes = MOST[name]
    shown = "\n".join(way.lines())
    assert len(way.functions) <= functions, shown
    assert way.changes <= changes, shown
