"""A service manager for tests. It does what systemd does: it listens for notifications and stores descriptors."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

from .waiting import wait_until

# Run in the new process: descriptors go where sd_listen_fds(3) has them, then the program takes over.
LAUNCH_WITH_FDS = """
import fcntl, os, sys
fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
for place, fd in enumerate(copies):
    os.dup2(fd, 3 + place)
os.closerange(3 + len(fds), 200)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


class ServiceManager:
    """Stores descriptors from ``FDSTORE=1`` until ``FDSTOREREMOVE=1``, answers barriers, notes watchdog heartbeats."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="manager-", dir="/tmp")
        self.address = str(Path(self._directory) / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(0.1)
        self.stored_fds: list[tuple[str, int]] = []
        self.messages: list[dict[str, str]] = []
        self.ready = False
        """Whether the daemon has sent READY=1."""
        self._last_heartbeat_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 65536, 1000)
            except TimeoutError:
                continue
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "WATCHDOG" in fields or "READY" in fields:
                self._last_heartbeat_at = time.monotonic()
                self.ready = self.ready or "READY" in fields
            name = fields.get("FDNAME", "")
            if "FDSTORE" in fields:
                self.stored_fds += [(name, fd) for fd in fds]
                fds = []
            if "FDSTOREREMOVE" in fields:
                for _, fd in [item for item in self.stored_fds if item[0] == name]:
                    os.close(fd)
                self.stored_fds = [item for item in self.stored_fds if item[0] != name]
            for fd in fds:
                os.close(fd)
            self.messages.append(fields)

    @property
    def silent_for_s(self) -> float:
        """Seconds since the daemon's last watchdog heartbeat."""
        return time.monotonic() - self._last_heartbeat_at

    def wait_stored_fds(self, count: int) -> None:
        """Until exactly ``count`` descriptors are stored."""
        wait_until(lambda: len(self.stored_fds) == count, explain=lambda: self.stored_fds)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        for _, fd in self.stored_fds:
            os.close(fd)
        shutil.rmtree(self._directory)
