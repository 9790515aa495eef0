"""The watch over the event loop: what blocks it, for how long, and what does not count."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from kvoffd.observe import loop_watch
from kvoffd.observe.loop_watch import STOP, LoopWatch
from tests.kit.clock import Clock
from tests.kit.waiting import DEADLINE_S, wait_until


def over(watch: LoopWatch, bound: str) -> int:
    buckets = watch.loop_blocked_seconds.buckets
    return buckets["+Inf"] - buckets[bound]


def block(seconds: float) -> None:
    time.sleep(seconds)


def spin(seconds: float) -> None:
    used = time.thread_time()
    while time.thread_time() - used < seconds:
        pass


async def watched(*calls: tuple[float, object], for_s: float = 0.6) -> LoopWatch:
    watch = LoopWatch()
    loop = asyncio.get_running_loop()
    watch.start(loop)
    for after, call in calls:
        loop.call_later(after, call)
    await asyncio.sleep(for_s)
    watch.stop()
    return watch


def longest(caplog: pytest.LogCaptureFixture) -> str:
    """The line of the longest block: where the cores stand still now and then, others are logged too."""
    return max(caplog.messages, key=lambda line: int(line.split()[5]))


@pytest.fixture
def all_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each block is logged, not one a minute."""
    monkeypatch.setattr("kvoffd.system.rare_warnings.RARE_S", 0.0)
    with caplog.at_level(logging.WARNING):
        yield


@pytest.mark.usefixtures("all_logged")
@pytest.mark.parametrize("blocker", [block, spin], ids=["asleep", "busy"])
def test_a_callback_that_blocks_is_measured_and_named(
    caplog: pytest.LogCaptureFixture, blocker: Callable[[float], None]
) -> None:
    def named() -> bool:
        caplog.clear()
        watch = uvloop.run(watched((0.15, lambda: blocker(0.8))))
        assert over(watch, "0.1") >= 1
        assert watch.loop_blocked_max_seconds > 0.4  # less waits for a CPU before the beat was due
        line = longest(caplog)
        assert line.startswith("The loop was blocked for")
        return blocker.__name__ in line and f"in <lambda> ({os.path.basename(__file__)}" in line

    wait_until(named, 90.0)  # where all threads stood still at first, it shows what ran then


def test_turns_after_the_watch_has_stopped_disturb_nobody() -> None:
    """As those of a daemon that lets its running jobs finish."""
    watch = uvloop.run(watched())
    with watch:
        block(0.01)


class OwnTime:
    """A watch whose clocks, waits for a CPU and beats are the test's, and which samples nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.waited_s, self.process_s, self.beats = Clock(), 0.0, 0.0, list[Callable[[], None]]()
        own = SimpleNamespace(monotonic=self.clock, thread_time=lambda: 0.0, process_time=lambda: self.process_s)
        monkeypatch.setattr(loop_watch, "time", own)
        monkeypatch.setattr(LoopWatch, "_watch", lambda *_: None)
        monkeypatch.setattr(LoopWatch, "_waited_for_cpu_s", lambda _: self.waited_s)
        self.watch = LoopWatch()
        self.watch.start(cast("Any", SimpleNamespace(call_later=lambda _, beat: self.beats.append(beat))))

    def beat(self, late_s: float = 0.0) -> None:
        """Run the beat that is due, or this much later."""
        self.clock.now = max(self.clock.now, self.watch._due_at + late_s)
        self.beats.pop()()


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnTime]:
    own = OwnTime(monkeypatch)
    yield own
    own.watch.stop()


def test_a_stop_between_two_beats_is_seen(own_time: OwnTime) -> None:
    """The beats of an idle loop are 0.25 s apart."""
    for seconds in (0.002, 0.04, 0.002):
        with own_time.watch, own_time.watch:
            own_time.clock.now += seconds
    own_time.beat()
    assert over(own_time.watch, "0.001") == over(own_time.watch, "0.025") == 1, "the longest turn between two counts"
    assert own_time.watch.loop_blocked_max_seconds == pytest.approx(0.04)
    own_time.beat()
    assert over(own_time.watch, "0.001") == 1


def test_a_loop_that_has_no_cpu_is_not_blocked(own_time: OwnTime) -> None:
    own_time.waited_s += 0.3
    own_time.beat(late_s=0.5)
    assert own_time.watch.loop_blocked_max_seconds == pytest.approx(0.2)
    with own_time.watch:
        own_time.clock.now += 0.8
        own_time.waited_s += 0.7
    own_time.beat()
    assert own_time.watch.loop_blocked_seconds.sum_seconds == pytest.approx(0.2 + 0.1)


_WATCHED = """
import asyncio, logging, sys, threading, time
from kvoffd.observe import loop_watch
from kvoffd.system import rare_warnings as rare
rare.RARE_S = 0
logging.basicConfig(format="%(message)s")
def spin():
    while True:
        pass
def work(loop):
    until = time.monotonic() + 0.005
    while time.monotonic() < until:
        pass
    loop.call_later(0.005, work, loop)
async def main():
    watch = loop_watch.LoopWatch()
    loop = asyncio.get_running_loop()
    watch.start(loop)
    threading.Thread(target=spin, daemon=True).start()
    work(loop)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    watch.stop()
asyncio.run(main())
"""


def test_a_stopped_process_is_reported_as_such() -> None:
    """Also where it is busy."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _WATCHED], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as stopped:
        assert stopped.stdout.readline() == "ready\n"

        def reported() -> bool:
            stopped.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            time.sleep(1.5)
            stopped.send_signal(signal.SIGCONT)
            line = next(line for line in stopped.stderr if int(line.split()[5]) > 1000)
            return STOP in line

        for _ in range(2):
            wait_until(reported)  # a loop that had no CPU before the stop was blocked by both
        stopped.communicate(timeout=DEADLINE_S)


@pytest.mark.usefixtures("all_logged")
@pytest.mark.parametrize(
    ("seen", "absent_s", "used_s", "named"),
    [
        ("work", 0.0, 2.0, "work"),
        ("work", 0.0, 0.1, "work"),
        ("work", 1.5, 2.0, "work"),  # it lets no other thread run
        ("", 1.5, 2.0, "unknown code"),
        ("work", 1.5, 0.1, STOP),  # it blocked the loop a little before
        ("", 1.5, 0.1, STOP),
    ],
)
def test_a_block_is_named_by_what_ran(
    own_time: OwnTime, caplog: pytest.LogCaptureFixture, seen: str, absent_s: float, used_s: float, named: str
) -> None:
    """Absent: for how long the sampling thread did not run."""
    own_time.watch._sample = loop_watch._Sample(own_time.watch._due_at, seen, absent_s)
    own_time.watch._look_at = own_time.watch._due_at + 2.0
    own_time.process_s += used_s
    own_time.beat(late_s=2.0)
    assert caplog.messages == [f"The loop was blocked for 2000 ms by {named}."]


@pytest.mark.usefixtures("all_logged")
def test_a_turn_that_ended_before_the_beat_is_not_called_a_stop(
    own_time: OwnTime, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a call to a slow disk while the loop is idle: the other thread had no reason to look."""
    own_time.watch._look_at = own_time.watch._due_at + loop_watch.SAMPLED_S
    with own_time.watch:
        own_time.clock.now += 0.2
    own_time.beat()
    assert caplog.messages == [f"The loop was blocked for 200 ms by {loop_watch.UNSEEN}."]


def hold_the_interpreter() -> None:
    sum(range(80_000_000))  # no other thread runs; longer than two stops of a host that is busy


@pytest.mark.usefixtures("all_logged")
def test_code_that_lets_no_other_thread_run_is_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    def is_judged() -> bool:
        caplog.clear()
        began, cpu_s = time.monotonic(), time.process_time()
        uvloop.run(watched((0.15, hold_the_interpreter)))
        # A machine that stood still for longer than it ran was a stop, which this test is not about.
        return STOP not in longest(caplog) or time.process_time() - cpu_s > (time.monotonic() - began) / 2

    wait_until(is_judged)
    assert STOP not in longest(caplog)


def _spin_for_ever(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def test_waits_for_a_cpu_are_told_by_the_kernel() -> None:
    """Another process runs on the same core."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    other = multiprocessing.get_context("fork").Process(target=_spin_for_ever, args=(core,))
    other.start()
    os.sched_setaffinity(0, {core})

    async def waits() -> None:
        watch = LoopWatch()
        watch.start(asyncio.get_running_loop())
        before = watch._waited_for_cpu_s()
        wait_until(lambda: watch._waited_for_cpu_s() > before + 0.02, interval_s=0.0)
        watch.stop()

    try:
        uvloop.run(waits())
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.join()
