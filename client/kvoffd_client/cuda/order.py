"""Keeps the order of the GPU on the host: a job is sent when the kernels that were launched before it are done.

Kernels may still write the blocks of a store, and may still read the blocks of a load for the request that had them
before. No event is shared with another process, and no stream of the engine ever waits for the daemon.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvoffd_proto.errors import ErrorCode

log = logging.getLogger("kvoffd_client")


class Event(Protocol):
    """An event of the GPU; a ``torch.cuda.Event(blocking=True)``, whose waiter sleeps."""

    def synchronize(self) -> None:
        """Wait until it has happened. Raises RuntimeError when the GPU failed."""


@dataclass(eq=False)
class _Job:
    job_id: int
    event: Event
    send: Callable[[], None]
    fail: Callable[[ErrorCode], None]


class OrderedSender:
    """A thread that waits for events, one after the other, and then sends jobs. No method waits for the GPU.

    Args:
        record: records an event behind everything launched so far on the caller's stream.
    """

    def __init__(self, record: Callable[[], Event]) -> None:
        self._record = record
        self._changed = threading.Condition()
        self._jobs: dict[int, _Job] = {}  # not sent yet, oldest first; the first is the one the thread waits for
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvoffd-order", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, send: Callable[[], None], fail: Callable[[ErrorCode], None]) -> None:
        """Have ``send`` called when what the caller's stream holds now is done, or ``fail`` if it will not be.

        ``send`` is called in the sender's thread, ``fail`` there or in the caller of ``withdraw``; neither may wait.
        An error of ``record`` is raised here.
        """
        job = _Job(job_id, self._record(), send, fail)
        with self._changed:
            self._jobs[job_id] = job
            self._changed.notify_all()

    def withdraw(self, job_ids: Iterable[int]) -> list[int]:
        """Fail those of the jobs that have not been sent, with CANCELLED. Return their ids."""
        with self._changed:
            taken = [job for job_id in job_ids if (job := self._jobs.pop(job_id, None)) is not None]
            for job in taken:
                job.fail(ErrorCode.CANCELLED)
            self._changed.notify_all()
        return [job.job_id for job in taken]

    @property
    def waiting(self) -> list[int]:
        with self._changed:
            return list(self._jobs)

    def close(self) -> None:
        """Forget what has not been sent and end the thread, which a GPU that hangs may hold for ever."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            error: Exception | None = None
            try:
                job.event.synchronize()
            except Exception as failure:  # torch raises many kinds for a GPU that has failed
                error = failure
            with self._changed:
                # It may have been withdrawn meanwhile, and even submitted again under the same id.
                if self._jobs.get(job.job_id) is job:
                    self._finish(job, error)
                    del self._jobs[job.job_id]
                    self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._jobs)
            return None if self._closed else next(iter(self._jobs.values()))

    def _finish(self, job: _Job, error: Exception | None) -> None:
        """Send or fail a job. Under the lock, so that ``withdraw`` finds it either unsent or sent."""
        try:
            if error is None:
                job.send()
                return
            log.error("Job %d is not sent, since the GPU failed: %s", job.job_id, error)
        except Exception:
            log.exception("Job %d could not be sent.", job.job_id)
        job.fail(ErrorCode.COPY_FAILED)
