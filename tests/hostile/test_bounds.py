"""Small requests for much: plans, pins, and what their end costs."""

from __future__ import annotations

from pathlib import Path

from kvoffd_client import SharedMemory
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.wire import MAX_PAGES
from tests.hostile.target import Target
from tests.support.wire import NAMESPACE, WireClient, ids, keys, refusal_of

PAGE = 8192
BLOCKS = 64


def hold(client: WireClient, memory: SharedMemory, pages: int, fingerprint: bytes) -> bytes:
    """Register memory whose blocks have so many pages of one byte."""
    client.open_namespace(fingerprint)
    segment = client.next_id()
    client.attach(memory.fd, segment)
    name = fingerprint[:16]
    client.ask(
        m.Register(
            client.next_id(), client.token, fingerprint, name, 0, 1,
            [MemfdHandle(segment, memory.size_bytes)], [TensorLayout(0, 0, PAGE, BLOCKS)], [[PageRef(0, 1)] * pages],
        ),
        m.Registered,
    )  # fmt: skip
    return name


def test_many_pages_times_many_blocks(target: Target) -> None:
    """A job of a few kilobytes that asks for millions of copies."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as client, SharedMemory(BLOCKS * PAGE) as memory:
            name = hold(client, memory, MAX_PAGES, b"\7" * 32)
            one = m.GroupTransfer(0, keys(1), ids(1))
            assert client.result(m.Submit(client.next_id(), client.token, name, [m.Store(1, [one])])).ok
            many = m.GroupTransfer(0, keys(*range(BLOCKS)), ids(*range(BLOCKS)))
            for number in range(20):
                refusal = client.refused(m.Submit(client.next_id(), client.token, name, [m.Store(number, [many])]))
                assert refusal.code is ErrorCode.TOO_MANY
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace(b"\7" * 32)
                lookup = m.Lookup(1, scheduler.token, b"\7" * 32, 2**40, [m.GroupKeys(0, keys(1))])
                assert scheduler.ask(lookup, m.LookupReply).pinned == 1
                again = m.GroupTransfer(0, keys(*[1] * 500), ids(*range(BLOCKS)))
                refusal = client.refused(
                    m.Submit(client.next_id(), client.token, name, [], [m.Load(5, 2**40, [again])])
                )
                assert refusal.code is ErrorCode.TOO_MANY

    target.attack(attack)


def test_jobs_that_each_may_be_and_together_may_not(target: Target) -> None:
    """Plans stay within what a session may have in flight, however many jobs it sends without waiting."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as client, SharedMemory(BLOCKS * PAGE) as memory:
            name = hold(client, memory, MAX_PAGES, b"\6" * 32)
            for number in range(64):
                one = m.GroupTransfer(0, keys(number), ids(1))
                client.send(m.Submit(1000 + number, client.token, name, [m.Store(number, [one])]))
            client.send(m.Health(9999, client.token))
            while (reply := client.reply()).request_id != 9999:
                assert refusal_of(reply).code is ErrorCode.TOO_MANY

    target.attack(attack)


def test_one_block_in_very_many_leases(target: Target) -> None:
    """65,536 times in each of as many leases as there may be; then the session ends with all of them."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as worker, SharedMemory(BLOCKS * PAGE) as memory:
            worker.open_namespace()
            name = worker.register(memory, PAGE)
            part = m.GroupTransfer(0, keys(1), ids(1))
            assert worker.result(m.Submit(worker.next_id(), worker.token, name, [m.Store(1, [part])])).ok
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace()
                pinned = 0
                for number in range(40):
                    asked = [m.GroupKeys(0, keys(1) * 65_536)]
                    lookup = m.Lookup(number, scheduler.token, NAMESPACE, 2**40 + number, asked)
                    reply = scheduler.raw(codec.encode(lookup))
                    assert isinstance(reply, m.LookupReply)
                    pinned += reply.pinned
                assert pinned == 2**20

    target.attack(attack)


def test_the_whole_pool_under_leases(target: Target) -> None:
    """Others store and load meanwhile: nobody may lease all there is."""

    def attack(directory: Path) -> None:
        count = (16 << 20) // PAGE
        with WireClient(directory) as worker, SharedMemory(count * PAGE) as memory:
            worker.open_namespace()
            name = worker.register(memory, PAGE)
            for begin in range(0, count, 64):
                numbers = range(begin, begin + 64)
                part = m.GroupTransfer(0, keys(*numbers), ids(*numbers))
                worker.result(m.Submit(worker.next_id(), worker.token, name, [m.Store(begin, [part])]))
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace()
                for number in range(50):
                    asked = [m.GroupKeys(0, keys(*range(count)))]
                    lookup = m.Lookup(number + 1, scheduler.token, NAMESPACE, 2**40 + number, asked)
                    reply = scheduler.ask(lookup, m.LookupReply)
                    assert reply.pinned < count

    target.attack(attack)
