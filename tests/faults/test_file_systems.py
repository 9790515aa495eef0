"""File systems that become read-only, freeze or are full, below disks, logs and traces: reads go on, and health says
why."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.cases import case
from tests.kit.checked import CheckedEngine, Truth, over_disk, put_on_disk, wait_disk, wait_written
from tests.kit.command import command, start_cli
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import run, tmpfs
from tests.kit.require import require
from tests.kit.waiting import wait_until
from tests.kit.wire import books

BLOCKS = 64
ALL = range(BLOCKS)
E2FSCK_MENDED = 1
"""The exit status of e2fsck after it corrected errors (man e2fsck); above it, some are left."""


def mount(image: Path, place: Path) -> None:
    """An error makes it read-only, as on most systems."""
    run("mount", "-o", "loop,errors=remount-ro", image, place)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """The file of a file system, and where it is mounted."""
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    run("truncate", "--size=48M", image)
    run("mkfs.ext4", "-q", "-O", "^has_journal", image)
    mount(image, place)
    yield image, place
    subprocess.run(["umount", "-l", place], check=False, capture_output=True)


def test_a_read_only_disk_is_read_and_an_engines_reset_holds(ext4: tuple[Path, Path]) -> None:
    """Blocks are right, and what an engine resets stays away when the disk is mended."""
    image, place = ext4
    device = Path(run("findmnt", "-no", "SOURCE", place).strip()).name
    trigger = Path("/sys/fs/ext4", device, "trigger_fs_error")
    require("root", trigger.exists(), "this kernel has no trigger_fs_error")
    with over_disk(place, "4MiB") as daemon:
        wait_disk(daemon)
        with CheckedEngine(daemon) as engine:
            put_on_disk(daemon, engine, BLOCKS)
        daemon.stop()
        os.sync()
        daemon.start()
        assert wait_disk(daemon).blocks == BLOCKS
        trigger.write_text("x")
        with CheckedEngine(daemon, engine.truth) as engine:
            assert sum(len(engine.get(range(at, at + 16))) for at in range(0, BLOCKS, 16)) == BLOCKS
            engine.put(range(BLOCKS, BLOCKS + 128))
            wait_until(lambda: books(daemon.directory).health == "degraded", explain=lambda: books(daemon.directory))
            assert any("disk" in name for name in books(daemon.directory).problems)
            assert engine.scheduler.reset()
            engine.truth.drop()
            assert engine.get(ALL) == []
        daemon.kill()
        run("umount", place)
        # A copy: a mount namespace of another test may hold the first file system, which stays read-only until it ends.
        mended = Path(shutil.copy(image, image.with_name("mended")))
        assert subprocess.run(["e2fsck", "-fy", mended], capture_output=True, check=False).returncode <= E2FSCK_MENDED
        mount(mended, place)
        daemon.start()
        wait_disk(daemon)
        with CheckedEngine(daemon, engine.truth) as engine:
            assert engine.get(ALL) == []


def test_a_frozen_file_system_keeps_nobody_waiting(ext4: tuple[Path, Path]) -> None:
    """Stores and lookups of what is in the pool go on, and the writes when it thaws."""
    truth = Truth()
    _, place = ext4
    with over_disk(place) as daemon, CheckedEngine(daemon, truth) as engine:
        wait_disk(daemon)
        run("fsfreeze", "-f", place)
        try:
            end = time.monotonic() + 2.0
            engine.put(ALL)
            while time.monotonic() < end:
                assert engine.get(ALL, 5.0) == list(ALL)
            assert books(daemon.directory).tiers.written_blocks < BLOCKS
        finally:
            subprocess.run(["fsfreeze", "-u", place], check=False)
        wait_written(daemon, BLOCKS)
        assert engine.has(ALL)


def test_an_operator_has_the_patience_for_a_busy_disk_that_an_engine_has_not(ext4: tuple[Path, Path]) -> None:
    """A clear and a quota are answered once they are written down, which takes 3 s; an engine's reset fails sooner."""
    _, place = ext4
    with DaemonProcess("16MiB", environ={"STATE_DIRECTORY": str(place)}) as daemon, CheckedEngine(daemon) as engine:
        label = engine.namespace.label
        for words in (("clear", label, "--yes"), ("namespaces", "quota", label, "--max", "4MiB")):
            run("fsfreeze", "-f", place)
            thaws = threading.Timer(3.0, run, ("fsfreeze", "-u", place))
            thaws.start()
            try:
                with case(words[0]):
                    assert command(daemon, *words)[0] == 0
                    assert not thaws.is_alive() or thaws.finished.is_set(), "it was not written down yet"
            finally:
                thaws.join()
        run("fsfreeze", "-f", place)
        try:
            assert not engine.scheduler.reset()
        finally:
            run("fsfreeze", "-u", place)


def test_a_log_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    """A full device, a full file system and a closed pipe: the daemon serves, and ends in good order."""
    with tmpfs(tmp_path / "log", "4k") as place:
        for to in (">> /dev/full 2>&1", f">> {place}/log 2>&1", "&> >(exit 0)"):
            before = ["bash", "-c", f'exec "$@" {to}', "sh"]
            with case(to), DaemonProcess("16MiB", before=before) as daemon, CheckedEngine(daemon) as engine:
                engine.put(ALL)
                assert engine.has(ALL)
                assert daemon.stop() == 0


def test_a_record_onto_a_full_disk_says_what_is_in_it(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "full", "4k") as place, DaemonProcess("16MiB") as daemon:
        (place / "filler").write_bytes(bytes(4096))
        recording = start_cli("trace", "record", str(place / "trace"), "--directory", str(daemon.directory))
        with CheckedEngine(daemon) as engine:
            while recording.poll() is None:
                engine.put(range(8))
                engine.get(range(8))
        said = "".join(recording.communicate(timeout=60))
        assert recording.returncode == 2, said
        assert "Traceback" not in said
        assert "can be replayed" not in said
