"""The disk tier: on a real file with threads, and step by step on a file in memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvoffd.tiers.tier import TierResult
from tests.tiers.conformance import TierConformance
from tests.tiers.makers import DiskMaker, SteppedMaker
from tests.tiers.rig import PATIENCE_S, Maker, TierRig, block_of


class TestOnFile(TierConformance):
    """On files, with threads."""

    def make(self, directory: Path) -> Maker:
        return DiskMaker(directory)


class TestInMemory(TierConformance):
    """In memory, step by step."""

    def make(self, directory: Path) -> Maker:
        return SteppedMaker(directory)


def test_of_many_jobs_that_ended_some_are_handled_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffd.tiers.disk.disk_tier.ENDED_AT_ONCE", 2)
    rig = TierRig(DiskMaker(tmp_path))
    endings = [rig.write(block_of(number)) for number in range(5)]
    assert rig.tier.workers.wait_idle(time.monotonic() + PATIENCE_S)
    handled = []
    while rig.under_way:
        rig.posted.get(timeout=PATIENCE_S)()
        handled.append(5 - rig.under_way)
    assert [count for count in (2, 4, 5) if count in handled] == [2, 4, 5]
    assert {ending.result for ending in endings if ending} == {TierResult.DONE}
    rig.settle()
    assert rig.close()
