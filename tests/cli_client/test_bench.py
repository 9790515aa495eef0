"""``kvoffd-cli bench``, in miniature, against real daemons."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.cli import bench, main
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.waiting import wait_until

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a bench with few rounds; returns what it prints."""
    for name, value in {"ROUNDS": 1, "SAMPLES": 4, "PIECES": (16 << 10, 1 << 20), "COPIED_BYTES": 16 << 20}.items():
        monkeypatch.setattr(bench, name, value)

    def run_bench(daemon: DaemonProcess, *words: str) -> str:
        assert main(["bench", *words, "--directory", str(daemon.directory)]) == 0
        return capsys.readouterr().out

    return run_bench


def test_every_case_has_a_floor_of_the_same_run_and_a_bench_is_in_no_sum(run: Run) -> None:
    with DaemonProcess("160MiB", eviction_policy="learned") as daemon, AdminClient(daemon.directory) as admin:
        for name, cases, unit in (("lookup", 12, "µs"), ("copy", 4, "GB/s")):
            found = json.loads(run(daemon, name, "--json"))
            assert len(found["results"]) == cases == len({result["case"] for result in found["results"]})
            for result in found["results"]:
                assert result["unit"] == unit
                assert result["ratio"] == pytest.approx(result["value"] / result["floor"])
            assert run(daemon, name).splitlines()[-1].startswith("floor: ")
        wait_until(lambda: not admin.stats().namespaces)
        stats = admin.stats()
        assert (stats.pool.of("free"), stats.errors) == (stats.pool.size_bytes, {})
        assert (stats.learned.requests, stats.learned.classes) == (0, [])
        for part in (stats.last_minute, stats.since_start):
            assert (part.asked_keys, part.stored_bytes, part.lookups) == (0, 0, 0)
        assert stats.lookup_seconds.count == 0
        assert stats.curve is None or not stats.curve.asked_tokens
        with FakeEngine(daemon.directory, "model") as engine:  # an engine's requests do
            engine.lookup([bytes(32)])
            wait_until(lambda: admin.stats().learned.requests == 1)


def test_a_full_pool_is_left_alone_unless_told_to_and_a_policy_that_knows_better_does_not_evict_a_bench(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Leases hold them: without, this fails at the first lookup."""
    chance, documents = random.Random(3), [[bytes([number, at]) * 16 for at in range(32)] for number in range(80)]
    with (
        DaemonProcess("256MiB", eviction_policy="learned") as daemon,
        FakeEngine(daemon.directory, "model", layers=4, blocks=32, page_bytes=64 << 10) as engine,
        AdminClient(daemon.directory) as admin,
    ):
        for _ in range(400):
            keys = documents[min(chance.randrange(80) for _ in range(3))]
            found = engine.lookup(keys)
            engine.release()
            if found < len(keys):
                engine.store(keys[found:], range(found, len(keys)))
        stats = admin.stats()
        assert (stats.pool.of("free"), stats.since_start.rejected_keys > 0) == (0, True)
        for name in ("lookup", "copy"):
            assert main(["bench", name, "--directory", str(daemon.directory)]) == 2
            assert "0 B are free, and it evicts nothing unless --evict is given." in capsys.readouterr().err
            assert admin.stats().since_start.evicted_blocks == stats.since_start.evicted_blocks
        for name, cases in (("lookup", 12), ("copy", 4)):
            assert len(json.loads(run(daemon, name, "--json", "--evict"))["results"]) == cases


def test_a_bench_of_a_daemon_that_ends_is_a_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with DaemonProcess("160MiB") as daemon:
        monkeypatch.setattr(bench, "print_status", lambda what: daemon.kill())
        assert main(["bench", "lookup", "--directory", str(daemon.directory)]) == 2
        out, err = capsys.readouterr()
        begins = [line.split()[0] for line in err.splitlines()]
        assert (out, begins) == ("", ["kvoffd-cli:"] * 2), "what it takes, and why not"


def test_what_a_bench_that_was_killed_left_is_dropped_and_nothing_else() -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    with (
        DaemonProcess("160MiB") as daemon,
        FakeEngine(daemon.directory, "bench lookup") as running,
        FakeEngine(daemon.directory) as engine,
    ):
        assert running.store(keys[:1], [0]).ok
        assert engine.store(keys, range(3)).ok
        with FakeEngine(daemon.directory, "bench copy") as killed:
            assert killed.store(keys[:2], range(2)).ok
        with AdminClient(daemon.directory) as admin:
            left = [("bench lookup", 1), ("demo", 3)]
            wait_until(lambda: [(one.label, one.ready_blocks) for one in admin.namespaces().namespaces] == left)
        wait_until(lambda: "Dropped the 2 blocks of 'bench copy', which has ended." in daemon.log)
        assert "opens the namespace 'bench copy'; it evicts nothing." in daemon.log
