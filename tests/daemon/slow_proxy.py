"""A TCP proxy before a real server, through which long answers come slowly."""

from __future__ import annotations

import socket
import socketserver
import threading
import time

from tests.kit.closing import ServerThread, ThreadsServer

PART_BYTES = 16_384
SHORT_BYTES = 4096
"""What comes at a time and is shorter is handed on at once: answers to questions."""


class SlowProxy(ServerThread):
    """Hands everything on between clients and a port of 127.0.0.1.

    Attributes:
        bytes_per_s: how fast the server's long answers go to each client; 0 for as they come.
    """

    def __init__(self, server_port: int) -> None:
        self.bytes_per_s = 0.0
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    with socket.create_connection(("127.0.0.1", server_port), 10.0) as server:
                        server.settimeout(None)
                        for one in (server, self.request):
                            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        threading.Thread(target=_hand_on, args=(self.request, server), daemon=True).start()
                        while part := server.recv(PART_BYTES):
                            if proxy.bytes_per_s and len(part) >= SHORT_BYTES:
                                time.sleep(len(part) / proxy.bytes_per_s)
                            self.request.sendall(part)
                except OSError:
                    pass

        super().__init__(ThreadsServer(Handler))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def _hand_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while part := source.recv(PART_BYTES):
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
