"""The comparison in miniature: schedulers without a model, and the reports."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.bench.overhead.__main__ import main
from tests.bench.overhead.throughput import Load, Throughput, Turn, throughput_table

BLOCKS, ROUNDS = 12, 2


def test_misses_are_stored_and_hits_are_loaded_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run compares what was stored and loaded with what must be."""
    saved = tmp_path / "results" / "overhead.md"
    monkeypatch.setattr(logging.getLogger("kvoffd"), "setLevel", lambda level: None)
    words = ["--part", "steps", "--blocks", str(BLOCKS), "--step-rounds", str(ROUNDS), "--json", "--save", str(saved)]
    assert main(words) == 0
    out = capsys.readouterr().out  # vLLM logs there too
    printed = json.loads(out[out.index("{\n") :])
    for case in ("miss", "hit"):
        assert len(printed["steps"][case]) == 3
        for runs in printed["steps"][case].values():
            assert len(runs) == ROUNDS
            assert all(run["connector_s"] > 0 and run["steps"] >= 2 for run in runs)
    assert "engine" not in printed
    text = saved.read_text()
    assert f"one request of {BLOCKS} blocks" in text
    assert text.count(" met (target") + text.count(" MISSED (target") == 2


def test_a_connector_that_costs_a_twentieth_misses_the_target() -> None:
    found = Throughput([Turn(100.0, 1.0, 0.0)] * 4, [Turn(95.0, 1.0, 0.1)] * 4, [0.0] * 4)
    assert found.ratios == [0.95] * 4
    assert "MISSED" in throughput_table(found, Load(), "tiny")
    found.kvoffd = [Turn(99.0, 1.0, 0.1)] * 4
    assert "MISSED" not in throughput_table(found, Load(), "tiny")
