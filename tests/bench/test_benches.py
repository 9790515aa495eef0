"""Every bench, in miniature, against a real daemon."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.bench.daemon import PAGE_BYTES
from tests.bench.daemon.__main__ import run_bench
from tests.bench.daemon.copy_bench import bench_copy
from tests.bench.daemon.message_bench import STORE_KEYS, bench_jobs, bench_lookup
from tests.bench.daemon.results import BenchFailed, Report
from tests.bench.daemon.synthetic_engine import SyntheticEngine
from tests.kit.daemon import DaemonProcess

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
        stats = admin.stats()
    assert stats.pool.of("free") == stats.pool.size_bytes
    assert set(stats.errors) <= {"not_ready"}, "a reset while another one runs"


def test_hits_are_hits_and_misses_are_misses(daemon: DaemonProcess) -> None:
    with SyntheticEngine(daemon.directory, "lookup", 1, STORE_KEYS, PAGE_BYTES):  # holds the namespace
        small_lookup(daemon)
        with AdminClient(daemon.directory) as admin:
            stats = admin.stats()
    (namespace,) = [found for found in stats.namespaces if found.model == "measured lookup"]
    each = 3 * 20 + 1
    measured = (1 + 1_000) * (each + 20)
    assert namespace.found_keys["pool"] == measured + 1_000 * each
    assert namespace.asked_keys > namespace.found_keys["pool"] + measured


def test_copies_fit_the_pool_or_say_what_they_need(daemon: DaemonProcess) -> None:
    fitted = bench_copy(daemon.directory, quiet, piece_sizes=(64 * KIB,), job_bytes=128 * MIB, rounds=1)
    assert len(fitted.results) == 5
    with (
        DaemonProcess("12MiB") as small,
        pytest.raises(BenchFailed, match=r"pieces of 1\.00 MiB need 48\.0 MiB"),
    ):
        bench_copy(small.directory, quiet, piece_sizes=(MIB,), rounds=1)


def test_a_bench_says_what_it_evicts(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("jobs", "nothing", [])
    for most_bytes, words in ((0, ""), (8 * MIB, ""), (100 * MIB, "up to 64.0 MiB of its own"), (2**50, "64.0 MiB")):
        with FakeEngine(daemon.directory) as engine:
            keys = [bytes([number]) * 32 for number in range(16)]
            assert engine.store(keys, range(16)).ok
            run_bench(lambda *_: report, daemon.directory, most_bytes, as_json=True, fits=True)
        said = capsys.readouterr().err
        assert words in said
        assert bool(words) == ("1.00 MiB of other blocks are evicted" in said)
    with pytest.raises(BenchFailed, match=r"has 64\.0 MiB, and this bench needs 112 MiB"):
        run_bench(lambda *_: report, daemon.directory, 100 * MIB, as_json=True)
