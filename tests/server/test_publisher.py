"""KV events as messages: bounded, numbered, in order."""

from __future__ import annotations

from kvoffd.cache.namespace import Namespace
from kvoffd.server.publisher import MAX_EVENTS_PER_MESSAGE, EventPublisher
from kvoffd_proto.events import (
    END_OF_REPLAY,
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_event_batch,
)
from kvoffd_proto.messages import GroupSpec


def test_much_at_once_becomes_many_messages_in_order() -> None:
    namespace = Namespace(b"f" * 32, "", 1, 8, [GroupSpec("full", 16)], "{}")
    publisher = EventPublisher(1000)
    publisher.cleared(namespace)
    count = 3 * MAX_EVENTS_PER_MESSAGE
    for number in range(count):
        publisher.stored(namespace, 0, [number.to_bytes(8, "big")])
    messages = publisher.flush()
    assert len(messages) == 4
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in messages] == [0, 1, 2, 3]
    events = [event for _, _, payload in messages for event in decode_event_batch(payload).events]
    assert isinstance(events[0], AllBlocksCleared)
    stored = [event.block_hashes[0] for event in events[1:] if isinstance(event, BlockStored)]
    assert stored == [number.to_bytes(8, "big") for number in range(count)]
    assert publisher.flush() == []
    assert list(publisher.replay(2)) == [*messages[2:], (b"", END_OF_REPLAY, b"")]


def test_a_replay_that_nobody_reads_keeps_no_message() -> None:
    namespace = Namespace(b"f" * 32, "", 1, 8, [GroupSpec("full", 16)], "{}")
    publisher = EventPublisher(4)
    for _ in range(4):
        publisher.cleared(namespace)
        publisher.flush()
    replay = publisher.replay(0)
    first = next(replay)
    for _ in range(2):
        publisher.cleared(namespace)
        publisher.flush()
    assert [int.from_bytes(sequence, "big", signed=True) for _, sequence, _ in (first, *replay)] == [0, 2, 3, -1]
    for _ in range(5):
        publisher.cleared(namespace)
        publisher.flush()
    assert [sequence for _, sequence, _ in publisher._replay(0, 4)] == [END_OF_REPLAY]


def test_an_event_names_the_medium_as_vllm_does() -> None:
    namespace = Namespace(b"f" * 32, "", 1, 8, [GroupSpec("full", 16)], "{}")
    publisher = EventPublisher(1000)
    for medium in (MEDIUM_CPU, MEDIUM_STORAGE):
        publisher.stored(namespace, 0, [bytes(8)], medium)
        publisher.removed(namespace, 0, [bytes(8)], medium)
    ((_, _, payload),) = publisher.flush()
    found = [
        (type(event), event.medium)
        for event in decode_event_batch(payload).events
        if isinstance(event, BlockStored | BlockRemoved)
    ]
    assert found == [
        (BlockStored, MEDIUM_CPU),
        (BlockRemoved, MEDIUM_CPU),
        (BlockStored, MEDIUM_STORAGE),
        (BlockRemoved, MEDIUM_STORAGE),
    ]
