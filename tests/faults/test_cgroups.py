"""Limits of a container: a pool file that an earlier one left is charged to the pod, and huge pages are limited too."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.kit.checked import CheckedEngine
from tests.kit.command import run_daemon_here
from tests.kit.daemon import DaemonProcess
from tests.kit.linux import Cgroup, cgroup, run, tmpfs
from tests.kit.waiting import wait_until

MIB = 1 << 20
SOME = range(16)
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


def start_in(
    stack: ExitStack, pod: Cgroup, pool_size: str, pool_file: Path, limit_bytes: int = 1 << 40
) -> DaemonProcess:
    """A daemon, not started, in a container of its own."""
    container = stack.enter_context(pod.below())
    container.limit(limit_bytes)
    daemon = DaemonProcess(pool_size, pool_file=str(pool_file), before=container.enter)
    stack.callback(daemon.close)
    return daemon


def said_by(daemon: DaemonProcess) -> str:
    """What a daemon says that is refused."""
    daemon.start(wait=False)
    assert daemon.process.wait(60) == 2, daemon.log
    return daemon.log


def test_a_killed_daemon_starts_again_or_says_what_holds_the_memory(pool_file: Path) -> None:
    """Its pool stays charged to the pod. Without a sentence, the kernel would kill one start after the other."""
    with cgroup("memory") as pod, ExitStack() as stack:
        first = start_in(stack, pod, "64MiB", pool_file).start()
        with CheckedEngine(first) as engine:
            engine.put(SOME)
        first.kill()
        wait_until(lambda: pod.used_bytes < 90 * MIB, explain=lambda: pod.used_bytes)
        pod.limit(pod.used_bytes + 26 * MIB)
        said = said_by(start_in(stack, pod, "64MiB", pool_file))
        assert "The daemon needs 24.0 MiB to start, but only " in said
        assert f"or remove the pool file {pool_file}, which holds 6" in said
        pod.limit(160 * MIB)
        with CheckedEngine(start_in(stack, pod, "64MiB", pool_file).start(), engine.truth) as again:
            assert again.has(SOME)


def test_a_larger_pool_counts_only_what_its_own_container_gets_back(pool_file: Path) -> None:
    with cgroup("memory") as pod, ExitStack() as stack:
        start_in(stack, pod, "64MiB", pool_file).start().kill()
        assert "is limited to 140 MiB" in said_by(start_in(stack, pod, "128MiB", pool_file, 140 * MIB))
        assert pool_file.stat().st_size < 70 * MIB, "the old one is left as it was"


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs, and 16 MiB of huge pages that nobody has."""
    run("mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", tmp_path)
    before = HUGE_PAGES.read_text()
    try:
        HUGE_PAGES.write_text(str(int(before) + 8))
        if int(HUGE_PAGES.read_text()) < int(before) + 8:
            pytest.skip("the machine has no 8 huge pages left")
        yield tmp_path
    finally:
        run("umount", "-l", tmp_path)
        HUGE_PAGES.write_text(before)


def test_config_checks_no_other_memory_for_a_pool_of_huge_pages(tmp_path: Path) -> None:
    run("mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", tmp_path)
    try:
        for directory, status in ((tmp_path, 0), (Path("/dev/shm"), 2)):
            pool = ("--pool-size", "1000TiB", "--pool-file", f"{directory}/{tmp_path.name}.pool")
            ended = run_daemon_here("config", *pool, "--directory", str(tmp_path), KVOFFD_HTTP_ADDRESS="")
            assert ended.returncode == status, ended.stderr
    finally:
        run("umount", "-l", tmp_path)


def test_config_and_start_refuse_a_pool_file_for_the_same_reason(tmp_path: Path) -> None:
    """A small file system in memory, and one on a disk. Also if there is a file, as of a smaller pool."""
    with tmpfs(tmp_path / "small", "4m") as small, tempfile.NamedTemporaryFile(dir="/usr") as on_disk:
        old = small / "old.pool"
        old.touch(0o600)
        of_disk, of_small = "would lie on a disk", f"free space on {small}"
        for path, why in ((small / "p", of_small), (old, of_small), ("/usr/p", of_disk), (on_disk.name, of_disk)):
            pool = ("--pool-size", "8MiB", "--pool-file", str(path))
            ended = run_daemon_here("config", *pool, "--directory", str(tmp_path / "run"), KVOFFD_HTTP_ADDRESS="")
            assert ended.returncode == 2
            assert why in ended.stderr
            with closing(DaemonProcess("8MiB", pool_file=str(path))) as daemon:
                assert why in said_by(daemon)
        assert [*small.iterdir()] == [old]


def test_config_counts_what_a_pool_file_has(tmp_path: Path) -> None:
    """A start uses the pool again, though its file system is full of it."""
    with tmpfs(tmp_path / "small", "16m") as small:
        pool = small / "pool"
        with DaemonProcess("8MiB", pool_file=str(pool)) as daemon:
            daemon.stop()
        asked = ("--pool-size", "8MiB", "--pool-file", str(pool), "--directory", str(tmp_path / "run"))
        ended = run_daemon_here("config", *asked, KVOFFD_HTTP_ADDRESS="")
        assert ended.returncode == 0, ended.stderr


def test_a_limit_of_huge_pages_is_named(huge: Path) -> None:
    """And not their number, if there are enough."""
    with cgroup("hugetlb") as pod, ExitStack() as stack:
        assert "or raise vm.nr_hugepages." in said_by(start_in(stack, pod, "512MiB", huge / "pool"))
        pod.limit(4 * MIB)
        said = said_by(start_in(stack, pod, "8MiB", huge / "pool"))
        assert "raise a limit, since the machine has enough: hugetlb.2MB.max of the daemon's cgroup" in said
        pod.limit(16 * MIB)
        start_in(stack, pod, "8MiB", huge / "pool").start()
