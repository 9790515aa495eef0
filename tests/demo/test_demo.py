"""`make demo` on real processes, as a stranger would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demo.processes import SharedServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 60.0


def start_demo(directory: Path) -> subprocess.Popen[str]:
    """The demo with ``directory`` as the place of .demo/ and of its sockets."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.demo"],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def processes_about(text: str) -> list[str]:
    """Command lines of live processes that name ``text``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    demo = start_demo(tmp_path)
    output, _ = demo.communicate(timeout=570)
    assert demo.returncode == 0, output
    result = json.loads((tmp_path / ".demo" / "result.json").read_text())
    assert list(result) == [
        "cold_ttft_ms",
        "warm_ttft_ms",
        "second_engine_ttft_ms",
        "restarted_ttft_ms",
        "another_node_ttft_ms",
        "tokens_equal",
        "loaded_tokens",
        "prompt_tokens",
    ]
    assert result["tokens_equal"] is True
    # All but the tails of three prompts.
    assert result["prompt_tokens"] - 3 * 32 < result["loaded_tokens"] < result["prompt_tokens"]
    for name in ("warm_ttft_ms", "restarted_ttft_ms", "second_engine_ttft_ms"):
        assert 0 < result[name] < result["cold_ttft_ms"] / 2
    if SharedServer.program() is None:
        assert result["another_node_ttft_ms"] is None
        assert "Another node was not tried" in output
    else:
        assert 0 < result["another_node_ttft_ms"] < result["cold_ttft_ms"]
        assert "another node" in output
    assert "kvoffd-cli stats" in output
    assert not list(tmp_path.glob("kvoffd-demo-*"))
    assert processes_about(str(tmp_path)) == []


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    pytest.importorskip("vllm")
    demo = start_demo(tmp_path)

    def runs_an_engine() -> bool:
        assert demo.poll() is None, demo.communicate()[0]
        return any("tests.demo.engine" in command for command in processes_about(str(tmp_path)))

    wait_until(runs_an_engine, START_DEADLINE_S, interval_s=0.05)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "Traceback" not in output
    assert "Interrupted" in output
    assert processes_about(str(tmp_path)) == []
    assert not list(tmp_path.glob("kvoffd-demo-*"))
