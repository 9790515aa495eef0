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
_HEAD_BYTES = 5 + 2 + 255 + 9
"""Most bytes of a message's header, a tag of up to 255 bytes, and a number."""
_NUMBER_BYTES = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Bytes of a whole number by its first byte; 1 for others."""

CODEC_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of the three decoders below for a frame that is not a message of the expected kind."""
decode_request = _requests.decode
decode_reply = _replies.decode
decode_completions = _completions.decode
"""Decodes the payload of a message on a session's topic."""


def request_id_of(frame: bytes | memoryview) -> int:
    """Return the request id of a frame that does not decode, for the refusal; 0 if it has none.

    Only the frame's head is looked at: the decoder takes 0.1 s to skip the other elements of a large one.
    """
    head = bytes(frame[:_HEAD_BYTES])
    try:
        # An array (fixarray, array 16 or 32) of a tag (fixstr or str 8), a number and more: the first two are decoded.
        tag_at = 1 if head[0] >> 4 == 0x9 else {0xDC: 3, 0xDD: 5}[head[0]]
        number_at = tag_at + (2 + head[tag_at + 1] if head[tag_at] == 0xD9 else 1 + head[tag_at] % 32)
        end = number_at + _NUMBER_BYTES.get(head[number_at], 1)
        return _heads.decode(b"\x92" + head[tag_at:end]).request_id
    except (*CODEC_ERRORS, LookupError):
        return 0
