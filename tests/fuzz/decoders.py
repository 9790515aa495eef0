"""What must hold for every decoder, whatever the bytes. Each function takes one input and raises where it does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import MagicMock

from kvoffd_client import NamespaceSpec, SchedulerClient
from kvoffd_proto import codec, events, lifeline
from tests.fuzz import corpus
from tests.fuzz.bend import Choices, bend
from tests.fuzz.pages import bent_namespaces, disk_pages, namespaces

SPEC = NamespaceSpec.named("fuzz")
CLIENT = SchedulerClient("/nowhere", SPEC, subscribe_events=True, transport=MagicMock(lock=nullcontext()))


def request(data: bytes) -> None:
    """A frame of ``jobs.sock`` as the daemon reads it."""
    assert 0 <= codec.request_id_of(data) < 2**63
    try:
        message = codec.decode_request(data)
    except codec.CODEC_ERRORS:
        return
    again = codec.encode(message)
    assert codec.decode_request(again) == message
    assert codec.request_id_of(again) == message.request_id


def reply(data: bytes) -> None:
    """A frame of ``jobs.sock`` as a client reads it."""
    try:
        message = codec.decode_reply(data)
    except codec.CODEC_ERRORS:
        return
    assert len(codec.encode(message)) > 0


def completions(data: bytes) -> None:
    """A payload on a session's topic."""
    try:
        message = codec.decode_completions(data)
    except codec.CODEC_ERRORS:
        return
    assert codec.decode_completions(codec.encode(message)).results is not None


def lifeline_stream(data: bytes) -> None:
    """A lifeline's bytes, in one piece and in single ones: the same frames, or refused in both."""
    whole, bytewise = _bodies([data]), _bodies([data[at : at + 1] for at in range(len(data))])
    assert whole == bytewise
    for body in whole or []:
        for decode in (lifeline.decode_from_client, lifeline.decode_from_daemon):
            try:
                frame = decode(body)
            except lifeline.LifelineError:
                continue
            assert decode(lifeline.encode_frame(frame)[lifeline.LENGTH_BYTES :]) == frame


def _bodies(pieces: list[bytes]) -> list[bytes] | None:
    """The frames of a stream; None where it is refused."""
    buffer = lifeline.FrameBuffer()
    try:
        return [body for piece in pieces for body in buffer.feed(piece)]
    except lifeline.LifelineError:
        return None


def event_batch(data: bytes) -> None:
    """A payload of KV events in a client: taken or counted as lost, and the next message is read all the same."""
    try:
        events.decode_event_batch(data)
    except codec.CODEC_ERRORS:
        pass
    topic, good = events.kv_topic(SPEC.fingerprint), codec.encode(events.EventBatch(0.0, [events.AllBlocksCleared()]))
    CLIENT.on_publication(topic, bytes(8), data, 0.0)
    CLIENT.take_events()
    lost = CLIENT.events_lost
    CLIENT.on_publication(topic, (1).to_bytes(8, "big"), good, 0.0)
    assert CLIENT.take_events() == [events.AllBlocksCleared()]
    assert CLIENT.events_lost == lost


def bent(name: str) -> Callable[[bytes], None]:
    """The decoder of that name, over right messages whose structure was changed."""

    def check(data: bytes) -> None:
        choices = Choices(data)
        PLAIN[name](bend(choices, choices.of(corpus.seeds(name))))

    return check


def bent_lifeline(data: bytes) -> None:
    """A lifeline frame whose structure was changed, between right ones."""
    choices = Choices(data)
    frames = corpus.seeds("lifeline_stream")
    body = bend(choices, choices.of(frames[:-1])[lifeline.LENGTH_BYTES :])
    right = choices.of(frames)
    lifeline_stream(right + len(body).to_bytes(lifeline.LENGTH_BYTES, "little") + body + right)


PLAIN = {target.__name__: target for target in (request, reply, completions, event_batch)}
OTHERS = (lifeline_stream, bent_lifeline, namespaces, bent_namespaces, disk_pages)
DECODERS: dict[str, Callable[[bytes], None]] = {
    **PLAIN,
    **{f"bent_{name}": bent(name) for name in PLAIN},
    **{target.__name__: target for target in OTHERS},
}
"""For each target its function, which takes one input and raises where a promise does not hold."""
