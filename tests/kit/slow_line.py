"""A line to a server that carries so many bytes a second and no more, and stops on the way when a test says so."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from math import inf

from .closing import ServerThread, ThreadsServer

PART_BYTES = 16 << 10


class SlowLine(ServerThread):
    """Forwards connections to a port of 127.0.0.1.

    Attributes:
        bytes_per_second: what all connections together get from the server.
        left_bytes: that still come from the server; then nothing does, and connections stay open.
    """

    def __init__(self, port: int, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.left_bytes = inf
        self._lock = threading.Lock()
        self._free_at = 0.0
        line = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    with socket.create_connection(("127.0.0.1", port)) as server:
                        threading.Thread(target=line._send, args=(self.request, server), daemon=True).start()
                        line._bring(server, self.request)
                except OSError:
                    pass

        super().__init__(ThreadsServer(Handler))

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 20):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _bring(self, server: socket.socket, client: socket.socket) -> None:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * PART_BYTES)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PART_BYTES)
        while data := server.recv(PART_BYTES):
            with self._lock:
                now = time.monotonic()
                self._free_at = max(now, self._free_at) + len(data) / self.bytes_per_second
                wait_s = self._free_at - now
                self.left_bytes -= len(data)
            time.sleep(wait_s)
            while self.left_bytes < 0:
                time.sleep(0.01)
            client.sendall(data)
