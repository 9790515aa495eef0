"""Counts what is sent between a node and one of those that it asks: a TCP proxy."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from kvoffd_client.session import Closing

RECEIVE_BYTES = 1 << 16


@dataclass
class Sent:
    """Messages and bytes in one direction. What comes in one piece counts as one message, which holds while little is
    sent: each end sends a message by one call."""

    messages: int = 0
    nbytes: int = 0


class CountedLink(Closing):
    """Listens on a port of ``host`` and forwards to another one of 127.0.0.1.

    Args:
        port: to forward to.
        at: to listen on; 0 for a free one.

    Attributes:
        asked: what those who connected have sent.
        answered: what they were sent.
        connections: how many there were.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", at: int = 0) -> None:
        self.asked, self.answered, self.connections = Sent(), Sent(), 0
        self._target = port
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server((host, at))
        self._run(self._accept)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close all connections. Repeatable."""
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @staticmethod
    def _run(target: object, *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            self.connections += 1
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets += [client, server]
            self._run(self._forward, client, server, self.asked)
            self._run(self._forward, server, client, self.answered)

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket, sent: Sent) -> None:
        with suppress(OSError):  # an end is closed
            while data := source.recv(RECEIVE_BYTES):
                sent.messages += 1
                sent.nbytes += len(data)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
