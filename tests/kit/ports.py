"""TCP ports of the loopback."""

from __future__ import annotations

import random
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path

FIRST, BLOCK = 10_000, 64
"""The first port, and how many each process draws from."""


def free_port() -> int:
    """One that nobody has at the moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Several of which no two are the same, below those that the kernel gives to sockets that connect.

    So a killed server can be followed by another at its port, which no client can have got. Nor can a test that runs
    side by side be given it before its server has bound it: each process has ports of its own.
    """
    free: list[int] = []
    with ExitStack() as sockets:
        for port in islice(_ports(), BLOCK):
            if len(free) == count:
                break
            with suppress(OSError):
                free.append(sockets.enter_context(socket.create_server(("127.0.0.1", port))).getsockname()[1])
    assert len(free) == count, f"of this process's {BLOCK} ports {len(free)} are free"
    return free


@cache
def _ports() -> Iterator[int]:
    """This process's ports, again and again. It has them by a name in the network namespace, as the ports are in it."""
    first_local = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    blocks = range(FIRST, first_local - BLOCK + 1, BLOCK)
    for first in random.SystemRandom().sample(blocks, len(blocks)):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0kvoffd's tests have ports from {first}")
        except OSError:
            name.close()
        else:
            _NAMES.append(name)
            return cycle(range(first, first + BLOCK))
    raise RuntimeError("other processes of tests have all ports")


_NAMES: list[socket.socket] = []
"""Open as long as the process."""


def http_get(port: int, path: str) -> tuple[int, str]:
    """The status and the body of what a port answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
