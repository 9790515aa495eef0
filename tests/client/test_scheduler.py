"""Lookups, leases and events on real sockets."""

from __future__ import annotations

import pytest

from kvoffd_client import NamespaceSpec, SchedulerClient, scheduler_client
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, EventBatch, KvEvent, kv_topic
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import wait_until

SPEC = NamespaceSpec.named("client-tests")
KEYS = [m.GroupKeys(0, bytes(96))]


def removed(number: int) -> BlockRemoved:
    return BlockRemoved([bytes([number])], "CPU", 0)


def test_keys_of_a_wrong_length_are_an_error_of_the_caller(scheduler: SchedulerClient) -> None:
    with pytest.raises(ValueError, match="whole number"):
        scheduler.lookup([m.GroupKeys(0, bytes(33))])


def test_invalidate_and_reset_reach_the_daemon(fake: FakeDaemon, scheduler: SchedulerClient) -> None:
    scheduler.invalidate(KEYS)
    assert scheduler.reset(5)
    assert [request.groups for request in fake.seen(m.Invalidate)] == [KEYS]
    assert len(fake.seen(m.Reset)) == 1
    fake.stop()
    wait_until(lambda: not scheduler.ready)
    assert not scheduler.reset(0.1)


def taken(scheduler: SchedulerClient, count: int) -> list[KvEvent]:
    """Events, once so many have come."""
    got: list[KvEvent] = []
    wait_until(lambda: (got.extend(scheduler.take_events()), len(got) >= count)[1])
    return got


def test_lost_events_are_counted_and_nothing_is_known_then(fake: FakeDaemon, scheduler: SchedulerClient) -> None:
    for number in range(4):
        fake.kv_event(SPEC.fingerprint, [removed(number)], publish=number % 3 == 0)
    wait_until(lambda: scheduler.events_lost == 2)
    assert taken(scheduler, 2)[-2:] == [AllBlocksCleared(), removed(3)]


def test_events_that_nobody_takes_or_that_do_not_decode_are_counted(
    scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_client, "MAX_BUFFERED_EVENTS", 3)
    messages = [encode(EventBatch(0.0, [removed(number)])) for number in range(4)]

    def publish(number: int, message: bytes) -> None:
        scheduler.on_publication(kv_topic(SPEC.fingerprint), number.to_bytes(8, "big"), message, 0.0)

    for number, message in enumerate(messages):
        publish(number, message)
    assert (scheduler.take_events(), scheduler.events_lost) == ([AllBlocksCleared(), removed(3)], 4)
    publish(4, b"\xc1")
    publish(5, messages[1])
    assert (scheduler.take_events(), scheduler.events_lost) == ([AllBlocksCleared(), removed(1)], 5)
