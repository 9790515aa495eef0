"""KV events and their topics."""

from __future__ import annotations

from kvoffd_proto.codec import encode
from kvoffd_proto.events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    decode_event_batch,
    kv_topic,
    session_topic,
)

EVENTS: list[KvEvent] = [
    BlockStored([b"a" * 32, b"b" * 32], 2, MEDIUM_CPU, 1, [bytes(32), b"a" * 32], bytes(16)),
    BlockRemoved([b"a" * 32], MEDIUM_CPU, 1),
    AllBlocksCleared(),
]


def test_a_batch_comes_back_as_it_was_published() -> None:
    batch = EventBatch(12.5, EVENTS)
    assert decode_event_batch(encode(batch)) == batch


def test_no_session_hears_another_ones_completions() -> None:
    assert not session_topic(1, 23).startswith(session_topic(1, 2))
    assert not session_topic(12, 3).startswith(session_topic(1, 2))
    assert kv_topic(b"\xab\x01") == b"kv@ab01"
