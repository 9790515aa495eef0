"""Threads that one of them which hangs, in a call to a disk or a GPU, does not keep the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

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
    """

    def __init__(self, works: Iterable[tuple[str, Callable[[], None]]], stop: Callable[[], object]) -> None:
        self._threads: list[threading.Thread] = []
        try:
            for name, work in works:
                start(thread := threading.Thread(target=work, name=name, daemon=True))
                self._threads.append(thread)
        except NoMoreThreads:
            stop()
            for thread in self._threads:
                thread.join()
            raise

    def join(self, until: float) -> bool:
        """Wait for all to end; False where one still runs at ``until`` (of ``time.monotonic``)."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
