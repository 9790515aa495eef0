"""How long the event loop is blocked: by a callback, or by many in a row, while every client waits."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from kvoffd.observe.meters import DurationHistogram
from kvoffd_proto.messages import Histogram

logger = logging.getLogger(__name__)

BEAT_S, IDLE_BEAT_S = 0.05, 0.25
"""Seconds between two beats of a loop that works, and of one that does not: a wake-up costs 0.1 ms of CPU. A block is
seen from the next beat on, so at most so much of it is missed."""
WORKING_SHARE = 0.01
"""Share of a core from which on a loop works."""
SAMPLED_S = 0.06
"""How late a beat is when another thread looks what the loop is doing."""
LOGGED_S = 0.1
LOG_EVERY_S = 10.0
FRAMES_LOGGED = 6
STOPPED_SHARE = 0.01
"""A process that used less of a core than this while its loop was blocked and its other threads slept did not run."""
BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class LoopWatch:
    """Beats in the loop and measures how late each is, less the time for which the thread had no CPU to run on.

    A thread of its own wakes half as often; it looks at the loop's stack when a
    beat is late, which costs the loop nothing and knows every callback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._blocked = DurationHistogram(BOUNDS_S)
        self.loop_blocked_maximum_seconds = 0.0
        self._due_at = 0.0
        self._sampled: tuple[float, float, str] | None = None  # the beat that was late, when it was seen, and what ran
        self._process_s = 0.0
        self._logged_at = -LOG_EVERY_S
        self._unlogged = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._schedstat = -1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch ``loop``, whose thread calls this, until ``stop``."""
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # a kernel without scheduler statistics: waits for a CPU count as blocked
        self._loop = loop
        self._waited_s = self._waited_for_cpu_s()
        self._used_s = self._beat_at = 0.0
        self._beat_again(self._clock())
        watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(watched,), name="loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    @property
    def loop_blocked(self) -> Histogram:
        """All beats by how late they were, in seconds."""
        return self._blocked.counted()

    def observe(self, late_s: float, what: str) -> None:
        """Count one beat; log it where it was late, with what ran, but not more often than every ``LOG_EVERY_S``."""
        self._blocked.observe(late_s)
        self.loop_blocked_maximum_seconds = max(self.loop_blocked_maximum_seconds, late_s)
        if late_s <= LOGGED_S:
            return
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            self._unlogged += 1
            return
        times = "once" if self._unlogged == 1 else f"{self._unlogged} times"
        more = f" It was {times} more since the last such line." if self._unlogged else ""
        logger.warning("The loop was blocked for %.0f ms by %s.%s", late_s * 1000, what or "what was not seen", more)
        self._logged_at, self._unlogged = now, 0

    def _beat(self) -> None:
        if self._stopped.is_set():
            return
        waited_s = self._waited_for_cpu_s()
        due_at, now = self._due_at, self._clock()
        sampled, self._sampled = self._sampled, None
        # The wait for a CPU since the last beat, of which some may have been before this one was due.
        late_s = max(0.0, now - due_at - (waited_s - self._waited_s))
        self._waited_s = waited_s
        seen_at, what = sampled[1:] if sampled and sampled[0] == due_at else (now, "")
        # The thread that looks at the stack came as late as the loop, and nothing ran.
        idle = time.process_time() - self._process_s < STOPPED_SHARE * late_s
        if idle and seen_at - due_at > late_s / 2:
            what = (
                "a stop of the whole process (SIGSTOP, a frozen container, or a host that gave this machine no CPU: "
                "see st in vmstat)"
            )
        self.observe(late_s, what)
        self._beat_again(now)

    def _beat_again(self, now: float) -> None:
        used_s = time.thread_time()
        works = used_s - self._used_s > WORKING_SHARE * (now - self._beat_at)
        self._used_s, self._beat_at, self._process_s = used_s, now, time.process_time()
        period_s = BEAT_S if works else IDLE_BEAT_S
        self._due_at = now + period_s
        self._loop.call_later(period_s, self._beat)

    def _waited_for_cpu_s(self) -> float:
        """For how long the loop's thread could run and had no CPU, since its start (Documentation/scheduler)."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0

    def _watch(self, watched: int) -> None:
        """Look at the loop's stack while a beat is late. In a thread."""
        while not self._stopped.wait(max(SAMPLED_S / 4, self._due_at + SAMPLED_S - self._clock())):
            due_at = self._due_at
            now = self._clock()
            late = now - due_at >= SAMPLED_S
            if late and (self._sampled is None or self._sampled[0] != due_at):
                frame = sys._current_frames().get(watched)
                self._sampled = due_at, now, describe(frame)


def describe(frame: FrameType | None) -> str:
    """The innermost calls, such as ``close (mappings.py:80) in tick (lifelines.py:120)``."""
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES_LOGGED:
        code = frame.f_code
        calls.append(f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})")
        frame = frame.f_back
    return " in ".join(calls)
