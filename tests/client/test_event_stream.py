"""Events in order; where some were lost, nothing that was known holds any more."""

from __future__ import annotations

import pytest

from kvoffd_client import event_stream
from kvoffd_client.event_stream import EventStream
from kvoffd_proto.codec import encode
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, EventBatch, KvEvent

CLEARED = AllBlocksCleared()


def event(number: int) -> KvEvent:
    return BlockRemoved([b"%d" % number], "CPU", 0)


def message(number: int) -> tuple[bytes, bytes]:
    return number.to_bytes(8, "big"), encode(EventBatch(0.0, [event(number)]))


def stream() -> EventStream:
    made = EventStream(b"kv@mine")
    assert made.take() == [CLEARED]
    return made


def test_events_that_nobody_takes_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_BUFFERED_EVENTS", 3)
    events = stream()
    for number in range(5):
        events.message(*message(number))
    assert events.take() == [CLEARED, event(4)]
    assert events.lost == 4


def test_a_payload_that_does_not_decode_is_counted_as_lost() -> None:
    events = stream()
    events.message(bytes(8), b"\xc1")
    events.message(*message(1))
    assert events.take() == [CLEARED, event(1)]
    assert events.lost == 1
