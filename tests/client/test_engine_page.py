"""What the page for authors of engines shows works, and so do the mistakes that they make first."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import kvoffd_client
from kvoffd_client import DaemonUnavailable, ErrorCode, GroupTransfer, JobResult
from kvoffd_client.health_request import ask_health
from kvoffd_client.testing import FakeEngine, running_daemon
from tests.kit.daemon import DaemonProcess

PAGE = Path(kvoffd_client.__file__).parents[1] / "ENGINE.md"


def test_the_lines_of_the_page_run(shared_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    program, whole_engine = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert f"A test runs these {sum(bool(line) for line in program.splitlines())} lines." in PAGE.read_text()
    exec(compile(program, str(PAGE), "exec"), {"directory": shared_daemon.directory})  # noqa: S102 - the page is ours
    assert capsys.readouterr().out == "Job 1 copied 16384 bytes.\n"
    exec(compile(whole_engine, str(PAGE), "exec"), {"directory": shared_daemon.directory})  # noqa: S102 - the page is ours


def test_lists_become_bytes_and_bytes_are_asked_for(shared_daemon: DaemonProcess) -> None:
    keys = [bytes([number]) * 32 for number in range(2)]
    transfer = GroupTransfer.of(keys, [5, 2**31 - 1], first_block=3)
    assert transfer == GroupTransfer(0, b"".join(keys), (5).to_bytes(4, "little") + b"\xff\xff\xff\x7f", 3)
    for ids in ([-(2**31) - 1], [2**31], [1.5]):
        with pytest.raises(ValueError, match="Block ids are whole numbers"):
            GroupTransfer.of(keys, ids)  # type: ignore[arg-type]
    with FakeEngine(shared_daemon.directory) as engine, pytest.raises(TypeError, match=r"GroupTransfer\.of"):
        engine.workers[0].store(1, [GroupTransfer(0, b"".join(keys), [0, 1])])  # type: ignore[arg-type]


def test_a_result_says_how_it_ended() -> None:
    assert JobResult(3, True, 8192, 0.1).sentence == "Job 3 copied 8192 bytes."
    assert JobResult(3, False, 0, 0.1, ErrorCode.NO_SPACE).sentence.startswith("Job 3 failed: The pool has no space")


def test_a_daemon_of_a_test_ends_with_it_and_says_why_it_does_not_start() -> None:
    with running_daemon("12MiB") as directory, FakeEngine(directory, blocks=1) as engine:
        assert ask_health(directory) is not None
        assert engine.store([b"k" * 32], [0]).ok
    assert not os.path.exists(directory)
    with pytest.raises(DaemonUnavailable, match="pool_size"), running_daemon("tiny"):
        raise AssertionError("it started")
