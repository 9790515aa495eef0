"""Measures how long callbacks block the event loop, one or many in a row, while every client waits."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

from kvoffd.observe.meters import DurationHistogram, RecentDurations
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd_proto.stats import Histogram

logger = logging.getLogger(__name__)

BEAT_S, IDLE_BEAT_S = 0.05, 0.25
"""Seconds between two beats of a busy and of an idle loop: a wake-up costs 0.1 ms of CPU."""
WORKING_SHARE = 0.01
"""Share of a core that makes a loop busy."""
SAMPLED_S = 0.06
"""Delay of a beat after which the other thread samples the loop's stack."""
LOGGED_S = 0.1
"""Blocked time that is logged, with the cause."""
FRAMES_LOGGED = 6
"""Innermost calls that are logged as the cause."""
BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
STOP = (
    "a stop of the whole process (SIGSTOP, a frozen container, or a host that gave this machine no CPU: see st in "
    "vmstat)"
)
UNSEEN = f"something that ended before it was looked at: a call, or {STOP}"


class _Sample(NamedTuple):
    """View of the other thread while the beat that was due at ``due_at`` was late."""

    due_at: float
    what: str
    """The loop's innermost calls, when they were first looked at."""
    absent_s: float
    """Longest time for which the other thread itself did not run."""


class LoopWatch:
    """Measures how late a timer of the loop (a beat) runs, without the time in which the thread waited for a CPU. If a
    turn of the loop (``with watch``) took longer since the last beat, its duration counts instead.

    Another thread wakes about as often and samples the loop's stack when a beat is late, which costs the loop nothing.
    If that thread did not run for most of that time either, and the process used little CPU, the process was stopped.
    """

    def __init__(self) -> None:
        self._blocked = DurationHistogram(BOUNDS_S)
        self.recent = RecentDurations(self._blocked, time.monotonic)
        self.loop_blocked_max_seconds = 0.0
        self._due_at = 0.0
        self._turn_depth, self._turn_at, self._longest_turn_s = 0, 0.0, 0.0
        """Depth of nested turns; start of the outermost; longest turn since the last beat."""
        self._sample = _Sample(0.0, "", 0.0)
        self._look_at = 0.0
        """Time at which the other thread means to look next."""
        self._warnings = RareWarnings(logger)
        self._ended = threading.Event()
        self._schedstat = -1
        """Descriptor of the loop's thread's scheduler statistics."""
        self._beat_at = self._thread_cpu_s = self._process_cpu_s = self._waited_s = 0.0
        """Time of the last beat; until then, CPU time of the loop's thread and of the process, and the thread's waits
        for a CPU."""
        self._subtracted_s = 0.0
        """The thread's waits when they were last subtracted from a beat's delay or a turn's duration."""

    @property
    def loop_blocked_seconds(self) -> Histogram:
        """Beats by the seconds for which the loop was blocked since the previous one."""
        return self._blocked.counted()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch ``loop`` until ``stop``. Called in the loop's thread."""
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # no scheduler statistics: waiting for a CPU counts as blocked
        self._loop = loop
        self._waited_s = self._subtracted_s = self._waited_for_cpu_s()
        self._beat_again(time.monotonic())
        self._thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="loop-watch", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> None:
        """Begin a turn, the code that the loop runs until the end of the block."""
        if not self._turn_depth:
            self._turn_at = time.monotonic()
        self._turn_depth += 1

    def __exit__(self, *_: object) -> None:
        self._turn_depth -= 1
        if self._turn_depth:
            return
        seconds = time.monotonic() - self._turn_at
        if seconds > max(BOUNDS_S[0], self._longest_turn_s):  # reading the waits for each turn would cost too much
            # Waits since they were last subtracted: those from before this turn make it count as shorter.
            waited_s = self._waited_for_cpu_s()
            self._longest_turn_s = max(self._longest_turn_s, seconds - (waited_s - self._subtracted_s))
            self._subtracted_s = waited_s

    def stop(self) -> None:
        """Stop watching. Turns may still follow: a daemon that stops continues to serve its running jobs."""
        self._ended.set()
        self._thread.join()
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _beat(self) -> None:
        if self._ended.is_set():
            return
        now, waited_s = time.monotonic(), self._waited_for_cpu_s()
        # The wait for a CPU since the last beat may partly be from before this beat was due.
        late_s = max(0.0, now - self._due_at - (waited_s - self._waited_s))
        self._waited_s = self._subtracted_s = waited_s
        blocked_s, self._longest_turn_s = max(late_s, self._longest_turn_s), 0.0
        self._blocked.observe(blocked_s)
        self.loop_blocked_max_seconds = max(self.loop_blocked_max_seconds, blocked_s)
        if blocked_s > LOGGED_S:
            what = self._blocker(now, blocked_s)
            self._warnings.warn("The loop was blocked for %.0f ms by %s.", blocked_s * 1000, what)
        self._beat_again(now)

    def _blocker(self, now: float, blocked_s: float) -> str:
        """Return what blocked the loop until this beat, the first of these that fits:

        * the calls that the other thread saw, if it saw this beat late and ran for most of that time
        * UNSEEN, if it was not to look yet
        * STOP, if the process used little CPU
        * the calls, if it saw any, though late; else unknown code
        """
        sample, what = self._sample, ""
        if sample.due_at == self._due_at:  # it saw this beat late
            what = sample.what
            absent_s = max(sample.absent_s, now - self._look_at)
            if what and absent_s <= blocked_s / 2:
                return what
        elif now < self._look_at:  # it was not to look yet: a long turn ended before the beat was due
            return UNSEEN
        if time.process_time() - self._process_cpu_s <= blocked_s / 2:
            return STOP
        return what or "unknown code"

    def _beat_again(self, now: float) -> None:
        used_s = time.thread_time()
        works = used_s - self._thread_cpu_s > WORKING_SHARE * (now - self._beat_at)
        self._beat_at, self._thread_cpu_s, self._process_cpu_s = now, used_s, time.process_time()
        period_s = BEAT_S if works else IDLE_BEAT_S
        self._due_at = now + period_s
        self._loop.call_later(period_s, self._beat)

    def _waited_for_cpu_s(self) -> float:
        """Return how long the loop's thread has waited for a CPU (Linux, Documentation/scheduler/sched-stats.rst)."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0

    def _watch(self, watched: int) -> None:
        """Sample the loop's stack while a beat is late. Runs in a thread."""
        while True:
            # First when the next beat would be late; then, while it is, again and again.
            self._look_at = max(self._due_at + SAMPLED_S, time.monotonic() + SAMPLED_S / 4)
            if self._ended.wait(self._look_at - time.monotonic()):
                return
            now, due_at = time.monotonic(), self._due_at
            if now - due_at >= SAMPLED_S:
                sample = self._sample
                if sample.due_at != due_at:
                    sample = _Sample(due_at, describe(sys._current_frames().get(watched)), 0.0)
                self._sample = sample._replace(absent_s=max(sample.absent_s, now - self._look_at))


def describe(frame: FrameType | None) -> str:
    """Return the innermost calls, such as ``close (mappings.py:80) in tick (lifeline.py:120)``."""
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES_LOGGED:
        code = frame.f_code
        calls.append(f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        frame = frame.f_back
    return " in ".join(calls)
