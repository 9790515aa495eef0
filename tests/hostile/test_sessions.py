"""Attacks by sessions that are let in: with memory, with floods, on what belongs to others, by the lifeline."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryFile

import pytest
import zmq

from kvoffd.server.session import WHOLE_EVERY_S
from kvoffd.server.submission import MAX_UNACKNOWLEDGED_BYTES
from kvoffd_client import SharedMemory
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from tests.hostile import peers
from tests.hostile.target import Target
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, key, keys, refusal_of
from tests.kit.waiting import wait_until

PAGE = 16384
BLOCKS = 8
VICTIM_KEYS = [key(1000 + number) for number in range(BLOCKS)]
ADD_SEALS, SHRINK = 1033, 0x0002  # fcntl(2)
KEEP_SIZE, PUNCH_HOLE = 1, 2  # fallocate(2)


@pytest.fixture(scope="module")
def flags() -> dict[str, str]:
    return {"max_jobs_in_flight": "16", "max_leases": "16", "max_keys_per_request": "4096"}


@pytest.fixture
def hostile(target: Target) -> Iterator[WireClient]:
    """A worker in a namespace of its own."""
    with WireClient(target.directory) as client:
        client.open_namespace()
        yield client


@pytest.fixture
def victim(target: Target) -> Iterator[FakeEngine]:
    """An engine whose blocks the attack is on."""
    with FakeEngine(target.directory, "victim", layers=1, blocks=2 * BLOCKS, page_bytes=PAGE) as engine:
        engine.fill(range(BLOCKS), seed=11)
        assert engine.store(VICTIM_KEYS, range(BLOCKS)).ok
        assert engine.lookup(VICTIM_KEYS) == BLOCKS  # pinned, until it loads
        yield engine
        assert engine.load(VICTIM_KEYS, range(BLOCKS, 2 * BLOCKS)).ok
        assert engine.checksums(range(BLOCKS, 2 * BLOCKS)) == engine.checksums(range(BLOCKS))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(BLOCKS * PAGE, "hostile") as shared:
        yield shared


def memfd(size: int, seal: bool = True) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if seal:
        fcntl.fcntl(fd, ADD_SEALS, SHRINK)
    return fd


def registration(client: WireClient, **changes: object) -> m.Register:
    values = {
        "segments": [MemfdHandle(7, BLOCKS * PAGE)],
        "tensors": [TensorLayout(0, 0, PAGE, BLOCKS)],
        "groups": [[PageRef(0, PAGE)]],
        "rank": 0,
        "blocks_per_key": 1,
        **changes,
    }
    return m.Register(client.next_id(), client.token, NAMESPACE, os.urandom(16), **values)  # type: ignore[arg-type]


def job(client: WireClient, name: bytes, number: int, *wanted: int) -> m.Submit:
    part = m.GroupTransfer(0, keys(*wanted), ids(*(at % BLOCKS for at in range(len(wanted)))))
    return m.Submit(number, client.token, name, [m.Store(number, [part])])


# --- memory ----------------------------------------------------------------------------------------


def test_a_file_shrunk_between_attach_and_register_is_refused(hostile: WireClient) -> None:
    fd = memfd(BLOCKS * PAGE, seal=False)
    hostile.attach(fd, 7)
    os.ftruncate(fd, PAGE)
    assert hostile.refused(registration(hostile)).code is ErrorCode.UNSAFE_SEGMENT
    fcntl.fcntl(fd, ADD_SEALS, SHRINK)
    assert hostile.refused(registration(hostile)).code is ErrorCode.UNSAFE_SEGMENT
    os.close(fd)


def other_descriptors() -> dict[str, Callable[[], int]]:
    def reopened() -> int:
        fd = memfd(BLOCKS * PAGE)
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        finally:
            os.close(fd)

    def file() -> int:
        with TemporaryFile() as made:
            return os.dup(made.fileno())

    def epoll() -> int:
        with select.epoll() as poller:
            return os.dup(poller.fileno())

    return {
        "pipe": lambda: os.pipe()[0],
        "socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach(),
        "directory": lambda: os.open("/", os.O_RDONLY),
        "file": file,
        "path": lambda: os.open("/etc/passwd", os.O_PATH),
        "device": lambda: os.open("/dev/zero", os.O_RDWR),
        "terminal": lambda: os.openpty()[1],
        "epoll": epoll,
        "event": lambda: os.eventfd(0),
        "itself": lambda: os.pidfd_open(os.getpid()),
        "read-only memory": reopened,
    }


def test_a_descriptor_of_another_kind_is_refused(hostile: WireClient) -> None:
    for kind, make in other_descriptors().items():
        fd = make()
        answer = hostile.attach(fd, 7)
        os.close(fd)
        if isinstance(answer, lifeline.AttachRefused):
            assert answer.code is ErrorCode.UNSAFE_SEGMENT, kind
        else:
            assert kind == "read-only memory"
            assert hostile.refused(registration(hostile)).code is ErrorCode.UNSAFE_SEGMENT


def test_memory_larger_than_it_is_is_refused(hostile: WireClient, memory: SharedMemory) -> None:
    hostile.attach(memory.fd, 7)
    for size in (2**63 - 1, 2**47, BLOCKS * PAGE + 1):
        assert hostile.refused(registration(hostile, segments=[MemfdHandle(7, size)])).code is ErrorCode.UNSAFE_SEGMENT


def test_memory_that_is_not_there_is_refused(hostile: WireClient) -> None:
    """A page is charged to whoever touches it first, which a copy from a hole would do."""
    for number, size in enumerate((2**40, BLOCKS * PAGE)):
        fd = memfd(size)
        os.pwrite(fd, bytes(BLOCKS * PAGE - mmap.PAGESIZE), 0)
        hostile.attach(fd, number)
        request = registration(hostile, segments=[MemfdHandle(number, size)])
        assert hostile.refused(request).code is ErrorCode.UNSAFE_SEGMENT
        assert os.fstat(fd).st_blocks * 512 < BLOCKS * PAGE
        os.close(fd)


def test_memory_that_is_given_back_after_it_was_registered_is_seen_before_the_next_jobs(hostile: WireClient) -> None:
    with SharedMemory(BLOCKS * PAGE, "hostile") as memory:
        name = hostile.register(memory)
        assert hostile.result(job(hostile, name, 1, 1)).ok
        hole = ctypes.CDLL(None, use_errno=True).fallocate(memory.fd, KEEP_SIZE | PUNCH_HOLE, 0, mmap.PAGESIZE)
        assert hole == 0
        time.sleep(2 * WHOLE_EVERY_S)
        assert hostile.refused(job(hostile, name, 2, 1)).code is ErrorCode.UNSAFE_SEGMENT
        memory.view[:1] = 1
        assert hostile.result(job(hostile, name, 3, 1)).ok


def test_tensors_that_lie_over_each_other_are_its_own_affair(hostile: WireClient, memory: SharedMemory) -> None:
    hostile.attach(memory.fd, 7)
    layout = TensorLayout(0, 0, PAGE, BLOCKS)
    request = registration(hostile, tensors=[layout] * 64, groups=[[PageRef(number, 256) for number in range(64)]])
    hostile.ask(request)
    assert hostile.result(job(hostile, request.registration_id, 1, 1, 2, 3)).ok


def test_a_registration_of_very_many_pages_does_not_keep_the_daemon_busy(
    hostile: WireClient, memory: SharedMemory
) -> None:
    hostile.attach(memory.fd, 7)
    for _ in range(3):
        reply = hostile.raw(codec.encode(registration(hostile, groups=[[PageRef(0, 1)] * 2_000_000])))
        assert isinstance(reply, m.Error)


def test_memory_that_is_unmapped_and_emptied_under_its_jobs(hostile: WireClient) -> None:
    fd = memfd(BLOCKS * PAGE)
    mapped = mmap.mmap(fd, BLOCKS * PAGE)
    mapped[:] = b"\xaa" * len(mapped)
    hostile.attach(fd, 7)
    request = registration(hostile)
    hostile.ask(request)
    for number in range(1, 16):
        hostile.send(job(hostile, request.registration_id, number, *range(number * 8, number * 8 + 8)))
    hostile.ask(m.Replay, 0)  # they are accepted
    mapped.close()
    # The seal keeps the file's length; its pages can be taken out all the same.
    assert ctypes.CDLL(None).fallocate(fd, KEEP_SIZE | PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(BLOCKS * PAGE)) == 0
    os.close(fd)
    # What is copied from the holes is allocated again, so that the next jobs may find all of it there.
    wait_until(lambda: not hostile.ask(m.Replay, 0).unfinished)


# --- floods ----------------------------------------------------------------------------------------


def test_descriptors_without_register_are_bounded_and_given_back(hostile: WireClient) -> None:
    fd = memfd(PAGE)
    answers = [hostile.attach(fd, number) for number in range(80)]
    os.close(fd)
    assert sum(isinstance(answer, lifeline.Attached) for answer in answers) == 64
    assert all(answer.code is ErrorCode.TOO_MANY for answer in answers if isinstance(answer, lifeline.AttachRefused))


def test_descriptors_without_attach_frames_end_the_session(target: Target) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    frame = lifeline.encode_frame(lifeline.Attach(1))
    for count in (2, 16, 17, 200):
        with WireClient(target.directory) as client:
            with contextlib.suppress(OSError):
                for byte in frame[:-1] * 3:
                    client.send_fds(bytes([byte]), [null] * count)
            assert client.lifeline_ended()
    os.close(null)


def test_a_peer_that_does_not_read_its_lifeline_is_ended_and_piles_no_descriptors_up(target: Target) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    frame, before = lifeline.encode_frame(lifeline.Attach(1)), peers.descriptors_of(target.pid)
    with WireClient(target.directory) as client:
        with contextlib.suppress(OSError):
            for count in [1] * 3000 + [16] * 50:  # answers first, until there is no room for more
                client.send_fds(frame, [null] * count)
                while struct.unpack("i", fcntl.ioctl(client.stream, termios.TIOCOUTQ, bytes(4)))[0]:
                    time.sleep(0.0001)  # the daemon reads
        os.close(null)
        assert peers.descriptors_of(target.pid) < before + 50
        with contextlib.suppress(ConnectionResetError):
            while client.stream.recv(1 << 16):
                pass


def test_leases_are_limited(target: Target) -> None:
    with WireClient(target.directory) as worker, SharedMemory(BLOCKS * PAGE, "x") as memory:
        worker.open_namespace()
        assert worker.result(job(worker, worker.register(memory), 1, 1)).ok
        with WireClient(target.directory, m.Role.SCHEDULER) as scheduler:
            scheduler.open_namespace()
            refused = 0
            for number in range(200):
                request = m.Lookup(
                    number, scheduler.token, NAMESPACE, scheduler.lease(number + 1), [m.GroupKeys(0, keys(1))]
                )
                reply = scheduler.raw(codec.encode(request))
                refused += isinstance(reply, m.Error) and reply.code is ErrorCode.TOO_MANY
            assert refused == 200 - 16


def test_a_scheduler_that_floods_and_never_reads(target: Target) -> None:
    with WireClient(target.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        groups = [m.GroupKeys(0, keys(*range(100)))]
        for number in range(20_000):
            lookup = m.Lookup(number, scheduler.token, NAMESPACE, scheduler.lease(number + 1), groups)
            try:
                scheduler.jobs.send(codec.encode(lookup), zmq.NOBLOCK)
            except zmq.Again:
                break


def test_jobs_beyond_the_limit_are_refused_and_those_within_it_end(hostile: WireClient, memory: SharedMemory) -> None:
    name = hostile.register(memory)
    for number in range(1, 501):
        first = number % 100 * 4  # few enough that the honest engine's blocks stay
        hostile.send(job(hostile, name, number, *range(first, first + 4)))
    hostile.send(m.Replay(10_000, hostile.token, 0))
    refused = 0
    while (reply := hostile.reply()).request_id != 10_000:
        assert refusal_of(reply).code is ErrorCode.TOO_MANY
        refused += 1

    def done() -> int:
        replay = hostile.ask(m.Replay(hostile.next_id() + 20_000, hostile.token, 0))
        return sum(len(batch.results) for batch in replay.batches)

    wait_until(lambda: done() + refused >= 500)
    assert done() + refused == 500


def test_completions_that_are_never_acknowledged_are_bounded(hostile: WireClient) -> None:
    """Each names 4096 keys that it lacks, 128 KiB; nobody ever says that they arrived."""
    with SharedMemory(4096 * PAGE, "hostile") as memory:
        name = hostile.register(memory)
    assert hostile.result(job(hostile, name, 1, 1)).ok
    with WireClient(hostile.paths.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        assert scheduler.ask(m.Lookup, NAMESPACE, scheduler.lease(1), [m.GroupKeys(0, keys(1))]).pinned == 1
        part = m.GroupTransfer(0, keys(*range(5000, 9096)), ids(*range(4096)))
        accepted, request_id = 0, 100
        while accepted < 1000:
            load = m.Submit(request_id, hostile.token, name, [], [m.Load(request_id, scheduler.lease(1), [part])])
            hostile.send(load)
            health = m.Health(request_id + 1, hostile.token)
            hostile.send(health)
            reply = hostile.reply()
            if not isinstance(reply, m.HealthReply):
                assert refusal_of(reply).code is ErrorCode.TOO_MANY
                break
            accepted, request_id = accepted + 1, request_id + 2
        assert accepted <= MAX_UNACKNOWLEDGED_BYTES // (4096 * 32) + 1
        assert accepted >= 8
        hostile.reply()


def test_a_subscriber_of_everything_that_never_reads(hostile: WireClient, memory: SharedMemory) -> None:
    hostile.subscribe(b"")
    hostile.events.setsockopt(zmq.RCVHWM, 1)
    name = hostile.register(memory)
    for round_ in range(100):
        assert hostile.result(job(hostile, name, round_ + 1, *range(round_ * 8, round_ * 8 + 8))).ok
        hostile.ask(m.Heartbeat, 2**62, [])


def test_frames_that_promise_more_than_they_hold(hostile: WireClient) -> None:
    for frame in (
        b"\xdd" + (1_000_000).to_bytes(4, "big") + b"\xc0" * 1_000_000,
        b"\x91" * 1_000_000,
        b"\xdf\xff\xff\xff\xff" + b"\x00" * 1000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x93\xa5stats\x01\xc6\x7f\xff\xff\xff",
    ):
        for _ in range(20):
            reply = hostile.raw(frame)
            assert isinstance(reply, m.Error)
            assert reply.code is ErrorCode.MALFORMED


# --- what belongs to others -------------------------------------------------------------------------


def test_what_belongs_to_another_session_cannot_be_named(
    target: Target, hostile: WireClient, victim: FakeEngine, memory: SharedMemory
) -> None:
    assert victim._lookup is not None
    lease, fingerprint = victim._lookup.lease_id, victim.namespace.fingerprint
    with WireClient(target.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        assert scheduler.ask(m.Release, [lease]).count == 0
        assert scheduler.ask(m.Heartbeat, 0, [lease]).ended == [lease]
        part = m.GroupKeys(0, b"".join(VICTIM_KEYS))
        for request in (
            m.Lookup(3, scheduler.token, fingerprint, scheduler.lease(1), [part]),
            m.Invalidate(4, scheduler.token, fingerprint, [part]),
            m.Reset(5, scheduler.token, fingerprint),
        ):
            assert scheduler.refused(request).code is ErrorCode.UNKNOWN_NAMESPACE
        for extend in (False, True):
            assert scheduler.refused(m.Lookup, NAMESPACE, lease, [part], extend=extend).code is ErrorCode.UNKNOWN_LEASE
        own = scheduler.ask(m.Lookup, NAMESPACE, scheduler.lease(2), [part])
        assert own.pinned == 0
        name = hostile.register(memory)
        blocks = m.GroupTransfer(0, b"".join(VICTIM_KEYS), ids(*range(BLOCKS)))
        assert hostile.refused(m.Submit, name, [], [m.Load(8, lease, [blocks])]).code is ErrorCode.UNKNOWN_LEASE
        assert not any(memory.view)
        cancel = hostile.ask(m.Cancel, list(range(100)))
        assert (cancel.cancelled, cancel.running) == ([], [])
        for session in range(1, hostile.session_id):
            foreign = [(session << 32) + number for number in range(1, 20)]
            assert scheduler.ask(m.Release, foreign).count == 0


def test_a_registration_of_another_session_is_unknown(hostile: WireClient, memory: SharedMemory) -> None:
    name = hostile.register(memory)
    with WireClient(hostile.paths.directory) as other:
        other.open_namespace()
        assert other.refused(job(other, name, 1, 1)).code is ErrorCode.UNKNOWN_REGISTRATION
        assert other.refused(m.Unregister, name).code is ErrorCode.UNKNOWN_REGISTRATION
        assert other.refused(registration(other)).code is ErrorCode.UNKNOWN_SEGMENT


def test_tokens_cannot_be_guessed_from_ones_own(hostile: WireClient) -> None:
    for bit in range(128):
        near = (int.from_bytes(hostile.token, "big") ^ 1 << bit).to_bytes(16, "big")
        assert hostile.refused(m.Health(1, near)).code is ErrorCode.BAD_TOKEN


def test_a_pool_that_is_written_full_evicts_but_never_what_is_pinned(
    hostile: WireClient, victim: FakeEngine, memory: SharedMemory
) -> None:
    """Eviction is shared; a pin is not to be broken, however much comes."""
    name = hostile.register(memory)
    for round_ in range(200):  # 25 MiB into 16
        assert hostile.result(job(hostile, name, round_ + 1, *range(round_ * 8, round_ * 8 + 8))).ok
        hostile.ask(m.Heartbeat, 2**62, [])


# --- the lifeline -----------------------------------------------------------------------------------


def test_a_frame_that_comes_byte_by_byte_is_a_frame(hostile: WireClient, memory: SharedMemory) -> None:
    frame = lifeline.encode_frame(lifeline.Attach(7))
    hostile.send_fds(frame[:1], [memory.fd])
    for byte in frame[1:]:
        hostile.send_fds(bytes([byte]), [])
    assert hostile.lifeline_frame() == lifeline.Attached(7)
    hostile.ask(registration(hostile))


def test_a_lifeline_left_in_the_middle_of_a_frame(target: Target) -> None:
    frame = lifeline.encode_frame(lifeline.Attach(7))
    clients = [WireClient(target.directory) for _ in range(len(frame) - 1)]
    for length, client in enumerate(clients, 1):
        client.send_fds(frame[:length], [])
    for client in clients:
        client.close()
