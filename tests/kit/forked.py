"""Processes that are forked from one that has their imports, which are most of a start's CPU.

They use multiprocessing's server, but no process of multiprocessing: that imports this one's main module, such as a
bench.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, reduction
from typing import Any

LOOK_S = 1.0
"""Longest pause between two looks whether another thread has read the exit status."""


@dataclass
class _Call:
    """What multiprocessing's server takes for the process to be."""

    target: Callable[..., int]
    arguments: tuple[Any, ...]

    def _bootstrap(self, parent: int) -> int:
        return self.target(*self.arguments)


class Forked:
    """A call of ``target``, whose result is the exit status, in a process as a subprocess.Popen is.

    ``fds`` are descriptors for it: ``forkserver.get_inherited_fds`` returns them there.
    """

    def __init__(
        self, server: forkserver.ForkServer, target: Callable[..., int], *arguments: Any, fds: Sequence[int] = ()
    ) -> None:
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status, message = server.connect_to_new_process(list(fds))
        with open(message, "wb") as pipe:
            for part in ({"sys_path": sys.path, "dir": os.getcwd()}, _Call(target, arguments)):
                reduction.dump(part, pipe)
        self.pid = forkserver.read_signed(self._status)

    def poll(self) -> int | None:
        """The exit status, or minus a signal's number; None while it runs. For any thread."""
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = forkserver.read_signed(self._status)
                os.close(self._status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("kvoffd", timeout or 0.0)
            with suppress(OSError):  # another thread has just read the status
                select.select([self._status], [], [], min(left_s, LOOK_S))
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the server has not said so yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_server(*modules: str) -> forkserver.ForkServer:
    """A server that imports these when the first process is forked."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(modules))
    return server
