"""Directories that hang, fail or come late: the daemon's thread never waits for them, and its end not for long."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvoffd.config import Config, DiskSize
from kvoffd.pool.pool import Pool
from kvoffd.server.persistence import State, StateFile
from kvoffd.server.tiers import TierSupervisor, make_tiering
from kvoffd.tiers.disk_file import OpeningStopped
from kvoffd.tiers.tier import TierListener, TierStats
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.stats import DiskState
from tests.kit.slot_cache import CacheRig, FoldedEvents, keys_of
from tests.kit.waiting import wait_until


class FakeDisk:
    """As much of a DiskTier as TierSupervisor uses."""

    open_seconds, found_blocks, lifetime_bytes, lifetime_written_bytes, direct, removed = 0.0, 0, 0, 0, True, False

    def __init__(self, hangs: bool = False, generation: int = 0) -> None:
        self.hangs, self.generation = hangs, generation
        self.closes: list[float] = []
        self.names = {b"one", b"other"}
        """Namespaces that it has blocks of, all of this generation."""
        self.errors: dict[str, int] = {}

    @property
    def found_generations(self) -> dict[bytes, int]:
        return dict.fromkeys(self.names, self.generation)

    def stats(self) -> TierStats:
        return TierStats(2**30, errors=Counter(self.errors))

    def tick(self) -> None:
        pass

    def available(self) -> bool:
        return not self.hangs

    def close(self, deadline_s: float) -> bool:
        self.closes.append(deadline_s)
        return not self.hangs

    def remove_all(self, fingerprint: bytes) -> int:
        self.names = self.names - {fingerprint}
        return 1


class TiersRig:
    """Tiers whose directories a test opens as it likes, in the threads that are made for that."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.rig = CacheRig(16, 4)
        self.calls: list[Callable[[], None]] = []
        self.go = threading.Event()
        self.result: FakeDisk | Exception = FakeDisk()
        self.saved = State(StateFile(str(directory / "kvoffd.state"), 1 << 20))
        self.saved.restore()
        cache, clock, pool = self.rig.cache, self.rig.clock, cast(Pool, None)
        config, events = Config(**settings), FoldedEvents(MEDIUM_STORAGE)
        self.tiering = make_tiering(config, cache, events, clock, lambda: False, self.saved)
        self.tiers = TierSupervisor(config, self.tiering, cache, pool, clock, self.calls.append, self.saved)
        self.tiers.open_disk = self.open  # type: ignore[assignment,method-assign]

    def open(self, size: DiskSize, listener: TierListener) -> FakeDisk:
        while not self.go.wait(0.01):
            if self.tiers._stopping:
                raise OpeningStopped("Stopping.")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def attach(self, result: FakeDisk | Exception, name: str = "/somewhere") -> None:
        """Begin to open a directory, of which this is to come."""
        self.result = result
        self.tiers._begin_to_open(DiskSize(name, 2**30), self.tiering)

    def opened(self) -> None:
        """Let the thread do its work, and take in what it posts."""
        self.go.set()
        wait_until(lambda: self.calls)
        self.calls.pop()()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TiersRig]:
    made = TiersRig(tmp_path)
    yield made
    made.tiers._stopping = True
    made.saved.file.close(10.0)


def test_what_goes_wrong_inside_an_opening_is_a_problem_and_no_end(rig: TiersRig) -> None:
    rig.attach(RuntimeError("surprise"))
    rig.opened()
    assert [disk.state for disk in rig.tiers] == [DiskState.FAILED]
    assert "surprise" in next(rig.tiers.problems)[1]


def test_a_disk_that_hangs_does_not_delay_the_daemons_end(rig: TiersRig) -> None:
    rig.attach(disk := FakeDisk(hangs=True))
    rig.opened()
    assert "does not return" in next(rig.tiers.problems)[1]
    assert not rig.tiers.close(60.0), "its threads may still be in the pool"
    assert disk.closes == [0.0]


def test_what_is_cleared_does_not_come_with_a_directory_that_is_being_opened(rig: TiersRig) -> None:
    """A clear raises the generation of one namespace, or of all."""
    clears: tuple[tuple[Callable[[], object], set[bytes]], ...] = (
        (lambda: rig.saved.raise_generation(b"one"), {b"other"}),
        (rig.saved.raise_all, set()),
    )
    for clear, left in clears:
        rig.go.clear()
        rig.attach(disk := FakeDisk())
        clear()
        rig.opened()
        assert disk.names == left


def test_a_generation_that_was_forgotten_is_known_by_a_disk_and_all_else_is_older(rig: TiersRig) -> None:
    """As when the machine was started. What came up from another disk until then may be from before too."""
    space = rig.rig.open("one")
    rig.rig.store(space, keys_of(1, 2))
    disks = FakeDisk(), FakeDisk(generation=5)
    for number, disk in enumerate(disks):
        disk.names = {space.fingerprint}
        rig.attach(disk, f"/mnt/{number}")
        rig.opened()
    assert [disk.names for disk in disks] == [set(), {space.fingerprint}]
    assert (rig.saved.generation(space.fingerprint), space.generation, space.ready_blocks) == (5, 5, 0)
    rig.saved.raise_generation(space.fingerprint)
    rig.attach(disk := FakeDisk(generation=5), "/mnt/late")
    disk.names = {space.fingerprint}
    rig.opened()
    assert disk.names == set(), "what is raised after the loss is above all from before"


def test_a_disk_with_a_generation_of_the_future_is_void_with_all_else(rig: TiersRig) -> None:
    space = rig.rig.open("one")
    rig.rig.store(space, keys_of(1, 2))
    rig.attach(disk := FakeDisk(generation=2**61))
    disk.names = {space.fingerprint}
    rig.opened()
    assert (disk.names, space.ready_blocks) == (set(), 0)
    assert space.generation == rig.saved.generation(space.fingerprint) > 2**61


def test_what_was_spent_of_the_days_writes_is_known_to_the_next_daemon(tmp_path: Path) -> None:
    left = []
    for _ in range(2):
        rig = TiersRig(tmp_path, disk_write_bytes_per_day=8 << 20)
        budget = rig.tiering.disk_writer.budget
        left.append(budget.left_bytes)
        assert budget.take(1 << 18)
        rig.tiers.tick()
        assert rig.tiers.close(1.0)
        rig.saved.file.close(10.0)
    assert left == [1 << 20, pytest.approx((1 << 20) - (1 << 18), abs=1 << 12)]


@pytest.mark.parametrize(
    ("mode", "given", "per_day"), [("auto", None, 3 << 30), ("auto", 1 << 30, 1 << 30), ("always", None, 0)]
)
def test_a_days_writes_are_the_size_of_the_disks_beyond_their_first_filling(
    tmp_path: Path, mode: str, given: int | None, per_day: int
) -> None:
    sizes = tuple(DiskSize(f"/mnt/{number}", (number + 1) << 30) for number in range(2))
    rig = TiersRig(tmp_path, disk=sizes, disk_write=mode, disk_write_bytes_per_day=given)
    rig.attach(disk := FakeDisk())
    disk.lifetime_written_bytes = 1 << 29
    rig.opened()
    budget = rig.tiering.disk_writer.budget
    assert budget.first_filling_bytes == 1 << 29, "of the one that is open, as far as it was not written yet"
    assert budget.left_bytes == (per_day // 8 + (1 << 29) if per_day else None)
    rig.saved.file.close(10.0)


def test_errors_of_a_disk_are_a_problem_for_an_hour(rig: TiersRig) -> None:
    rig.attach(disk := FakeDisk())
    rig.opened()
    assert dict(rig.tiers.problems) == {}
    disk.errors = {"torn": 2, "not_direct": 1}
    rig.tiers.tick()
    assert "(2 torn)" in dict(rig.tiers.problems)["disk_errors"]
    for _ in range(64):  # the window moves in steps of three minutes
        rig.rig.clock.now += 60.0
        rig.tiers.tick()
    assert dict(rig.tiers.problems) == {}
