"""Events in order, whatever was dropped."""

from __future__ import annotations

from kvoffd_client.event_stream import EventStream
from kvoffd_proto.codec import encode
from kvoffd_proto.events import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, EventBatch, KvEvent

MINE, OTHER = b"kv@mine", b"kv@other"


def event(number: int) -> KvEvent:
    return BlockRemoved([b"%d" % number], "CPU", 0)


def message(number: int, topic: bytes = MINE) -> tuple[bytes, bytes, bytes]:
    return topic, number.to_bytes(8, "big"), encode(EventBatch(0.0, [event(number)]))


def stream(max_events: int = 100) -> EventStream:
    made = EventStream(MINE, max_events)
    made.new_epoch(1)
    return made


def test_only_events_of_the_topic_are_kept_and_other_topics_are_no_gap() -> None:
    events = stream()
    for number, topic in enumerate([MINE, OTHER, MINE]):
        events.message(*message(number, topic))
    assert events.take() == [event(0), event(2)]
    assert not events.has_gap
    assert events.take() == []


def test_a_gap_holds_events_back_until_a_replay_fills_it() -> None:
    events = stream()
    events.message(*message(0))
    events.message(*message(3))
    assert events.has_gap
    assert events.take() == [event(0)]
    assert events.begin_replay() == 1
    for number in (1, 2, 3):
        events.replayed(*message(number))
    events.replayed(b"", END_OF_REPLAY, b"")
    assert events.take() == [event(1), event(2), event(3)]
    assert events.lost == 0


def test_what_a_replay_does_not_bring_is_counted_as_lost() -> None:
    events = stream()
    events.message(*message(5))
    events.begin_replay()
    events.replayed(*message(4))
    events.replayed(b"", END_OF_REPLAY, b"")
    assert events.take() == [event(4), event(5)]
    assert events.lost == 4


def test_a_gap_that_opens_while_a_replay_runs_is_not_given_up_by_its_end() -> None:
    events = stream()
    events.begin_replay()
    events.message(*message(1))
    events.replayed(b"", END_OF_REPLAY, b"")
    assert events.has_gap
    assert events.lost == 0
    assert events.begin_replay() == 0
    events.replayed(*message(0))
    assert events.take() == [event(0), event(1)]


def test_history_older_than_the_replay_buffer_is_lost_once() -> None:
    events = stream()
    events.begin_replay()
    for number in (10, 11):
        events.replayed(*message(number))
    events.replayed(b"", END_OF_REPLAY, b"")
    assert events.take() == [event(10), event(11)]
    assert events.lost == 10


def test_a_new_daemon_begins_with_an_empty_index() -> None:
    events = stream()
    events.message(*message(0))
    events.new_epoch(1)
    events.new_epoch(2)
    events.message(*message(0))
    assert events.take() == [event(0), AllBlocksCleared(), event(0)]


def test_events_that_nobody_takes_are_bounded_and_counted() -> None:
    events = stream(max_events=3)
    for number in range(5):
        events.message(*message(number))
    assert events.take() == [event(2), event(3), event(4)]
    assert events.lost == 2


def test_a_payload_that_does_not_decode_is_counted_and_not_waited_for() -> None:
    events = stream()
    events.message(MINE, bytes(8), b"\xc1")
    events.message(*message(1))
    assert events.take() == [event(1)]
    assert events.lost == 1
