"""The codec of the wire: MessagePack by msgspec, typed on both sides."""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from kvoffd_proto import admin, stats  # noqa: F401 - declare the administrators' requests
from kvoffd_proto.messages import EXCHANGES, AnyReply, AnyRequest, Completions, Count, Error, Reply

REPLIES: tuple[type[Reply], ...] = (
    *dict.fromkeys(known.answer for known in EXCHANGES.values() if issubclass(known.answer, Reply)),
    Error,
)
"""All replies of the protocol."""

encode = msgspec.msgpack.Encoder().encode
"""Encodes a message, as the frame of a request or a reply, or as the payload of a publication."""
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(reduce(or_, EXCHANGES))
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(reduce(or_, REPLIES))
_completions = msgspec.msgpack.Decoder(Completions)


class _Head(msgspec.Struct, array_like=True):
    """The first two elements of any message; the others are ignored."""

    tag: str
    request_id: Count


_heads = msgspec.msgpack.Decoder(_Head)

CODEC_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of the three decoders below for a frame that is not a message of the expected kind."""
decode_request = _requests.decode
decode_reply = _replies.decode
decode_completions = _completions.decode
"""Decodes the payload of a message on a session's topic."""


def request_id_of(frame: bytes | memoryview) -> int:
    """Return the request id of a frame that does not decode, for the refusal; 0 if it has none."""
    try:
        return _heads.decode(frame).request_id
    except CODEC_ERRORS:
        return 0
