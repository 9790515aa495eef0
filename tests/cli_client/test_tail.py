"""KV events as lines and objects."""

from __future__ import annotations

import json

import pytest

from kvoffd_client.cli.tail import event_object, fingerprint_of, gap_before, lines_of
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, kv_topic

FINGERPRINT = bytes(range(32))
TOPIC = kv_topic(FINGERPRINT)
BATCH = EventBatch(
    ts=1_700_000_000.25,
    events=[
        BlockStored([b"\xaa" * 32, b"\xbb" * 32], None, [], 16, None, "CPU", None, 1),
        BlockRemoved([b"\xcc" * 32], "CPU", 0),
        AllBlocksCleared(),
    ],
)


def test_one_line_per_event() -> None:
    stored, removed, cleared = lines_of(TOPIC, 812, BATCH, {FINGERPRINT: "tiny"})
    for line in (stored, removed, cleared):
        assert ".250       812  00010203 tiny  " in line
    assert stored.endswith("stored   group 1       2 blocks  aaaaaaaaaaaa to bbbbbbbbbbbb")
    assert removed.endswith("removed  group 0       1 block   cccccccccccc")
    assert cleared.endswith("cleared  all blocks")


def test_objects_are_json_with_hex() -> None:
    found = json.loads(json.dumps(event_object(TOPIC, 812, BATCH, {FINGERPRINT: "tiny"})))
    assert found["namespace"] == FINGERPRINT.hex()
    assert (found["sequence"], found["label"], found["time"]) == (812, "tiny", 1_700_000_000.25)
    assert [event["type"] for event in found["events"]] == ["stored", "removed", "cleared"]
    assert found["events"][0]["block_hashes"] == ["aa" * 32, "bb" * 32]
    assert found["events"][0]["tokens_per_block"] == 16


def test_a_label_cannot_move_the_cursor() -> None:
    assert "\x1b" not in "".join(lines_of(TOPIC, 1, BATCH, {FINGERPRINT: "\x1b[2J"}))


@pytest.mark.parametrize(
    ("sequence", "last", "words"), [(5, None, ""), (6, 5, ""), (7, 5, "1 event message "), (9, 5, "3 event messages ")]
)
def test_gaps_are_counted(sequence: int, last: int | None, words: str) -> None:
    assert gap_before(sequence, last).startswith(words)
    assert bool(gap_before(sequence, last)) == bool(words)


def test_a_restart_is_told() -> None:
    assert "restarted" in gap_before(0, 500)


@pytest.mark.parametrize("topic", [b"kv@", b"kv@zz", b"\xff\xfe"])
def test_a_strange_topic_has_no_fingerprint(topic: bytes) -> None:
    assert fingerprint_of(topic) == b""
