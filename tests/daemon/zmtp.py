"""What a client may send to the sockets behind the lifeline that is no ZeroMQ, or bad ZeroMQ."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from tests.kit.wire import TIMEOUT_S

_GREETING = (b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL").ljust(64, b"\0")


def _ready(kind: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + b"\x08Identity" + bytes(4)
    return bytes([4, len(body)]) + body


def shake_hands(path: Path) -> socket.socket:
    """Connect to one of ``request_streams`` as ZeroMQ does; what is sent then are frames."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(TIMEOUT_S)
    stream.connect(str(path))
    stream.sendall(_GREETING + _ready(b"SUB" if path.name == "events.sock" else b"DEALER"))
    answer = b""  # before it has come whatever follows ends the connection
    while len(answer) < len(_GREETING) + 2 or len(answer) < len(_GREETING) + 2 + answer[len(_GREETING) + 1]:
        data = stream.recv(4096)
        assert data, "the daemon closed the connection"
        answer += data
    assert b"READY" in answer, answer
    return stream


def numbered_routing_ids(count: int = 96) -> Iterator[bytes]:
    """What a libzmq ROUTER would call its next clients that have no id: random numbers of an unseeded ``rand``.

    One that finds such a name taken ends its process with an assertion.
    """
    libc = ctypes.CDLL(None)
    libc.srand(1)
    firsts = [libc.rand() | libc.rand() << 31 for _ in range(8)]
    for number in range(count):
        yield b"\0" + struct.pack(">I", firsts[number % 8] + number // 8 & 0xFFFFFFFF)


STREAM_GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "64 KiB of ones": b"\xff" * 65536,
    "a part of a greeting": _GREETING[:10],
    "a greeting alone": _GREETING,
    "another mechanism": _GREETING.replace(b"NULL\0", b"PLAIN"),
    "a frame without the handshake": _GREETING + b"\0\3abc",
    "a frame before the handshake's answer": _GREETING + _ready(b"DEALER") + b"\0\3abc",
    "a socket of the wrong kind": _GREETING + _ready(b"PAIR"),
    "the first version of the protocol": b"\x05\0abcd" + b"\0\0" * 50,
}
"""What a client may send on ``request_streams`` that is no ZeroMQ, by what is wrong with it."""

FRAME_GARBAGE: dict[str, bytes] = {
    "a part of a frame": b"\0\xffabc",
    "a frame of a terabyte": b"\2" + (1 << 40).to_bytes(8, "big") + bytes(1000),
    "a frame of less than nothing": b"\2" + b"\xff" * 8,
    "a message that never ends": b"\1\0" * 100_000,
    "a message of very many frames": b"\1\0" * 100_000 + b"\0\0",
    "an empty command": b"\4\0",
    "a command that is none": b"\4\6\5HELLO",
    "a second handshake": _ready(b"DEALER"),
    "a ping of nothing": b"\4\5\4PING",
    "a ping of too much": b"\6" + (1000).to_bytes(8, "big") + b"\4PING" + bytes(995),
    "an error": b"\4\x0c\5ERROR\5hello",
    "a subscription that is a command": b"\4\x0d\x09SUBSCRIBEkv@",
    "a subscription that is too long": b"\2" + (5000).to_bytes(8, "big") + b"\1" * 5000,
}
"""What a client may send there after ``shake_hands`` that is no message, or too much of it."""
