"""What systemd does for the daemon of a chaos run: starts it again whenever it ends, kills it when it hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Self

from tests.kit.daemon import START_DEADLINE_S, DaemonProcess
from tests.kit.service_manager import ServiceManager
from tests.kit.waiting import wait_until

WATCHDOG_S = 1.2
ABORT_S = 0.5
"""Seconds between SIGABRT and SIGKILL, as TimeoutAbortSec of systemd."""
RESTART_S = 0.02
POLL_S = 0.005


class Supervisor:
    """Keeps one daemon running until it is closed.

    Args:
        pool_file: where the pool lies; None has the manager keep it, as systemd's descriptor store does.
        directory: of its sockets; None for one of its own.

    Attributes:
        lives: daemons started.
        hung: for each daemon that was killed because it hung, from when to when it was silent.
        failure: a sentence when a daemon did not come up.
    """

    make_daemon = DaemonProcess

    def __init__(
        self,
        pool_size: str,
        pool_file: Path | None,
        limits: dict[str, float] | None = None,
        directory: Path | None = None,
        **flags: str,
    ) -> None:
        self._manager = ServiceManager()
        file = {} if pool_file is None else {"pool_file": str(pool_file)}
        self.daemon = self.make_daemon(
            pool_size, directory, manager=self._manager, watchdog_s=WATCHDOG_S, limits=limits, **file, **flags
        )
        self.lives = 0
        self.hung: list[tuple[float, float]] = []
        self.failure = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Self:
        """Start the first daemon."""
        self._start()
        self._thread.start()
        return self

    @property
    def directory(self) -> Path:
        return self.daemon.directory

    def signal(self, number: int) -> None:
        """Send the daemon a signal, if it is there just now."""
        try:
            os.kill(self.daemon.pid, number)
        except ProcessLookupError:
            pass

    def wait_serving(self, lives: int, deadline_s: float = START_DEADLINE_S) -> None:
        """Until at least ``lives`` daemons were started and the last of them serves."""

        def serves() -> bool:
            assert not self.failure, self.failure
            return self.lives >= lives and self.daemon.running and self._manager.ready

        wait_until(serves, deadline_s, explain=lambda: self.daemon.log[-4000:])

    def close(self) -> None:
        """End the daemon for good and remove what it left."""
        self._closing = True
        if self.lives:
            self._thread.join()
        self.daemon.close()
        self._manager.close()

    def _start(self) -> None:
        self._manager.ready = False
        self.daemon.start(wait=False)
        self.lives += 1
        self._started_at = time.monotonic()

    def _run(self) -> None:
        while not self._closing and not self.failure:
            time.sleep(POLL_S)
            if not self.daemon.running:
                time.sleep(RESTART_S)
                self._start()
            elif self._manager.ready and self._manager.silent_for_s > WATCHDOG_S:
                silent_since = time.monotonic() - self._manager.silent_for_s
                self._abort()
                self.hung.append((silent_since, time.monotonic()))
            elif not self._manager.ready and time.monotonic() - self._started_at > START_DEADLINE_S:
                self.failure = f"the daemon does not get ready:\n{self.daemon.log[-4000:]}"

    def _abort(self) -> None:
        # SIGCONT, since a stopped process takes no other signal but SIGKILL; systemd does the same.
        self.signal(signal.SIGABRT)
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + ABORT_S
        while self.daemon.running and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self.daemon.running:
            self.daemon.kill()
