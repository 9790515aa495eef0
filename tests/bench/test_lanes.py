"""The ceiling of the daemon's copy lanes, in small: every byte of every transfer is counted, or the program fails."""

from __future__ import annotations

import json

import pytest

from kvoffd.transfer.cuda.gpu_copy import STEP_PIECES
from kvoffd.transfer.cuda.lane_ceiling import measure
from kvoffd_client.bench import KIB
from kvoffd_client.cli.app import main


def test_batches_are_full_and_large_pieces_are_copied_alone() -> None:
    assert measure(2, 8 * KIB, 3)["pieces_per_call"] == STEP_PIECES
    assert measure(2, 256 * KIB, 3)["pieces_per_call"] == 1


def test_bench_copy_shows_the_ceiling_without_a_daemon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffd_client.bench.lanes.ROUNDS", 1)
    monkeypatch.setattr("kvoffd_client.bench.lanes.TRANSFERS", 100)
    options = ["bench", "copy", "--lanes", "2", "--piece-size", "64KiB", "--json"]
    assert main(options) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["case"] == "2 lanes, pieces of 64.0 KiB"
    assert (result["unit"], result["cpu_per"]) == ("TB/s", "piece")
    assert result["value"] > 0.01, "as wide as a pipe"
    assert main([*options, "--memory", "cuda"]) == 2
    assert "--lanes copies nothing" in capsys.readouterr().err
