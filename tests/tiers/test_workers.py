"""The threads of tiers: each task ends once, in the daemon's thread, whatever raises."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from kvoffd.errors import NoMoreThreads
from kvoffd.system.threads import AbandonableThreads, Workers, start, submit
from kvoffd.tiers import shared
from kvoffd.tiers.disk import DiskTier
from kvoffd.tiers.peer_messages import HelperSettings
from kvoffd.tiers.peer_process import HelperProcess
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, open_store
from kvoffd.tiers.tier import TierListener
from tests.kit.open_files import open_files
from tests.kit.waiting import deliver_until, wait_until

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
    wait_until(lambda: rig.workers.running == rig.workers.waiting == 0)
    assert rig.workers.unfinished == len(names), "their ends are still to be handled"
    rig.until(lambda: len(rig.ended) == len(names))
    assert not rig.workers.unfinished
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


def test_a_task_ends_when_its_result_is_given_and_others_of_its_call_go_on() -> None:
    posted, gate, ended = deque[Callable[[], None]](), threading.Event(), list[tuple[str, str]]()

    def work(tasks: list[str]) -> Iterator[str]:
        yield tasks[0].upper()
        assert gate.wait(DEADLINE_S)
        yield tasks[1].upper()
        raise ZeroDivisionError

    workers: Workers[str, str] = Workers(
        *("test", [work], lambda error: "failed", lambda *end: ended.append(end), posted.append, time.monotonic),
        lambda waiting: [waiting.popleft() for _ in range(4)] if len(waiting) == 4 else [],
    )
    for name in "abcd":
        workers.put(name)
    deliver_until(posted, lambda: ended == [("a", "A")])
    assert workers.running == 3
    gate.set()
    assert workers.close(time.monotonic() + DEADLINE_S)
    assert ended == [("a", "A"), ("b", "B"), ("c", "failed"), ("d", "failed")]


def test_threads_that_are_nice_give_way_to_the_one_that_started_them() -> None:
    posted, ended = deque[Callable[[], None]](), list[int]()

    def work(tasks: list[str]) -> list[int]:
        return [os.getpriority(os.PRIO_PROCESS, threading.get_native_id())]

    end = ("test", [work], lambda error: -99, lambda task, result: ended.append(result), posted.append, time.monotonic)
    workers: Workers[str, int] = Workers(*end, nice=3)
    workers.put("a")
    deliver_until(posted, lambda: bool(ended))
    assert ended == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)]
    assert workers.close(time.monotonic() + DEADLINE_S)


def refuse_thread(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the thread of kvoffd with this number, counted from now, not start."""

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("kvoffd-") and next(numbers) == number:
            raise RuntimeError("can't start new thread")
        real_start(thread)

    numbers, real_start = itertools.count(), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("started", range(5))
def test_a_disk_leaves_nothing_where_a_thread_does_not_start(
    tmp_path: Path, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(started, monkeypatch)

    def resources() -> set[object]:
        contexts = [line for line in Path("/proc/self/maps").read_text().splitlines() if "[aio]" in line]
        return {*threading.enumerate(), *open_files(), *contexts}

    before = resources()
    listener, pool = cast("TierListener", None), memoryview(bytearray(4096))
    open_disk = partial(DiskTier, tmp_path, 1 << 24, pool=pool, clock=time.monotonic, post=print, listener=listener)
    with pytest.raises(NoMoreThreads) if started < 4 else nullcontext():
        open_disk(generation=lambda _: 0).close(DEADLINE_S)
    assert resources() <= before


@pytest.mark.parametrize("started", range(6))
def test_a_shared_tier_leaves_nothing_where_a_thread_does_not_start(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(started, monkeypatch)
    before = {*threading.enumerate()}
    open_tier = partial(SharedTier, "", open_store("redis://127.0.0.1:1", Credentials()), pool=memoryview(b""))
    listener = cast("TierListener", None)
    with pytest.raises(NoMoreThreads) if started < 5 else nullcontext():
        tier = open_tier(clock=time.monotonic, post=print, listener=listener, ask_deadline_s=1.0)
        assert tier.close(DEADLINE_S)
    assert {*threading.enumerate()} <= before


def test_a_shared_tier_without_memory_for_its_answers_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(shared, "Answers", no_memory)
    before = {*threading.enumerate()}
    open_tier = partial(SharedTier, "", open_store("redis://127.0.0.1:1", Credentials()), pool=memoryview(b""))
    with pytest.raises(MemoryError):
        open_tier(clock=time.monotonic, post=print, listener=cast("TierListener", None), ask_deadline_s=1.0)
    assert {*threading.enumerate()} <= before


def test_only_a_refused_thread_counts_as_one() -> None:
    """A pool of threads that was shut down, and a thread that was started before, are bugs of ours: the sentence about
    the limits of processes would be false."""
    with ThreadPoolExecutor() as executor:
        pass
    with pytest.raises(RuntimeError, match="after shutdown"):
        submit(executor, print)
    thread = threading.Thread(target=print)
    start(thread)
    with pytest.raises(RuntimeError, match="only be started once"):
        start(thread)
    thread.join()


def test_threads_are_ended_where_a_later_one_fails_for_another_reason() -> None:
    def works() -> Iterator[tuple[str, Callable[[], None]]]:
        yield "first", lambda: ended.wait(DEADLINE_S) and None
        raise MemoryError

    ended, before = threading.Event(), {*threading.enumerate()}
    with pytest.raises(MemoryError):
        AbandonableThreads(works(), ended.set)
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("started", range(3))
def test_a_helper_process_leaves_nothing_where_a_thread_does_not_start(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(started, monkeypatch)
    before = {*threading.enumerate(), *open_files()}
    settings = HelperSettings(["127.0.0.1:1"], "", b"a secret of tests")
    with pytest.raises(NoMoreThreads):
        HelperProcess(settings, (-1, 0, 0), lambda *_: None, lambda: None)
    assert {*threading.enumerate(), *open_files()} <= before
