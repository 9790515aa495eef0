"""The codec takes every message apart as it was put together, and refuses everything else.

What becomes of any bytes, and of messages of which some bytes are changed, tests/fuzz has.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, inspect

from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS, decode_completions, decode_reply, decode_request, encode, request_id_of
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import EventBatch, decode_event_batch
from tests.kit.amount import TIMES
from tests.kit.cases import case
from tests.kit.made_up_messages import instances

REQUESTS = tuple(m.EXCHANGES)
REPLIES = codec.REPLIES
OTHERS = {m.Completions: decode_completions, EventBatch: decode_event_batch}


quick = settings(max_examples=8 * TIMES)


def test_every_message_comes_back_as_it_was_sent() -> None:
    decoders = {**dict.fromkeys(REQUESTS, decode_request), **dict.fromkeys(REPLIES, decode_reply), **OTHERS}
    for struct in decoders:

        @settings(quick, max_examples=3 * TIMES)
        @given(instances(struct))
        def check(message: Struct) -> None:
            assert decoders[type(message)](encode(message)) == message  # type: ignore[arg-type,index]

        check()


def test_hello_and_error_are_read_by_all_releases() -> None:
    """So that two of different protocols can say so: these bytes stay what they are."""
    hello = decode_request(b"\x96\xa5hello\x07\x04\xa6worker\xa1n\xa1s")
    assert hello == m.Hello(7, 4, m.Role.WORKER, "n", "s")
    assert encode(m.Error(7, ErrorCode.BAD_VERSION, "why")) == b"\x94\xa5error\x07%c\xa3why" % ErrorCode.BAD_VERSION


def wire(*parts: object) -> bytes:
    return msgspec.msgpack.encode(list(parts))


FINGERPRINT = b"f" * 32


def test_a_frame_that_is_no_request_is_refused() -> None:
    """``GARBAGE`` of tests/kit/wire.py has others."""
    frames = {
        "unknown tag": wire("destroy", 1),
        "request id that is a text": wire("stats", "1"),
        "field too many": wire("stats", 1, 1),
        "group index beyond its range": wire("lookup", 1, FINGERPRINT, 2**32, [[65536, b""]]),
        "text that is not UTF-8": b"\xa5\xff\xff\xff\xff\xff",
    }
    for wrong, frame in frames.items():
        with case(wrong), pytest.raises(CODEC_ERRORS) as refusal:
            decode_request(frame)
        assert str(refusal.value), wrong


def test_the_request_id_is_found_in_a_frame_that_does_not_decode() -> None:
    assert request_id_of(wire("destroy", 77)) == 77
    tags, fields = ("", "a", "t" * 31, "t" * 32, "t" * 255), (0, 13, 14, 65533, 65534)
    for number, tag, more in product((0, 127, 128, 255, 256, 65536, 2**32, 2**63 - 1), tags, fields):
        assert request_id_of(wire(tag, number, *[None] * more)) == number, (number, tag, more)
    assert request_id_of(b"\x92\xa1a\xd1\x01\x00") == 256, "as some encoders write it"


def test_the_request_id_is_found_without_a_look_at_the_rest_of_the_frame() -> None:
    """To skip the elements of one of 4 MiB took 0.15 s of the daemon's loop."""
    large = wire("destroy", 77, *[None] * 100_000)
    assert request_id_of(large[:-1]) == request_id_of(large) == 77


def test_a_frame_without_a_usable_request_id_counts_as_0() -> None:
    for frame in (b"", wire("stats"), wire("stats", -3), wire("stats", 2**63), wire("stats", "77"), b"\xc0"):
        assert request_id_of(frame) == 0, frame


LIFELINE = (lifeline.Greeting, lifeline.Refused, lifeline.Attached, lifeline.AttachRefused, lifeline.Attach)


@quick
@given(
    st.lists(st.sampled_from(LIFELINE).flatmap(instances), max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_lifeline_frames_arrive_whole_however_the_stream_is_cut(sent: list[Struct], pieces: list[int]) -> None:
    stream = b"".join(lifeline.encode_frame(frame) for frame in sent)  # type: ignore[arg-type]
    buffer, bodies, position, turn = lifeline.FrameBuffer(), [], 0, 0
    while position < len(stream):
        step = pieces[turn % len(pieces)]
        bodies += buffer.feed(stream[position : position + step])
        position, turn = position + step, turn + 1
    decoded = [
        lifeline.decode_from_client(body) if isinstance(frame, lifeline.Attach) else lifeline.decode_from_daemon(body)
        for frame, body in zip(sent, bodies, strict=True)
    ]
    assert decoded == sent


@pytest.mark.parametrize("size", [0, lifeline.MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_lifeline_frame_of_an_impossible_length_is_refused_before_it_arrives(size: int) -> None:
    with pytest.raises(lifeline.LifelineError, match=str(size)):
        lifeline.FrameBuffer().feed(size.to_bytes(lifeline.LENGTH_BYTES, "little"))


def test_deeply_nested_lifeline_garbage_is_refused() -> None:
    for decode in (lifeline.decode_from_client, lifeline.decode_from_daemon):
        with pytest.raises(lifeline.LifelineError):
            decode(b"\x91" * (lifeline.MAX_FRAME_BYTES - 1))


def _unlimited_texts(kind: object, path: str) -> Iterator[str]:
    """Yield where a type, as msgspec describes it, has texts of any length."""
    if isinstance(kind, inspect.StrType) and kind.max_length is None:
        yield path
    elif isinstance(kind, inspect.Metadata):
        yield from _unlimited_texts(kind.type, path)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from _unlimited_texts(field.type, f"{path}.{field.name}")
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _unlimited_texts(one, path)
    elif isinstance(kind, inspect.CollectionType):
        yield from _unlimited_texts(kind.item_type, f"{path}[]")


def test_every_text_of_a_request_has_a_limit() -> None:
    """The daemon keeps most of them: a thousand prompts of each engine, whose marks could be of 2 MiB."""
    assert [one for kind in m.EXCHANGES for one in _unlimited_texts(inspect.type_info(kind), kind.__name__)] == []
