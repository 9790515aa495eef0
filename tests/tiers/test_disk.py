"""The disk tier: on a real file with threads, and step by step on a file in memory."""

from __future__ import annotations

from pathlib import Path

from tests.tiers.conformance import TierConformance
from tests.tiers.makers import DiskMaker, SteppedMaker
from tests.tiers.rig import Maker


class TestOnFile(TierConformance):
    """On files, with threads."""

    def make(self, directory: Path) -> Maker:
        return DiskMaker(directory)


class TestInMemory(TierConformance):
    """In memory, step by step."""

    def make(self, directory: Path) -> Maker:
        return SteppedMaker(directory)
