"""What attackers speak with, so that they need no client of ours: raw sockets, ZMTP 3.0 frames, lifelines.

``tests.kit.wire.WireClient`` is for attackers that want a well-formed session.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvoffd_proto import lifeline
from kvoffd_proto.sockets import SocketPaths

TIMEOUT_S = 10.0
MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a ZMTP frame."""
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)


def take_all_descriptors() -> None:
    """Let this process open as many descriptors as the kernel allows it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connect(path: Path, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """A stream connected to a unix socket of the daemon. Raises OSError when the daemon refuses."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)
    stream.connect(str(path))
    return stream


def connections(path: Path, most: int, seconds: float) -> list[socket.socket]:
    """Up to ``most`` connections, as many as come within ``seconds``; a refusal is waited out."""
    found: list[socket.socket] = []
    deadline = time.monotonic() + seconds
    while len(found) < most and time.monotonic() < deadline:
        try:
            found.append(connect(path, 0.2))
        except OSError:
            time.sleep(0.001)
    return found


def is_open(stream: socket.socket) -> bool:
    """Whether the daemon has not closed the stream, by what has arrived until now."""
    stream.setblocking(False)
    try:
        return stream.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def zmtp_frame(body: bytes, flags: int = 0) -> bytes:
    """One frame; the long form where the body needs it."""
    if len(body) > 255 or flags & LONG:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags]) + bytes([len(body)]) + body


def zmtp_handshake(kind: bytes = b"DEALER", name: bytes = b"") -> bytes:
    """What a client of that socket type sends first (mechanism NULL)."""
    properties = {b"Socket-Type": kind, b"Identity": name}
    ready = b"\x05READY" + b"".join(
        bytes([len(key)]) + key + len(value).to_bytes(4, "big") + value for key, value in properties.items()
    )
    return GREETING + zmtp_frame(ready, COMMAND)


def zmtp(path: Path, kind: bytes = b"DEALER") -> socket.socket:
    """A connection that has shaken hands, as far as the client's side goes."""
    stream = connect(path)
    stream.sendall(zmtp_handshake(kind))
    return stream


class RawSession:
    """A lifeline and nothing else: its greeting, or why it was refused, and its token."""

    def __init__(self, directory: Path) -> None:
        self.paths = SocketPaths(directory)
        self.stream = connect(self.paths.lifeline)
        self._frames = lifeline.FrameBuffer()
        self.greeting = self.frame()
        self.token = self.greeting.token if isinstance(self.greeting, lifeline.Greeting) else b""

    def frame(self) -> lifeline.FromDaemon | None:
        """The next frame; None at the end of the lifeline."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.stream.recv(4096):
                if bodies := self._frames.feed(data):
                    return lifeline.decode_from_daemon(bodies[0])
        return None

    def attach(self, fd: int, segment_id: int) -> lifeline.FromDaemon | None:
        """Hand a descriptor over; the daemon's answer."""
        socket.send_fds(self.stream, [lifeline.encode_frame(lifeline.Attach(segment_id))], [fd])
        return self.frame()

    def close(self) -> None:
        self.stream.close()


def for_seconds(seconds: float) -> Iterator[int]:
    """0, 1, 2 ... until ``seconds`` are over."""
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        yield number
        number += 1


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
