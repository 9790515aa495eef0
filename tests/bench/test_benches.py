"""Every bench, in miniature, against a real daemon."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvoffd_client import AdminClient
from kvoffd_client.bench import PAGE_BYTES, SHARED_BLOCKS
from kvoffd_client.bench.copy_bench import bench_copy
from kvoffd_client.bench.fairness import bench_fairness
from kvoffd_client.bench.message_bench import STORE_KEYS, bench_jobs, bench_lookup
from kvoffd_client.bench.results import BenchFailed, Report
from kvoffd_client.bench.shared_bench import bench_shared
from kvoffd_client.bench.synthetic_engine import SyntheticEngine
from kvoffd_client.cli.bench_commands import run_bench
from kvoffd_client.cli.target import CliError
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.redis_server import RedisServer
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.nightly

KIB, MIB = 2**10, 2**20
DEADLINE_S = 10.0


def quiet(_: str) -> None: ...


def small_lookup(daemon: DaemonProcess) -> Report:
    return bench_lookup(
        daemon.directory, quiet, key_counts=(1, 1_000), rounds=3, samples=20, engines=1, clients=2, seconds=0.2
    )


def small_copy(daemon: DaemonProcess) -> Report:
    return bench_copy(daemon.directory, quiet, piece_sizes=(16 * KIB, 64 * KIB), job_bytes=8 * MIB, rounds=3)


def small_jobs(daemon: DaemonProcess) -> Report:
    return bench_jobs(daemon.directory, quiet, rounds=3, samples=20, in_flight=8, sequences=32, ranks=2, engines=1)


@pytest.mark.parametrize(("bench", "cases"), [(small_lookup, 12), (small_copy, 10), (small_jobs, 19)])
def test_a_bench_reports_every_case_with_its_floor_and_leaves_nothing_in_the_daemon(
    daemon: DaemonProcess, bench: Callable[[DaemonProcess], Report], cases: int
) -> None:
    found = msgspec.to_builtins(bench(daemon).to_object())
    assert len(found["results"]) == cases == len({result["case"] for result in found["results"]})
    for result in found["results"]:
        assert {"case", "value", "unit", "floor", "ratio"} <= set(result)
        assert result["value"] > 0
        assert result["floor"] > 0
        assert result["ratio"] == pytest.approx(result["value"] / result["floor"])
        # Far beyond what is promised: only a bench that measures the wrong thing is out of these bounds.
        assert 0.005 < result["ratio"] < 200
        if result["cpu_seconds"] is not None:
            assert 0 < result["cpu_seconds"] < 20
            assert result["cpu_per"] in ("lookup", "job", "GB", "step", "s")
    assert any(result["cpu_seconds"] for result in found["results"])
    if bench is small_copy:
        for result in found["results"]:
            assert (0 < result["checksum_cpu_seconds"] <= result["cpu_seconds"]) or result["case"].startswith("load")
    with AdminClient(daemon.directory) as admin:
        wait_until(lambda: not admin.stats().namespaces, DEADLINE_S)
        stats = admin.stats()
    assert stats.pool.free_bytes == stats.pool.pool_bytes
    assert stats.errors == {}
    # It is in none of the daemon's sums.
    assert [(part.keys_asked, part.stored_bytes, part.lookups) for part in stats.recent] == [(0, 0, 0)] * 4
    assert stats.lookup_seconds.count == 0


def test_an_engine_beside_a_flood_is_served_and_neither_leaves_anything_behind() -> None:
    with DaemonProcess("192MiB") as daemon:
        report = bench_fairness(daemon.directory, quiet, rounds=1, seconds=0.4, connections=4)
        found = {result.case: result for result in report.results}
        assert len(found) == 8
        assert all(0.01 < result.ratio < 100 for result in found.values())
        assert found["loads of 1 MiB, p50"].value < 1e6
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
        assert stats.pool.free_bytes == stats.pool.pool_bytes
        assert set(stats.errors) <= {"unknown_lease"}, "the flood is stopped in the middle of its loads"


def test_a_store_that_nodes_share_is_measured_through_the_daemon() -> None:
    with RedisServer() as server, DaemonProcess("512MiB", shared=server.url) as daemon:
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: admin.stats().shared[0].reachable, 20.0)
        report = bench_shared(daemon.directory, quiet, rounds=2)
        write, read, ask = report.results
        assert all(result.value > 0 for result in report.results)
        assert write.cpu is not None
        assert read.cpu is not None
        assert ask.ratio > 0.5, "a bare EXISTS of the same keys does less"
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
        assert stats.pool.free_bytes == stats.pool.pool_bytes
        assert stats.shared[0].read_blocks == stats.shared[0].written_blocks == 2 * SHARED_BLOCKS
    with DaemonProcess("64MiB") as daemon, pytest.raises(BenchFailed, match="--shared"):
        bench_shared(daemon.directory, quiet)


def test_hits_are_hits_and_misses_are_misses(daemon: DaemonProcess) -> None:
    with SyntheticEngine(daemon.directory, "lookup", 1, STORE_KEYS, PAGE_BYTES):  # holds the namespace
        small_lookup(daemon)
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
    (namespace,) = [found for found in stats.namespaces if found.label == "bench lookup"]
    each = 3 * 20 + 1
    measured = (1 + 1_000) * (each + 20)
    assert namespace.keys_ready == measured + 1_000 * each
    assert namespace.keys_asked > namespace.keys_ready + measured


def test_copies_fit_the_pool_or_say_what_they_need(daemon: DaemonProcess) -> None:
    fitted = bench_copy(daemon.directory, quiet, piece_sizes=(64 * KIB,), job_bytes=128 * MIB, rounds=1)
    assert len(fitted.results) == 5
    with (
        DaemonProcess("12MiB") as small,
        pytest.raises(BenchFailed, match=r"pieces of 1\.00 MiB need 48\.0 MiB"),
    ):
        bench_copy(small.directory, quiet, piece_sizes=(MIB,), rounds=1)


def test_a_bench_drops_what_one_that_was_killed_left_and_nothing_else(daemon: DaemonProcess) -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    with FakeEngine(daemon.directory, namespace="bench lookup") as running, FakeEngine(daemon.directory) as engine:
        assert running.store(keys[:1], [0]).ok
        assert engine.store(keys, range(3)).ok
        with FakeEngine(daemon.directory, namespace="bench copy") as killed:
            assert killed.store(keys[:2], range(2)).ok
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: [one.sessions for one in admin.namespaces().namespaces] == [2, 2, 0])
            assert run_bench(lambda *_: Report("jobs", "nothing", []), daemon.directory, as_json=True) == 0
            left = {one.label: one.ready_blocks for one in admin.namespaces().namespaces}
    assert left == {"bench lookup": 1, "demo": 3}


def test_a_bench_says_what_it_evicts(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("jobs", "nothing", [])
    for most_bytes, words in ((0, ""), (8 * MIB, ""), (100 * MIB, "up to 64.0 MiB of its own"), (2**50, "64.0 MiB")):
        with FakeEngine(daemon.directory) as engine:
            keys = [bytes([number]) * 32 for number in range(16)]
            assert engine.store(keys, range(16)).ok
            assert run_bench(lambda *_: report, daemon.directory, most_bytes, as_json=True, fits=True) == 0
        said = capsys.readouterr().err
        assert words in said
        assert bool(words) == ("1.00 MiB of other blocks are evicted" in said)
    with pytest.raises(CliError, match=r"has 64\.0 MiB, and this bench needs 112 MiB"):
        run_bench(lambda *_: report, daemon.directory, 100 * MIB, as_json=True)
