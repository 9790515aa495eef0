"""Doctor's advice is carried out on ten made-up days: what it promised comes, and where it has none, nothing helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from .days import DAYS
from .trial import try_day

SIZE = 1000
EXPECTED = {
    "too_small": {"pool_too_small"},
    "too_large": {"pool_too_large"},
    "all_unique": set(),
    "two_at_once": set(),
    "disk_never_read": {"disk_writes"},
    "store_only": set(),
    "own_suffices": set(),
    "three_tenants": {"pool_too_small", "crowding"},
    "dated_prefix": {"prompts_differ"},
    "slow_store": {"pool_too_small"},
}
QUICK = ("too_small",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in DAYS]
)
@pytest.mark.timeout(300)
def test_what_is_promised_comes(name: str, tmp_path: Path) -> None:
    tried = try_day(name, SIZE, tmp_path)
    assert {one.advice for one in tried if one.advice} == EXPECTED[name], tried
    assert all(one.is_kept for one in tried), tried
