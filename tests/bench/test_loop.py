"""No turn of the loop is long at a large pool, and the program that measures it works."""

from __future__ import annotations

import pytest

from tests.bench.loop import CASES, LONGEST_MS, child, page


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_no_turn_is_long(case: str) -> None:
    """The best of three: others on the machine take caches and cores."""
    found = [child(case)]
    while min(one["longest"] for one in found) > LONGEST_MS and len(found) < 3:
        found.append(child(case))
    print(page(found))
    assert min(one["longest"] for one in found) <= LONGEST_MS
