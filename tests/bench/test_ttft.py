"""The bench of a real engine, as far as it goes without one."""

from __future__ import annotations

import sys

import pytest
from support.daemon import DaemonProcess

from kvoffd_client.bench.report import BenchFailed
from kvoffd_client.bench.ttft import bench_engine


def test_without_vllm_a_sentence_says_where_to_run_it(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BenchFailed, match="the Python that your engines run with"):
        bench_engine(daemon.directory, lambda _: None, "none")
    print("the report")
    assert capfd.readouterr().out == "the report\n"
