"""A thread for calls that may never return."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from kvoffd.errors import KvoffdError
from kvoffd_proto.errors import ErrorCode

_log = logging.getLogger(__name__)

WAITING_LIMIT = 64


class ControlThread:
    """Runs tasks one after the other. A task that hangs keeps the later ones from running, and nobody else.

    Args:
        name: of the thread.
        what: the device or driver it calls, for sentences.
        clock: what ``busy_s`` is measured on, in seconds.
    """

    def __init__(self, name: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._wake = threading.Condition()
        self._tasks: deque[Callable[[], None]] = deque()
        self._began: float | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy_s(self) -> float:
        """For how long the current task has been running; 0 when there is none."""
        began = self._began
        return 0.0 if began is None else self._clock() - began

    def submit(self, task: Callable[[], None]) -> None:
        """Have the thread run ``task`` after those before it. Raises KvoffdError when too many wait."""
        with self._wake:
            if len(self._tasks) >= WAITING_LIMIT:
                raise KvoffdError(
                    f"{self._what} has not answered for {self.busy_s:.0f} s and {len(self._tasks)} requests wait for "
                    "it; see the driver's log (dmesg), and restart the daemon if the GPU is well.",
                    ErrorCode.TOO_MANY,
                )
            self.submit_always(task)

    def submit_always(self, task: Callable[[], None]) -> None:
        """As ``submit``, but never refuse: for what undoes a submitted task, so that these are bounded too."""
        with self._wake:
            self._tasks.append(task)
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        """Run what waits, then end the thread; False when it still runs after ``timeout_s``."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                task()
            except Exception:
                _log.exception("A task of %s failed; its thread goes on.", self._what)

    def _next(self) -> Callable[[], None] | None:
        with self._wake:
            self._began = None
            self._wake.wait_for(lambda: self._tasks or self._stopped)
            if not self._tasks:
                return None
            self._began = self._clock()
            return self._tasks.popleft()
