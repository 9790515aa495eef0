"""KV events are in the format that vLLM's own subscribers read."""

from __future__ import annotations

import importlib.util

import msgspec
import pytest

from kvoffd_proto.codec import encode
from kvoffd_proto.events import (
    END_OF_REPLAY,
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
    BlockStored([b"a" * 32, b"b" * 32], None, [], 16, None, MEDIUM_CPU, None, 1),
    BlockRemoved([b"a" * 32], MEDIUM_CPU, 1),
    AllBlocksCleared(),
]


def test_a_batch_comes_back_as_it_was_published() -> None:
    batch = EventBatch(12.5, EVENTS)
    assert decode_event_batch(encode(batch)) == batch


def test_events_are_maps_with_a_type_in_an_array() -> None:
    raw = msgspec.msgpack.decode(encode(EventBatch(12.5, EVENTS)))
    assert raw[0] == 12.5
    assert [event["type"] for event in raw[1]] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert raw[1][0]["block_hashes"] == [b"a" * 32, b"b" * 32]


def test_the_end_of_a_replay_is_the_number_minus_one() -> None:
    assert END_OF_REPLAY == b"\xff" * 8


def test_no_session_hears_another_ones_completions() -> None:
    assert not session_topic(1, 23).startswith(session_topic(1, 2))
    assert not session_topic(12, 3).startswith(session_topic(1, 2))
    assert kv_topic(b"\xab\x01") == b"kv@ab01"


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # importing vLLM warns about what is not ours
@pytest.mark.timeout(300)
def test_vllm_reads_our_events() -> None:
    from vllm.distributed import kv_events

    batch = msgspec.msgpack.decode(encode(EventBatch(12.5, EVENTS)), type=kv_events.KVEventBatch)
    stored, removed, cleared = batch.events
    assert batch.ts == 12.5
    assert isinstance(stored, kv_events.BlockStored)
    assert stored.block_hashes == [b"a" * 32, b"b" * 32]
    assert (stored.block_size, stored.medium, stored.group_idx) == (16, kv_events.MEDIUM_CPU, 1)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert removed.block_hashes == [b"a" * 32]
    assert isinstance(cleared, kv_events.AllBlocksCleared)
