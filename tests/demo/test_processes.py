"""The demo leaves nothing behind and says why it failed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.demo.processes import Child, DemoFailed, own_environment, uninterrupted
from tests.support.waiting import wait_until

DEADLINE_S = 10.0


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(children: ExitStack, log: Path, program: str) -> Child:
    child = Child("The child", [sys.executable, "-c", program], log, own_environment())
    children.callback(child.abort)
    return child


def wait_until_gone(pid: int) -> None:
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: not status.exists() or "State:\tZ" in status.read_text(), DEADLINE_S)


GRANDCHILD = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({{"pid": child.pid}}), flush=True)
{then}
"""


def test_grandchildren_end_with_their_parent(children: ExitStack, tmp_path: Path) -> None:
    child = start(children, tmp_path / "log", GRANDCHILD.format(then="time.sleep(600)"))
    pid = child.receive(DEADLINE_S)["pid"]
    assert isinstance(pid, int)
    os.kill(pid, 0)
    child.abort()
    wait_until_gone(pid)


def test_grandchildren_end_when_their_parent_died_before(children: ExitStack, tmp_path: Path) -> None:
    child = start(children, tmp_path / "log", GRANDCHILD.format(then="sys.exit(3)"))
    pid = child.receive(DEADLINE_S)["pid"]
    assert isinstance(pid, int)
    with pytest.raises(DemoFailed, match="status 3"):
        child.receive(DEADLINE_S)
    child.abort()
    wait_until_gone(pid)


def test_a_child_that_ends_shows_the_end_of_its_log(children: ExitStack, tmp_path: Path) -> None:
    child = start(children, tmp_path / "log", "import sys; print('out of luck', file=sys.stderr); sys.exit(9)")
    with pytest.raises(DemoFailed, match=r"(?s)The child ended unasked, with status 9.*out of luck"):
        child.receive(DEADLINE_S)


def test_a_child_that_hangs_is_given_up(children: ExitStack, tmp_path: Path) -> None:
    child = start(children, tmp_path / "log", "import time; time.sleep(600)")
    with pytest.raises(DemoFailed, match="said nothing for 0 s"):
        child.receive(0.3)


def test_lines_that_come_together_are_read_one_by_one(children: ExitStack, tmp_path: Path) -> None:
    child = start(children, tmp_path / "log", 'print(\'{"n": 1}\\n{"n": 2}\')')
    assert [child.receive(DEADLINE_S), child.receive(DEADLINE_S)] == [{"n": 1}, {"n": 2}]


def test_the_users_own_kvoffd_settings_stay_out_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFD_POOL_SIZE", "1TiB")
    assert not any(name.startswith("KVOFFD_") for name in own_environment())


def test_what_interrupts_waits_until_a_process_that_is_started_is_known() -> None:
    known = []

    def start() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            known.append("child")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known == ["child"]
