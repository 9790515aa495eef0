"""A disk below the pool: what left the pool comes back with its bytes, and what was dropped does not, whatever ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvoffd_client import AdminClient, GroupKeys
from tests.daemon.refused_calls import refusing
from tests.kit.checked import (
    STEP,
    CheckedEngine,
    Truth,
    disk_of,
    over_disk,
    overwrite,
    places_of,
    put_on_disk,
    wait_disk,
)
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import tmpfs
from tests.kit.waiting import wait_until
from tests.kit.wire import books, keys

BLOCK_BYTES = 65536
IN_POOL = 32
"""Blocks that the pool can hold."""
SOME = range(8)


def daemon_on(place: Path, **given: Any) -> DaemonProcess:
    return over_disk(place, "2MiB", "16MiB", **given)


@contextmanager
def running(daemon: DaemonProcess, truth: Truth | None = None) -> Iterator[CheckedEngine]:
    """Start the daemon, and an engine once the disk serves; it runs on afterwards, without the engine."""
    daemon.start()
    wait_disk(daemon)
    with CheckedEngine(daemon, truth) as engine:
        yield engine


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose disk is at ``tmp_path``."""
    with daemon_on(tmp_path) as started:
        wait_disk(started)
        yield started


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with daemon_on(tmp_path_factory.mktemp("disk")) as started:
        wait_disk(started)
        yield started


# --- what comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_evicted_blocks_come_back(shared_daemon: DaemonProcess, world_size: int) -> None:
    daemon = shared_daemon
    with CheckedEngine(daemon, world_size=world_size, page_bytes=BLOCK_BYTES // world_size) as engine:
        promoted = books(daemon.directory).tiers.promoted_blocks
        put_on_disk(daemon, engine, 3 * IN_POOL)
        for first in (0, 8, 40):
            assert engine.has(range(first, first + 8))
        found = books(daemon.directory)
        space = found.namespaces[engine.namespace.fingerprint]
        assert space.evicted_blocks >= 2 * IN_POOL, "or nothing came from the disk"
        assert space.asked_keys == 3 * 8
        assert found.tiers.promoted_blocks >= promoted + 8
        wait_until(lambda: disk_of(daemon).used_bytes == 3 * IN_POOL * BLOCK_BYTES)
        assert found.disks[0].physical_bytes <= found.disks[0].size_bytes
        assert found.health == "ok"


def test_a_full_disk_stays_within_its_size(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Its file and its index, with 32 MiB of blocks for 16 MiB."""
    with CheckedEngine(daemon) as engine:
        for first in range(0, 512, 16):
            engine.put(range(first, first + 16))
            wait_until(lambda: not books(daemon.directory).tiers.writes_waiting)
        found = books(daemon.directory).disks[0]
        assert found.evicted_blocks > 0
        assert found.used_bytes <= found.size_bytes == 16 << 20
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 17 << 20
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) <= 17 << 20


def test_blocks_outlive_the_pool(daemon: DaemonProcess) -> None:
    """After SIGTERM and after kill -9; the pool itself is empty then."""
    with CheckedEngine(daemon) as engine:
        put_on_disk(daemon, engine, 48)
    for end in (daemon.stop, daemon.kill):
        end()
        with running(daemon, engine.truth) as engine:
            assert books(daemon.directory).ready_bytes == 0
            assert engine.has(SOME)


@pytest.mark.parametrize("policy", ["learned", "lru"])
def test_a_disk_with_space_takes_whole_conversations(tmp_path: Path, policy: str) -> None:
    """By the defaults, with all of them several times the pool, whatever part of it each has."""
    for part, (count, blocks) in {"a third": (6, 21), "a tenth": (14, 6), "3 %": (45, 2)}.items():
        place = tmp_path / part
        place.mkdir()
        with (
            DaemonProcess("4MiB", disk=f"{place}=32MiB", eviction_policy=policy) as daemon,
            CheckedEngine(daemon) as engine,
        ):
            wait_disk(daemon)
            for time in range(3):
                for first in range(0, STEP * count, STEP):
                    conversation = range(first, first + blocks)
                    if not time:
                        engine.put(conversation)
                        wait_until(lambda: not books(daemon.directory).tiers.writes_waiting)  # while others compute
                    else:
                        assert engine.has(conversation), f"{part}, asked for again"
            assert books(daemon.directory).tiers.written_blocks == count * blocks


# --- what does not ---------------------------------------------------------------------------------


def test_dropped_blocks_stay_away(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with CheckedEngine(daemon) as engine, AdminClient(daemon.directory) as admin:
        put_on_disk(daemon, engine, 48)
        engine.scheduler.invalidate([GroupKeys(0, keys(1)[0])])
        engine.truth.drop([1])
        assert engine.get([0, 1, 2]) == [0, 2]
        assert engine.scheduler.reset()
        engine.truth.drop()
        assert engine.get([2]) == []
        put_on_disk(daemon, engine, 48)
        assert engine.has([2]), "not the bytes from before the reset"
        assert admin.clear() >= 48
        assert engine.lookup(keys(40)) == 0
        wait_until(lambda: disk_of(daemon).blocks == 0)


def test_a_reset_takes_nothing_of_another_namespace(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with CheckedEngine(daemon) as engine, CheckedEngine(daemon, namespace="other") as other:
        other.truth.version = 7
        put_on_disk(daemon, other, 16)
        put_on_disk(daemon, engine, 48)
        assert engine.scheduler.reset()
        assert engine.lookup(keys(0)) == engine.lookup(keys(47)) == 0
        wait_until(lambda: disk_of(daemon).blocks == 16)
        assert other.has(SOME)


def test_clear_reaches_namespaces_that_nobody_opened(daemon: DaemonProcess) -> None:
    with CheckedEngine(daemon) as engine:
        put_on_disk(daemon, engine, 16)
    daemon.stop()
    daemon.start()
    assert wait_disk(daemon).blocks == 16
    with AdminClient(daemon.directory) as admin:
        assert admin.clear() == 16
    with CheckedEngine(daemon) as engine:
        assert engine.lookup(keys(0)) == 0


def test_a_reset_holds_for_a_disk_that_was_absent(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As one that was not mounted; where systemd has a state directory, over a reboot too. What is stored after the
    reset stays, until a copy of the disk of before the reset is put back: nothing of that is found."""
    environ = {"STATE_DIRECTORY": str(tmp_path_factory.mktemp("state"))}
    with daemon_on(tmp_path, environ=environ) as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            put_on_disk(daemon, engine, 16)
        daemon.stop()
        copies = {file: file.read_bytes() for file in tmp_path.iterdir()}
        disk = daemon.flags.pop("disk")
        daemon.start()
        with CheckedEngine(daemon) as engine:
            assert engine.scheduler.reset()
            engine.truth.version += 1
        daemon.stop()
        for left in daemon.directory.iterdir():
            left.unlink()
        daemon.flags["disk"] = disk
        with running(daemon, engine.truth) as engine:
            assert engine.get(range(16)) == []
            put_on_disk(daemon, engine, 16)
        daemon.stop()
        with running(daemon, engine.truth) as engine:
            assert engine.has(SOME)
        daemon.stop()
        for file, data in copies.items():
            file.write_bytes(data)
        with running(daemon) as engine:
            assert engine.get(range(16)) == []


# --- faults ----------------------------------------------------------------------------------------


def test_corrupt_bytes_are_a_miss_and_counted(daemon: DaemonProcess, tmp_path: Path) -> None:
    with CheckedEngine(daemon) as engine:
        put_on_disk(daemon, engine, 8)
    daemon.stop()
    (place,) = places_of(tmp_path / "kvoffd.disk", [engine.truth[0]])
    overwrite(tmp_path / "kvoffd.disk", place, bytes(100))
    with running(daemon, engine.truth) as engine:
        assert engine.get(SOME) == [*range(1, 8)]
    found = books(daemon.directory)
    assert found.tiers.promotions_failed == {"corrupt": 1}
    assert found.disks[0].errors == {"corrupt": 1}
    assert (found.health, found.problems) == ("degraded", {"disk_errors": 1})


@pytest.mark.parametrize("call", ["io_setup", "io_submit"])
def test_where_the_kernel_reads_nothing_asynchronously_blocks_are_read_one_after_another(
    tmp_path: Path, call: str
) -> None:
    """Of blocks that are asked for together one is torn, and one and those behind it cannot be read."""
    apart, others = range(0, 16, 2), range(1, 16, 2)  # neighbours are one read
    with daemon_on(tmp_path, before=refusing(errno.EAGAIN, call)) as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            put_on_disk(daemon, engine, 48)
            assert engine.has(others)
            assert ("[aio]" in Path(f"/proc/{daemon.pid}/maps").read_text()) is (call == "io_submit")
        daemon.kill()
        file = tmp_path / "kvoffd.disk"
        (torn,), (cut,) = (places_of(file, [engine.truth[number]]) for number in (6, 10))
        overwrite(file, torn + BLOCK_BYTES - 4096, bytes(4096))
        with running(daemon, engine.truth) as engine:
            os.truncate(file, cut + BLOCK_BYTES - 4096)
            assert engine.lookup(keys(*apart)) == 3
            assert engine.has([0, 2, 4])
            assert engine.has([8])
            assert [engine.lookup(keys(number)) for number in (6, 10, 12)] == [0, 0, 0]
        assert disk_of(daemon).errors == {"torn": 1, "short_read": 3}


def assert_fails_and_the_pool_serves(daemon: DaemonProcess, why: str) -> None:
    with CheckedEngine(daemon) as engine:
        assert why in wait_disk(daemon, "failed").problem
        found = books(daemon.directory)
        assert (found.health, list(found.problems)) == ("degraded", ["disk_failed"])
        engine.put([0])
        assert engine.has([0])


def test_an_unusable_directory_costs_only_an_optional_disk(tmp_path: Path) -> None:
    with daemon_on(tmp_path / "missing", disk_start="optional") as daemon:
        assert_fails_and_the_pool_serves(daemon, "missing")


def test_a_full_file_system_costs_only_the_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "full", "4m") as place, daemon_on(place, disk_start="optional") as daemon:
        assert_fails_and_the_pool_serves(daemon, "Free space")


def test_two_daemons_do_not_write_one_disk(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with CheckedEngine(daemon) as engine:
        put_on_disk(daemon, engine, 48)
        with daemon_on(Path(disk_of(daemon).directory)) as second:
            assert_fails_and_the_pool_serves(second, "in use")
        assert engine.has(SOME)
