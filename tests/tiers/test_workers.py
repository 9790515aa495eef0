"""The threads of tiers: each task ends once, in the daemon's thread, whatever raises."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvoffd.tiers.tier import Workers
from tests.kit.waiting import deliver_until

DEADLINE_S = 10.0


class Rig:
    """Two threads, which do what the test lets them, and two tasks at a time."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], None]] = deque()
        self.ended: list[tuple[str, object]] = []
        self.gate = threading.Event()
        self.calls: list[list[str]] = []
        self.workers: Workers[str, str] = Workers(
            *("test", [self.work] * 2, repr, self.end, self.posted.append, time.monotonic), self.take
        )

    def take(self, waiting: deque[str]) -> list[str]:
        return [waiting.popleft() for _ in range(min(2, len(waiting)))]

    def work(self, tasks: list[str]) -> list[str]:
        self.calls.append(tasks)
        assert self.gate.wait(DEADLINE_S)
        if "bad" in tasks:
            raise ZeroDivisionError("planted")
        return [task.upper() for task in tasks]

    def end(self, task: str, result: object) -> None:
        self.ended.append((task, result))
        if task == "odd":
            raise ZeroDivisionError("planted")

    def until(self, condition: Callable[[], bool]) -> None:
        deliver_until(self.posted, condition)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gate.set()
    assert rig.workers.close(time.monotonic() + DEADLINE_S)


def test_workers_end_each_task_once_whatever_raises(rig: Rig) -> None:
    rig.gate.set()
    names = [*(f"a{number}" for number in range(200)), "bad", "odd", "last"]
    for name in names:
        rig.workers.put(name)
    rig.until(lambda: len(rig.ended) == len(names))
    assert sorted(name for name, _ in rig.ended) == sorted(names)
    ends = dict(rig.ended)
    assert ends["a7"] == "A7"
    assert "ZeroDivisionError" in str(ends["bad"])
    assert (rig.workers.waiting, rig.workers.running) == (0, 0)


def test_workers_whose_call_hangs(rig: Rig) -> None:
    for name in "abcdefg":
        rig.workers.put(name)
    rig.until(lambda: rig.workers.waiting == 3)
    assert rig.workers.longest_s > 0
    assert rig.workers.running == 4
    first = rig.workers.end("late", lambda task: task == "f"), rig.workers.end("closed")
    assert first == (1, 2)
    assert rig.ended == [("f", "late"), ("e", "closed"), ("g", "closed")]
    assert not rig.workers.close(time.monotonic())
    rig.gate.set()
    assert rig.workers.close(time.monotonic() + DEADLINE_S)
    assert sorted(rig.ended[3:]) == [("a", "A"), ("b", "B"), ("c", "C"), ("d", "D")]  # by close: nobody ran the loop
    assert rig.workers.longest_s == 0.0
