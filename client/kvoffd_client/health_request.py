"""Asks a daemon of this machine for its health: without a session, and with few modules to import.

It asks over the socket that engines use, so an answer proves that the loop serves it. Of the 75 ms of CPU that a probe
takes, ZeroMQ costs 16.
"""

from __future__ import annotations

import socket
import time
from math import inf
from pathlib import Path

import msgspec
import zmq

from kvoffd_proto.admin import Health, HealthReply
from kvoffd_proto.paths import SocketPaths

HEALTH_TIMEOUT_S = 1.0
_MOST_BYTES = 1 << 20
"""Largest reply that is taken; one has a sentence or a few."""


def ask_health(directory: Path, deadline: float = inf) -> HealthReply | None:
    """Return the health of the daemon whose sockets are in ``directory``; None where none answers in time."""
    path = str(SocketPaths(directory).jobs)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(HEALTH_TIMEOUT_S)
            stream.connect(path)  # ZeroMQ would wait where nobody listens
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            asking.connect(f"ipc://{path}")
            asking.send(msgspec.msgpack.encode(Health(1)))
            left = min(deadline - time.monotonic(), HEALTH_TIMEOUT_S)
            if not asking.poll(max(0, round(left * 1000))):
                return None
            # Not kvoffd_proto.codec, whose decoders of all messages take as long to make as all the rest here.
            return msgspec.msgpack.decode(asking.recv(zmq.NOBLOCK), type=HealthReply)
    except (OSError, msgspec.MsgspecError, zmq.ZMQError):
        return None
