"""The benches of real engines, with one and without."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvoffd_client import AdminClient
from tests.bench.daemon.engine_bench import NewPrompts, bench_engine
from tests.bench.daemon.pool_bench import bench_pool
from tests.bench.daemon.results import BenchFailed, Progress, Report
from tests.bench.report_file import ROOT
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_demo_llama
from tests.kit.waiting import wait_until


@pytest.mark.parametrize(
    "bench", [partial(bench_pool, model="none", tokens=64), partial(bench_engine, asked=NewPrompts())]
)
def test_without_vllm_a_sentence_says_where_to_run_it(
    bench: Callable[[Path, Progress], Report],
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BenchFailed, match="the Python that your engines run with"):
        bench(daemon.directory, lambda _: None)
    print("the report")
    assert capfd.readouterr().out == "the report\n"


@pytest.mark.engine
@pytest.mark.shapes
@pytest.mark.timeout(600)
def test_a_real_engine_is_faster_with_its_blocks_in_the_pool(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    model = make_demo_llama(tmp_path / "model")
    with DaemonProcess("512MiB") as daemon:
        command = [sys.executable, "-m", "tests.bench.daemon", "pool", "--json", "--model", str(model)]
        command += ["--directory", str(daemon.directory)]
        # In a process of its own: what vLLM warns of is not this test's business.
        ran = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
        with AdminClient(daemon.directory) as admin:
            wait_until(lambda: admin.stats().pool.of("free") == admin.stats().pool.size_bytes, 10.0)
    assert ran.returncode == 0, ran.stderr[-4000:]
    cold, warm = json.loads(ran.stdout)["results"]
    assert warm["value"] < cold["value"] / 2
