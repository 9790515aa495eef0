"""What the comparison says is what was measured. LMCache is not needed for these."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.cpu_time import OthersShare, process_cpu_s
from tests.bench.peers.play_kvoffd import KvoffdPlayer
from tests.bench.peers.player import Geometry
from tests.bench.peers.servers import KvoffdServer, ServerFailed
from tests.bench.peers.table import Row, table
from tests.bench.report_file import number
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[3]
BURN = "import time; end = time.perf_counter() + {seconds}\nwhile time.perf_counter() < end: pass"


def test_a_ratio_above_one_means_that_kvoffd_was_better() -> None:
    times = Row("lookup", "ms", [1.0, 2.0, 1.0], [4.0, 4.0, 8.0])
    speeds = Row("store", "GB/s", [8.0, 6.0, 6.0], [4.0, 6.0, 12.0], more_is_better=True)
    assert times.ratios == [4.0, 2.0, 8.0]
    assert speeds.ratios == [2.0, 1.0, 0.5]
    assert times.to_object()["ratio"] == 4.0
    assert speeds.cells()[4] == "1.00 (0.500 to 2.00)"


def test_the_table_shows_medians_and_leaves_out_floors_that_do_not_exist() -> None:
    lines = table([Row("a", "ms", [1.0, 9.0, 2.0], [3.0] * 3, [0.5] * 3), Row("b", "MiB", [1.0], [2.0])]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[3:7]] == [
        "2.00",
        "3.00",
        "1.50 (0.333 to 3.00)",
        "0.500 (0.500 to 0.500)",
    ]
    assert lines[3].split("|")[6].strip() == ""


def test_numbers_have_as_many_digits_as_can_be_trusted() -> None:
    assert [number(value) for value in (1234.5, 12.34, 1.234, 0.01234)] == ["1,234", "12.3", "1.23", "0.012"]


def test_the_cpu_clock_of_another_process_runs_while_it_works() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN.format(seconds=30)]) as busy:
        try:
            wait_until(lambda: process_cpu_s(busy.pid) >= 0.05, 30)
        finally:
            busy.kill()


def test_children_are_not_others() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN.format(seconds=30)]) as busy:
        try:
            begin, used_before, child_before = time.monotonic(), machine_cpu_s(), process_cpu_s(busy.pid)
            with OthersShare() as others:
                inside = time.perf_counter()
                while process_cpu_s(busy.pid) < child_before + 0.3:
                    assert time.monotonic() < begin + 30
                seconds = time.perf_counter() - inside
            used = machine_cpu_s() - used_before
            assert others.share * seconds * (os.cpu_count() or 1) <= used - 0.25
        finally:
            busy.kill()


def machine_cpu_s() -> float:
    """What all processes have used, idling and waiting left out."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def test_a_server_starts_and_is_gone() -> None:
    with KvoffdServer("64MiB") as server:
        pid, directory = server.pid, server.directory
    assert not directory.exists()
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_that_does_not_start_says_why() -> None:
    server = KvoffdServer("1000TiB")
    with pytest.raises(ServerFailed, match="pool"), server:
        pass
    assert not server.directory.exists()


def test_without_lmcache_the_comparison_says_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.peers", "--lmcache-python", str(tmp_path / "python")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert "make bench-peers" in run.stderr


def test_kvoffds_player_copies_what_it_says(daemon: DaemonProcess) -> None:
    player = KvoffdPlayer(daemon.directory, daemon.pid)
    try:
        for page_bytes in (4096, 8192):  # one geometry after the other, as in the comparison
            player.open(Geometry(layers=2, blocks=20, page_bytes=page_bytes))
            player.verify(16)
            stored, loaded = player.copies(list(range(1, 9)))
            assert stored.seconds > 0
            assert loaded.seconds > 0
    finally:
        player.close()
