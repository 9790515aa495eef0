"""TCP ports of the loopback."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
