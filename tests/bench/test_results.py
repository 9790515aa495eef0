"""Results of a bench, as numbers and as a plot."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.daemon.__main__ import core_lines
from tests.bench.daemon.results import (
    BenchFailed,
    BenchGpu,
    Cost,
    Curve,
    Report,
    Result,
    check_plot,
    draw_plot,
    median_percentile,
    percentile,
)

REPORT = Report(
    "copy",
    "memcpy",
    [],
    [Curve("store", [(16384, 10.0), (65536, 15.0)]), Curve("memcpy", [(16384, 20.0), (65536, 21.0)], is_floor=True)],
)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_of_a_hundred(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_percentile_of_one_value() -> None:
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_one_disturbed_round_does_not_count() -> None:
    assert median_percentile([[1, 2, 3], [2, 3, 4], [900, 900, 900]], 0.5) == 3


def test_the_object_has_the_promised_shape() -> None:
    found = msgspec.to_builtins(Report("lookup", "floor", [Result("a", 3.0, "µs", 2.0)]).to_object())
    assert set(found) == {"bench", "machine", "results", "gpu"}
    assert found["gpu"] is None
    no_cost = {"cpu_seconds": None, "cpu_per": None, "checksum_cpu_seconds": None}
    assert found["results"] == [{"case": "a", "value": 3.0, "unit": "µs", "floor": 2.0, "ratio": 1.5, **no_cost}]
    assert found["machine"]["cpus"] >= 1


def test_cores_are_told_for_each_gpu() -> None:
    gpu = BenchGpu("Stub", "GPU-1", "13.0", 0, None)
    report = Report("copy", "floor", [Result("store", 40.0, "GB/s", 55.0, Cost(0.04, "GB", 0.03))], gpu=gpu)
    (line,) = core_lines(report.results)
    assert line == "cores for each GPU at 55 GB/s: 2.20, checksums 1.65 of them: store"


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "speeds.png"
    check_plot(path)
    draw_plot(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchFailed, match="pip install matplotlib"):
        check_plot(tmp_path / "speeds.png")


@pytest.mark.parametrize(("name", "reason"), [("speeds.jpg", r"ends in \.png"), ("no/speeds.png", "no directory")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchFailed, match=reason):
        check_plot(tmp_path / name)
