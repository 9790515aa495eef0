"""Threads that one of them which hangs, in a call to a disk or a GPU, does not keep the process from ending."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvoffd.errors import NoMoreThreads


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises NoMoreThreads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoMoreThreads from error


class DaemonThreads:
    """Starts a thread for each function, given with the thread's name. An executor's threads would be waited for.

    ``stop`` has them return. Raises NoMoreThreads; then none runs.

    Args:
        nice: how much their priority is below that of the thread that starts them, as of ``nice``.
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
        except NoMoreThreads:
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
        """Wait for all to end; False where one still runs at ``until`` (of ``time.monotonic``)."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
