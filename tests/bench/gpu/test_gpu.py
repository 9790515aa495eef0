"""``make gpu`` without a GPU: its parts run over the double, and its results say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu import __main__ as program
from tests.bench.gpu.parts import PARTS, Setup
from tests.kit.stub_cuda import fresh_stub

ROOT = Path(__file__).parents[3]


def test_parts_run_alone_over_the_double_which_the_page_says(tmp_path: Path) -> None:
    library = fresh_stub().path  # or the test is skipped
    before = set(Path("/dev/shm").glob("kvoffd-gpu-*"))
    command = [sys.executable, "-m", "tests.bench.gpu", "--double", "--library", library, "--out", str(tmp_path)]
    names = ["driver", "latency", "fault"]
    parts = [f"--part={name}" for name in names]
    done = subprocess.run([*command, *parts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr, *(path.read_text() for path in tmp_path.glob("*.md")))
    (found,), (page,) = tmp_path.glob("gpu-double-*.json"), tmp_path.glob("gpu-double-*.md")
    report = json.loads(found.read_text())
    assert report["double"]
    assert list(report["parts"]) == names
    fault = report["parts"]["fault"]["found"]
    assert (fault["job"], fault["status_is_right"], fault["block_is_back"]) == ("COPY_FAILED", True, True)
    assert "**Not a GPU.**" in page.read_text()
    assert set(Path("/dev/shm").glob("kvoffd-gpu-*")) == before, "files were left"


def test_what_must_not_be_is_wrong() -> None:
    right: dict[str, dict[str, Any]] = {
        "latency": {"64 KiB": {"loads": {"gb_per_s": 9.0}, "stores": {"gb_per_s": 9.0}}},
        "tests": {"status": 0, "summary": "1 passed, 9 skipped"},
        "death": {"reverted": 0, "during_loads": 1},
        "fault": {"status_is_right": True, "block_is_back": None},
    }
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("latency", {"64 KiB": {"loads": {"gb_per_s": 0.0}, "stores": {"gb_per_s": 9.0}}}),
        ("tests", {"status": 1}),
        ("tests", {"summary": "10 skipped"}),
        ("death", {"reverted": 1}),
        ("death", {"during_loads": 0}),
        ("fault", {"status_is_right": False}),
        ("fault", {"block_is_back": False}),
    ]
    for part, found in right.items():
        assert not PARTS[part].is_wrong(found), part
    for part, found in wrong:
        assert PARTS[part].is_wrong(right[part] | found), (part, found)


class HangingProcess:
    """A part that wrote what it found and then, in a call of a driver that hangs, survives SIGKILL."""

    pid = 1 << 30  # nobody

    def __init__(self, command: list[str], **options: object) -> None:
        Path(command[command.index("--to") + 1]).write_text('{"card": "X", "reverted": 1}')

    def wait(self, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired("part", timeout_s)


def test_a_wrong_part_fails_the_run_which_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", HangingProcess)
    monkeypatch.setattr(program, "run_facts", lambda command: {"date": "today", "commit": "abc"})
    assert program.measure(["driver", "death"], Setup("", double=True), tmp_path) == 1
    (page,) = tmp_path.glob("*.md")
    assert "## driver: done" in page.read_text()
    assert "## death: wrong" in page.read_text()
