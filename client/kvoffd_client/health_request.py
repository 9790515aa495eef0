"""Asks a daemon of this machine for its health: without a session, without ZeroMQ, and with few modules to import."""

from __future__ import annotations

import socket
import time
from math import inf
from pathlib import Path

import msgspec

from kvoffd_proto import zmtp
from kvoffd_proto.health import Health, HealthReply
from kvoffd_proto.sockets import SocketPaths

HEALTH_TIMEOUT_S = 1.0
_READ_BYTES = 65536
_MOST_BYTES = 1 << 20
"""Largest reply that is taken; one has a sentence or a few."""


def ask_health(directory: Path, deadline: float = inf) -> HealthReply | None:
    """Return the health of the daemon whose sockets are in ``directory``; None where none answers in time."""
    deadline = min(deadline, time.monotonic() + HEALTH_TIMEOUT_S)
    received = zmtp.Input({b"ROUTER"}, _MOST_BYTES, 1)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            _wait_until(stream, deadline)
            stream.connect(str(SocketPaths(directory).jobs))
            stream.sendall(zmtp.opening(b"DEALER"))
            asked = False
            while not isinstance(message := received.next(), list):
                if received.ready and not asked:  # libzmq closes the connection of who asks before it has let him in
                    stream.sendall(zmtp.encode([msgspec.msgpack.encode(Health(1))]))
                    asked = True
                _wait_until(stream, deadline)
                data = stream.recv(_READ_BYTES)
                if not data:
                    return None
                received.feed(data)
        # Not kvoffd_proto.codec, whose decoders of all messages take as long to make as all the rest here.
        return msgspec.msgpack.decode(message[0], type=HealthReply)
    except (OSError, msgspec.MsgspecError, zmtp.ZmtpError):
        return None


def _wait_until(stream: socket.socket, deadline: float) -> None:
    """Have the next call wait no longer. Raises TimeoutError where it is too late, whatever still comes."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    stream.settimeout(left)
