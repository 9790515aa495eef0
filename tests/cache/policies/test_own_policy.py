"""A policy of another package, found by its entry point: the suite, a whole daemon and ``simulate`` with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from kvoffd_client.testing import FakeEngine
from tests.kit.daemon import DaemonProcess
from tests.kit.package import install
from tests.kit.wire import keys

SUITE = ("tests/cache/policies/test_policies.py", "tests/cache/test_adopt.py")
USED, SCAN = keys(*range(8)), keys(*range(100, 400))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the environment has where the package is installed."""
    target = install(Path(__file__).parent / "fewest_policy", tmp_path_factory.mktemp("installed"))
    return {"PYTHONPATH": os.pathsep.join([str(target), *sys.path])}


def output_of(installed: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", *words]
    ended = subprocess.run(command, env=os.environ | installed, stdout=subprocess.PIPE, timeout=100, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_the_suite_finds_it_and_it_passes(installed: dict[str, str]) -> None:
    told = output_of(installed, "pytest", "-q", "-p", "no:cacheprovider", "-k", "fewest", *SUITE)
    assert int(told.split(" passed")[0].split()[-1]) >= 15


def test_simulate_finds_it(installed: dict[str, str], tmp_path: Path) -> None:
    requests = [[1, 2], [1, 2], [3, 4], [5, 6], [1, 2]]
    (trace := tmp_path / "t.jsonl").write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    told = output_of(installed, "kvoffd.simulate.command", str(trace), "--policy=fewest,lru", "--blocks=4", "--json")
    found = {one["policy"]: one["hit_percent"] for one in json.loads(told)["results"]}
    assert found == {"fewest": 40.0, "lru": 20.0}


def test_a_daemon_keeps_by_it_what_was_found_most_often(installed: dict[str, str], pool_file: Path) -> None:
    with DaemonProcess("16MiB", environ=installed, eviction_policy="fewest", pool_file=str(pool_file)) as daemon:
        with FakeEngine(daemon.directory, layers=1, blocks=100, page_bytes=65536) as engine:
            engine.fill(range(8), seed=5)
            written = engine.checksums(range(8))
            assert engine.store(USED, range(8)).ok
            assert engine.lookup(USED) == 8
            engine.release()
            for at in range(0, len(SCAN), 100):
                assert engine.store(SCAN[at : at + 100], range(100)).ok
            assert engine.lookup(USED) == 8
        daemon.stop()
        daemon.start()
        for counted in ("keys without blocks 328 KiB", "the policy's file 410 KiB"):
            assert counted in daemon.log, "the bounds of what another package's policy may know"
        with FakeEngine(daemon.directory, layers=1, blocks=100, page_bytes=65536) as engine:
            assert engine.lookup(USED) == 8
            assert engine.load(USED, range(8)).ok
            assert engine.checksums(range(8)) == written
        with AdminClient(daemon.directory) as admin:
            assert admin.describe_policy().policy == "fewest"
            assert admin.stats().errors == {}
