"""Bad input at every door of a running daemon: a clear error, counted, and nothing changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest
import zmq

from kvoffd.config import Config
from kvoffd.server.session import Peer
from kvoffd.server.sessions import RESERVED_SESSIONS, may_connect
from kvoffd_client import SharedMemory
from kvoffd_client.testing import FakeEngine
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle, PageRef, TensorLayout
from kvoffd_proto.messages import PROTOCOL_VERSION
from tests.kit.daemon import DaemonProcess
from tests.kit.struct_wire import NAMESPACE, WireClient, ids, keys, load_of, stats, store_of
from tests.kit.waiting import wait_until

PAGE = 16384


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """What is refused changes nothing, so that all tests may use one daemon."""
    return shared_daemon


@pytest.fixture
def memory():
    with SharedMemory(8 * PAGE, "test") as shared:
        yield shared


def count_of(daemon: DaemonProcess, code: ErrorCode) -> int:
    return stats(daemon.directory).errors.get(code.name.lower(), 0)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x00" * 100,
        msgspec.msgpack.encode(["lookup"]),
        msgspec.msgpack.encode(["no such message", 7, b"0" * 16]),
        msgspec.msgpack.encode({"type": "stats"}),
        b"\x91" * 2000,
    ],
)
def test_a_frame_that_is_no_message_gets_an_error(daemon, worker, frame):
    before = count_of(daemon, ErrorCode.MALFORMED)
    reply = worker.raw(frame)
    assert isinstance(reply, m.Error)
    assert reply.code is ErrorCode.MALFORMED
    assert count_of(daemon, ErrorCode.MALFORMED) == before + 1


def test_the_refusal_of_a_broken_request_names_it(worker):
    reply = worker.raw(msgspec.msgpack.encode(["stats", 4711, "not bytes"]))
    assert (reply.request_id, reply.code) == (4711, ErrorCode.MALFORMED)


def test_a_message_of_several_frames_gets_an_error(worker):
    reply = worker.raw(b"one", b"two", b"three")
    assert isinstance(reply, m.Error)


def test_a_client_that_does_not_take_its_replies_is_not_read(daemon, worker):
    # It can send no more at some time, and all that was sent is answered when it reads.
    sent = 0
    before = count_of(daemon, ErrorCode.MALFORMED)
    while worker.jobs.poll(2000, zmq.POLLOUT):
        worker.jobs.send(b"\xc1", zmq.NOBLOCK)
        sent += 1
    received = 0
    while received < sent:
        assert worker.jobs.poll(10_000)
        assert isinstance(codec.decode_reply(worker.jobs.recv()), m.Error)
        received += 1
    assert count_of(daemon, ErrorCode.MALFORMED) - before == sent


def test_an_oversized_frame_is_refused_and_the_session_goes_on():
    with DaemonProcess(max_frame_size="64KiB") as daemon, WireClient(daemon.directory) as client:
        reply = client.raw(b"\x00" * (65 * 1024))
        assert reply.code is ErrorCode.TOO_LARGE
        client.ask(m.Health)


def test_a_foreign_token_is_refused(daemon, worker):
    before = count_of(daemon, ErrorCode.BAD_TOKEN)
    assert worker.refused(m.Stats(1, os.urandom(16))).code is ErrorCode.BAD_TOKEN
    assert count_of(daemon, ErrorCode.BAD_TOKEN) == before + 1


def test_a_token_dies_with_its_lifeline(daemon, worker):
    with WireClient(daemon.directory) as other:
        token = other.token
        before = count_of(daemon, ErrorCode.BAD_TOKEN)
        other.stream.close()
        for _ in range(1000):
            reply = worker.raw(codec.encode(m.Stats(1, token)))
            if isinstance(reply, m.Error):
                break
        assert reply.code is ErrorCode.BAD_TOKEN
    assert count_of(daemon, ErrorCode.BAD_TOKEN) == before, "what crosses the end of its own lifeline is no error"


def test_nothing_is_answered_before_hello(daemon):
    with WireClient(daemon.directory, role=None) as client:
        assert client.refused(m.Stats).code is ErrorCode.NO_HELLO


def test_another_protocol_version_is_refused_with_both_numbers(daemon):
    with WireClient(daemon.directory, role=None) as client:
        error = client.refused(m.Hello, PROTOCOL_VERSION + 41, m.Role.WORKER, "old", "")
        assert error.code is ErrorCode.BAD_VERSION
        assert str(PROTOCOL_VERSION + 41) in error.message
        assert f"speaks {PROTOCOL_VERSION}" in error.message


def test_hello_may_be_said_twice_but_not_with_another_role(daemon):
    with WireClient(daemon.directory, m.Role.WORKER) as client:
        client.hello(m.Role.WORKER)
        assert client.refused(m.Hello, PROTOCOL_VERSION, m.Role.ADMIN, "test", "").code is ErrorCode.WRONG_ROLE


@pytest.mark.parametrize("role", [m.Role.WORKER, m.Role.SCHEDULER])
def test_engines_may_not_administer(daemon, role):
    with WireClient(daemon.directory, role) as client:
        for request in (m.Clear(1, client.token), m.Sessions(2, client.token), m.Namespaces(3, client.token)):
            assert client.refused(request).code is ErrorCode.WRONG_ROLE


def test_roles_keep_to_their_requests(daemon, worker):
    assert worker.refused(m.Lookup, NAMESPACE, worker.lease(1), []).code is ErrorCode.WRONG_ROLE
    with WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
        assert scheduler.refused(m.Submit, b"r" * 16, [store_of(1, keys(1), ids(0))]).code is ErrorCode.WRONG_ROLE


def test_a_namespace_cannot_be_opened_with_another_geometry(worker):
    assert (
        worker.refused(m.OpenNamespace, NAMESPACE, "test", 2, 32, [m.GroupSpec("full", 16)], "{}").code
        is ErrorCode.NAMESPACE_MISMATCH
    )


@pytest.mark.parametrize("blob", [b"short", keys(1) + b"x"])
def test_keys_of_a_wrong_length_are_refused(daemon, worker, memory, blob):
    with WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        assert (
            scheduler.refused(m.Lookup, NAMESPACE, scheduler.lease(1), [m.GroupKeys(0, blob)]).code
            is ErrorCode.BAD_KEYS
        )
    registration = worker.register(memory)
    assert worker.refused(m.Submit, registration, [store_of(1, blob, ids(0))]).code is ErrorCode.BAD_KEYS


@pytest.mark.parametrize("block_ids", [ids(8), ids(-1), ids(2**31 - 1), ids(0, 1), b"", b"\0\0\0"])
def test_bad_block_ids_are_refused_before_a_byte_moves(daemon, worker, memory, block_ids):
    registration = worker.register(memory)
    before = stats(daemon.directory)
    assert worker.refused(m.Submit, registration, [store_of(1, keys(1), block_ids)]).code is ErrorCode.BAD_BLOCK_IDS
    after = stats(daemon.directory)
    assert (after.store.jobs, after.pool.free_bytes) == (before.store.jobs, after.pool.pool_bytes)


def test_one_bad_group_refuses_the_whole_job(daemon, worker, memory):
    registration = worker.register(memory)
    good, bad = m.GroupTransfer(0, keys(1), ids(0)), m.GroupTransfer(1, keys(2), ids(0))
    assert worker.refused(m.Submit, registration, [m.Store(1, [good, bad])]).code is ErrorCode.BAD_GEOMETRY
    assert worker.refused(m.Submit, registration, [m.Store(1, [good, good])]).code is ErrorCode.BAD_KEYS
    assert stats(daemon.directory).pool.writing_bytes == 0


def test_a_key_twice_in_one_store_is_refused(worker, memory):
    registration = worker.register(memory)
    assert worker.refused(m.Submit, registration, [store_of(1, keys(1, 1), ids(0, 1))]).code is ErrorCode.BAD_KEYS


@pytest.mark.parametrize("origins", [(keys(7),), (keys(7, 8, 9),), (b"", bytes(4)), (keys(7, 8), bytes(3))])
def test_parents_and_tokens_that_do_not_fit_the_keys_are_refused(worker, memory, origins):
    registration = worker.register(memory)
    part = m.GroupTransfer(0, keys(1, 2), ids(0, 1), 0, *origins)
    assert worker.refused(m.Submit, registration, [m.Store(1, [part])]).code is ErrorCode.BAD_KEYS


def test_a_load_under_an_unknown_lease_is_refused(worker, memory):
    registration = worker.register(memory)
    assert (
        worker.refused(m.Submit, registration, [], [load_of(1, 2**40, keys(1), ids(0))]).code is ErrorCode.UNKNOWN_LEASE
    )


def register_request(worker: WireClient, **changes: object) -> m.Register:
    memory, tensors, groups = [MemfdHandle(7, 8 * PAGE)], [TensorLayout(0, 0, PAGE, 8)], [[PageRef(0, PAGE)]]
    request = worker.request(m.Register, NAMESPACE, os.urandom(16), 0, 1, memory, tensors, groups)
    return msgspec.structs.replace(request, **changes)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"segments": [MemfdHandle(99, 8 * PAGE)]}, ErrorCode.UNKNOWN_SEGMENT),
        ({"segments": [MemfdHandle(7, PAGE), MemfdHandle(7, PAGE)]}, ErrorCode.BAD_GEOMETRY),
        ({"tensors": [TensorLayout(0, 0, PAGE, 9)]}, ErrorCode.OUT_OF_BOUNDS),
        ({"tensors": [TensorLayout(0, 1, PAGE, 8)]}, ErrorCode.OUT_OF_BOUNDS),
        ({"tensors": [TensorLayout(0, 0, 2**62, 3)]}, ErrorCode.OUT_OF_BOUNDS),
        ({"tensors": [TensorLayout(1, 0, PAGE, 8)]}, ErrorCode.OUT_OF_BOUNDS),
        ({"groups": [[PageRef(1, PAGE)]]}, ErrorCode.OUT_OF_BOUNDS),
        ({"groups": [[PageRef(0, PAGE)], [PageRef(0, PAGE)]]}, ErrorCode.BAD_GEOMETRY),
        ({"groups": [[]]}, ErrorCode.BAD_GEOMETRY),
        ({"rank": 1}, ErrorCode.BAD_GEOMETRY),
        ({"namespace": b"?" * 32}, ErrorCode.UNKNOWN_NAMESPACE),
    ],
)
def test_a_registration_that_does_not_fit_is_refused_and_the_next_one_works(worker, memory, changes, code):
    worker.attach(memory.fd, 7)
    assert worker.refused(register_request(worker, **changes)).code is code
    worker.ask(register_request(worker))


def test_memory_that_can_shrink_is_refused(worker):
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 8 * PAGE)
        worker.attach(fd, 7)
    finally:
        os.close(fd)
    assert worker.refused(register_request(worker)).code is ErrorCode.UNSAFE_SEGMENT


def test_gpu_handles_are_refused_with_a_sentence(worker):
    from kvoffd_proto.handles import CudaIpcHandle

    refusal = worker.refused(register_request(worker, segments=[CudaIpcHandle(bytes(64), PAGE, bytes(16))]))
    assert refusal.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00\xc1", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_garbage_on_the_lifeline_ends_that_session_only(daemon, worker, data):
    with WireClient(daemon.directory) as other:
        other.send_fds(data, [])
        assert other.lifeline_ended()
    worker.ask(m.Health)


def test_an_attach_without_a_descriptor_ends_the_session(daemon):
    with WireClient(daemon.directory) as client:
        client.send_fds(lifeline.encode_frame(lifeline.Attach(1)), [])
        assert client.lifeline_ended()


def test_a_segment_id_can_be_attached_once(worker, memory):
    assert isinstance(worker.attach(memory.fd, 3), lifeline.Attached)
    refused = worker.attach(memory.fd, 3)
    assert isinstance(refused, lifeline.AttachRefused)
    assert refused.code is ErrorCode.MALFORMED


def test_the_number_of_sessions_is_limited_but_for_administrators():
    with DaemonProcess(max_sessions="2") as daemon, WireClient(daemon.directory), WireClient(daemon.directory):
        with WireClient(daemon.directory, role=None) as third:
            assert third.refused(m.Hello, PROTOCOL_VERSION, m.Role.WORKER, "third", "").code is ErrorCode.TOO_MANY
            third.hello(m.Role.ADMIN)
        reserve = [WireClient(daemon.directory, role=None) for _ in range(RESERVED_SESSIONS + 1)]
        refused = reserve[-1].greeting
        assert isinstance(refused, lifeline.Refused)
        assert refused.code is ErrorCode.TOO_MANY
        for client in reserve:
            client.close()

        def free_again() -> bool:
            with WireClient(daemon.directory, role=None) as client:
                return not isinstance(client.greeting, lifeline.Refused)

        wait_until(free_again)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_who_is_not_allowed_is_refused():
    with DaemonProcess(allowed_uids="4242", allowed_gids="4242") as daemon:
        let_everybody_in(daemon)
        assert cleared(daemon, 4242) == "0"
        refusal = cleared(daemon, 4343)
        assert "User 4343 (group 4343) may not use this kvoffd" in refusal
        assert "allowed_uids" in refusal


def test_root_and_the_daemons_own_user_are_never_locked_out():
    """They could read the daemon's memory anyway; without them nobody could ask it what is wrong."""
    with DaemonProcess(allowed_uids="4242", allowed_gids="4242") as daemon:
        with WireClient(daemon.directory, m.Role.ADMIN) as client:
            assert client.greeting.session_id


def test_the_daemons_own_user_that_is_not_root_is_never_locked_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 997)
    config = Config(allowed_uids=(2000,), allowed_gids=(4242,))
    assert [may_connect(Peer(1, uid, 4343), config) for uid in (0, 997, 2000, 2001)] == [True, True, True, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_users_that_are_not_named_may_not_administer():
    """Nor can an engine's user, who could clear what others stored."""
    with DaemonProcess(allowed_uids="4242,4343", admin_uids="4343") as daemon:
        let_everybody_in(daemon)
        assert cleared(daemon, 4343) == "0"
        refusal = cleared(daemon, 4242)
        assert "User 4242 may not administer" in refusal
        assert "admin_uids" in refusal


CLEAR = """
import os, sys
from kvoffd_client import AdminClient
from kvoffd_client import KvoffdClientError
directory, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
with AdminClient(directory) as admin:
    try:
        print(admin.clear())
    except KvoffdClientError as error:
        print(error)
"""


def let_everybody_in(daemon: DaemonProcess) -> None:
    """As far as the file system is concerned."""
    for path in (daemon.directory, *daemon.directory.glob("*.sock")):
        path.chmod(0o777)


def cleared(daemon: DaemonProcess, uid: int) -> str:
    """What a user's attempt to clear the cache came to."""
    command = [sys.executable, "-c", CLEAR, str(daemon.directory), str(uid)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


PEEP = """
import os, sys
import zmq
from kvoffd_proto import codec, messages
directory, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
with zmq.Context() as context, context.socket(zmq.SUB) as tail, context.socket(zmq.DEALER) as jobs:
    for peeping in (tail, jobs):
        peeping.setsockopt(zmq.LINGER, 0)
    tail.setsockopt(zmq.SUBSCRIBE, b"")
    tail.connect(f"ipc://{directory}/events.sock")
    jobs.connect(f"ipc://{directory}/jobs.sock")
    jobs.send_multipart([b"", bytes(8)])  # a replay of all events, which takes no session
    jobs.send(codec.encode(messages.Stats(1, bytes(16))))
    print("ready", flush=True)
    sys.stdin.readline()
    print(bool(tail.poll(500)), bool(jobs.poll(500)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("uid", [4242, 4343])
def test_every_socket_asks_the_kernel_who_is_there(uid: int):
    """Where the file system lets somebody through: his completions and events are for allowed users too."""
    with DaemonProcess(allowed_uids="0,4242") as daemon:
        let_everybody_in(daemon)
        command = [sys.executable, "-c", PEEP, str(daemon.directory), str(uid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peeping:
            assert peeping.stdout.readline() == "ready\n"
            with FakeEngine(daemon.directory, layers=1, blocks=2) as engine:
                assert engine.lookup([b"k" * 32]) == 0
                for number in range(20):  # a subscription takes a while to arrive
                    assert engine.store([bytes([number]) * 32], [0]).ok
                    time.sleep(0.05)
            out, _ = peeping.communicate("\n", timeout=30)
        assert out.split() == [str(uid == 4242)] * 2


def test_the_limit_of_keys_in_a_request_is_kept():
    with DaemonProcess(max_keys_per_request="4") as daemon, WireClient(daemon.directory, m.Role.SCHEDULER) as scheduler:
        scheduler.open_namespace()
        part = m.GroupKeys(0, keys(1, 2, 3, 4, 5))
        assert scheduler.refused(m.Lookup, NAMESPACE, scheduler.lease(1), [part]).code is ErrorCode.TOO_MANY


def test_every_limit_is_told_in_welcome():
    flags = {
        "max_frame_size": "64KiB",
        "max_keys_per_request": "4",
        "max_jobs_per_message": "3",
        "max_keys_per_job": "7",
        "max_pieces_per_job": "80",
        "max_pieces_in_flight": "90",
        "max_jobs_in_flight": "2",
        "max_leases": "3",
        "max_leased_keys": "100",
        "max_registrations": "5",
        "max_segments": "6",
    }
    with DaemonProcess(**flags) as daemon, WireClient(daemon.directory) as client:
        assert client.hello(m.Role.WORKER).limits == m.Limits(65536, 4, 3, 7, 80, 90, 2, 3, 100, 5, 6)
