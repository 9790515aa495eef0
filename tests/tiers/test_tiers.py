"""Several disks as one tier, which come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiers.conformance import TierConformance
from tiers.makers import DiskMaker, SteppedMaker, step
from tiers.rig import ONE, Maker, TierRig, block_of

from kvoffd.tiers.tier import Tier, TierResult
from kvoffd.tiers.tiers import Tiers

DONE = TierResult.DONE
SIZE_BYTES = 340 << 10
REGION_BYTES = 64 << 10


class TiersMaker(Maker):
    """Disks as one."""

    exact_order = False

    def __init__(self, *disks: DiskMaker) -> None:
        self.disks = disks
        self.capacity_bytes = sum(disk.capacity_bytes for disk in disks)

    def open(self, rig: TierRig) -> Tier:
        tiers = Tiers()
        for disk in self.disks:
            tiers.attach(disk.open(rig))
        return tiers

    def work(self, tier: Tier) -> None:
        assert isinstance(tier, Tiers)
        for disk, member in zip(self.disks, tier.members, strict=False):
            if disk.stepped:
                while step(member):
                    pass


class TestTwoFiles(TierConformance):
    """On files, with threads."""

    def make(self, directory: Path) -> Maker:
        return TiersMaker(*(DiskMaker(directory / name, None, SIZE_BYTES, REGION_BYTES) for name in "ab"))


class TestTwoInMemory(TierConformance):
    """In memory, step by step."""

    def make(self, directory: Path) -> Maker:
        return TiersMaker(*(SteppedMaker(directory / name, None, SIZE_BYTES, REGION_BYTES) for name in "ab"))


@pytest.fixture
def makers(tmp_path: Path) -> list[SteppedMaker]:
    return [SteppedMaker(tmp_path / "a", None, 300 << 10), SteppedMaker(tmp_path / "b", None, 2 << 20)]


@pytest.fixture
def rig(makers: list[SteppedMaker]) -> TierRig:
    return TierRig(TiersMaker(*makers))


def tiers_of(rig: TierRig) -> Tiers:
    assert isinstance(rig.tier, Tiers)
    return rig.tier


def store(rig: TierRig, *numbers: int) -> None:
    for number in numbers:
        ending = rig.write(block_of(number))
        rig.settle()
        assert ending is not None
        assert ending.result is DONE


def test_a_disk_that_leaves_takes_its_blocks_along_and_brings_them_back(
    rig: TierRig, makers: list[SteppedMaker]
) -> None:
    endings = [rig.write(block_of(number)) for number in range(8)]
    rig.settle()
    assert all(ending is not None and ending.result is DONE for ending in endings)
    small, large = tiers_of(rig).members
    mine = {number for number in range(8) if block_of(number).id.key in small.index(ONE, 0)}
    assert mine
    assert len(mine) < 8
    tiers_of(rig).detach(small)
    assert rig.ids() == {block_of(number).id for number in range(8) if number not in mine}
    assert all(rig.read(block_of(number)) is None for number in mine)
    assert small.close(60)
    tiers_of(rig).attach(makers[0].open(rig))
    assert rig.ids() == {block_of(number).id for number in range(8)}
    assert len(rig.tier.index(ONE, 0)) == 8
    tiers_of(rig).detach(large)
    assert rig.ids() == {block_of(number).id for number in mine}


def test_writes_go_where_least_waits_and_most_is_free(rig: TierRig) -> None:
    small, large = tiers_of(rig).members
    store(rig, *range(10))
    assert large.stats().blocks == 10
    for number in range(100, 116):
        assert rig.write(block_of(number)) is not None
    assert min(tier.stats().queued_writes for tier in (small, large)) >= 4, "one is busy while the other is not"
    rig.settle()
    large.drain()
    store(rig, 200)
    assert block_of(200).id.key in small.index(ONE, 0)


def test_a_block_on_its_way_is_not_taken_by_another(rig: TierRig) -> None:
    assert rig.write(block_of(1)) is not None
    assert rig.write(block_of(1)) is None
    rig.settle()
    assert rig.tier.stats().blocks == 1


def test_without_disks_there_is_nothing() -> None:
    rig = TierRig(TiersMaker())
    assert rig.write(block_of(1)) is None
    assert rig.read(block_of(1)) is None
    assert rig.tier.stats().size_bytes == 0
    assert rig.tier.remove_namespace(ONE) == 0
    assert rig.close()
