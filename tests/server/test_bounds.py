"""What a client may ask for is bounded before anything is done for it, against a real daemon."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from kvoffd.server.report import DESCRIPTIONS_BYTES
from kvoffd_client import SharedMemory
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.wire import MAX_GROUPS
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys, load_of, stats, store_of

PAGE = 8192
BLOCKS = 64
POOL = 4 << 20


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    bounds = {"max_leased_keys": "1000", "max_pieces_in_flight": "400", "max_pieces_per_job": "200"}
    with DaemonProcess("4MiB", eviction_policy="lru", **bounds) as running:
        yield running


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(BLOCKS * PAGE, "bounds") as shared:
        yield shared


def store(client: WireClient, name: bytes, *numbers: int) -> m.JobResult:
    return client.store(name, client.next_id(), keys(*numbers), ids(*(number % BLOCKS for number in numbers)))


def lookup(client: WireClient, lease: int, *numbers: int, extend: bool = False) -> m.LookupReply:
    asked = [m.GroupKeys(0, keys(*numbers))]
    return client.ask(m.Lookup, NAMESPACE, lease, asked, extend=extend)


def test_a_small_request_for_a_large_plan_is_refused_before_it_is_planned(
    daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    """A few keys, whose blocks have a hundred pages of one byte each."""
    worker.attach(memory.fd, 7)
    pages = [[PageRef(0, 1)] * 100]
    name = bytes(16)
    worker.open_namespace(b"\1" * 32)
    tensors = [TensorLayout(0, 0, PAGE, BLOCKS)]
    worker.ask(m.Register, b"\1" * 32, name, 0, 1, [MemfdHandle(7, memory.size_bytes)], tensors, pages)
    refusal = worker.refused(m.Submit, name, [store_of(1, keys(1, 2, 3), ids(1, 2, 3))])
    assert refusal.code is ErrorCode.TOO_MANY
    assert "300 pieces" in refusal.message
    twice = load_of(1, 2**40, keys(1, 1), ids(1, 2))
    assert worker.refused(m.Submit, name, [], [twice]).code is ErrorCode.BAD_KEYS
    twice = load_of(1, 2**40, keys(1, 2), ids(1, 1))
    assert worker.refused(m.Submit, name, [], [twice]).code is ErrorCode.BAD_BLOCK_IDS


def test_a_block_that_is_named_often_counts_as_often(
    daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    assert store(worker, worker.register(memory, PAGE), 1).ok
    with (
        WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler,
        WireClient(daemon.directory, m.Role.ADMIN) as admin,
    ):
        scheduler.open_namespace()
        assert lookup(scheduler, 2**50, *[1] * 400).pinned == 400
        assert lookup(scheduler, 2**50 + 1, *[1] * 900).pinned == 600, "as many keys as a session may lease"
        assert lookup(scheduler, 2**50 + 2, 1).pinned == 0
        report = admin.ask(m.Stats)
        assert (report.pinned_blocks, report.shortened_lookups) == (1, 2)
        scheduler.ask(m.Release, [2**50])
        assert lookup(scheduler, 2**50 + 3, 1).pinned == 1


def test_leases_leave_room_for_others_and_are_shared_when_others_come(
    daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    """Whoever is alone may lease seven eighths of the pool; when another comes each has its half of that."""
    name = worker.register(memory, PAGE)
    slots = POOL // PAGE
    for begin in range(0, slots, 32):
        assert store(worker, name, *range(1000 + begin, 1032 + begin)).ok
    everything = range(1000, 1000 + slots)
    with (
        WireClient(daemon.directory, m.Role.SCHEDULER) as greedy,
        WireClient(daemon.directory, m.Role.SCHEDULER) as other,
    ):
        greedy.open_namespace()
        other.open_namespace()
        first = lookup(greedy, 2**50, *everything)
        assert first.pinned == slots * 7 // 8
        assert first.states == [b"\2" * first.pinned + b"\0" * (slots - first.pinned)]
        assert lookup(greedy, 2**50 + 1, *everything[-20:]).pinned == 0
        assert lookup(greedy, 2**50 + 2, *everything[:20]).pinned == 20, "they are pinned already"
        assert lookup(other, 2**50 + 3, *everything[-40:]).pinned == 40
        assert store(worker, name, *range(5000, 5024)).ok
        renewed = greedy.ask(m.Heartbeat, 0, [2**50])
        assert renewed.ended == [2**50], "it has more than its share now"
        renewed = other.ask(m.Heartbeat, 0, [2**50 + 3])
        assert not renewed.ended
    deadline = time.monotonic() + 10
    while stats(daemon.directory).pinned_blocks and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stats(daemon.directory).pinned_blocks


def test_a_prefix_that_many_leases_share_counts_once(
    daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    name = worker.register(memory, PAGE)
    shared = range(1000, 1000 + POOL // PAGE // 2)
    for begin in range(0, len(shared), 32):
        assert store(worker, name, *shared[begin : begin + 32]).ok
    with WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        for number in range(3):
            assert lookup(scheduler, 2**50 + number, *shared).pinned == len(shared)


def test_a_lease_is_extended_by_keys_of_another_request(
    daemon: DaemonProcess, worker: WireClient, memory: SharedMemory
) -> None:
    name = worker.register(memory, PAGE)
    assert store(worker, name, 1, 2, 3).ok
    with WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        assert lookup(scheduler, 2**50, 1).pinned == 1
        assert lookup(scheduler, 2**50, 2, 3, 4, extend=True).states == [b"\2\2\0"]
        assert worker.load(name, 9, 2**50, keys(1, 2, 3), ids(4, 5, 6)).ok
        assert stats(daemon.directory).leases == 0


def test_a_large_frame_of_small_objects_is_refused_before_it_is_decoded(worker: WireClient) -> None:
    """A million pages of a registration would keep the loop for a tenth of a second, and the frame is all they cost."""
    pages = [PageRef(0, PAGE)] * 65_536
    refused = worker.refused(m.Register, NAMESPACE, b"x" * 16, 0, 1, [MemfdHandle(1, PAGE)], [], [pages] * 16)
    assert refused.code is ErrorCode.TOO_LARGE
    assert "2097152 are allowed" in refused.message
    many = [m.GroupTransfer(0, b"", b"")] * (MAX_GROUPS + 1)
    assert worker.refused(m.Submit, b"x" * 16, [m.Store(1, many)]).code is ErrorCode.MALFORMED


def test_a_listing_has_descriptions_of_a_mebibyte(daemon: DaemonProcess) -> None:
    with contextlib.ExitStack() as opened:
        admin = opened.enter_context(WireClient(daemon.directory, m.Role.ADMIN))
        for session in range(2):
            client = opened.enter_context(WireClient(daemon.directory, m.Role.SCHEDULER))
            for number in range(16):
                name, groups = bytes([session, number]) * 16, [m.GroupSpec("full_attention", 16)]
                request = m.OpenNamespace(number, client.token, name, "big", 1, 32, groups, "x" * 60_000)
                client.ask(request)
        listed = admin.ask(m.Namespaces).namespaces
        assert sum(len(one.description) for one in listed) <= DESCRIPTIONS_BYTES
        assert {len(one.description) for one in listed if one.label == "big"} == {0, 60_000}
