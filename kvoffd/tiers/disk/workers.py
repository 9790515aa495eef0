"""Who does the jobs: threads, or a simulation step by step."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvoffd.tiers.disk.execute import Ended, Executor
from kvoffd.tiers.disk.queue import Batch, DiskQueue, Job, Kind
from kvoffd.tiers.tier import TierResult

logger = logging.getLogger(__name__)


class Load(NamedTuple):
    """What there is to do, and has been."""

    queued_reads: int
    queued_writes: int
    running_reads: int
    running_writes: int
    longest_s: float
    """How long the oldest call has been running."""
    busy_seconds: float


class Workers(ABC):
    """Work a queue off.

    Args:
        notify: called after jobs have ended, from any thread: ``collect`` has them then.
    """

    def __init__(
        self, queue: DiskQueue, executor: Executor, clock: Callable[[], float], notify: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._executor = executor
        self._clock = clock
        self._notify = notify
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._ended: deque[Ended] = deque()
        self._busy_seconds = 0.0

    def submit(self, job: Job) -> None:
        """Queues a job, which ends once."""
        with self._changed:
            self._queue.put(job)
            self._changed.notify()

    def end_late(self) -> None:
        """Ends what waits and is beyond its deadline."""
        with self._changed:
            jobs = self._queue.late(self._clock())
        self._end_unbegun(jobs, TierResult.DEADLINE)

    def end_waiting(self, result: TierResult) -> None:
        """Ends all that waits."""
        with self._changed:
            jobs = self._queue.clear()
        self._end_unbegun(jobs, result)

    def collect(self) -> list[Ended]:
        """Takes what has ended."""
        ended: list[Ended] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def load(self) -> Load:
        """Counters. Updates count as writes."""
        queue = self._queue
        with self._changed:
            return Load(
                queue.waiting(Kind.READ),
                queue.waiting(Kind.WRITE) + queue.waiting(Kind.UPDATE),
                queue.running_jobs(Kind.READ),
                queue.running_jobs(Kind.WRITE) + queue.running_jobs(Kind.UPDATE),
                queue.longest_s(self._clock()),
                self._busy_seconds,
            )

    @abstractmethod
    def wait_idle(self, until: float) -> bool:
        """Waits until nothing waits or runs, or ``until`` (of ``time.monotonic``); False where something does."""

    @abstractmethod
    def stop(self, until: float) -> bool:
        """Ends the threads; False where one hangs still at ``until`` (of ``time.monotonic``)."""

    def _end_unbegun(self, jobs: list[Job], result: TierResult) -> None:
        self._ended.extend(Ended(job, result) for job in jobs)
        if jobs:
            self._notify()

    def _do(self, batch: Batch) -> None:
        begun = time.perf_counter()
        try:
            ended = self._executor.run(batch, batch.begun_at)
        except Exception as error:  # a bug: its jobs fail, the thread goes on
            logger.exception("A disk thread failed; its %d jobs fail, the thread goes on.", len(batch.jobs))
            sentence = f"A disk thread failed ({error!r}): a bug; the log has more."
            ended = [Ended(job, TierResult.FAILED, "bug", sentence) for job in batch.jobs]
        with self._changed:
            self._busy_seconds += time.perf_counter() - begun
            self._queue.done(batch)
            self._ended.extend(ended)
            # Whoever takes the next job is this thread: no other need be woken.
            if not self._queue.jobs:
                self._idle.notify_all()
        self._notify()


class ThreadWorkers(Workers):
    """So many threads."""

    def __init__(
        self,
        queue: DiskQueue,
        executor: Executor,
        clock: Callable[[], float],
        notify: Callable[[], None],
        threads: int,
        name: str,
    ) -> None:
        super().__init__(queue, executor, clock, notify)
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait_idle(self, until: float) -> bool:
        with self._changed:
            return self._idle.wait_for(lambda: not self._queue.jobs, max(0.0, until - time.monotonic()))

    def stop(self, until: float) -> bool:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            self._do(batch)

    def _next(self) -> Batch | None:
        with self._changed:
            while (batch := self._queue.next(self._clock())) is None:
                if self._stopped:
                    return None
                self._changed.wait()
            return batch


class StepWorkers(Workers):
    """Does nothing but when told to: for simulations, whose every run is the same."""

    def step(self) -> bool:
        """Does one batch; False where there is none."""
        batch = self._queue.next(self._clock())
        if batch is None:
            return False
        self._do(batch)
        return True

    def wait_idle(self, until: float) -> bool:
        while self.step():
            pass
        return not self._queue.jobs

    def stop(self, until: float) -> bool:
        return not self._queue.jobs
