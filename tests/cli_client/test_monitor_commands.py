"""``stats --watch`` in virtual time, and KV events as lines and objects."""

from __future__ import annotations

import json
from itertools import islice

import msgspec
import pytest

from kvoffd_client import DaemonUnavailable
from kvoffd_client.cli.json_output import to_json
from kvoffd_client.cli.monitor_commands import (
    describe_gap,
    event_lines,
    event_object,
    stats_pages,
    topic_fingerprint,
)
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, kv_topic
from kvoffd_proto.stats import StatsReply
from tests.kit.clock import Clock

FINGERPRINT = bytes(range(32))
TOPIC = kv_topic(FINGERPRINT)
BATCH = EventBatch(
    ts=1_700_000_000.25,
    events=[
        BlockStored([b"\xaa" * 32, b"\xbb" * 32], 16, "CPU", 1),
        BlockRemoved([b"\xcc" * 32], "CPU", 0),
        AllBlocksCleared(),
    ],
)


def test_one_line_per_event() -> None:
    stored, removed, cleared = event_lines(TOPIC, 812, BATCH, {FINGERPRINT: "tiny"})
    for line in (stored, removed, cleared):
        assert ".250       812  00010203 tiny  " in line
    assert stored.endswith("stored   group 1       2 blocks  aaaaaaaaaaaa to bbbbbbbbbbbb")
    assert removed.endswith("removed  group 0       1 block   cccccccccccc")
    assert cleared.endswith("cleared  all blocks")


def test_events_of_disks_are_told_from_those_of_the_pool() -> None:
    on_disk = EventBatch(0.5, [msgspec.structs.replace(event, medium="STORAGE") for event in BATCH.events[:2]])
    written, dropped = event_lines(TOPIC, 812, on_disk, {})
    assert "  written  group 1 " in written
    assert "  dropped  group 0 " in dropped


def test_objects_are_json_with_hex() -> None:
    found = json.loads(to_json(event_object(TOPIC, 812, BATCH, {FINGERPRINT: "tiny"})))
    assert found["namespace"] == FINGERPRINT.hex()
    assert (found["sequence"], found["label"], found["time"]) == (812, "tiny", 1_700_000_000.25)
    assert [event["type"] for event in found["events"]] == ["stored", "removed", "cleared"]
    assert found["events"][0]["block_hashes"] == ["aa" * 32, "bb" * 32]
    assert found["events"][0]["tokens_per_block"] == 16


def test_a_label_cannot_move_the_cursor() -> None:
    assert "\x1b" not in "".join(event_lines(TOPIC, 1, BATCH, {FINGERPRINT: "\x1b[2J"}))


@pytest.mark.parametrize(
    ("sequence", "last", "words"), [(5, None, ""), (6, 5, ""), (7, 5, "1 event message "), (9, 5, "3 event messages ")]
)
def test_gaps_are_counted(sequence: int, last: int | None, words: str) -> None:
    assert describe_gap(sequence, last).startswith(words)
    assert bool(describe_gap(sequence, last)) == bool(words)


def test_a_restart_is_told() -> None:
    assert "restarted" in describe_gap(0, 500)


@pytest.mark.parametrize("topic", [b"kv@", b"kv@zz", b"\xff\xfe"])
def test_a_strange_topic_has_no_fingerprint(topic: bytes) -> None:
    assert topic_fingerprint(topic) == b""


class SleepingClock(Clock):
    def __init__(self) -> None:
        super().__init__(100.0)
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Source:
    """Answers with each of ``answers`` in turn; None is a daemon that is not there. Takes ``cost_s`` an answer."""

    def __init__(self, clock: SleepingClock, answers: list[StatsReply | None], cost_s: float = 0.0) -> None:
        self._clock = clock
        self._answers = iter(answers)
        self._cost_s = cost_s
        self.waits: list[float] = []

    def stats(self, timeout_s: float) -> StatsReply:
        self.waits.append(timeout_s)
        self._clock.now += self._cost_s
        answer = next(self._answers)
        if answer is None:
            raise DaemonUnavailable("No daemon.")
        return answer


def test_each_page_is_a_new_answer(busy: StatsReply, fresh: StatsReply) -> None:
    clock = SleepingClock()
    pages = islice(stats_pages(Source(clock, [fresh, busy, fresh]).stats, 1.0, clock, clock.sleep), 3)
    assert [page.now for page in pages] == [fresh, busy, fresh]
    assert clock.slept == [1.0, 1.0]


def test_the_time_of_an_answer_does_not_add_to_the_interval(fresh: StatsReply) -> None:
    clock = SleepingClock()
    source = Source(clock, [fresh] * 4, cost_s=0.25)
    list(islice(stats_pages(source.stats, 1.0, clock, clock.sleep), 4))
    assert clock.slept == [1.0, 0.75, 0.75]


def test_slow_answers_are_not_made_up_for(fresh: StatsReply) -> None:
    clock = SleepingClock()
    source = Source(clock, [fresh] * 4, cost_s=5.0)
    list(islice(stats_pages(source.stats, 1.0, clock, clock.sleep), 4))
    assert clock.slept == [1.0, 0.0, 0.0]


def test_a_daemon_that_goes_is_told_and_waited_for(fresh: StatsReply, busy: StatsReply) -> None:
    clock = SleepingClock()
    source = Source(clock, [fresh, None, None, None, busy, busy])
    _, gone, still_gone, _, back, _ = islice(stats_pages(source.stats, 1.0, clock, clock.sleep), 6)
    for page in (gone, still_gone):
        assert page.now is fresh
        assert page.notice.startswith("No daemon. Trying again; these numbers are of ")
        assert page.notice.count("Trying") == 1
    assert (back.now, back.notice) == (busy, "")
    assert source.waits == [10, 2, 4, 8, 10, 2], "a daemon that hangs shows soon, and is given time"


def test_without_a_daemon_at_the_start_there_is_nothing_to_watch(fresh: StatsReply) -> None:
    clock = SleepingClock()
    with pytest.raises(DaemonUnavailable):
        next(stats_pages(Source(clock, [None]).stats, 1.0, clock, clock.sleep))
