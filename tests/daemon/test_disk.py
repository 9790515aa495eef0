"""A disk below the pool: what left the pool comes back with its bytes, and what was dropped does not, whatever ends."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from kvoffd_client import AdminClient, GroupKeys, RequestRefused, SharedMemory
from kvoffd_client.testing import FakeEngine
from tests.daemon.refused_calls import refusing
from tests.kit.daemon import DaemonProcess
from tests.kit.require import missing, require
from tests.kit.waiting import wait_until
from tests.kit.wire import PAGE_BYTES as WIRE_PAGE_BYTES
from tests.kit.wire import Books, DiskStats, WireClient, books, invalidate, keys

PAGE_BYTES = 65536
SLOT_PAGE_BYTES = 4096
BATCH = 8
BLOCK_BYTES = 4 * PAGE_BYTES
IN_POOL = 32
"""Blocks that the pool can hold."""


def daemon_on(
    place: Path,
    size: str = "64MiB",
    directory: Path | None = None,
    environ: dict[str, str] | None = None,
    **flags: str,
) -> DaemonProcess:
    """A pool of 8 MiB over a disk that takes every block."""
    return DaemonProcess("8MiB", directory, environ=environ, disk=f"{place}={size}", disk_write="always", **flags)


def engine_on(daemon: DaemonProcess, world_size: int = 1, label: str = "demo") -> FakeEngine:
    return FakeEngine(daemon.directory, label, page_bytes=PAGE_BYTES // world_size, blocks=64, world_size=world_size)


def disk_of(daemon: DaemonProcess) -> DiskStats:
    (disk,) = books(daemon.directory).disks
    return disk


def wait_state(daemon: DaemonProcess, state: str) -> DiskStats:
    wait_until(lambda: disk_of(daemon).state == state, explain=lambda: disk_of(daemon))
    return disk_of(daemon)


@contextmanager
def running(daemon: DaemonProcess, world_size: int = 1) -> Iterator[FakeEngine]:
    """Start the daemon, and an engine once the disk serves; it runs on afterwards, without the engine."""
    daemon.start()
    wait_state(daemon, "serving")
    with engine_on(daemon, world_size) as engine:
        yield engine


def fill(daemon: DaemonProcess, engine: FakeEngine, blocks: int, seed: int = 0) -> dict[int, int]:
    """Store blocks 0 to ``blocks`` and wait until they are on disk; returns their checksums."""
    sums: dict[int, int] = {}
    before = books(daemon.directory).tiers.demoted_blocks
    for first in range(0, blocks, BATCH):
        numbers = range(first, first + BATCH)
        engine.fill(range(BATCH), seed=seed + first)
        sums.update(zip(numbers, engine.checksums(range(BATCH)), strict=True))
        assert engine.store(keys(*numbers), range(BATCH)).ok
        wait_until(lambda: books(daemon.directory).tiers.demoted_blocks >= before + len(sums))
    return sums


def load(engine: FakeEngine, *numbers: int) -> dict[int, int]:
    """Look up, load, and return the checksums of what came."""
    assert engine.lookup(keys(*numbers)) == len(numbers)
    blocks = range(32, 32 + len(numbers))
    assert engine.load(keys(*numbers), blocks).ok
    return dict(zip(numbers, engine.checksums(blocks), strict=True))


def of(sums: dict[int, int], *numbers: int) -> dict[int, int]:
    return {number: sums[number] for number in numbers}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose disk is at ``tmp_path``."""
    with daemon_on(tmp_path) as started:
        wait_state(started, "serving")
        yield started


@pytest.fixture(scope="module")
def module_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """What ``shared_daemon`` gives."""
    with daemon_on(tmp_path_factory.mktemp("disk")) as started:
        wait_state(started, "serving")
        yield started


# --- what comes back -------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_evicted_blocks_come_back(shared_daemon: DaemonProcess, world_size: int) -> None:
    daemon = shared_daemon
    with engine_on(daemon, world_size) as engine:
        promoted = books(daemon.directory).tiers.promoted_blocks
        sums = fill(daemon, engine, 3 * IN_POOL)
        for first in (0, 8, 40):
            numbers = range(first, first + BATCH)
            assert load(engine, *numbers) == of(sums, *numbers)
        found = books(daemon.directory)
        space = found.namespaces[engine.namespace.fingerprint]
        assert space.evicted_blocks >= 2 * IN_POOL, "or nothing came from the disk"
        assert space.asked_keys == 3 * BATCH
        assert found.tiers.promoted_blocks >= promoted + BATCH
        wait_until(lambda: disk_of(daemon).used_bytes == 3 * IN_POOL * BLOCK_BYTES)
        assert found.disks[0].physical_bytes <= found.disks[0].size_bytes
        assert found.health == "ok"


def test_blocks_outlive_the_pool(tmp_path: Path) -> None:
    """After SIGTERM and after kill -9; the pool itself is empty then."""
    with daemon_on(tmp_path) as daemon:
        wait_state(daemon, "serving")
        with engine_on(daemon) as engine:
            sums = fill(daemon, engine, 48)
        for end in (daemon.stop, daemon.kill):
            end()
            with running(daemon) as engine:
                assert books(daemon.directory).ready_bytes == 0
                assert load(engine, *range(BATCH)) == of(sums, *range(BATCH))


# --- what does not ---------------------------------------------------------------------------------


def test_dropped_blocks_stay_away(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        fill(daemon, engine, 48)
        engine.scheduler.invalidate([GroupKeys(0, keys(1)[0])])
        assert engine.lookup(keys(0, 1, 2)) == 1
        assert engine.lookup(keys(2)) == 1
        assert engine.scheduler.reset()
        assert engine.lookup(keys(2)) == 0
        sums = fill(daemon, engine, 48, seed=1000)
        assert load(engine, 2) == of(sums, 2), "the bytes from before the reset"
        assert admin.clear() >= 48
        assert engine.lookup(keys(40)) == 0
        wait_until(lambda: disk_of(daemon).blocks == 0)


def test_a_reset_takes_nothing_of_another_namespace(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with engine_on(daemon) as engine, engine_on(daemon, label="other") as other:
        sums = fill(daemon, other, 16)
        fill(daemon, engine, 48)
        assert engine.scheduler.reset()
        assert engine.lookup(keys(0)) == engine.lookup(keys(47)) == 0
        wait_until(lambda: disk_of(daemon).blocks == 16)
        assert load(other, *range(BATCH)) == of(sums, *range(BATCH))


DROPS: dict[str, Callable[[FakeEngine, AdminClient], object]] = {
    "reset": lambda engine, admin: engine.scheduler.reset(),
    "clear": lambda engine, admin: admin.clear(),
}


def test_a_kill_behind_the_answer_brings_nothing_back(daemon: DaemonProcess) -> None:
    for how, drop in DROPS.items():
        with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
            fill(daemon, engine, 48)
            assert drop(engine, admin), how
            daemon.kill()
        with running(daemon) as engine:
            assert engine.lookup(keys(0)) == disk_of(daemon).blocks == 0, how


@pytest.mark.parametrize("drop", ["clear", "invalidate"])
@pytest.mark.parametrize("state_too", [False, True])
def test_what_cannot_be_written_down_stays_away_once_it_can(daemon: DaemonProcess, state_too: bool, drop: str) -> None:
    """The kernel refuses writes to the disk, and where ``state_too`` to ``kvoffd.state``. Then both are mended."""
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        fill(daemon, engine, 48)
        limit = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (0 if state_too else WIRE_PAGE_BYTES, limit[1]))
        both = f"not noted yet in {daemon.directory}/kvoffd.state and /"
        with pytest.raises(RequestRefused, match=both) if state_too else nullcontext():
            if drop == "clear":
                admin.clear()
            else:
                invalidate(engine.scheduler, engine.namespace.fingerprint, keys(*range(48)))
        assert engine.lookup(keys(3)) == 0
        if state_too:
            resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limit)
            daemon.stop()
        else:
            daemon.kill()
    with running(daemon) as engine:
        assert engine.lookup(keys(3)) == 0
        sums = fill(daemon, engine, 16, seed=500)
    daemon.stop()
    with running(daemon) as engine:
        assert load(engine, 3) == of(sums, 3), "only what was there before is gone"


def test_clear_reaches_namespaces_that_nobody_opened(daemon: DaemonProcess) -> None:
    with engine_on(daemon) as engine:
        fill(daemon, engine, 16)
    daemon.stop()
    daemon.start()
    assert wait_state(daemon, "serving").blocks == 16
    with AdminClient(daemon.directory) as admin:
        assert admin.clear() == 16
    with engine_on(daemon) as engine:
        assert engine.lookup(keys(0)) == 0


def test_a_reset_holds_for_a_disk_that_was_absent(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As one that was not mounted; where systemd has a state directory, over a reboot too. What is stored after the
    reset stays."""
    environ = {"STATE_DIRECTORY": str(tmp_path_factory.mktemp("state"))}
    with daemon_on(tmp_path, environ=environ) as daemon:
        wait_state(daemon, "serving")
        with engine_on(daemon) as engine:
            fill(daemon, engine, 16)
        daemon.stop()
        disk = daemon.flags.pop("disk")
        daemon.start()
        with engine_on(daemon) as engine:
            assert engine.scheduler.reset()
        daemon.stop()
        for left in daemon.directory.iterdir():
            left.unlink()
        daemon.flags["disk"] = disk
        with running(daemon) as engine:
            assert engine.lookup(keys(*range(16))) == 0
            sums = fill(daemon, engine, 16, seed=500)
        daemon.stop()
        with running(daemon) as engine:
            assert load(engine, *range(BATCH)) == of(sums, *range(BATCH))


def test_a_reset_that_the_disk_missed_holds_for_an_older_copy(tmp_path: Path) -> None:
    """The disk is away over the reset, comes back, and then a copy of its file of before the reset is put back."""
    with daemon_on(tmp_path) as daemon:
        wait_state(daemon, "serving")
        with engine_on(daemon) as engine:
            fill(daemon, engine, 16)
        daemon.stop()
        copies = {file: file.read_bytes() for file in tmp_path.iterdir()}
        disk = daemon.flags.pop("disk")
        daemon.start()
        with engine_on(daemon) as engine:
            reset = engine.scheduler.reset()
        daemon.stop()
        daemon.flags["disk"] = disk
        with running(daemon) as engine:
            found_then = engine.lookup(keys(*range(16)))
            fill(daemon, engine, 16, seed=500)
        daemon.stop()
        with running(daemon):
            pass
        daemon.stop()
        for file, data in copies.items():
            file.write_bytes(data)
        with running(daemon) as engine:
            stale = engine.lookup(keys(*range(16)))
        assert (reset, found_then, stale) == (True, 0, 0)


# --- faults ----------------------------------------------------------------------------------------


def test_corrupt_bytes_are_a_miss_and_counted(daemon: DaemonProcess, tmp_path: Path, memory: SharedMemory) -> None:
    before = memory.view.tobytes()
    page = before[:WIRE_PAGE_BYTES]
    with WireClient(daemon.directory) as worker:
        worker.open_namespace()
        assert worker.store(worker.register(memory), keys(*range(BATCH)), list(range(BATCH))).ok
        wait_until(lambda: disk_of(daemon).blocks == BATCH)
    daemon.stop()
    file = tmp_path / "kvoffd.disk"
    content = file.read_bytes()
    assert content.count(page) == 1
    with file.open("r+b") as opened:
        opened.seek(content.index(page))
        opened.write(b"\0" * 100)
    daemon.start()
    wait_state(daemon, "serving")
    with WireClient(daemon.directory) as worker, WireClient(daemon.directory, "scheduler") as scheduler:
        worker.open_namespace()
        scheduler.open_namespace()
        memory.view[:] = 0
        cache, leases = worker.register(memory), iter(range(1, 100_000))
        wait_until(lambda: scheduler.lookup(next(leases), keys(*range(BATCH))).states == "-RRRRRRR")
        last = next(leases) - 1
        assert worker.load(cache, scheduler.lease(last), keys(*range(1, BATCH)), list(range(1, BATCH))).ok
        end = BATCH * WIRE_PAGE_BYTES
        assert memory.view.tobytes()[:end] == bytes(WIRE_PAGE_BYTES) + before[WIRE_PAGE_BYTES:end]
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
        wait_state(daemon, "serving")
        with engine_on(daemon) as engine:
            sums = fill(daemon, engine, 48)
            assert load(engine, *others) == of(sums, *others)
            assert ("[aio]" in Path(f"/proc/{daemon.pid}/maps").read_text()) is (call == "io_submit")
        daemon.kill()
        file = tmp_path / "kvoffd.disk"
        content = file.read_bytes()
        torn, cut = (content.index(*keys(number)) // SLOT_PAGE_BYTES * SLOT_PAGE_BYTES for number in (6, 10))
        with file.open("r+b") as opened:
            opened.seek(torn + BLOCK_BYTES)
            opened.write(bytes(SLOT_PAGE_BYTES))
        with running(daemon) as engine:
            os.truncate(file, cut + BLOCK_BYTES)
            assert engine.lookup(keys(*apart)) == 3
            assert load(engine, 0, 2, 4) == of(sums, 0, 2, 4)
            assert load(engine, 8) == of(sums, 8)
            assert [engine.lookup(keys(number)) for number in (6, 10, 12)] == [0, 0, 0]
        assert disk_of(daemon).errors == {"torn": 1, "short_read": 3}


def test_a_directory_of_no_use_costs_only_the_disk(tmp_path: Path) -> None:
    with daemon_on(tmp_path / "missing") as daemon, engine_on(daemon) as engine:
        assert "missing" in wait_state(daemon, "failed").problem
        engine.fill([0], seed=0)
        assert engine.store(keys(0), [0]).ok
        assert engine.lookup(keys(0)) == 1
        assert_degraded(books(daemon.directory))


def assert_degraded(found: Books) -> None:
    assert (found.health, list(found.problems)) == ("degraded", ["disk_failed"])


def test_two_daemons_do_not_write_one_disk(shared_daemon: DaemonProcess) -> None:
    daemon = shared_daemon
    with engine_on(daemon) as engine:
        sums = fill(daemon, engine, 48)
        with daemon_on(Path(disk_of(daemon).directory)) as second, engine_on(second) as other:
            assert "in use" in wait_state(second, "failed").problem
            assert_degraded(books(second.directory))
            other.fill([0], seed=77)
            assert other.store(keys(0), [0]).ok
            assert other.lookup(keys(0)) == 1
        assert load(engine, *range(BATCH)) == of(sums, *range(BATCH))


def test_a_full_file_system_costs_only_the_disk(tmp_path: Path) -> None:
    require("root", os.geteuid() == 0, "mounting a small file system needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        missing("root", f"no file system can be mounted: {mounted.stderr}")
    try:
        with daemon_on(tmp_path) as daemon, engine_on(daemon) as engine:
            assert "Make room" in wait_state(daemon, "failed").problem
            assert_degraded(books(daemon.directory))
            assert engine.store(keys(0), [0]).ok
            assert engine.lookup(keys(0)) == 1
    finally:
        subprocess.run(["umount", tmp_path], check=True)
