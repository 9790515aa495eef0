"""Directories that hang, fail or come late: the daemon's thread never waits for them, and its end not for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvoffd.config import Config, DiskSize
from kvoffd.server import disks as disks_module
from kvoffd.server.admin_requests import clear
from kvoffd.server.background import Background
from kvoffd.server.context import Context
from kvoffd.server.disks import Disks
from kvoffd.server.engine_requests import invalidate
from kvoffd.server.recent import Recent
from kvoffd.server.service import Service
from kvoffd.tiers.disk.file import DiskError, OpeningStopped
from kvoffd.tiers.tier import TierBlock, TierKey, TierListener, TierStats
from kvoffd_proto.messages import Clear, GroupKeys, GroupSpec, Invalidate
from kvoffd_proto.tier_stats import DiskState
from tests.kit.cache_harness import CacheHarness, keys_of
from tests.kit.tiering_harness import FoldedTierEvents
from tests.kit.waiting import wait_until

SIZE = DiskSize("/somewhere", 2**30)


class FakeDisk:
    """As much of a DiskTier as Disks uses."""

    open_seconds, found_blocks, direct = 0.0, 0, True
    file_id, found_version, version = "file", 1, 1

    def __init__(self, hangs: bool = False, busy: int = 0) -> None:
        self.hangs = hangs
        self.busy = busy
        self.closes: list[float] = []
        self.names = {b"one", b"other"}
        """Namespaces that it has blocks of."""
        self.removed: set[TierKey] = set()
        self.kept = True
        """Whether that holds after a kill."""

    def stats(self) -> TierStats:
        return TierStats._make((2**30, *[0] * 11, self.busy, 0, 0.0, {}))

    def close(self, deadline_s: float) -> bool:
        self.closes.append(deadline_s)
        if self.hangs:
            time.sleep(deadline_s)
        return not self.hangs

    def tick(self) -> None:
        """Has nothing to do."""

    def groups(self) -> list[tuple[bytes, int]]:
        return [(name, 0) for name in self.names]

    def index(self, fingerprint: bytes, group: int) -> dict[bytes, TierBlock]:
        return {}

    def remove_namespace(self, fingerprint: bytes) -> int:
        self.names.discard(fingerprint)
        return 0

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        self.removed = set(block_ids)
        self.kept = False
        return len(self.removed)

    def removals_kept(self) -> Callable[[], bool]:
        return lambda: self.kept


class DisksRig:
    """Disks whose directories a test opens as it likes, in the threads that Disks makes for that."""

    def __init__(self, directory: Path) -> None:
        self.rig = CacheHarness()
        self.calls: list[Callable[[], None]] = []
        self.go = threading.Event()
        self.result: FakeDisk | Exception = FakeDisk()
        self.disks = Disks(
            Config(directory=directory),
            self.rig.cache,
            FoldedTierEvents(),
            self.rig.clock,
            self.open,  # type: ignore[arg-type]
            self.calls.append,
            lambda: False,
        )

    def open(self, size: DiskSize, listener: TierListener, should_stop: Callable[[], bool]) -> FakeDisk:
        while not self.go.wait(0.01):
            if should_stop():
                raise OpeningStopped("Told to stop.")
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def attach(self) -> None:
        self.disks.open(SIZE)

    def opened(self) -> None:
        """Let the thread do its work, and take in what it posts."""
        self.go.set()
        wait_until(lambda: self.calls)
        self.calls.pop()()

    def state(self) -> list[DiskState]:
        return [disk.state for disk in self.disks._disks.values()]


def no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[DisksRig]:
    made = DisksRig(tmp_path)
    yield made
    made.disks._stopping = True


def test_nothing_knows_of_tiers_before_the_first_directory(rig: DisksRig) -> None:
    assert rig.disks.tiering is None
    assert rig.rig.cache.blocks.tiering is None
    rig.attach()
    assert rig.state() == [DiskState.OPENING]
    rig.opened()
    assert rig.state() == [DiskState.SERVING]


def test_a_directory_that_fails_says_why(rig: DisksRig) -> None:
    rig.result = DiskError("It is full of water.")
    rig.attach()
    rig.opened()
    assert rig.disks.problems == [("disk_failed", "It is full of water. Restart the daemon to try it again.")]
    assert rig.state() == [DiskState.FAILED]


def test_what_goes_wrong_inside_an_opening_is_a_problem_and_no_end(rig: DisksRig) -> None:
    rig.result = RuntimeError("surprise")
    rig.attach()
    rig.opened()
    assert rig.state() == [DiskState.FAILED]
    assert "surprise" in rig.disks.problems[0][1]


def test_without_a_thread_to_open_it_a_directory_says_so(rig: DisksRig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        rig.attach()
    assert rig.state() == [DiskState.FAILED]
    assert "no more threads" in rig.disks.problems[0][1]
    assert rig.disks.close(0.0)


def test_a_disk_that_hangs_does_not_delay_the_daemons_end(rig: DisksRig) -> None:
    disk = rig.result = FakeDisk(hangs=True)
    rig.attach()
    rig.opened()
    assert "does not return" in rig.disks.problems[0][1]
    assert not rig.disks.close(60.0), "its threads may still be in the pool"
    assert disk.closes == [0.0]


def test_an_opening_that_hangs_does_not_delay_the_daemons_end(rig: DisksRig) -> None:
    stuck = threading.Event()
    rig.disks._open_disk = lambda *_: stuck.wait(60.0)  # type: ignore[assignment,return-value]
    rig.attach()
    begin = time.monotonic()
    assert rig.disks.close(60.0)
    assert time.monotonic() - begin < 30.0
    stuck.set()


def test_a_directory_that_opens_after_the_end_is_closed_again(rig: DisksRig) -> None:
    disk = FakeDisk()
    rig.result = disk
    rig.go.set()
    rig.attach()
    assert rig.disks.close(5.0)
    while rig.calls:
        rig.calls.pop()()
    assert disk.closes == [0.0]


def clear_by_operator(rig: DisksRig, namespace: bytes | None) -> Background:
    """The work that the request leaves."""
    if namespace is not None:
        rig.rig.cache.open_namespace(namespace, "one", 1, 8, [GroupSpec("full_attention", 16)], "{}")
    cache, disks = rig.rig.cache, rig.disks
    recent = Recent(cache, time.monotonic)
    context = SimpleNamespace(
        curve=SimpleNamespace(namespace_forgotten=lambda _: None),
        cache=cache,
        disks=disks,
        tiering=disks.tiering,
        recent=recent,
        epoch=1,
        sessions=[],
        clock=time.monotonic,
        background=Background(),
    )
    context.removal = partial(Context.removal, cast(Context, context))
    clear(context, SimpleNamespace(id=1, peer="somebody"), Clear(1, bytes(16), namespace))  # type: ignore[arg-type]
    return context.background


@pytest.mark.parametrize(("namespace", "left"), [(b"one", {b"other"}), (None, set())])
def test_what_is_cleared_does_not_come_with_a_directory_that_is_being_opened(
    rig: DisksRig, namespace: bytes | None, left: set[bytes]
) -> None:
    disk = rig.result = FakeDisk()
    rig.attach()
    work = clear_by_operator(rig, namespace)
    while len(work):
        work.step()
    rig.opened()
    assert disk.names == left


@pytest.mark.parametrize("comes", ["a directory", "an engine"])
def test_what_comes_while_all_is_cleared_brings_nothing_back(rig: DisksRig, comes: str) -> None:
    disk = rig.result = FakeDisk()
    rig.attach()
    spaces = [rig.rig.open(name) for name in ("one", "other")]
    for space in spaces:
        rig.rig.put(space, keys_of(1))
    disk.names = {space.fingerprint for space in spaces} | {b"late".ljust(32)}
    if comes == "an engine":
        rig.opened()
    work = clear_by_operator(rig, None)
    work.step()
    assert [space.ready_blocks for space in spaces] == [0, 1]
    if comes == "an engine":
        rig.rig.open("late")
    else:
        rig.opened()
    while len(work):
        work.step()
    assert disk.names == set()


def test_a_reset_on_all_nodes_reaches_who_has_the_name_of_a_namespace_that_was_forgotten_meanwhile(
    rig: DisksRig,
) -> None:
    cache = rig.rig.cache
    space = rig.rig.open()
    rig.rig.put(space, keys_of(1))
    clearing = cache.clear(space, keep_tiers=True)
    context = SimpleNamespace(cache=cache, disks=rig.disks, tiering=None)
    steps = Service._void(SimpleNamespace(context=context), space.fingerprint)  # type: ignore[arg-type]
    assert next(steps) is None
    assert list(clearing) == []
    cache.forget_namespace(space)
    again = rig.rig.open()
    rig.rig.put(again, keys_of(2))
    assert list(steps) == []
    assert again.held_blocks == 0


def test_an_engine_takes_from_a_directory_that_is_being_opened_what_it_invalidates(rig: DisksRig) -> None:
    disk = rig.result = FakeDisk()
    rig.attach()
    space, cache = rig.rig.open("one"), rig.rig.cache
    context = SimpleNamespace(
        cache=cache,
        disks=rig.disks,
        check_key_count=lambda namespace, groups: None,
        background=Background(),
        clock=time.monotonic,
        epoch=1,
    )
    context.removal = partial(Context.removal, cast(Context, context))
    session = SimpleNamespace(id=1, check_namespace=lambda name: None)
    groups = [GroupKeys(0, keys_of(1, 2))]
    invalidate(context, session, Invalidate(1, b"", space.fingerprint, groups))  # type: ignore[arg-type]
    rig.opened()
    assert len(disk.removed) == 2


def test_what_is_invalidated_does_not_come_with_a_directory_that_is_being_opened(
    rig: DisksRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks_module, "MOST_INVALIDATED", 4)
    space, disk = rig.rig.open("one"), FakeDisk()
    disk.names = {space.fingerprint}
    rig.result = disk
    rig.attach()
    rig.disks.invalidated(space, [GroupKeys(0, keys_of(1, 2)), GroupKeys(0, keys_of(2, 3))])
    kept = rig.disks.removals_kept()
    assert not kept()
    rig.opened()
    assert disk.removed == {TierKey(space.fingerprint, 0, keys_of(number)) for number in (1, 2, 3)}
    assert disk.names == {space.fingerprint}
    assert not kept()
    disk.kept = True
    assert kept()
    assert rig.disks.removals_kept()()


def test_where_very_much_is_invalidated_nothing_of_the_namespace_comes(
    rig: DisksRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks_module, "MOST_INVALIDATED", 4)
    space, disk = rig.rig.open("one"), FakeDisk()
    disk.names = {space.fingerprint, b"other"}
    rig.result = disk
    rig.attach()
    rig.disks.invalidated(space, [GroupKeys(0, keys_of(1, 2, 3))])
    rig.disks.invalidated(space, [GroupKeys(0, keys_of(4, 5))])
    rig.opened()
    assert disk.names == {b"other"}


def test_a_reset_reaches_a_directory_that_is_being_opened(rig: DisksRig) -> None:
    disk = rig.result = FakeDisk()
    rig.attach()
    rig.disks.namespace_reset(b"one")
    rig.opened()
    assert disk.names == {b"other"}


def test_a_directory_that_was_away_over_a_reset_and_a_restart_brings_nothing_back(
    rig: DisksRig, tmp_path: Path
) -> None:
    disk = FakeDisk()
    rig.disks.namespace_reset(b"one", everywhere=True)
    wait_until(rig.disks.removals_kept())
    for left in ({b"other"}, {b"one", b"other"}):
        again = DisksRig(tmp_path)
        again.result = disk
        again.attach()
        again.opened()
        assert disk.names == left
        wait_until(again.disks.removals_kept())
        disk.names = {b"one", b"other"}
