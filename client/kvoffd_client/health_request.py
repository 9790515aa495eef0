"""Asks a daemon for its health without a session.

Probes do so every few seconds, so this must start fast: it imports ZeroMQ and msgspec, but no messages of the wire.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from kvoffd_proto.paths import SocketPaths

HEALTH_S = 1.0
MAX_HEALTH_BYTES = 1 << 20
Level = Literal["ok", "degraded", "down"]

Causes = list[tuple[str, str]]
"""Reason and sentence of each cause."""


def ask_health(directory: Path, timeout_s: float = HEALTH_S) -> tuple[str, Causes] | None:
    """Return a daemon's level, and causes, over the socket that engines use; None without an answer in time."""
    path = str(SocketPaths(directory).jobs)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(timeout_s)
            stream.connect(path)  # ZeroMQ would wait if nobody listens
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, MAX_HEALTH_BYTES)
            asking.connect(f"ipc://{path}")
            asking.send(msgspec.msgpack.encode(("health", 1)))  # a Health with the id 1; below a HealthReply
            if not asking.poll(round(timeout_s * 1000)):
                return None
            reply = msgspec.msgpack.decode(asking.recv(zmq.NOBLOCK), type=tuple[str, int, Level, Causes])
            return reply[2], reply[3]
    except (OSError, msgspec.MsgspecError, zmq.ZMQError):
        return None
