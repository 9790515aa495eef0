"""``make gpu`` without a GPU: its parts run over the double, and its results say so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bench.gpu import __main__ as program
from tests.bench.gpu.page import write_page
from tests.bench.gpu.parts import FAULT_POOL_BYTES, Setup, _has_room, is_wrong, run_tests
from tests.support.stub_cuda import fresh_stub

ROOT = Path(__file__).parents[3]


def test_parts_run_alone_over_the_double_which_the_page_says(tmp_path: Path) -> None:
    library = fresh_stub().path  # or the test is skipped
    before = set(Path("/dev/shm").glob("kvoffd-gpu-*"))
    command = [sys.executable, "-m", "tests.bench.gpu", "--double", "--library", library, "--out", str(tmp_path)]
    done = subprocess.run([*command, "--part", "driver", "--part", "fault"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr, *(path.read_text() for path in tmp_path.glob("*.md")))
    (found,), (page,) = tmp_path.glob("gpu-double-*.json"), tmp_path.glob("gpu-double-*.md")
    report = json.loads(found.read_text())
    assert report["double"]
    assert list(report["parts"]) == ["driver", "fault"]
    fault = report["parts"]["fault"]["found"]
    assert (fault["job"], fault["status_is_right"], fault["block_is_back"]) == ("COPY_FAILED", True, True)
    assert "**Not a GPU.**" in page.read_text()
    assert set(Path("/dev/shm").glob("kvoffd-gpu-*")) == before, "files were left"


def test_a_part_that_failed_is_told_on_the_page() -> None:
    copy = {"case": "store", "value": 50.0, "unit": "GB/s", "floor": 55.0, "ratio": 50 / 55}
    parts = {
        "sharing": {"outcome": "failed", "seconds": 3.0, "found": "Traceback: no such device"},
        "copy": {"outcome": "done", "seconds": 9.0, "found": {"results": [copy]}},
    }
    page = write_page({"card": "X", "double": False, "date": "today", "commit": "abc", "parts": parts}, "x.png")
    assert "## sharing: failed, 3 s" in page
    assert "no such device" in page
    assert "x.png" in page
    assert "| 91%" in page
    assert "Not a GPU" not in page


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ("sharing", {"ordinary": {"right_bytes": True}}, {"ordinary": {"right_bytes": False}}),
        ("sharing", {"ordinary, another user": {"registered": False}}, {"chunks": "CudaError: out of memory"}),
        ("pinning", {"1 GiB": {"refused_bytes": 0}}, {"1 GiB": "TimeoutError: "}),
        ("tests", {"status": 0}, {"status": 1}),
        ("death", {"reverted": 0}, {"reverted": 1}),
        ("fault", {"status_is_right": True, "block_is_back": None}, {"status_is_right": False, "block_is_back": None}),
        ("fault", {"status_is_right": True, "block_is_back": True}, {"status_is_right": True, "block_is_back": False}),
    ],
)
def test_what_ran_and_found_what_must_not_be_is_wrong(
    part: str, good: dict[str, object], bad: dict[str, object]
) -> None:
    assert (is_wrong(part, good), is_wrong(part, bad)) == (False, True)


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


def test_tests_that_are_cut_short_have_said_how_far_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho one PASSED\necho FAILED two\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert run_tests(Setup("", double=True)) == {
        "status": 1,
        "summary": "FAILED two",
        "failed": ["FAILED two"],
        "end": ["one PASSED", "FAILED two"],
    }
    assert capfd.readouterr().out.splitlines() == ["one PASSED", "FAILED two"]


def test_a_small_dev_shm_has_no_room_for_the_faulting_daemons_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's has 64 MiB, which the pool must fit in; half of that is not enough with what else is there."""
    room = {"free": 64 << 20}
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: SimpleNamespace(**room))
    assert _has_room(tmp_path)
    room["free"] = FAULT_POOL_BYTES
    assert not _has_room(tmp_path)
