"""``make gpu`` without a GPU: its parts run over the double, and its results say so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.bench.gpu import __main__ as program
from tests.bench.gpu import parts
from tests.bench.gpu.page import write_page
from tests.bench.gpu.parts import FAULT_POOL_BYTES, Setup, _has_room, is_wrong, look_at_driver, run_tests
from tests.bench.report_file import run_facts
from tests.kit.stub_cuda import fresh_stub

ROOT = Path(__file__).parents[3]


def test_parts_run_alone_over_the_double_which_the_page_says(tmp_path: Path) -> None:
    library = fresh_stub().path  # or the test is skipped
    before = set(Path("/dev/shm").glob("kvoffd-gpu-*"))
    command = [sys.executable, "-m", "tests.bench.gpu", "--double", "--library", library, "--out", str(tmp_path)]
    names = ["driver", "batches", "latency", "fault"]
    parts = [f"--part={name}" for name in names]
    done = subprocess.run([*command, *parts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout, done.stderr, *(path.read_text() for path in tmp_path.glob("*.md")))
    (found,), (page,) = tmp_path.glob("gpu-double-*.json"), tmp_path.glob("gpu-double-*.md")
    report = json.loads(found.read_text())
    assert report["double"]
    assert list(report["parts"]) == names
    assert report["parts"]["batches"]["found"]["soak"]["right_bytes"]
    fault = report["parts"]["fault"]["found"]
    assert (fault["job"], fault["status_is_right"], fault["block_is_back"]) == ("COPY_FAILED", True, True)
    assert "**Not a GPU.**" in page.read_text()
    assert set(Path("/dev/shm").glob("kvoffd-gpu-*")) == before, "files were left"


def test_without_git_a_run_has_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_facts("make gpu")["commit"] == "unknown"


def test_an_nvidia_smi_that_hangs_costs_its_own_answer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = fresh_stub().path
    monkeypatch.setattr(parts, "NVIDIA_SMI_S", 0.2)
    script(tmp_path / "nvidia-smi", "exec sleep 60")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = look_at_driver(Setup(library, double=True))
    assert (found["card"], str(found["nvidia_smi"])[:14]) == ("Stub 0", "TimeoutExpired")


def test_a_part_that_failed_is_reported_on_the_page() -> None:
    copy = {"case": "store", "value": 50.0, "unit": "GB/s", "floor": 55.0, "ratio": 50 / 55}
    parts = {
        "sharing": {"outcome": "failed", "seconds": 3.0, "found": "Traceback: no such device"},
        "copy": {"outcome": "done", "seconds": 9.0, "found": {"results": [copy]}},
    }
    page = write_page({"card": "X", "double": False, "date": "today", "commit": "abc", "parts": parts})
    assert "## sharing: failed, 3 s" in page
    assert "no such device" in page
    assert "| 91%" in page
    assert "Not a GPU" not in page


@pytest.mark.parametrize(
    ("part", "good", "bad"),
    [
        ("sharing", {"ordinary": {"right_bytes": True}}, {"ordinary": {"right_bytes": False}}),
        ("sharing", {"ordinary, another user": {"registered": False}}, {"chunks": "CudaError: out of memory"}),
        ("pinning", {"1 GiB": {"refused_bytes": 0}}, {"1 GiB": "TimeoutError: "}),
        (
            "latency",
            {"64 KiB": {"loads": {"gb_per_s": 9.0}, "stores": {"gb_per_s": 9.0}}},
            {"64 KiB": {"loads": {"gb_per_s": 0.0}, "stores": {"gb_per_s": 9.0}}},
        ),
        (
            "batches",
            {"4 KiB": {"right_bytes": True}, "order ANY": "CudaError"},
            {"soak": {"right_bytes": False}, "order ANY": "CudaError"},
        ),
        ("tests", {"status": 0, "summary": "1 passed"}, {"status": 1, "summary": "1 failed, 1 passed"}),
        ("tests", {"status": 0, "summary": "1 passed, 9 skipped"}, {"status": 0, "summary": "10 skipped"}),
        ("death", {"reverted": 0, "during_loads": 1}, {"reverted": 1, "during_loads": 1}),
        ("death", {"reverted": 0, "during_loads": 8}, {"reverted": 0, "during_loads": 0}),
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


def script(path: Path, commands: str) -> str:
    path.write_text(f"#!/bin/sh\n{commands}\n")
    path.chmod(0o755)
    return str(path)


def test_engines_take_no_time_from_the_other_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a vLLM for CUDA is there too, each takes a minute or more."""
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", 'echo "$@"'))
    assert str(run_tests(Setup("", double=True))["summary"]).endswith("tests/gpu --ignore tests/gpu/test_engines.py")


def test_plugins_of_the_machines_python_keep_no_test_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that take a ``path``, which pytest 9 does not give any more."""
    information = tmp_path / "old-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: old\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[pytest11]\nold = old_plugin\n")
    (tmp_path / "old_plugin.py").write_text("def pytest_ignore_collect(path, config): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", f'exec {sys.executable} "$@" --help'))
    assert run_tests(Setup("", double=True))["status"] == 0


def test_tests_that_are_cut_short_have_said_how_far_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path / "python", "echo one PASSED; echo FAILED two; exit 1"))
    assert run_tests(Setup("", double=True)) == {
        "status": 1,
        "summary": "FAILED two",
        "failed": ["FAILED two"],
        "end": ["one PASSED", "FAILED two"],
    }
    assert capfd.readouterr().out.splitlines() == ["one PASSED", "FAILED two"]


def test_what_was_tried_is_said_in_case_the_part_is_cut_short(capfd: pytest.CaptureFixture[str]) -> None:
    assert parts.tried(lambda: {"right_bytes": True}) == {"right_bytes": True}
    assert parts.tried(lambda: 1 // 0) == "ZeroDivisionError: integer division or modulo by zero"
    assert "{'right_bytes': True}\nZeroDivisionError" in capfd.readouterr().out


def test_a_small_dev_shm_has_no_room_for_the_faulting_daemons_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's has 64 MiB, which the pool must fit in; half of that is not enough with what else is there."""
    room = {"free": 64 << 20}
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: SimpleNamespace(**room))
    assert _has_room(tmp_path)
    room["free"] = FAULT_POOL_BYTES
    assert not _has_room(tmp_path)
