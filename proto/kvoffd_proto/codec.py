"""The one codec of the wire: msgpack by msgspec, typed on both sides."""

from __future__ import annotations

import msgspec

from kvoffd_proto.messages import AnyReply, AnyRequest, Completions

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)
_completions = msgspec.msgpack.Decoder(Completions)
_heads = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ids = msgspec.msgpack.Decoder(int)


class CodecError(Exception):
    """The frame is not a message that belongs here. The text says what is wrong with it."""


def encode(message: AnyRequest | AnyReply | Completions) -> bytes:
    """Return the frame of ``message``."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> AnyRequest:
    """Decode a request frame. Raises CodecError."""
    try:
        return _requests.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from error


def decode_reply(frame: bytes | memoryview) -> AnyReply:
    """Decode a reply frame. Raises CodecError."""
    try:
        return _replies.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from error


def decode_completions(frame: bytes | memoryview) -> Completions:
    """Decode the payload of a message on a session's topic. Raises CodecError."""
    try:
        return _completions.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(str(error)) from error


def request_id_of(frame: bytes | memoryview) -> int:
    """The request id of a frame that does not decode, so that the refusal finds its sender; 0 where there is none."""
    try:
        head = _heads.decode(frame)
        found = _ids.decode(head[1]) if len(head) > 1 else 0
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    return found if 0 <= found < 2**63 else 0
