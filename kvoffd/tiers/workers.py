"""Threads that do what is queued. What they have done is handled in the daemon's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from kvoffd.errors import NoMoreThreads
from kvoffd.system.threads import DaemonThreads

logger = logging.getLogger(__name__)

ENDED_AT_ONCE = 32
"""Tasks whose ends are handled before the daemon's thread does other work."""
AGAIN_S = 0.02
"""A thread whose queue has nothing for it now looks again after so long."""

T = TypeVar("T")
R = TypeVar("R")


def take_one(waiting: deque[T]) -> list[T]:
    """The first task of a queue."""
    return [waiting.popleft()]


class Workers(Generic[T, R]):
    """A queue and its threads, which do not keep a process from ending. Each task ends once.

    Args:
        name: of the threads.
        works: one for each thread, so that it may have a connection of its own. It does some tasks and returns the
            result of each; where it raises, that is their result.
        on_end: called in the daemon's thread, with a task and its result.
        post: calls a function in the daemon's thread. For any thread.
        clock: in seconds. For any thread.
        take: takes from the queue, which is not empty, what is done in one go; nothing: not now. Called in any thread,
            one at a time.

    Raises NoMoreThreads; then none runs.
    """

    def __init__(
        self,
        name: str,
        works: Sequence[Callable[[list[T]], list[R]]],
        on_end: Callable[[T, R | Exception], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        take: Callable[[deque[T]], list[T]] = take_one,
    ) -> None:
        self._name = name
        self._works = works
        self._on_end = on_end
        self._post = post
        self._clock = clock
        self._take = take
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._delivering = threading.Lock()
        self._waiting: deque[T] = deque()
        self._running: dict[int, tuple[float, list[T]]] = {}  # by thread: since when, and what
        self._ended: deque[tuple[T, R | Exception]] = deque()
        self._posted = self._stopped = self._called = False
        self._busy_seconds = 0.0
        self._start()

    def _start(self) -> None:
        self._threads = DaemonThreads([])
        try:
            self._threads = DaemonThreads(
                (f"{self._name}-{number}", partial(self._run, number)) for number in range(len(self._works))
            )
        except NoMoreThreads:
            self._stop(time.monotonic())
            raise

    def put(self, task: T) -> None:
        with self._changed:
            self._waiting.append(task)
            self._call_one()

    def end(self, result: R | Exception, which: Callable[[T], bool] = lambda task: True) -> int:
        """End tasks that nobody has begun, in this thread and with this result; returns how many."""
        with self._changed:
            ended = [task for task in self._waiting if which(task)]
            if ended:
                kept = [task for task in self._waiting if not which(task)]
                self._waiting.clear()
                self._waiting.extend(kept)
            self._notify_idle()
        for task in ended:
            self._finish(task, result)
        return len(ended)

    @property
    def waiting(self) -> int:
        """Tasks that nobody has begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Tasks that have begun and not ended."""
        with self._changed:
            return sum(len(tasks) for _, tasks in self._running.values())

    @property
    def longest_s(self) -> float:
        """How long the oldest running call has taken so far."""
        with self._changed:
            return max((self._clock() - begun for begun, _ in self._running.values()), default=0.0)

    @property
    def busy_seconds(self) -> float:
        return self._busy_seconds

    def close(self, until: float) -> bool:
        """Wait until nothing waits or runs, handle all ends in this thread, and end the threads.

        False where something still hangs at ``until`` (of ``time.monotonic``); then it may be called again.
        """
        idle = self._wait_idle(until)
        with self._delivering:
            self._deliver(len(self._ended))
        return idle and self._stop(until)

    def _wait_idle(self, until: float) -> bool:
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._waiting and not self._running, max(0.0, until - time.monotonic())
            )

    def _stop(self, until: float) -> bool:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        return self._threads.join(until)

    def _deliver_some(self) -> None:
        if self._delivering.acquire(blocking=False):  # else another thread closes, and handles what ends
            try:
                self._posted = False
                self._deliver(min(ENDED_AT_ONCE, len(self._ended)))
            finally:
                self._delivering.release()
            if self._ended:
                self._wake()

    def _deliver(self, count: int) -> None:
        for _ in range(count):
            self._finish(*self._ended.popleft())

    def _finish(self, task: T, result: R | Exception) -> None:
        try:
            self._on_end(task, result)
        except Exception:
            logger.exception("The end of a task of %s raised: a bug; the others go on.", self._name)

    def _run(self, number: int) -> None:
        while (tasks := self._next(number)) is not None:
            self._do(number, tasks)

    def _next(self, number: int) -> list[T] | None:
        """The next tasks; None once stopped."""
        with self._changed:
            while not self._stopped:
                self._called = False
                if tasks := self._begin(number):
                    if self._waiting:
                        self._call_one()
                    return tasks
                self._changed.wait(AGAIN_S if self._waiting else None)
        return None

    def _call_one(self) -> None:
        """Wake a thread; one that takes tasks and leaves some wakes the next."""
        if not self._called:
            self._called = True
            self._changed.notify()

    def _begin(self, number: int) -> list[T]:
        tasks = self._take(self._waiting) if self._waiting else []
        if tasks:
            self._running[number] = self._clock(), tasks
        return tasks

    def _do(self, number: int, tasks: list[T]) -> None:
        begun = time.perf_counter()
        results: Sequence[R | Exception]
        try:
            results = self._works[number](tasks)
            assert len(results) == len(tasks)
        except Exception as error:
            results = [error] * len(tasks)
        with self._changed:
            self._busy_seconds += time.perf_counter() - begun
            del self._running[number]
            self._ended.extend(zip(tasks, results, strict=True))
            # This thread takes the next tasks: no other need be woken.
            self._notify_idle()
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            wake, self._posted = not self._posted, True
        if wake:
            self._post(self._deliver_some)

    def _notify_idle(self) -> None:
        if not self._waiting and not self._running:
            self._idle.notify_all()
