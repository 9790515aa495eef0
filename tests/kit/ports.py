"""TCP ports of the loopback."""

from __future__ import annotations

import random
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

FIRST = 10_000
TRIES = 1_000


def free_port() -> int:
    """One that nobody has at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Several of which no two are the same, below those that the kernel gives to sockets that connect.

    So a killed server can be followed by another at its port, which no client can have got.
    """
    first_local = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    drawn = random.SystemRandom().sample(range(FIRST, first_local), TRIES)
    free: list[int] = []
    with ExitStack() as sockets:
        while len(free) < count:
            with suppress(OSError):
                free.append(sockets.enter_context(socket.create_server(("127.0.0.1", drawn[-1]))).getsockname()[1])
            drawn.pop()
    return free


def http_get(port: int, path: str) -> tuple[int, str]:
    """The status and the body of what a port answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
