"""Sends jobs in the GPU's order: a job is sent once the kernels launched before it have finished.

Until then kernels may write the blocks of a store, or read the blocks of a load for their previous request. No event is
shared with another process, and no stream of the engine ever waits for the daemon.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvoffd_client.worker_client import Job
from kvoffd_proto.errors import ErrorCode

log = logging.getLogger("kvoffd_client")


class Event(Protocol):
    """An event of the GPU, as ``torch.cuda.Event(blocking=True)``, whose waiter sleeps."""

    def synchronize(self) -> None:
        """Wait for the event. Raises RuntimeError if the GPU failed."""


@dataclass(eq=False)
class _Step:
    """Jobs that are sent together."""

    event: Event
    jobs: dict[int, Job]
    """Jobs that were not withdrawn, by id."""
    send: Callable[[list[Job]], None]
    fail: Callable[[Job, ErrorCode], None]
    ended_at: float | None = None
    """Time of the event, or of its failure; None before."""


class StreamMark:
    """Place in the GPU's order: behind the kernels that were launched before it."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    @property
    def ended_at(self) -> float | None:
        """Time when those kernels had ended, or the GPU failed; None while they run."""
        return self._step.ended_at


class OrderedSender:
    """A thread that waits for events, one after the other, and then sends jobs.

    Args:
        record: records an event after everything launched so far on the caller's stream.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self._record = record
        self._changed = threading.Condition()
        self._steps: deque[_Step] = deque()  # not sent yet; the thread waits for the first
        self._step_of: dict[int, _Step] = {}  # by job id
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvoffd-order", daemon=True)
        self._thread.start()

    def submit(
        self, jobs: Iterable[Job], send: Callable[[list[Job]], None], fail: Callable[[Job, ErrorCode], None]
    ) -> None:
        """Schedule ``send(jobs)`` for when everything on the caller's stream has finished. Does not wait.

        ``fail`` is called with each job that will not be sent. Both are called in the sender's thread, ``fail`` also in
        the caller of ``withdraw``, and neither may block. Raises the errors of ``record``.
        """
        self._append(_Step(self._record(), {job.job_id: job for job in jobs}, send, fail))

    def mark(self) -> StreamMark:
        """Return a mark behind everything that is now on the caller's stream. Raises the errors of ``record``."""
        step = _Step(self._record(), {}, lambda _: None, lambda *_: None)
        self._append(step)
        return StreamMark(step)

    def _append(self, step: _Step) -> None:
        with self._changed:
            self._steps.append(step)
            self._step_of.update(dict.fromkeys(step.jobs, step))
            self._changed.notify_all()

    def withdraw(self, job_ids: Iterable[int], patience_s: float = 0.0) -> list[int]:
        """Fail the jobs not sent within ``patience_s`` with CANCELLED. Return their ids."""
        wanted = list(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._step_of.keys().isdisjoint(wanted), patience_s)
            taken = [job_id for job_id in wanted if job_id in self._step_of]
            for job_id in taken:
                step = self._step_of.pop(job_id)
                step.fail(step.jobs.pop(job_id), ErrorCode.CANCELLED)
            self._changed.notify_all()
        return taken

    @property
    def waiting(self) -> list[int]:
        with self._changed:
            return list(self._step_of)

    def close(self) -> None:
        """Drop unsent jobs and end the thread; a GPU that hangs may keep the thread waiting for ever."""
        with self._changed:
            self._closed = True
            self._steps.clear()
            self._step_of.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._steps)
                if self._closed:
                    return
                step = self._steps[0]
            error: Exception | None = None
            try:
                step.event.synchronize()
            except Exception as failure:  # torch raises many types for a failed GPU
                error = failure
            with self._changed:
                if self._closed:
                    return
                self._steps.popleft()
                step.ended_at = time.monotonic()
                self._finish(step, error)
                for job_id in step.jobs:
                    del self._step_of[job_id]
                self._changed.notify_all()

    def _finish(self, step: _Step, error: Exception | None) -> None:
        """Send or fail jobs. Needs the lock, so that ``withdraw`` finds each job either unsent or sent."""
        if not step.jobs:
            return
        try:
            if error is None:
                step.send(list(step.jobs.values()))
                return
            log.error("%d jobs are not sent because the GPU failed: %s", len(step.jobs), error)
        except Exception:
            log.exception("%d jobs could not be sent.", len(step.jobs))
        for job in step.jobs.values():
            step.fail(job, ErrorCode.CANCELLED)
