"""The one codec of the wire: msgpack by msgspec, typed on both sides."""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from kvoffd_proto import admin, stats  # noqa: F401 - they declare the requests of administrators
from kvoffd_proto.messages import EXCHANGES, AnyReply, AnyRequest, Completions, Count, Error, Reply

REPLIES: tuple[type[Reply], ...] = (
    *dict.fromkeys(known.answer for known in EXCHANGES.values() if issubclass(known.answer, Reply)),
    Error,
)
"""Every reply of the protocol."""

encode = msgspec.msgpack.Encoder().encode
"""Encodes a message, as the frame of a request or a reply, or as the payload of a publication."""
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(reduce(or_, EXCHANGES))
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(reduce(or_, REPLIES))
_completions = msgspec.msgpack.Decoder(Completions)


class _Head(msgspec.Struct, array_like=True):
    """The beginning of any message; what follows is passed over."""

    tag: str
    request_id: Count


_heads = msgspec.msgpack.Decoder(_Head)

CODEC_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the next three raise for a frame that is not a message of the expected kind: the text says what is wrong."""
decode_request = _requests.decode
decode_reply = _replies.decode
decode_completions = _completions.decode
"""Decodes the payload of a message on a session's topic."""


def request_id_of(frame: bytes | memoryview) -> int:
    """The request id of a frame that does not decode, so that the refusal can name it; 0 where there is none."""
    try:
        return _heads.decode(frame).request_id
    except CODEC_ERRORS:
        return 0
