"""Directories that hang, fail or come late: the daemon's thread never waits for them, and its end not for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from kvoffd.config import Config, DiskSize
from kvoffd.pool.pool import Pool
from kvoffd.server.peer_places import PeerPlaces
from kvoffd.server.peers import Peers
from kvoffd.server.persistence import State, StateFile
from kvoffd.server.tier_supervisor import TierSupervisor, make_tiering
from kvoffd.tiering import TieringSettings, WriteMode
from kvoffd.tiers.disk import DiskTier
from kvoffd.tiers.header import make_block_group
from kvoffd.tiers.tier import TierListener
from kvoffd_proto.events import MEDIUM_STORAGE
from kvoffd_proto.stats import DiskState
from tests.kit.memory_disk import MemoryDisk, ReadsWithoutThreads, WorkersWithoutThreads, names_of
from tests.kit.slot_cache import CacheRig, FoldedEvents, keys_of
from tests.kit.tiering_harness import TieringHarness
from tests.kit.waiting import wait_until
from tests.tiers.disk_rig import ONE, OTHER, SIZE_BYTES, DiskRig, block_of


def disk_of(*fingerprints: bytes, generation: int = 0, written_bytes: int = 0) -> MemoryDisk:
    """A disk that has a block of each of these namespaces."""
    rig = DiskRig()
    for number, fingerprint in enumerate(fingerprints):
        rig.write(block_of(number, make_block_group(fingerprint, generation, 0, (12_000,))))
    rig.tier.counters.written_bytes += written_bytes
    assert rig.tier.close(1.0)
    return rig.files


def namespaces_on(disk: DiskTier) -> set[bytes]:
    return {group.fingerprint for group, _ in names_of(disk)}


class TiersRig:
    """Tiers whose directories a test opens as it likes, in the threads that are made for that."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.rig = CacheRig(16, 4)
        self.calls: list[Callable[[], None]] = []
        self.disk: DiskTier
        self.saved = State(StateFile(str(directory / "kvoffd.state"), 1 << 20))
        self.saved.restore()
        cache, clock, pool = self.rig.cache, self.rig.clock, cast(Pool, None)
        config, events = Config(**settings), FoldedEvents(MEDIUM_STORAGE)
        self.tiering = make_tiering(config, cache, events, clock, lambda: False, self.saved)
        self.tiers = TierSupervisor(config, self.tiering, cache, pool, clock, self.calls.append, self.saved)
        self.tiers.open_disk = self.open  # type: ignore[method-assign]

    def open(self, size: DiskSize, listener: TierListener) -> DiskTier:
        if isinstance(self._result, Exception):
            raise self._result
        self.disk = DiskTier(
            Path("/"),
            SIZE_BYTES,
            pool=memoryview(bytearray(4096)),
            clock=self.rig.clock,
            post=deque[object]().append,
            listener=listener,
            generation=self.saved.generations.of,
            calls=self._result,
            make_reads=ReadsWithoutThreads,
            make_workers=WorkersWithoutThreads,
        )
        return self.disk

    def attach(self, result: MemoryDisk | Exception, name: str = "/somewhere") -> None:
        """Have a thread read a directory, in which there is this. The daemon hears of it by ``opened``."""
        self._result = result
        self.tiers._begin_to_open(DiskSize(name, 2**30), self.tiering)
        wait_until(lambda: self.calls)

    def opened(self) -> DiskTier:
        self.calls.pop()()
        return self.disk


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TiersRig]:
    made = TiersRig(tmp_path)
    yield made
    made.saved.file.close(10.0)


def test_what_goes_wrong_inside_an_opening_is_a_problem_and_no_end(rig: TiersRig) -> None:
    rig.attach(RuntimeError("surprise"))
    rig.calls.pop()()
    assert [disk.state for disk in rig.tiers.disks] == [DiskState.FAILED]
    assert "surprise" in next(rig.tiers.problems)[1]


def test_a_disk_that_hangs_does_not_delay_the_daemons_end(rig: TiersRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.attach(disk_of())
    disk, closes = rig.opened(), list[float]()
    disk.hangs = True
    monkeypatch.setattr(disk, "close", closes.append)
    assert "does not return" in next(rig.tiers.problems)[1]
    assert not rig.tiers.close(60.0), "its threads may still be in the pool"
    assert closes == [0.0]


@pytest.mark.parametrize("fails", ["tiering", "disk"])
def test_what_fails_to_close_keeps_no_disk_from_being_closed(
    rig: TiersRig, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object) -> bool:
        raise LookupError("a bug")

    disks = []
    for number in range(3):
        rig.attach(disk_of(), f"/mnt/{number}")
        disks.append(rig.opened())
    if fails == "disk":
        monkeypatch.setattr(disks.pop(0), "close", fail)
    else:
        monkeypatch.setattr(rig.tiering, "stop", fail)
    with pytest.raises(LookupError, match="a bug"):
        rig.tiers.close(60.0)
    assert [disk.available() for disk in disks] == [False] * len(disks)


def test_what_is_cleared_does_not_come_with_a_directory_that_is_being_opened(rig: TiersRig) -> None:
    """A clear raises the generation of one namespace, or of all."""
    clears: tuple[tuple[Callable[[], object], set[bytes]], ...] = (
        (lambda: rig.saved.generations.void_here(ONE), {OTHER}),
        (lambda: rig.saved.generations.void_here(None), set()),
    )
    for clear, left in clears:
        rig.attach(disk_of(ONE, OTHER, generation=rig.saved.generations.of(ONE)))
        clear()
        assert namespaces_on(rig.opened()) == left


def test_a_generation_that_was_forgotten_is_known_by_a_disk_and_all_else_is_older(rig: TiersRig) -> None:
    """As when the machine was started. What came up from another disk until then may be from before too."""
    space = rig.rig.open("one")
    rig.rig.store(space, keys_of(1, 2))
    disks = []
    for generation in (0, 5):
        rig.attach(disk_of(space.fingerprint, generation=generation), f"/mnt/{generation}")
        disks.append(rig.opened())
    assert list(map(namespaces_on, disks)) == [set(), {space.fingerprint}]
    assert (rig.saved.generations.of(space.fingerprint), space.generation, space.ready_blocks) == (5, 5, 0)
    rig.attach(disk_of(space.fingerprint, generation=5), "/mnt/late")
    rig.saved.generations.void_here(space.fingerprint)
    assert namespaces_on(rig.opened()) == set(), "what is raised after the loss is above all from before"


def test_blocks_written_since_a_disk_was_opened_go_when_another_disk_knows_a_later_reset(rig: TiersRig) -> None:
    space = rig.rig.open("one")
    rig.attach(disk_of(), "/mnt/empty")
    first = rig.opened()
    assert first.write(block_of(1, make_block_group(space.fingerprint, 0, 0, (1,))), [0], lambda result: None)
    cast(WorkersWithoutThreads, first._writes).work()
    first._writes._deliver()
    assert namespaces_on(first) == {space.fingerprint}
    rig.attach(disk_of(space.fingerprint, generation=5), "/mnt/late")
    assert namespaces_on(rig.opened()) == {space.fingerprint}
    assert namespaces_on(first) == set()


def test_a_disk_with_a_generation_of_the_future_is_void_with_all_else(rig: TiersRig) -> None:
    space = rig.rig.open("one")
    rig.rig.store(space, keys_of(1, 2))
    rig.attach(disk_of(space.fingerprint, generation=2**61))
    assert namespaces_on(rig.opened()) == set()
    assert space.ready_blocks == 0
    assert space.generation == rig.saved.generations.of(space.fingerprint) > 2**61


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
    rig.attach(disk_of(written_bytes=1 << 29))
    rig.opened()
    budget = rig.tiering.disk_writer.budget
    assert budget.first_filling_bytes == 1 << 29, "of the one that is open, as far as it was not written yet"
    assert budget.left_bytes == (per_day // 8 + (1 << 29) if per_day else None)
    rig.saved.file.close(10.0)


def test_errors_of_a_disk_are_a_problem_for_an_hour(rig: TiersRig) -> None:
    rig.attach(disk_of())
    disk = rig.opened()
    assert dict(rig.tiers.problems) == {}
    disk.counters.errors.update({"torn": 2, "not_direct": 1})
    rig.tiers.tick()
    assert "(2 torn)" in dict(rig.tiers.problems)["disk_errors"]
    for _ in range(64):  # the window moves in steps of three minutes
        rig.rig.clock.now += 60.0
        rig.tiers.tick()
    assert dict(rig.tiers.problems) == {}


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("node-b", "peer://Node-B:7400"),
        ("NODE-b", "peer://Node-B:7400"),
        ("fd00::1", "peer://[fd00::1]:7400"),
        ("[FD00::1]", "peer://[fd00::1]:7400"),
        ("node-c", ""),
        ("FD00::2", "peer://[fd00::2]:7400"),
        ("fd00::2%!", ""),
        ("10.0.0.1", ""),
        ("10.0.0.2", "peer://10.0.0.2:7500"),
    ],
)
def test_a_peer_is_found_by_its_host_however_it_is_written(host: str, peer: str) -> None:
    configured = SimpleNamespace(_single=[("node-b", "Node-B:7400"), ("fd00::1", "[fd00::1]:7400")])
    configured.networks = {"[fd00::/8]:7400": (ip_network("fd00::/8"), 7400)}
    listed = {"10.0.0.2": "10.0.0.2:7500"}
    configured.places = SimpleNamespace(
        find=lambda host: listed.get(host, ""), give=lambda address, **_: f"peer://{address}"
    )
    assert Peers.at(cast(Any, configured), host) == peer


def test_a_place_knows_nothing_of_the_peer_that_had_it_before() -> None:
    """Neither its speed nor what it failed at: the next one is read as if it were the first."""
    quiet = TieringSettings(mode=WriteMode.NEVER)
    rig = TieringHarness(settings=quiet)
    tier = rig.share(quiet, "peer://slow:7400")
    tier.idle, tier.become = True, partial(setattr, tier, "name")  # type: ignore[attr-defined]
    replace = partial(rig.tiering.replace_source, settings=quiet)
    places = PeerPlaces(MagicMock(has_reads=lambda number: False), [], [], replace, rig.clock)
    places.add(0, cast(Any, tier), rig.tiering.sources[-1])
    (place,) = places._places
    place.source.reads.speed.measured, place.source.failures["overdue"] = 1.0, 3
    place.source.promoted_blocks, rig.tiering._origins._source_of[3] = 7, len(rig.tiering.sources)
    assert places.give("fast:7400", only_named=True) == "peer://fast:7400"
    assert rig.tiering.sources[-1] is place.source
    assert (place.source.tier.name, place.source.reads.speed.measured) == ("peer://fast:7400", 0.0)
    assert (place.source.failures, place.source.promoted_blocks) == ({}, 0)
    assert not rig.tiering._origins._source_of.any(), "its blocks do not count as unused ones of the new peer"
