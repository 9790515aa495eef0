"""Daemon threads and their queues. One that hangs in a disk or GPU call does not stop the process from exiting."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvoffd.errors import NoMoreThreads

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

ENDED_AT_ONCE = 8
"""Ended tasks that the loop handles at a time, in one or two milliseconds."""


def is_refused_thread(error: RuntimeError) -> bool:
    """Return whether the error says that the kernel refuses another thread. Other ones are bugs, or the exit."""
    return str(error) == "can't start new thread"


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises NoMoreThreads."""
    try:
        thread.start()
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise
        raise NoMoreThreads from error


def submit(executor: ThreadPoolExecutor, task: Callable[..., R], *arguments: object) -> Future[R]:
    """Submit a task to an executor, which may start a thread for it. Raises NoMoreThreads."""
    try:
        return executor.submit(task, *arguments)
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise
        raise NoMoreThreads from error


class AbandonableThreads:
    """One thread for each (name, function). The interpreter would wait for an executor's threads at exit.

    Args:
        stop: makes the functions return.
        nice: increment of the threads' nice value.

    Raises NoMoreThreads. After any error none runs.
    """

    def __init__(
        self, works: Iterable[tuple[str, Callable[[], None]]], stop: Callable[[], object], nice: int = 0
    ) -> None:
        self._threads: list[threading.Thread] = []
        self._nice = nice
        try:
            for name, work in works:
                start(thread := threading.Thread(target=self._run, args=(work,), name=name, daemon=True))
                self._threads.append(thread)
        except BaseException:
            stop()
            for thread in self._threads:
                thread.join()
            raise

    def _run(self, work: Callable[[], None]) -> None:
        if self._nice:
            thread = threading.get_native_id()
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._nice)
        work()

    def join(self, until: float) -> bool:
        """Wait for all threads; return False if one still runs at ``until`` (``time.monotonic``)."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class TaskThread:
    """A thread that runs tasks in order. ``clock`` measures ``busy_s``, in seconds. Raises NoMoreThreads."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._clock = name, clock
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """None ends the thread."""
        self._began: float | None = None
        self._threads = AbandonableThreads([(name, self._run)], self.stop)

    @property
    def busy_s(self) -> float:
        """Seconds since the current task began; 0 without one."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    @property
    def waiting(self) -> int:
        return self._tasks.qsize()

    def put(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """End the thread after the queued tasks."""
        self._tasks.put(None)

    def close(self, timeout_s: float) -> bool:
        """Stop and join the thread; return False if it still runs after ``timeout_s``."""
        self.stop()
        return self._threads.join(time.monotonic() + timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._began = self._clock()
            try:
                task()
            except Exception:
                logger.exception("A task of %s failed; the thread continues.", self._name)
            self._began = None


class Workers(Generic[T, R]):
    """A queue of tasks with daemon threads. Each task ends exactly once: ``on_end`` is called with its result.

    A task is in one of three places: ``_waiting``, ``_running``, or ``_ended`` until its end is handled. All are
    changed under one lock, but for ``_ended``, which the daemon's thread empties without it.

    Args:
        name: prefix of the threads' names.
        works: a function for each thread, which may own a connection. It runs a batch of tasks and yields their results
            in order. A task ends when its result is yielded, even if the batch continues.
        failed: returns the result of the batch's unfinished tasks if a work raises. Called in any thread.
        on_end: called in the daemon's thread with a task and its result.
        post: calls a function in the daemon's thread. Called in any thread.
        clock: in seconds. Called in any thread.
        take: takes a batch from the queue, which is not empty. Called in any thread, under the lock.
        nice: increment of the threads' nice value.

    Raises NoMoreThreads; then none runs.
    """

    def __init__(
        self,
        name: str,
        works: Sequence[Callable[[list[T]], Iterable[R]]],
        failed: Callable[[Exception], R],
        on_end: Callable[[T, R], None],
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
        take: Callable[[deque[T]], list[T]] = lambda waiting: [waiting.popleft()],
        *,
        nice: int = 0,
    ) -> None:
        self._name = name
        self._works, self._failed, self._on_end = works, failed, on_end
        self._post, self._clock, self._take = post, clock, take
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._waiting: deque[T] = deque()
        self._running: dict[int, tuple[float, list[T]]] = {}
        """Start time of each thread's batch, and its tasks that have not ended, by the thread's number."""
        self._ended: deque[tuple[T, R]] = deque()
        self._posted = False
        """Whether ``_deliver`` is posted, and has not run."""
        self._woken = False
        """Whether a thread was woken, and has not looked at the queue yet: no other is woken until then. If it leaves
        tasks, it wakes the next one itself. So a batch has what was put together, and few threads wake for nothing."""
        self._stopped = False
        self._nice = nice
        self._start()

    def _start(self) -> None:
        """Start the threads. Simulations replace it, and do with ``_begin`` and ``_do`` what a thread does."""
        works = ((f"{self._name}-{number}", partial(self._run, number)) for number in range(len(self._works)))
        self._threads = AbandonableThreads(works, self._stop, self._nice)

    def put(self, task: T) -> None:
        with self._changed:
            self._waiting.append(task)
            if not self._woken:
                self._woken = True
                self._changed.notify()

    def end(self, result: R, which: Callable[[T], bool] = lambda task: True) -> int:
        """End queued tasks with this result, in the calling thread; return their number."""
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
        return len(self._waiting)

    @property
    def running(self) -> int:
        with self._changed:
            return self._count_running()

    @property
    def unfinished(self) -> int:
        """Number of tasks whose end was not handled yet."""
        with self._changed:
            return len(self._waiting) + self._count_running() + len(self._ended)

    def _count_running(self) -> int:
        return sum(len(tasks) for _, tasks in self._running.values())

    @property
    def longest_s(self) -> float:
        """Seconds since the oldest running batch began."""
        with self._changed:
            return max((self._clock() - begun for begun, _ in self._running.values()), default=0.0)

    def close(self, until: float) -> bool:
        """Wait for all tasks, handle their ends, and end the threads. Called in the daemon's thread.

        Returns False if a task still hangs at ``until`` (``time.monotonic``); then it may be called again.
        """
        idle = self._wait_idle(until)
        while self._ended:
            self._finish(*self._ended.popleft())
        if not idle:
            return False
        self._stop()
        return self._threads.join(until)

    def _wait_idle(self, until: float) -> bool:
        with self._idle:
            return self._idle.wait_for(
                lambda: not self._waiting and not self._running, max(0.0, until - time.monotonic())
            )

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _deliver(self) -> None:
        """Handle some ends, in the daemon's thread, and post itself for the others."""
        self._posted = False
        for _ in range(min(ENDED_AT_ONCE, len(self._ended))):
            self._finish(*self._ended.popleft())
        if self._ended:
            self._posted = True
            self._post(self._deliver)

    def _finish(self, task: T, result: R) -> None:
        try:
            self._on_end(task, result)
        except Exception:
            logger.exception("The end of a task of %s raised: a bug; the others continue.", self._name)

    def _run(self, number: int) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                self._woken = False
                if not (tasks := self._begin(number)):
                    self._changed.wait()
                    continue
                if self._waiting:
                    self._woken = True
                    self._changed.notify()
            self._do(number, tasks)

    def _begin(self, number: int) -> list[T]:
        """Take a thread's next batch, under the lock; empty if nothing waits."""
        tasks = self._take(self._waiting) if self._waiting else []
        if tasks:
            self._running[number] = self._clock(), tasks
        return tasks

    def _do(self, number: int, tasks: list[T]) -> None:
        """Run a batch, in the thread. ``tasks`` is the list in ``_running``: those that have ended leave it."""
        try:
            for result in self._works[number](tasks.copy()):
                self._end_first(tasks, [result])
            assert not tasks, "the work yielded too few results"
        except Exception as error:
            self._end_first(tasks, [self._failed(error)] * len(tasks))
        with self._changed:
            del self._running[number]
            # This thread takes the next tasks, so no other is woken.
            self._notify_idle()

    def _end_first(self, tasks: list[T], results: list[R]) -> None:
        """End the first tasks of a batch with these results."""
        with self._changed:
            self._ended.extend([(tasks.pop(0), result) for result in results])
            must_post, self._posted = not self._posted, True
        if must_post:
            self._post(self._deliver)

    def _notify_idle(self) -> None:
        if not self._waiting and not self._running:
            self._idle.notify_all()
