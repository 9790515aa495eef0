"""``make gpu`` without a GPU: its parts run over the double, and its results say so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.stub_cuda import fresh_stub

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
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


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_parts_of_vllm_run_on_a_cpu(tmp_path: Path) -> None:
    names = ["vllm-start", "vllm-contest", "vllm-restarts", "vllm-pressure"]
    command = [sys.executable, "-m", "tests.bench.gpu", "--double", "--out", str(tmp_path)]
    subprocess.run([*command, *(f"--part={name}" for name in names)], cwd=ROOT)
    (found,), (page,) = tmp_path.glob("gpu-vllm-double-*.json"), tmp_path.glob("gpu-vllm-double-*.md")
    parts = json.loads(found.read_text())["parts"]
    assert {name: parts[name]["outcome"] for name in names} == dict.fromkeys(names, "done"), parts
    assert [step for name in names for step, one in parts[name]["found"].items() if "failed" in one] == []
    seen = parts["vllm-contest"]["found"]["kvoffd"]["decoding"]["new prompts"]
    assert all(seen["steps_ms"][state]["n"] for state in ("alone", "during", "after"))
    assert "| kvoffd, 3 prompts, after a reset " in page.read_text()
