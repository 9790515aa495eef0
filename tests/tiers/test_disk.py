"""The disk tier on a real file."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers.conformance import TierConformance
from tiers.rig import Maker, TierRig

from kvoffd.pool.checksum import digest
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.tier import Tier


class DiskMaker(Maker):
    """Opens a directory with threads."""

    def __init__(self, directory: Path, size_bytes: int = 600 << 10, region_bytes: int = 128 << 10) -> None:
        self.directory = directory
        self.size_bytes = size_bytes
        self.capacity_bytes = size_bytes - (64 << 10) - size_bytes // 10
        self.options = DiskOptions(reads_in_flight=4, writes_in_flight=2, region_bytes=region_bytes)

    def open(self, rig: TierRig) -> Tier:
        return DiskTier.open(
            self.directory,
            self.size_bytes,
            pool=rig.pool,
            digest=digest,
            clock=rig.clock,
            post=rig.posted.put,
            listener=rig.fold,
            options=self.options,
            wall_clock=lambda: rig.wall,
        )


class TestDisk(TierConformance):
    """On files, with threads."""

    def make(self, directory: Path) -> Maker:
        return DiskMaker(directory)


@pytest.fixture
def maker(tmp_path: Path) -> DiskMaker:
    return DiskMaker(tmp_path)
