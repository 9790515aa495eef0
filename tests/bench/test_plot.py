"""The plot is drawn where matplotlib is there, and asked for in a sentence where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvoffd_client.bench.plot import check_plot, draw
from kvoffd_client.bench.report import BenchFailed, Curve, Report

REPORT = Report(
    "copy",
    "memcpy",
    [],
    [Curve("store", [(16384, 10.0), (65536, 15.0)]), Curve("memcpy", [(16384, 20.0), (65536, 21.0)], is_floor=True)],
)


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "speeds.png"
    check_plot(path)
    draw(REPORT, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchFailed, match=r"pip install 'kvoffd\[plot\]'"):
        check_plot(tmp_path / "speeds.png")


@pytest.mark.parametrize(("name", "reason"), [("speeds.jpg", r"ends in \.png"), ("no/speeds.png", "no directory")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BenchFailed, match=reason):
        check_plot(tmp_path / name)
