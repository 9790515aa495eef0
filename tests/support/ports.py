"""TCP ports of the loopback."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_port() -> int:
    """One that nobody has at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Several of which no two are the same."""
    with ExitStack() as sockets:
        free = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in free]
