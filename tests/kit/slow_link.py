"""A slow network between a daemon and a store: a TCP proxy that forwards what the store answers at a stated speed."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from kvoffd_client.session import Closing

MIN_BYTES, MAX_BYTES, PIECE_S = 1 << 12, 1 << 16, 0.0005
"""What is forwarded at once: what takes this long, so that a short answer does not wait for long ones."""
MAX_AHEAD_S = 0.02
"""A link that was idle for longer has caught up with this much of its time. One that the machine kept from forwarding
catches up with all of it, as a network does whose other end was sending."""


class SlowLink(Closing):
    """Listens on a free port of 127.0.0.1 and forwards to another one.

    All connections share the speed, as they share a network. What is sent to the store is not slowed down.

    Attributes:
        bytes_per_second: of all that the store answers; None for as fast as it goes.
        answered_bytes: what was forwarded so far.
    """

    def __init__(self, port: int, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.answered_bytes = 0
        self._target = port
        self._hangs_at: int | None = None
        self._resumed = threading.Event()
        self._free_at = self._forwarded_at = 0.0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._run(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def hang_after(self, nbytes: int) -> None:
        """Forward nothing more once this much has been forwarded from now on, and keep all connections open."""
        with self._lock:
            self._resumed.clear()
            self._hangs_at = self.answered_bytes + nbytes

    def resume(self) -> None:
        """End the hang."""
        with self._lock:
            self._hangs_at = None
            self._resumed.set()

    @property
    def hangs(self) -> bool:
        """Whether it has begun to forward nothing."""
        return self._hangs_at is not None and self.answered_bytes >= self._hangs_at

    def close(self) -> None:
        """Close all connections. Repeatable."""
        self._resumed.set()
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @staticmethod
    def _run(target: object, *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):  # it is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                self._run(self._forward, client, server, False)
                self._run(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, slowly: bool) -> None:
        with suppress(OSError):  # an end is closed
            while data := source.recv(self._piece_bytes if slowly else MAX_BYTES):
                if slowly:
                    self._wait_turn(len(data))
                target.sendall(data)
                if slowly:
                    self._forwarded_at = time.monotonic()
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    @property
    def _piece_bytes(self) -> int:
        rate = self.bytes_per_second
        return MAX_BYTES if rate is None else min(MAX_BYTES, max(MIN_BYTES, int(rate * PIECE_S)))

    def _wait_turn(self, nbytes: int) -> None:
        """Return when this number of bytes has passed the link."""
        if self.hangs:
            self._resumed.wait()
        with self._lock:
            self.answered_bytes += nbytes
            now = time.monotonic()
            if self.bytes_per_second is None or now - self._forwarded_at > MAX_AHEAD_S:
                self._free_at = max(self._free_at, now - MAX_AHEAD_S)
            if self.bytes_per_second is None:
                return
            self._free_at += nbytes / self.bytes_per_second
            pause_s = self._free_at - now
        if pause_s > 0:
            time.sleep(pause_s)
