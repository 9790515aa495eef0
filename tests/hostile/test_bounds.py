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
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys, load_of, refusal_of, store_of

PAGE = 8192
BLOCKS = 64


def hold(client: WireClient, memory: SharedMemory, pages: int, fingerprint: bytes) -> bytes:
    """Register memory whose blocks have so many pages of one byte."""
    client.open_namespace(fingerprint)
    segment = client.next_id()
    client.attach(memory.fd, segment)
    name = fingerprint[:16]
    handles, tensors = [MemfdHandle(segment, memory.size_bytes)], [TensorLayout(0, 0, PAGE, BLOCKS)]
    client.ask(m.Register, fingerprint, name, 0, 1, handles, tensors, [[PageRef(0, 1)] * pages])
    return name


def test_many_pages_times_many_blocks(target: Target) -> None:
    """A job of a few kilobytes that asks for millions of copies."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as client, SharedMemory(BLOCKS * PAGE) as memory:
            name = hold(client, memory, MAX_PAGES, b"\7" * 32)
            assert client.store(name, 1, keys(1), ids(1)).ok
            for number in range(20):
                many = store_of(number, keys(*range(BLOCKS)), ids(*range(BLOCKS)))
                refusal = client.refused(m.Submit, name, [many])
                assert refusal.code is ErrorCode.TOO_MANY
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace(b"\7" * 32)
                assert scheduler.ask(m.Lookup, b"\7" * 32, 2**40, [m.GroupKeys(0, keys(1))]).pinned == 1
                again = load_of(5, 2**40, keys(*[1] * 500), ids(*range(BLOCKS)))
                refusal = client.refused(m.Submit, name, [], [again])
                assert refusal.code is ErrorCode.TOO_MANY

    target.attack(attack)


def test_jobs_that_each_may_be_and_together_may_not(target: Target) -> None:
    """Plans stay within what a session may have in flight, however many jobs it sends without waiting."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as client, SharedMemory(BLOCKS * PAGE) as memory:
            name = hold(client, memory, MAX_PAGES, b"\6" * 32)
            for number in range(64):
                client.send(m.Submit, name, [store_of(number, keys(number), ids(1))])
            last = client.send(m.Health)
            while (reply := client.reply()).request_id != last.request_id:
                assert refusal_of(reply).code is ErrorCode.TOO_MANY

    target.attack(attack)


def test_one_block_in_very_many_leases(target: Target) -> None:
    """65,536 times in each of as many leases as there may be; then the session ends with all of them."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as worker, SharedMemory(BLOCKS * PAGE) as memory:
            worker.open_namespace()
            name = worker.register(memory, PAGE)
            assert worker.store(name, 1, keys(1), ids(1)).ok
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
                worker.store(name, begin, keys(*numbers), ids(*numbers))
            with WireClient(directory, m.Role.SCHEDULER) as scheduler:
                scheduler.open_namespace()
                for number in range(50):
                    asked = [m.GroupKeys(0, keys(*range(count)))]
                    lookup = m.Lookup(number + 1, scheduler.token, NAMESPACE, 2**40 + number, asked)
                    reply = scheduler.ask(lookup)
                    assert reply.pinned < count

    target.attack(attack)
