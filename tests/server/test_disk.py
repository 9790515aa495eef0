"""Disks that are attached and detached while a daemon runs: what was dropped meanwhile does not come back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd.tiers.disk.file_format import FILE_NAME
from kvoffd_client import AdminClient, RequestRefused
from kvoffd_client.cli import main
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import messages as m
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until
from tests.kit.wire import keys

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
        assert engine.store(keys(*numbers), range(BATCH)).ok
        wait_until(lambda: below(admin).written_blocks >= before + len(sums), DEADLINE_S)
    return sums


def loaded(engine: FakeEngine, numbers: range) -> list[int]:
    """Look up, load, and return the checksums of what came."""
    assert engine.lookup(keys(*numbers)) == len(numbers)
    blocks = range(32, 32 + len(numbers))
    assert engine.load(keys(*numbers), blocks).ok
    return engine.checksums(blocks)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon_on(tmp_path) as running:
        yield running


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
        assert engine.store(keys(*range(100, 108)), range(BATCH)).ok
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
        assert engine.lookup(keys(*range(16))) == 0
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
        assert engine.lookup(keys(*range(16))) == 0


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
