"""What a scheduler's client knows of blocks that were stored lately, by which answers to lookups are judged."""

from __future__ import annotations

import random
import sys
from threading import Thread

import pytest

from kvoffd_client import SchedulerClient, scheduler_client
from kvoffd_client.scheduler_client import StoredKeys
from kvoffd_proto import codec
from kvoffd_proto.events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, EventBatch, KvEvent, kv_topic
from tests.client.test_session import OPTIONS, SPEC, PaperLink, connect

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def link() -> PaperLink:
    return PaperLink()


@pytest.fixture
def scheduler(link: PaperLink) -> SchedulerClient:
    """Connected at time 0; it collects no events."""
    made = SchedulerClient("/paper", SPEC, record_stored=True, options=OPTIONS, transport=link, rng=random.Random(1))
    connect(made, link, 0.0)
    return made


def publish(scheduler: SchedulerClient, number: int, *events: KvEvent, payload: bytes = b"") -> None:
    message = payload or codec.encode(EventBatch(1.0, list(events)))
    scheduler.on_publication(kv_topic(SPEC.fingerprint), number.to_bytes(8, "big"), message, 0.1)


@pytest.mark.parametrize("medium", [MEDIUM_CPU, MEDIUM_STORAGE])
def test_keys_of_events_were_stored_since(scheduler: SchedulerClient, medium: str) -> None:
    before = scheduler.stored.count
    publish(scheduler, 0, BlockStored([KEY], 16, medium, 0), BlockRemoved([OTHER], medium, 0))
    assert scheduler.stored.was_stored(KEY, before)
    assert not scheduler.stored.was_stored(OTHER, before)
    assert not scheduler.stored.was_stored(KEY, scheduler.stored.count)
    assert scheduler.take_events() == [], "nobody takes them, so none are kept"


@pytest.mark.parametrize("lost", ["a message", "garbage", "the connection"])
def test_after_lost_events_every_earlier_answer_may_be_outdated(
    scheduler: SchedulerClient, link: PaperLink, lost: str
) -> None:
    publish(scheduler, 0, BlockStored([KEY], 16, MEDIUM_CPU, 0))
    before = scheduler.stored.count
    assert scheduler.stored.forgotten <= before
    if lost == "a message":
        publish(scheduler, 2, BlockStored([OTHER], 16, MEDIUM_CPU, 0))
    elif lost == "garbage":
        publish(scheduler, 1, payload=b"\xc1")
    else:
        scheduler.on_lifeline_end(0.2, True)
    assert scheduler.stored.forgotten > before


def test_few_keys_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_client, "MAX_STORED_KEYS", 10)
    stored = StoredKeys()
    stored.add(bytes([number]) for number in range(25))
    assert [number for number in range(25) if stored.was_stored(bytes([number]), 0)] == list(range(15, 25))
    assert (stored.count, stored.forgotten) == (25, 15)
    stored.add([bytes([15])])
    assert stored.was_stored(bytes([15]), 25), "stored again, it is the newest"
    assert stored.since(24)[:2] == [bytes([15]), bytes([24])], "the newest first"
    assert stored.since(26) == []


def test_another_thread_may_add_keys_while_they_are_read() -> None:
    stored, threads = StoredKeys(), list[Thread]()
    stored.add([KEY])

    def add_one(*_: object) -> None:
        threads.append(Thread(target=stored.add, args=([len(threads).to_bytes(32, "big")],)))
        threads[-1].start()
        threads[-1].join(0.01)  # it may have to wait until they are read

    sys.setprofile(add_one)  # at each call that reads them, and each return
    try:
        found = stored.since(0)
    finally:
        sys.setprofile(None)
    for thread in threads:
        thread.join()
    assert len(threads) > 1
    assert found[-1] == KEY
