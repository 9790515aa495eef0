"""The bench of new prompts, without engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffd_client.bench.new_prompts import IDLE, KVOFFD, NONE, EngineReport, Latencies, NewPrompts, bench_engine
from kvoffd_client.bench.new_prompts import _children as children
from kvoffd_client.bench.results import BenchFailed
from kvoffd_client.cli.bench_commands import _first_tokens_table


def test_without_vllm_a_sentence_says_where_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BenchFailed, match="the Python that your engines run with"):
        bench_engine(tmp_path, lambda _: None, NewPrompts())
    print("the report")
    assert capfd.readouterr().out == "the report\n"


def test_a_report_has_each_case_with_both_percentiles_and_what_kvoffd_adds_to_a_connector_that_does_nothing() -> None:
    values = [float(number) for number in range(1, 11)]
    case = Latencies(64, True, {NONE: values, IDLE: values, KVOFFD: [value + 0.5 for value in values]})
    report = EngineReport(NewPrompts(), [case], "0.32.0")
    first, second = report.to_object()["results"]  # type: ignore[misc]
    assert (first["percentile"], second["percentile"]) == ("p50", "p90")
    assert (first["ms"], second["ms"]) == ({NONE: 5, IDLE: 5, KVOFFD: 5.5}, {NONE: 9, IDLE: 9, KVOFFD: 9.5})
    assert (first["more_than_does_nothing_ms"], first["ratio"]) == (0.5, 1.1)
    cells = [list(column.cells) for column in _first_tokens_table(report).columns]
    assert [column[0] for column in cells] == [
        "64 tokens, under load, p50",
        "5.00 ms",
        "5.00 ms",
        "5.50 ms",
        "+0.50 ms",
        "+10.0%",
    ]


def test_an_engines_processes_are_found_down_to_the_last() -> None:
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as started:
        try:
            while len(found := set(children())) < 2:
                pass
            assert started.pid in found
            assert os.getpid() not in found
        finally:
            os.killpg(started.pid, 9)
