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

import pytest
import uvloop

from kvoffd.observe.loop_watch import LoopWatch
from tests.kit.waiting import DEADLINE_S


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


@pytest.mark.parametrize("blocker", [block, spin], ids=["asleep", "busy"])
def test_a_callback_that_blocks_is_measured_and_named(caplog: pytest.LogCaptureFixture, blocker: object) -> None:
    with caplog.at_level(logging.WARNING):
        watch = uvloop.run(watched((0.15, lambda: blocker(0.8))))
    assert over(watch, "0.1") >= 1
    assert 0.4 < watch.loop_blocked_max_seconds < 3.0  # less waits for a CPU before the beat was due
    assert f"in <lambda> ({os.path.basename(__file__)}" in caplog.messages[0]
    assert caplog.messages[0].startswith("The loop was blocked for")
    assert blocker.__name__ in caplog.messages[0]


def test_turns_after_the_watch_has_stopped_disturb_nobody() -> None:
    """As those of a daemon that lets its running jobs finish."""
    watch = uvloop.run(watched())
    with watch:
        block(0.01)


def test_a_stop_between_two_beats_is_seen() -> None:
    """The beats of an idle loop are 0.25 s apart."""

    async def work() -> LoopWatch:
        watch = LoopWatch()
        watch.start(asyncio.get_running_loop())
        for seconds in (0.002, 0.04, 0.002):
            with watch, watch:
                block(seconds)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.3)
        watch.stop()
        return watch

    watch = uvloop.run(work())
    assert over(watch, "0.025") == 1, "the longest turn between two beats counts"
    assert over(watch, "0.001") <= 2
    assert 0.03 < watch.loop_blocked_max_seconds < 1.0


_WATCHED = """
import asyncio, logging, sys, threading, time
from kvoffd.observe import logging as rare, loop_watch
rare.RARE_S = 0
logging.basicConfig(format="%(message)s")
busy, late = sys.argv[1] == "busy", sys.argv[1] == "late"
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
    if busy:
        threading.Thread(target=spin, daemon=True).start()
        work(loop)
    await asyncio.sleep(0.6)
    if late:
        time.sleep(0.4)
    print("ready", flush=True)
    if late:
        time.sleep(0.1)
    await loop.run_in_executor(None, sys.stdin.read)
    await asyncio.sleep(0.6)
    watch.stop()
asyncio.run(main())
"""


@pytest.mark.parametrize(("state", "stops"), [("busy", 2), ("late", 1)])
def test_a_stopped_process_is_reported_as_such(state: str, stops: int) -> None:
    """Also where a callback blocked the loop a little, and was seen, before the process was stopped."""
    command = [sys.executable, "-c", _WATCHED, state]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as stopped:
        assert stopped.stdout.readline() == "ready\n"
        for _ in range(stops):
            stopped.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
            time.sleep(1.5)
            stopped.send_signal(signal.SIGCONT)
            # On a machine whose cores stand still there are other stops, which are shorter.
            line = next(line for line in stopped.stderr if int(line.split()[5]) > 1000)
            assert "by a stop of the whole process (SIGSTOP" in line
        stopped.communicate(timeout=DEADLINE_S)


def hold_the_interpreter() -> None:
    sum(range(60_000_000))  # no other thread runs


def test_code_that_lets_no_other_thread_run_is_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        uvloop.run(watched((0.15, hold_the_interpreter)))
    assert "hold_the_interpreter" in caplog.messages[0] or "unknown code" in caplog.messages[0]
    assert "SIGSTOP" not in caplog.text


def _spin_for_ever(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@pytest.mark.nightly  # it takes one of the cores for itself
def test_a_loop_that_has_no_cpu_is_not_blocked() -> None:
    """Four processes share one core with it: it runs a fifth of the time."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=_spin_for_ever, args=(core,)) for _ in range(4)]
    for other in others:
        other.start()
    os.sched_setaffinity(0, {core})
    try:
        began, used = time.monotonic(), time.thread_time()
        watch = uvloop.run(watched(*((at / 50, lambda: spin(0.01)) for at in range(25))))
        lacked = time.monotonic() - began - (time.thread_time() - used)
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.join()
    assert lacked > 0.3
    # Not nothing: it may wait for the interpreter's lock while the thread that has it waits for the CPU.
    assert watch.loop_blocked_seconds.sum_seconds < lacked / 2
