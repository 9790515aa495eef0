"""The comparison in miniature: schedulers without a model, and the reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.overhead import __main__ as program
from tests.bench.overhead.steps import CASES, IDLE, KVOFFD, NATIVE, Steps, StepsBench
from tests.bench.overhead.tables import steps_table, throughput_table, workers_table
from tests.bench.overhead.throughput import Load, Throughput, Turn
from tests.bench.overhead.worker_steps import CASES as WORKER_CASES
from tests.bench.overhead.worker_steps import measure_workers
from tests.kit.daemon import DaemonProcess
from tests.kit.models import make_tiny_llama

BLOCKS, ROUNDS = 12, 2


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    model = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")
    with DaemonProcess() as daemon, StepsBench(daemon.directory, model, BLOCKS, ROUNDS) as bench:
        yield bench.measure(ROUNDS, lambda _: None)


def test_every_connector_runs_in_every_round_of_every_case(steps: Steps) -> None:
    for case in CASES:
        for name in (IDLE, NATIVE, KVOFFD):
            assert len(steps.runs[case][name]) == ROUNDS
            for run in steps.runs[case][name]:
                between_steps_s = run.calls_s["has_pending_push_work"]
                assert 0 < run.connector_s - between_steps_s < run.scheduler_s
                assert run.step_s <= run.scheduler_s
                assert run.steps >= 2


def test_misses_are_stored_and_hits_are_loaded_by_kvoffd_as_by_vllms_own(steps: Steps) -> None:
    for name in (NATIVE, KVOFFD):
        assert {run.stored_blocks for run in steps.runs["miss"][name]} == {BLOCKS}
        assert {run.loaded_tokens for run in steps.runs["hit"][name]} == {BLOCKS * 32}
    assert all(run.loaded_tokens == run.stored_blocks == 0 for run in steps.runs["hit"][IDLE])


def test_the_table_has_both_ratios_and_whether_the_target_was_met(steps: Steps) -> None:
    text = steps_table(steps, 0.25)
    assert text.count(" met (target") + text.count(" MISSED (target") == len(CASES)
    assert "25%" in text
    assert set(steps.to_object()) == set(CASES)


def test_both_workers_store_in_every_case_and_the_table_says_which_takes_longer() -> None:
    with DaemonProcess() as daemon:
        found = measure_workers(daemon.directory, 2, lambda _: None)
    for case in WORKER_CASES:
        for name in (NATIVE, KVOFFD):
            assert len(found.calls[case][name]) == len(found.cpu[case][name]) == ROUNDS
            assert min(found.calls[case][name]) > 0
        found.calls[case][KVOFFD] = [1.5 * seconds for seconds in found.calls[case][NATIVE]]
    assert workers_table(found, 0.0).count("MISSED") == len(WORKER_CASES)


def test_a_connector_that_costs_a_twentieth_misses_the_target_of_throughput() -> None:
    found = Throughput(Load(), [Turn(100.0, 1.0, 0.0)] * 4, [Turn(95.0, 1.0, 0.1)] * 4, [0.0] * 4, 2**20)
    assert found.ratios == [0.95] * 4
    assert "MISSED" in throughput_table(found, "tiny")
    found.kvoffd = [Turn(99.0, 1.0, 0.1)] * 4
    assert "MISSED" not in throughput_table(found, "tiny")


def test_the_program_prints_and_saves_what_it_found(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "results" / "overhead.md"
    given = ["--part", "steps", "--blocks", "4", "--step-rounds", "1", "--json", "--save", str(saved)]
    monkeypatch.setattr(program, "_steps", lambda options, model: steps)
    monkeypatch.setattr(logging.getLogger("kvoffd"), "setLevel", lambda level: None)
    assert program.main(given) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "python -m tests.bench.overhead --part steps --blocks 4 --step-rounds 1"
    assert printed["steps"]["miss"]["ratio"] > 0
    assert "engine" not in printed
    assert f"one request of {BLOCKS} blocks" in saved.read_text()
