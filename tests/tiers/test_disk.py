"""The disk tier: on a real file with threads, and step by step on a file in memory."""

from __future__ import annotations

from pathlib import Path

from tiers.conformance import TierConformance
from tiers.makers import DiskMaker, SteppedMaker
from tiers.rig import Maker


class TestOnFile(TierConformance):
    """On files, with threads."""

    def make(self, directory: Path) -> Maker:
        return DiskMaker(directory)


class TestInMemory(TierConformance):
    """In memory, step by step."""

    def make(self, directory: Path) -> Maker:
        return SteppedMaker(directory)
