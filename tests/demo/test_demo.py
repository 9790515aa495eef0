"""`make demo` on real processes, as a stranger would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.redis_server import PROGRAM
from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 60.0

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def start_demo(directory: Path) -> subprocess.Popen[str]:
    """The demo with ``directory`` as the place of .demo/ and of its sockets."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), "DEMO_IN": str(directory)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.demo"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_of(directory: Path) -> list[str]:
    """Command lines of live processes that a demo there has started, itself included."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"DEMO_IN={directory}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    demo = start_demo(tmp_path)
    output, _ = demo.communicate(timeout=570)
    assert demo.returncode == 0, output
    result = json.loads((tmp_path / ".demo" / "result.json").read_text())
    assert result["tokens_equal"] is True
    # All but the tails of three prompts.
    assert result["prompt_tokens"] - 3 * 32 < result["loaded_tokens"] < result["prompt_tokens"]
    assert len(result["ttft_ms"]) == 4 + (PROGRAM is not None)
    assert min(result["ttft_ms"].values()) > 0
    assert "kvoffd-cli stats" in output
    assert not list(tmp_path.glob("kvoffd-demo-*"))
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("vllm")
    demo = start_demo(tmp_path)

    def runs_an_engine() -> bool:
        assert demo.poll() is None, demo.communicate()[0]
        return any("engine_main" in command for command in processes_of(tmp_path))

    wait_until(runs_an_engine, START_DEADLINE_S, interval_s=0.05)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "Traceback" not in output
    assert "Interrupted" in output
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("kvoffd-demo-*"))
