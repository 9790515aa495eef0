"""Frames of the lifeline: the unix stream that carries descriptors, and whose EOF ends the session.

A frame is a little-endian ``uint32`` length and that many bytes of MessagePack. A descriptor is ancillary data
(SCM_RIGHTS) of the message that holds the first byte of its frame.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

import msgspec

from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import END_OF_SESSION_IDS, TOKEN_BYTES, Count, Wire, doc

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 4096

SegmentName = Annotated[Count, doc("The id given in Attach.")]
Reason = Annotated[ErrorCode, doc("Reason of the refusal.")]
Advice = Annotated[str, doc("The reason, and what to do about it.", max_length=2048)]


class Greeting(Wire, frozen=True, tag="greeting"):
    """Daemon to client, first frame: the connection is accepted, and this is its session."""

    protocol_version: Annotated[int, doc("The daemon's protocol version.", ge=0)]
    epoch: Annotated[Count, doc("Random number of this run of the daemon, part of the topic of completions.")]
    session_id: Annotated[int, doc("The session this lifeline belongs to.", ge=1, lt=END_OF_SESSION_IDS)]
    token: Annotated[bytes, doc("Secret: after ``k``, the routing id.", min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Refused(Wire, frozen=True, tag="refused"):
    """Daemon to client: the connection is refused and will be closed."""

    code: Reason
    message: Advice


class Attach(Wire, frozen=True, tag="attach"):
    """Client to daemon, with exactly one descriptor, to be used by one Register. A refused Register does not use it."""

    segment_id: Annotated[Count, doc("Name of the descriptor, new in the session.")]


class Attached(Wire, frozen=True, tag="attached"):
    """Daemon to client: the daemon has the descriptor, and Register may refer to it."""

    segment_id: SegmentName


class AttachRefused(Wire, frozen=True, tag="attach_refused"):
    """Daemon to client: the descriptor was refused and closed; the session continues."""

    segment_id: SegmentName
    code: Reason
    message: Advice


class MemoryReleased(Wire, frozen=True, tag="memory_released"):
    """Daemon to client, last frame: the session has ended, and the daemon no longer accesses the client's memory.

    If a lifeline ends without it, the daemon has died: copies of a GPU may continue until its process is gone.
    """


class Leaving(Wire, frozen=True, tag="leaving"):
    """Client to daemon, last frame: the client ends the session on purpose.

    Close the stream afterwards. To wait for MemoryReleased, shut down the writing half and read until EOF. A lifeline
    that ends without Leaving is counted as a client that died; nothing else differs.
    """


FromDaemon = Greeting | Refused | Attached | AttachRefused | MemoryReleased
FromClient = Attach | Leaving
FrameT = TypeVar("FrameT", FromDaemon, FromClient)

_encoder = msgspec.msgpack.Encoder()


class LifelineError(Exception):
    """The stream holds something that is not a lifeline frame. Close the connection."""


def routing_id(token: bytes) -> bytes:
    """Return the routing id of a session's DEALER. ZeroMQ does not permit a zero as the first byte."""
    return b"k" + token


def encode_frame(message: FromDaemon | FromClient) -> bytes:
    """Return ``message`` as one length-prefixed frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameBuffer:
    """Collects stream bytes and yields whole frame bodies.

    Raises:
        LifelineError: a frame is empty or longer than ``MAX_FRAME_BYTES``.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data``; return the complete frame bodies."""
        self._pending += data
        bodies: list[bytes] = []
        while len(self._pending) >= LENGTH_BYTES:
            size = int.from_bytes(self._pending[:LENGTH_BYTES], "little")
            if not 0 < size <= MAX_FRAME_BYTES:
                raise LifelineError(f"A lifeline frame claims {size} bytes; 1 to {MAX_FRAME_BYTES} are allowed.")
            if len(self._pending) < LENGTH_BYTES + size:
                break
            bodies.append(bytes(self._pending[LENGTH_BYTES : LENGTH_BYTES + size]))
            del self._pending[: LENGTH_BYTES + size]
        return bodies


def _decode(decoder: msgspec.msgpack.Decoder[FrameT], sender: str, body: bytes) -> FrameT:
    """Decode the body of a frame. Raises LifelineError."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LifelineError(f"Not a lifeline frame of {sender}: {error}") from error


decode_from_daemon = partial(_decode, msgspec.msgpack.Decoder[FromDaemon](FromDaemon), "the daemon")
decode_from_client = partial(_decode, msgspec.msgpack.Decoder[FromClient](FromClient), "a client")
