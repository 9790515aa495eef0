"""Daemons that are forked from a process that has imported kvoffd: most of a start's CPU is its imports."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

LAUNCHER = Path(__file__).with_name("launcher.py")


class _Parent:
    """The process that forks them, of ``launcher.py``. It ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCHER), "forks", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._requests.shutdown(socket.SHUT_RDWR)  # also where a process that was forked from this one has it too
        self._requests.close()
        self._process.wait()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The process id of a new daemon."""
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
            reply = self._requests.recv(32)
        assert reply, f"the process that forks daemons ended with {self._process.wait()}"
        return int(reply)


_parent = cache(_Parent)


class ForkedDaemon:
    """``kvoffd`` with these arguments, as a subprocess.Popen is. ``options`` are those of ``launcher.py``."""

    def __init__(self, arguments: list[str], options: dict[str, Any], environ: dict[str, str], log: int) -> None:
        self.returncode: int | None = None
        self._ended, theirs = os.pipe()
        request = {"arguments": arguments, "options": options, "environ": environ, "directory": os.getcwd()}
        try:
            self.pid = _parent().fork(request, [log, theirs])
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """The exit status, or minus a signal's number; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            status = os.read(self._ended, 32)
            os.close(self._ended)
            assert status, "the process that forks daemons is gone"
            self.returncode = int(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("kvoffd", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
