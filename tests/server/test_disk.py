"""The disk tier in a real daemon: blocks that left the pool come back, and what is dropped does not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.tiers.disk.file_format import FILE_NAME
from kvoffd_client import AdminClient, BlockClient, BlockUnavailable, RequestRefused
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import events
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import key_list
from tests.kit.waiting import wait_until
from tests.server.test_kv_events import jobs_of, replay

DEADLINE_S = 30.0
PAGE = 65536
BATCH = 8
BLOCK_BYTES = 4 * PAGE


def daemon_on(place: Path, size: str = "64MiB", directory: Path | None = None, **flags: str) -> DaemonProcess:
    """A pool of 8 MiB, 32 blocks, over a disk that takes every block."""
    return DaemonProcess("8MiB", directory, disk=f"{place}={size}", **{"disk_write": "always", **flags})


def engine_on(daemon: DaemonProcess, world_size: int = 1) -> FakeEngine:
    return FakeEngine(daemon.directory, page_bytes=PAGE // world_size, blocks=64, world_size=world_size)


def serving(admin: AdminClient) -> None:
    wait_until(lambda: [disk.state for disk in admin.stats().disks] == ["serving"], DEADLINE_S)


def below(admin: AdminClient) -> m.TieringStats:
    found = admin.stats().below
    assert found is not None
    return found


def fill(engine: FakeEngine, admin: AdminClient, blocks: int) -> dict[int, int]:
    """Store blocks 0 to ``blocks`` and wait until they are on disk; returns their checksums."""
    sums: dict[int, int] = {}
    before = below(admin).written_blocks
    for first in range(0, blocks, BATCH):
        numbers = range(first, first + BATCH)
        engine.fill(range(BATCH), seed=first)
        sums.update(zip(numbers, engine.checksums(range(BATCH)), strict=True))
        assert engine.store(key_list(*numbers), range(BATCH)).ok
        wait_until(lambda: below(admin).written_blocks >= before + len(sums), DEADLINE_S)
    return sums


def loaded(engine: FakeEngine, numbers: range) -> list[int]:
    """Look up, load, and return the checksums of what came."""
    assert engine.lookup(key_list(*numbers)) == len(numbers)
    blocks = range(32, 32 + len(numbers))
    assert engine.load(key_list(*numbers), blocks).ok
    return engine.checksums(blocks)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_on(tmp_path) as running:
        yield running


@pytest.mark.parametrize("world_size", [1, 2])
def test_blocks_that_left_the_pool_come_back_with_equal_bytes(daemon: DaemonProcess, world_size: int) -> None:
    with engine_on(daemon, world_size) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        sums = fill(engine, admin, 96)
        for first in (0, 8, 40):
            numbers = range(first, first + BATCH)
            assert loaded(engine, numbers) == [sums[number] for number in numbers]
        stats = admin.stats()
        assert stats.namespaces[0].keys_pending >= BATCH
        assert stats.namespaces[0].keys_asked == 3 * BATCH
        assert below(admin).promoted_blocks >= BATCH
        assert stats.disks[0].used_bytes == 96 * BLOCK_BYTES
        assert stats.disks[0].physical_bytes <= stats.disks[0].size_bytes
        assert admin.health().healthy


def test_blocks_outlive_the_daemon_and_its_pool(tmp_path: Path) -> None:
    daemon = daemon_on(tmp_path)
    try:
        daemon.start()
        with AdminClient(daemon.directory) as admin:
            with engine_on(daemon) as engine:
                serving(admin)
                sums = fill(engine, admin, 48)
        for end in (daemon.stop, daemon.kill):
            end()
            daemon.start()
            with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
                serving(admin)
                assert admin.stats().pool.ready_bytes == 0
                assert loaded(engine, range(BATCH)) == [sums[number] for number in range(BATCH)]
    finally:
        daemon.close()


def test_what_is_put_and_finds_no_room_stays_on_disk(tmp_path: Path) -> None:
    with daemon_on(tmp_path, block_access="write", leased_share="1") as daemon, engine_on(daemon) as engine:
        with AdminClient(daemon.directory) as admin, BlockClient(daemon.directory) as desk:
            serving(admin)
            sums = fill(engine, admin, 48)
            (namespace,) = admin.namespaces().namespaces
            there = [info.key for info in desk.list_blocks(namespace.namespace)]
            held = desk.get_blocks(namespace.namespace, there)
            assert held[0] is not None
            with pytest.raises(BlockUnavailable, match="no room"):
                desk.put_block(namespace.namespace, key_list(0)[0], held[0].copy())
            for block in held:
                block.close()
            assert loaded(engine, range(1)) == [sums[0]]


def test_what_is_invalidated_or_reset_or_cleared_does_not_come_back(daemon: DaemonProcess) -> None:
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        fill(engine, admin, 48)
        engine.scheduler.invalidate([m.GroupKeys(0, key_list(1)[0])])
        assert engine.lookup(key_list(0, 1, 2)) == 1
        assert engine.lookup(key_list(2)) == 1
        assert engine.scheduler.reset()
        assert engine.lookup(key_list(2)) == 0
        fill(engine, admin, 48)
        wait_until(lambda: below(admin).written_blocks >= 96, DEADLINE_S)
        assert admin.clear() >= 48
        assert engine.lookup(key_list(40)) == 0
        wait_until(lambda: admin.stats().disks[0].blocks == 0, DEADLINE_S)


def test_what_was_removed_stays_away_after_a_kill_right_behind_the_answer(daemon: DaemonProcess) -> None:
    for how in ("reset", "clear"):
        with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
            serving(admin)
            fill(engine, admin, 48)
            assert engine.scheduler.reset() if how == "reset" else admin.clear() == 48
            daemon.kill()
        daemon.start()
        with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
            serving(admin)
            assert engine.lookup(key_list(0)) == admin.stats().disks[0].blocks == 0


def test_clearing_all_reaches_namespaces_that_nobody_has_opened_yet(tmp_path: Path) -> None:
    with daemon_on(tmp_path) as daemon:
        with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
            serving(admin)
            fill(engine, admin, 16)
        daemon.stop()
        daemon.start()
        with AdminClient(daemon.directory) as admin:
            serving(admin)
            assert admin.stats().disks[0].blocks == 16
            assert admin.clear() == 16
            with engine_on(daemon) as engine:
                assert engine.lookup(key_list(0)) == 0


def test_events_give_the_index_of_each_medium(daemon: DaemonProcess) -> None:
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        fill(engine, admin, 48)
        engine.scheduler.invalidate([m.GroupKeys(0, b"".join(key_list(3, 47)))])
        engine.lookup(key_list(0, 1))
        engine.release()
        index: dict[str | None, set[bytes]] = {events.MEDIUM_CPU: set(), events.MEDIUM_STORAGE: set()}
        for _, _, payload in replay(jobs_of(daemon), 0):
            for event in events.decode_event_batch(payload).events:
                if isinstance(event, events.AllBlocksCleared):
                    index = {medium: set() for medium in index}
                elif isinstance(event, events.BlockStored):
                    assert not index[event.medium] & set(event.block_hashes)
                    index[event.medium] |= set(event.block_hashes)
                else:
                    assert index[event.medium] >= set(event.block_hashes)
                    index[event.medium] -= set(event.block_hashes)
        assert index[events.MEDIUM_STORAGE] == set(key_list(*range(48))) - set(key_list(3, 47))
        assert len(index[events.MEDIUM_CPU]) == admin.stats().namespaces[0].ready_blocks
        assert set(key_list(0, 1)) <= index[events.MEDIUM_CPU]


def test_a_spoilt_file_is_a_miss_and_counted(daemon: DaemonProcess, tmp_path: Path) -> None:
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        sums = fill(engine, admin, 48)
        (file,) = tmp_path.iterdir()
        with file.open("r+b") as bytes_of:
            content = bytes_of.read()
            engine.fill([0], seed=0)
            # The first page of block 0 of the first batch, wherever it lies.
            at = content.index(engine._pages[0][0, 0].tobytes())
            bytes_of.seek(at)
            bytes_of.write(b"\0" * 100)
        assert engine.lookup(key_list(0)) == 0
        assert below(admin).failed_promotions == {"corrupt": 1}
        assert admin.stats().disks[0].errors == {"corrupt": 1}
        assert loaded(engine, range(1, 5)) == [sums[number] for number in range(1, 5)]
        health = admin.health()
        assert (health.level, health.ready) == (m.HealthLevel.DEGRADED, True), "lost blocks cost their recomputation"
        assert [cause.reason for cause in health.causes] == ["disk_errors"]
        assert "1 corrupt" in health.problems[0]
        assert admin.stats().health_problems == {"disk_errors": 1}


def test_a_directory_that_cannot_be_used_does_not_stop_the_daemon(tmp_path: Path) -> None:
    with daemon_on(tmp_path / "missing") as daemon:
        with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
            wait_until(lambda: [disk.state for disk in admin.stats().disks] == ["failed"], DEADLINE_S)
            engine.fill([0], seed=0)
            assert engine.store(key_list(0), [0]).ok
            assert engine.lookup(key_list(0)) == 1
            health = admin.health()
            assert not health.healthy
            assert "missing" in health.problems[0]
            assert main(["disk", "--directory", str(daemon.directory)]) == 1


def test_disks_come_and_go_while_the_daemon_serves(
    daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    where = ["--directory", str(daemon.directory)]
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        sums = fill(engine, admin, 16)
        assert main(["disk", "attach", f"{other}=32MiB", *where]) == 0
        assert main(["disk", "drain", str(tmp_path), *where]) == 0
        engine.fill(range(BATCH), seed=99)
        assert engine.store(key_list(*range(100, 108)), range(BATCH)).ok
        wait_until(lambda: admin.stats().disks[1].blocks == BATCH, DEADLINE_S)
        assert main(["disk", *where]) == 0
        page = capsys.readouterr().out
        for expected in (str(tmp_path), "draining", str(other), "serving", "16", "8"):
            assert expected in page
        assert main(["disk", "detach", str(tmp_path), *where]) == 0
        assert [disk.directory for disk in admin.stats().disks] == [str(other)]
        admin.clear()
        assert main(["disk", "attach", f"{tmp_path}=64MiB", *where]) == 0
        assert loaded(engine, range(BATCH)) == [sums[number] for number in range(BATCH)]
        with pytest.raises(RequestRefused, match="serving already"):
            admin.attach_disk(str(other), 2**26)
        with pytest.raises(RequestRefused, match="is not attached"):
            admin.detach_disk("/nowhere")
        assert main(["disk", "drain", "/nowhere", *where]) == 2
        assert "/nowhere is not attached; there are: " in capsys.readouterr().err
        assert admin.stats().errors == {}, "an operator's mistake is no error of the daemon"


def test_a_disk_that_was_away_while_its_blocks_became_stale_does_not_bring_them_back(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:
        serving(admin)
        fill(engine, admin, 16)
        admin.detach_disk(str(tmp_path))
        wait_until(lambda: not admin.stats().disks, DEADLINE_S)
        assert engine.scheduler.reset()
        admin.attach_disk(str(tmp_path), 2**26)
        serving(admin)
        assert engine.lookup(key_list(*range(16))) == 0
        wait_until(lambda: admin.stats().disks[0].blocks == 0, DEADLINE_S)
        # What is stored from now on is good, and stays over the next absence.
        sums = fill(engine, admin, BATCH)
        admin.detach_disk(str(tmp_path))
        wait_until(lambda: not admin.stats().disks, DEADLINE_S)
        admin.clear()
        admin.attach_disk(str(tmp_path), 2**26)
        serving(admin)
        assert loaded(engine, range(BATCH)) == [sums[number] for number in range(BATCH)]


@pytest.mark.parametrize("older", [True, False])
def test_an_older_copy_or_another_disk_in_a_disks_place_brings_nothing_back(
    daemon: DaemonProcess, tmp_path: Path, older: bool
) -> None:
    """Of a disk's file there was a backup, or two disks were mounted in each other's places."""
    other = tmp_path / "other"
    other.mkdir()
    stale, place = tmp_path / "stale", tmp_path if older else other
    with engine_on(daemon) as engine, AdminClient(daemon.directory) as admin:

        def detach(directory: Path) -> None:
            admin.detach_disk(str(directory))
            wait_until(lambda: not admin.stats().disks, DEADLINE_S)

        serving(admin)
        fill(engine, admin, 16)
        detach(tmp_path)
        shutil.copy(tmp_path / FILE_NAME, stale)
        admin.attach_disk(str(place), 2**26)
        serving(admin)
        assert engine.scheduler.reset()
        detach(place)
        os.replace(stale, place / FILE_NAME)
        admin.attach_disk(str(place), 2**26)
        serving(admin)
        assert engine.lookup(key_list(*range(16))) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be two users")
def test_only_root_and_the_daemons_user_change_the_disks(tmp_path: Path) -> None:
    with daemon_on(tmp_path, allowed_uids="0,65534") as daemon:
        os.chmod(daemon.directory, 0o755)
        for socket in daemon.directory.glob("*.sock"):
            os.chmod(socket, 0o666)
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setresuid(65534, 65534, 65534)
            with AdminClient(daemon.directory) as admin:
                try:
                    admin.detach_disk(str(tmp_path))
                except RequestRefused as refusal:
                    os._exit(7 if "root" in str(refusal) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_an_engine_that_dies_while_its_blocks_come_up_leaves_nothing(daemon: DaemonProcess) -> None:
    with AdminClient(daemon.directory) as admin:
        with engine_on(daemon) as engine:
            serving(admin)
            fill(engine, admin, 48)
            for _ in range(5):
                engine.scheduler.lookup([m.GroupKeys(0, b"".join(key_list(*range(8))))])
        wait_until(lambda: below(admin).pending_blocks == 0, DEADLINE_S)
        wait_until(lambda: admin.stats().pool.pinned_bytes == 0, DEADLINE_S)
        assert admin.stats().pool.writing_bytes == 0
        assert daemon.stop() == 0
