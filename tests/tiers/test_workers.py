"""The threads of tiers: each task ends once, in the daemon's thread, or is taken back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvoffd.tiers.workers import Workers

DEADLINE_S = 10.0


class Loop:
    """What the workers post, called when the test says so."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.ended: list[tuple[str, object]] = []
        self.posted = threading.Semaphore(0)
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)
        self.gate.set()

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.posted.release()

    def work(self, tasks: list[str]) -> list[str]:
        self.began.release()
        assert self.gate.wait(DEADLINE_S)
        if "bad" in tasks:
            raise ZeroDivisionError("planted")
        return [task.upper() for task in tasks]

    def run_until(self, count: int) -> list[tuple[str, object]]:
        while len(self.ended) < count:
            assert self.posted.acquire(timeout=DEADLINE_S)
            self.calls.popleft()()
        return self.ended


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def make(loop: Loop) -> Iterator[Callable[..., Workers[str, str]]]:
    made: list[Workers[str, str]] = []

    def make_workers(threads: int = 2, **options: object) -> Workers[str, str]:
        end = lambda task, result: loop.ended.append((task, result))  # noqa: E731
        workers: Workers[str, str] = Workers(
            "test",
            [loop.work] * threads,
            end,
            loop.post,
            time.monotonic,
            **options,  # type: ignore[arg-type]
        )
        made.append(workers)
        return workers

    yield make_workers
    loop.gate.set()
    for workers in made:
        assert workers.close(time.monotonic() + DEADLINE_S)


def test_each_task_ends_once_in_the_daemons_thread(loop: Loop, make: Callable[..., Workers[str, str]]) -> None:
    workers = make()
    for number in range(200):
        workers.put(f"a{number}")
    ended = loop.run_until(200)
    assert sorted(ended) == sorted((f"a{number}", f"A{number}") for number in range(200))
    assert (workers.waiting, workers.running) == (0, 0)


def test_an_exception_is_the_result(loop: Loop, make: Callable[..., Workers[str, str]]) -> None:
    workers = make(1)
    workers.put("bad")
    workers.put("good")
    (_, error), good = loop.run_until(2)
    assert isinstance(error, ZeroDivisionError)
    assert good == ("good", "GOOD")


def test_an_end_that_raises_keeps_no_other_from_ending(loop: Loop) -> None:
    def end(task: str, result: object) -> None:
        loop.ended.append((task, result))
        raise ZeroDivisionError("planted")

    workers: Workers[str, str] = Workers("test", [loop.work], end, loop.post, time.monotonic)
    workers.put("a")
    workers.put("b")
    assert loop.run_until(2) == [("a", "A"), ("b", "B")]
    assert workers.close(time.monotonic() + DEADLINE_S)


def test_what_has_not_begun_can_be_ended(loop: Loop, make: Callable[..., Workers[str, str]]) -> None:
    loop.gate.clear()
    workers = make(1)
    for task in ("a", "b", "c", "d"):
        workers.put(task)
    assert loop.began.acquire(timeout=DEADLINE_S)
    assert workers.end("late", lambda task: task == "c") == 1
    assert workers.end("closed") == 2
    assert loop.ended == [("c", "late"), ("b", "closed"), ("d", "closed")]
    loop.gate.set()
    assert loop.run_until(4)[3:] == [("a", "A")]


def test_a_call_that_hangs_is_seen_and_keeps_close_from_ending(
    loop: Loop, make: Callable[..., Workers[str, str]]
) -> None:
    loop.gate.clear()
    workers = make(1)
    workers.put("a")
    assert loop.began.acquire(timeout=DEADLINE_S)
    assert workers.longest_s > 0
    assert workers.running == 1
    assert not workers.close(time.monotonic())
    loop.gate.set()
    assert workers.close(time.monotonic() + DEADLINE_S)
    assert loop.ended == [("a", "A")]  # by close, though nobody ran the loop
    assert workers.longest_s == 0.0


def test_several_are_done_in_one_go_and_not_now_is_asked_again(
    loop: Loop, make: Callable[..., Workers[str, str]]
) -> None:
    asked = 0

    def take(waiting: deque[str]) -> list[str]:
        nonlocal asked
        asked += 1
        if asked < 3 or len(waiting) < 2:
            return []
        return [waiting.popleft(), waiting.popleft()]

    workers = make(1, take=take)
    workers.put("a")
    workers.put("b")
    assert loop.run_until(2) == [("a", "A"), ("b", "B")]
    assert loop.began.acquire(blocking=False)
    assert not loop.began.acquire(blocking=False)  # both in one call
