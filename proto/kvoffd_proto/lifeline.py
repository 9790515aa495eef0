"""Frames of the lifeline, the unix stream that carries descriptors and, by its EOF, death.

A frame is a little-endian ``uint32`` length and that many bytes of msgpack. A frame that brings a
descriptor has it in the ancillary data (SCM_RIGHTS) of the message that holds its first byte.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, TypeVar

import msgspec

from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import TOKEN_BYTES, Count, Wire, doc

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 4096

SegmentName = Annotated[Count, doc("The name given in Attach.")]
Reason = Annotated[ErrorCode, doc("Why it was refused.")]
Advice = Annotated[str, doc("A sentence that says what to do.", max_length=2048)]


class Greeting(Wire, frozen=True, tag="greeting"):
    """Daemon to client, first frame: the connection was accepted; the session of this lifeline."""

    protocol_version: Annotated[int, doc("The daemon's protocol version.", ge=0)]
    epoch: Annotated[Count, doc("Random number of this run of the daemon; in the topic of completions.")]
    session_id: Annotated[int, doc("The session this lifeline belongs to.", ge=1, lt=2**31)]
    token: Annotated[
        bytes, doc("Secret: after a ``k``, the DEALER's routing id.", min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)
    ]


class Refused(Wire, frozen=True, tag="refused"):
    """Daemon to client: the connection is refused and will be closed."""

    code: Reason
    message: Advice


class Attach(Wire, frozen=True, tag="attach"):
    """Client to daemon, with exactly one descriptor: keep it for one Register. One that is refused leaves it."""

    segment_id: Annotated[Count, doc("Name of the descriptor, new in the session.")]


class Attached(Wire, frozen=True, tag="attached"):
    """Daemon to client: the descriptor is held; Register may refer to it now."""

    segment_id: SegmentName


class AttachRefused(Wire, frozen=True, tag="attach_refused"):
    """Daemon to client: the descriptor was closed again; the session goes on."""

    segment_id: SegmentName
    code: Reason
    message: Advice


class MemoryReleased(Wire, frozen=True, tag="memory_released"):
    """Daemon to client, the last frame: the session has ended and no copy touches the client's memory any more.

    A lifeline that ends without it is a daemon's that died: copies of a GPU may go on until its process is gone.
    """


class Leaving(Wire, frozen=True, tag="leaving"):
    """Client to daemon, its last frame: it ends the session of its own accord.

    Close the stream behind it. To wait for MemoryReleased, shut down its writing half and read on.
    A lifeline that ends without it is taken for one of a process that ended; that makes a difference to what is
    counted, and to nothing else.
    """


FromDaemon = Greeting | Refused | Attached | AttachRefused | MemoryReleased
FromClient = Attach | Leaving
FrameT = TypeVar("FrameT", FromDaemon, FromClient)

_encoder = msgspec.msgpack.Encoder()


class LifelineError(Exception):
    """The stream holds something that is not a lifeline frame; the connection must be closed."""


def routing_id(token: bytes) -> bytes:
    """The routing id of a session's DEALER, which names it in every request. None may begin with a zero byte."""
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
        """Add ``data``; return the bodies that are complete now."""
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
