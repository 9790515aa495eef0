"""The one codec of the wire: msgpack by msgspec, typed on both sides."""

from __future__ import annotations

from functools import reduce
from operator import or_

import msgspec

from kvoffd_proto import admin, stats  # noqa: F401 - they declare the requests of administrators
from kvoffd_proto.messages import EXCHANGES, AnyReply, AnyRequest, Completions, Error, Reply

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

# Markers of msgpack, for request_id_of, which reads a frame without the decoder.
_FIXARRAY, _FIXSTR = 0b1001, 0b101
_ARRAY_HEAD_BYTES = {0xDC: 3, 0xDD: 5}
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_HEAD_BYTES = 5 + 32 + 9


CODEC_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What the next three raise for a frame that is not a message of the expected kind: the text says what is wrong."""
decode_request = _requests.decode
decode_reply = _replies.decode
decode_completions = _completions.decode
"""Decodes the payload of a message on a session's topic."""


def request_id_of(frame: bytes | memoryview) -> int:
    """Return the request id of a frame that does not decode, so that the refusal can name it; 0 where there is none.

    Reads the array's head, the tag and the number, and no more: the rest may be millions of items that mean nothing.
    """
    head = bytes(frame[:_HEAD_BYTES])
    at = _ARRAY_HEAD_BYTES.get(head[0], 1 if head[0] >> 4 == _FIXARRAY else 0) if head else 0
    if not at or len(head) <= at or head[at] >> 5 != _FIXSTR:
        return 0
    at += 1 + (head[at] & 0x1F)
    if len(head) <= at:
        return 0
    size = _UINT_BYTES.get(head[at], 0)
    number = head[at + 1 : at + 1 + size]
    found = int.from_bytes(number, "big") if size and len(number) == size else head[at]
    return found if (size or head[at] < 0x80) and found < 2**63 else 0
