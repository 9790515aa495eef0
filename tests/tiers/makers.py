"""Ways to open disk tiers."""

from __future__ import annotations

from pathlib import Path

from kvoffd.pool.checksums import digest
from kvoffd.system.files import FileCalls
from kvoffd.tiers.disk.disk_tier import DiskOptions, DiskTier
from kvoffd.tiers.disk.opening import open_disk_tier
from kvoffd.tiers.disk.workers import Workers
from kvoffd.tiers.tier import Tier
from tests.kit.memory_disk import MemoryDisk, WorkersWithoutThreads
from tests.tiers.rig import Maker, TierRig

SIZE_BYTES = 600 << 10
REGION_BYTES = 128 << 10


class StepWorkers(WorkersWithoutThreads):
    """Works only in calls of ``step``, so that it runs the same way every time."""

    def step(self) -> bool:
        """Does one batch; False where there is none."""
        batch = self._queue.next(self._clock())
        if batch is None:
            return False
        self._do(batch)
        return True

    def wait_idle(self, until: float) -> bool:
        while self.step():
            pass
        return not self._queue.jobs

    def stop(self, until: float) -> None:
        assert not self._queue.jobs


class DiskMaker(Maker):
    """Opens a directory with threads."""

    stepped = False

    def __init__(
        self,
        directory: Path,
        calls: FileCalls | None = None,
        size_bytes: int = SIZE_BYTES,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self.directory = directory
        self.calls = calls
        self.size_bytes = size_bytes
        self.capacity_bytes = size_bytes - (64 << 10) - size_bytes // 10
        self.options = DiskOptions(reads_in_flight=4, region_bytes=region_bytes)

    def open(self, rig: TierRig) -> Tier:
        self.directory.mkdir(exist_ok=True)
        return open_disk_tier(
            self.directory,
            self.size_bytes,
            pool=rig.pool,
            digest=digest,
            clock=rig.clock,
            post=rig.posted.put,
            listener=rig.fold,
            options=self.options,
            calls=self.calls,
            wall_clock=lambda: rig.wall,
            make_workers=StepWorkers if self.stepped else Workers,
        )


class SteppedMaker(DiskMaker):
    """Opens a file in memory; its jobs are done when the test says so."""

    stepped = True

    def __init__(
        self,
        directory: Path,
        disk: MemoryDisk | None = None,
        size_bytes: int = SIZE_BYTES,
        region_bytes: int = REGION_BYTES,
    ) -> None:
        self.disk = disk or MemoryDisk()
        super().__init__(directory, self.disk, size_bytes, region_bytes)

    def work(self, tier: Tier) -> None:
        while step(tier):
            pass


def removals_are_durable(tier: Tier) -> bool:
    """Whether the device has forgotten all that was removed: until then it may come back after a crash."""
    assert isinstance(tier, DiskTier)
    return not tier._updates.is_urgent and not tier._index.removed_entries


def step(tier: Tier) -> bool:
    """Has a stepped disk tier do one thing; False where it has nothing to do."""
    assert isinstance(tier, DiskTier)
    workers = tier.workers
    assert isinstance(workers, StepWorkers)
    return workers.step()
