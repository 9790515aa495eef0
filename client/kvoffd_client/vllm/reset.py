"""Dropping the namespace's blocks after a change of weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvoffd_client.vllm.log import logger

CONFIRM_TIMEOUT_S = 2.0
PAUSE_S = 0.2


class Reset:
    """Asks the daemon to drop the namespace until it confirms, in a thread of its own: the engine never waits for it.

    While ``due``, nothing of the daemon's may be believed: its blocks are of other weights.

    Args:
        drop: drops the namespace, waits at most the given seconds, returns whether the daemon confirmed.
    """

    def __init__(self, drop: Callable[[float], bool]) -> None:
        self._drop = drop
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._reports_due = 0
        self._again = False

    @property
    def due(self) -> bool:
        """A reset was asked for and is not confirmed."""
        return self._thread is not None

    @property
    def flushing(self) -> bool:
        """Jobs from before the reset still run in the workers; the engine must keep stepping."""
        return self._reports_due > 0

    def begin(self, reports_due: int) -> None:
        """The cache was reset while ``reports_due`` reports of running jobs were to come.

        Stores among those hold blocks of the old weights, so the daemon is asked once they have ended.
        """
        with self._lock:
            self._reports_due += reports_due
            self._again = True
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvoffd-reset", daemon=True)
                self._thread.start()

    def report(self, count: int) -> None:
        """``count`` of the reports came."""
        self._reports_due = max(0, self._reports_due - count)
        self._wake.set()

    def close(self) -> None:
        """Give up. Does not wait."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            if self._reports_due == 0:
                self._again = False
                if self._drop(CONFIRM_TIMEOUT_S):
                    with self._lock:
                        if not self._again:
                            self._thread = None
                            break
                    continue
            self._wake.wait(PAUSE_S)
        if not self._closed:
            logger.info("kvoffd: the daemon dropped all blocks of this engine's namespace.")
