"""ZMTP 3.1, the wire protocol of ZeroMQ (RFC 37), as one side of a connection: bytes in, messages out.

Our clients use this for ``jobs.sock`` and libzmq for ``events.sock``. Here every bound is met before anything is kept.
There are no sockets in this module.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: another of the same message follows; its size has eight bytes; it is a command."""
GREETING_BYTES = 64
MAX_COMMAND_BYTES = 512
"""READY with an identity of 255 bytes, the largest command of a client, has about 300."""
MAX_EARLY_FRAME_BYTES = 255
"""Only the last frame of a message may be longer."""
_SIZE = struct.Struct(">Q")
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


class ZmtpError(Exception):
    """The peer does not speak the protocol, or goes beyond its bounds: its connection is to be closed. Says why."""


class Command(NamedTuple):
    """A command of the protocol: PING, SUBSCRIBE, CANCEL or another."""

    name: bytes
    data: bytes


def encode(frames: Sequence[bytes]) -> bytes:
    """A message of these frames as it goes over the wire."""
    parts: list[bytes] = []
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags, size = (0 if number == last else MORE), len(frame)
        parts.append(bytes((flags, size)) if size < 256 else bytes((flags | LONG,)) + _SIZE.pack(size))
        parts.append(frame)
    return b"".join(parts)


def encode_command(name: bytes, data: bytes) -> bytes:
    """A command of fewer than 256 bytes as it goes over the wire."""
    return bytes((COMMAND, 1 + len(name) + len(data), len(name))) + name + data


def opening(socket_type: bytes) -> bytes:
    """What each side sends first on a connection: its greeting and its READY."""
    size = _SIZE.pack(len(socket_type))[4:]
    return _GREETING + encode_command(b"READY", b"\x0bSocket-Type" + size + socket_type)


class Input:
    """What one peer sends, cut into messages when they are asked for.

    Args:
        socket_types: types of sockets that may be at the other end.
        max_frame_bytes: a longer frame ends the connection.
        max_frames: a message of more frames ends the connection.
    """

    def __init__(self, socket_types: Collection[bytes], max_frame_bytes: int, max_frames: int) -> None:
        self._socket_types = socket_types
        self._max_frame_bytes = max_frame_bytes
        self._max_frames = max_frames
        self._buffer = bytearray()
        self._position = 0
        self._wanted = GREETING_BYTES
        self._frames: list[bytes] = []
        self._greeted = False
        self.ready = False

    def feed(self, data: bytes | memoryview) -> None:
        self._buffer += data

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have arrived and were not taken yet."""
        return len(self._buffer) - self._position

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived of what is next, as far as its size is known after ``next``."""
        return max(0, self._wanted - self.waiting_bytes)

    def next(self) -> list[bytes] | Command | None:
        """The next message or command; None when it has not arrived. Raises ZmtpError."""
        if not self._greeted and not self._take_greeting():
            return None
        while (header := self._header()) is not None:
            flags, begin, size = header
            if flags & COMMAND:
                if flags & MORE or size > MAX_COMMAND_BYTES:
                    raise ZmtpError(f"a command of {size} bytes")
            elif not self.ready:
                raise ZmtpError("a message before the handshake")
            elif size > self._max_frame_bytes:
                raise ZmtpError(f"a frame of {size} bytes")
            self._wanted = begin - self._position + size
            if self.waiting_bytes < self._wanted:
                return None
            with memoryview(self._buffer) as view:
                body = bytes(view[begin : begin + size])
            self._consume(self._wanted)
            if flags & COMMAND:
                command = _command(body)
                if self.ready:
                    return command
                self._take_ready(command)
                continue
            self._frames.append(body)
            if not flags & MORE:
                frames, self._frames = self._frames, []
                return frames
            if len(self._frames) == self._max_frames or size > MAX_EARLY_FRAME_BYTES:
                raise ZmtpError(f"a message with {len(self._frames)} frames and more, of {size} bytes")
        return None

    def _header(self) -> tuple[int, int, int] | None:
        """Flags of the next frame, where its body begins, and its size; None when that has not arrived."""
        waiting, at = self.waiting_bytes, self._position
        self._wanted = 2
        if waiting < 2:
            return None
        flags = self._buffer[at]
        if flags & ~(MORE | LONG | COMMAND):
            raise ZmtpError(f"a frame with the flags {flags}")
        if not flags & LONG:
            return flags, at + 2, self._buffer[at + 1]
        self._wanted = 1 + _SIZE.size
        if waiting < self._wanted:
            return None
        return flags, at + 9, _SIZE.unpack_from(self._buffer, at + 1)[0]

    def _take_greeting(self) -> bool:
        waiting = self.waiting_bytes
        if (waiting and self._buffer[0] != 0xFF) or (waiting >= 10 and not self._buffer[9] & 1):
            raise ZmtpError("no greeting of ZMTP")
        if waiting >= 11 and self._buffer[10] < 3:
            raise ZmtpError("ZMTP before version 3; libzmq 4 or later is needed")
        if waiting < GREETING_BYTES:
            return False
        if bytes(self._buffer[12:32]).rstrip(b"\0") != b"NULL":
            raise ZmtpError("a security mechanism; local sockets have none")
        self._consume(GREETING_BYTES)
        self._greeted = True
        return True

    def _take_ready(self, command: Command) -> None:
        if command.name != b"READY":
            raise ZmtpError(f"the command {command.name!r} in the handshake")
        found = _properties(command.data).get(b"socket-type")
        if found not in self._socket_types:
            raise ZmtpError(f"a socket of the type {found!r}; {b' or '.join(sorted(self._socket_types))!r} may connect")
        self.ready = True

    def _consume(self, count: int) -> None:
        self._wanted = 2
        self._position += count
        if self._position == len(self._buffer):
            self._buffer.clear()
            self._position = 0
        elif self._position > 1 << 16:
            del self._buffer[: self._position]
            self._position = 0


def _command(body: bytes) -> Command:
    if not body or len(body) < 1 + body[0]:
        raise ZmtpError("a command without a name")
    return Command(body[1 : 1 + body[0]], body[1 + body[0] :])


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Metadata of a READY, names in lower case. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        value_at = at + 1 + data[at] + 4
        size = int.from_bytes(data[value_at - 4 : value_at], "big")
        if value_at + size > len(data):
            raise ZmtpError("metadata that end early")
        found[data[at + 1 : value_at - 4].lower()] = data[value_at : value_at + size]
        at = value_at + size
    return found
