"""The client on real sockets against a daemon that misbehaves."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import socket
import threading
import time
import warnings
from unittest.mock import Mock

import pytest
import zmq

from kvoffd_client import (
    AdminClient,
    ClientOptions,
    DaemonUnavailable,
    ForkedProcess,
    NamespaceSpec,
    Registration,
    SchedulerClient,
    WorkerClient,
    scheduler_client,
)
from kvoffd_client.transport import BUSY_WAIT_S, CLOSE_S, LONG_YIELD_S, SocketTransport
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import AllBlocksCleared, BlockRemoved, EventBatch, KvEvent, kv_topic
from kvoffd_proto.lifeline import MemoryReleased, encode_frame
from kvoffd_proto.messages import GroupTransfer
from tests.kit.daemon import DaemonProcess
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.open_files import open_files
from tests.kit.waiting import wait_until
from tests.kit.wire import Eavesdropper

SPEC = NamespaceSpec.named("client-tests")
QUICK = ClientOptions(request_timeout_s=0.3, unresponsive_after_s=0.5, backoff_max_s=0.1)
KEYS = [m.GroupKeys(0, bytes(64))]
TRANSFER = [GroupTransfer(0, bytes(32), bytes(4))]


def test_without_a_daemon_everything_is_a_miss_until_one_comes(registration: Registration) -> None:
    fake = FakeDaemon()
    with (
        SchedulerClient(fake.directory, SPEC, options=QUICK) as scheduler,
        WorkerClient(fake.directory, SPEC, registration, options=QUICK) as worker,
    ):
        assert not scheduler.wait_ready(0.05)
        assert str(fake.directory) in (scheduler.problem or "")
        assert scheduler.lookup(KEYS).failed
        worker.store(1, TRANSFER)
        assert [result.error for result in worker.take_results()] == [ErrorCode.SESSION_ENDED]
        assert scheduler.credit_bytes == 0
        with fake:
            assert scheduler.wait_ready(5)
            assert worker.wait_ready(5)
            assert scheduler.problem is None
            assert scheduler.lookup(KEYS).wait(5)


def test_a_client_that_gets_no_thread_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gc.collect()
    before = open_files()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            SchedulerClient("/nowhere", NamespaceSpec.named("model"))
    gc.collect()
    assert open_files() <= before


def test_a_wait_polls_for_a_moment_and_then_sleeps(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.answers[m.Lookup] = lambda *_: None
    with SchedulerClient(fake.directory, SPEC, options=ClientOptions()) as scheduler:
        assert scheduler.wait_ready(5)
        yields: list[int] = []
        monkeypatch.setattr(os, "sched_yield", lambda: (yields.append(1), time.sleep(0.9 * BUSY_WAIT_S)))
        assert not scheduler.lookup(KEYS).wait(0.2)
        assert len(yields) <= 2, "of a thousand, if it polled all the time"
        monkeypatch.setattr(os, "sched_yield", lambda: (yields.append(1), time.sleep(2 * LONG_YIELD_S)))
        yields.clear()
        for _ in range(3):
            assert not scheduler.lookup(KEYS).wait(0.01)
        assert len(yields) <= 1  # others want the CPU: not again for a while


def test_garbage_replies_end_the_connection_and_a_new_one_works(fake: FakeDaemon, scheduler: SchedulerClient) -> None:
    ended: list[m.AnyRequest] = []

    def garbage_once(request: m.AnyRequest, _: object) -> bytes | m.AnyReply:
        assert isinstance(request, m.Lookup)
        ended.append(request)
        if len(ended) == 1:
            return b"\xc1garbage"
        return m.LookupReply(request.request_id, request.lease_id, [b"\2\2"], 2, 1000)

    fake.answers[m.Lookup] = garbage_once
    future = scheduler.lookup(KEYS)
    assert future.wait(5)
    assert future.failed
    assert scheduler.wait_ready(5)
    again = scheduler.lookup(KEYS)
    assert again.wait(5)
    assert not again.failed


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xffgarbage", b"\x01\x00\x00\x00\xc1"])
def test_garbage_on_the_lifeline_ends_the_connection(fake: FakeDaemon, scheduler: SchedulerClient, data: bytes) -> None:
    fake.send_lifeline(m.Role.SCHEDULER, data)
    wait_until(lambda: len(fake.seen(m.Hello)) == 2 and scheduler.ready)


def test_a_refusal_at_the_lifeline_is_kept_as_the_reason(fake: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    fake.greeting_version = 99
    with SchedulerClient(fake.directory, SPEC, options=QUICK) as client:
        assert not client.wait_settled(5)
        assert client.refusal.code is ErrorCode.BAD_VERSION
        wait_until(lambda: fake.greeted > 3)
    logged = [record for record in caplog.records if "99" in record.getMessage()]
    assert len(logged) == 1, "a reason is logged once, not at each attempt"


def test_a_refusal_forges_no_line_of_a_log_and_moves_no_cursor(
    fake: FakeDaemon, scheduler: SchedulerClient, caplog: pytest.LogCaptureFixture
) -> None:
    for code in (ErrorCode.INTERNAL, ErrorCode.BAD_TOKEN):
        fake.send_raw(m.Role.SCHEDULER, encode(m.Error(2**40, code, f"\x1b[2J\n{code.name}")))
        wait_until(lambda: any(text.endswith(f"?[2J?{code.name}") for text in caplog.messages))  # noqa: B023
    assert all(text.isprintable() for text in caplog.messages)


def test_no_call_waits_for_a_hanging_daemon(fake: FakeDaemon, scheduler: SchedulerClient, worker: WorkerClient) -> None:
    fake.freeze()
    began, futures = time.monotonic(), []
    for job_id in range(500):
        futures.append(scheduler.lookup(KEYS))
        worker.store(job_id, TRANSFER)
    a_timeout_each_s = len(futures) * QUICK.request_timeout_s
    assert time.monotonic() - began < a_timeout_each_s / 5, "a call that waited for the daemon would take one, or more"
    assert all(future.wait(5) and future.failed for future in futures)
    wait_until(lambda: not scheduler.ready and not worker.ready)
    assert scheduler.lookup(KEYS).failed
    fake.frozen.clear()
    assert scheduler.wait_ready(5)
    assert worker.wait_ready(5)


@pytest.mark.parametrize("state", ["alive", "hanging", "dead"])
def test_close_is_quick_repeatable_and_leaks_nothing(fake: FakeDaemon, registration: Registration, state: str) -> None:
    gc.collect()
    files, threads = open_files(), threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        scheduler = SchedulerClient(fake.directory, SPEC, options=QUICK)
        worker = WorkerClient(fake.directory, SPEC, registration, options=QUICK)
        assert scheduler.wait_ready(5)
        assert worker.wait_ready(5)
        if state == "hanging":
            fake.freeze()
        elif state == "dead":
            fake.stop()
        future = scheduler.lookup(KEYS)
        worker.load(1, 2**32, TRANSFER)
        for client in (scheduler, worker, scheduler, worker):
            began = time.monotonic()
            client.close()
            assert time.monotonic() - began < 5 * CLOSE_S
        assert future.done
        assert worker.unfinished == 0
        assert scheduler.lookup(KEYS).failed
        scheduler.release(future.lease_id)
        worker.fence([1, 2], 0.0)
        fake.stop()
        del scheduler, worker, client
        gc.collect()
    assert threading.active_count() <= threads
    wait_until(lambda: open_files() <= files)


def test_waiting_needs_no_further_descriptor(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has none left must not fail in its scheduler when it waits for the first time."""
    with SchedulerClient(fake.directory, SPEC, options=QUICK) as scheduler:
        wait_until(lambda: scheduler.ready)
        monkeypatch.setattr(os, "eventfd", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert scheduler.lookup(KEYS).wait(5)


def test_a_client_without_a_descriptor_for_its_sockets_says_so_and_tries_again(
    fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(zmq.Context, "socket", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
        with AdminClient(fake.directory) as admin, pytest.raises(DaemonUnavailable, match="Too many open files"):
            admin.stats()
        scheduler = SchedulerClient(fake.directory, SPEC, options=QUICK)
        wait_until(lambda: "Too many open files" in (scheduler.problem or ""))
    with scheduler:
        wait_until(lambda: scheduler.ready)
    assert "Internal error" not in caplog.text


def test_descriptors_that_nobody_asked_for_are_closed(fake: FakeDaemon, worker: WorkerClient) -> None:
    """An engine may have 1,024 by Linux' default, and ends without them."""
    before, released = len(open_files()), encode_frame(MemoryReleased())

    def send() -> None:
        for _ in range(50):
            socket.send_fds(fake.peer(m.Role.WORKER).stream, [released], [0] * 4)

    fake.do(send)
    fake.end_session(m.Role.WORKER)  # the client has read all of the stream when it connects again
    wait_until(lambda: len(fake.seen(m.Register)) == 2 and worker.ready)
    wait_until(lambda: len(open_files()) <= before)  # those of the new connection are others


def test_an_error_inside_is_logged_once_and_survived(
    fake: FakeDaemon, scheduler: SchedulerClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the client's thread, or in that of a caller that waits."""
    calls = 0

    def explode(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise RuntimeError("a bug")

    monkeypatch.setattr(scheduler, "_role_tick", explode)
    fake.end_session(m.Role.SCHEDULER)
    wait_until(lambda: calls > 3 and scheduler.ready)
    logged = [record for record in caplog.records if record.levelno == logging.ERROR and record.name == "kvoffd_client"]
    assert len(logged) == 1
    assert logged[0].exc_info is not None
    calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "on_reply", explode)
        future = scheduler.lookup(KEYS)
        wait_until(lambda: (scheduler.poll(), future.done)[1])
        assert future.failed
    assert scheduler.wait_ready(5)
    assert scheduler.lookup(KEYS).wait(5)


def _in_child(scheduler: SchedulerClient, pipe: multiprocessing.connection.Connection) -> None:
    try:
        scheduler.lookup(KEYS)
    except ForkedProcess as error:
        scheduler.close()
        pipe.send(str(error))
    pipe.recv()


def test_a_forked_child_does_not_keep_its_parents_session(fake: FakeDaemon, scheduler: SchedulerClient) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(scheduler, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(10)
        assert "new client" in ours.recv()
        assert scheduler.lookup(KEYS).wait(5), "the parent goes on"
        scheduler.close()
        wait_until(lambda: not fake.peers)
    finally:
        ours.send("end")
        child.join(10)
    assert child.exitcode == 0
    ours.close()
    child.close()


def test_each_client_connects_at_once_while_a_thread_waits_for_it(fake: FakeDaemon) -> None:
    """A message that ended no sleep would cost seconds."""
    for _ in range(40):
        with SchedulerClient(fake.directory, SPEC, options=ClientOptions()) as client:
            assert client.wait_ready(2.0)


def test_unsent_messages_die_with_their_daemon(
    fake: FakeDaemon, scheduler: SchedulerClient, worker: WorkerClient
) -> None:
    fake.freeze()
    for job_id in range(200):  # more than the sockets take
        scheduler.lookup([m.GroupKeys(0, bytes(320_000))])
        worker.store(job_id, TRANSFER)
    fake.stop()
    wait_until(lambda: not scheduler.ready and not worker.ready)
    fake.epoch += 1
    fake.start()
    assert scheduler.wait_ready(5)
    assert worker.wait_ready(5)
    assert scheduler.lookup(KEYS).wait(5)
    assert not fake.strangers


def test_a_thread_that_waits_does_not_delay_what_is_due(fake: FakeDaemon, scheduler: SchedulerClient) -> None:
    """It reads the sockets alone, but what is due in time is the I/O thread's."""
    fake.answers[m.Lookup] = lambda *_: None
    early = scheduler.lookup(KEYS)
    late = threading.Thread(target=scheduler.wait_settled, args=(5,))  # ready already: ends at once
    late.start()
    began = time.monotonic()
    future = scheduler.lookup(KEYS)
    future.wait(QUICK.request_timeout_s / 2)
    assert future.wait(5)
    assert time.monotonic() - began >= QUICK.request_timeout_s
    assert early.failed
    assert future.failed
    wait_until(lambda: len(fake.seen(m.Release)) == 2)
    late.join(5)


def test_a_client_whose_routing_id_is_taken_opens_another_session(shared_daemon: DaemonProcess) -> None:
    options = ClientOptions(request_timeout_s=0.1, unresponsive_after_s=0.2)
    with SchedulerClient(shared_daemon.directory, SPEC, options=options) as scheduler:
        assert scheduler.wait_ready(5)
        transport = scheduler._transport
        assert isinstance(transport, SocketTransport)
        assert transport._jobs is not None
        routing_id = transport._jobs.getsockopt(zmq.ROUTING_ID)
        assert isinstance(routing_id, bytes)
        with Eavesdropper(shared_daemon.directory, routing_id) as thief:
            thief.ask()
            assert thief.is_answered(5.0)
            deadline = time.monotonic() + 10.0
            while not (found := scheduler.lookup(KEYS)).wait(0.1) or found.failed:
                assert time.monotonic() < deadline, scheduler.problem


# --- lookups, leases and events ------------------------------------------------------------------


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


# --- jobs, fences and the end of a registration --------------------------------------------------


def take(worker: WorkerClient, count: int) -> dict[int, m.JobResult]:
    found: dict[int, m.JobResult] = {}
    deadline = time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found.update((result.job_id, result) for result in worker.wait_results(0.5))
    assert len(found) == count
    return found


def test_a_refused_job_tells_why(fake: FakeDaemon, worker: WorkerClient) -> None:
    fake.answers[m.Submit] = lambda request, _: m.Error(request.request_id, ErrorCode.BAD_KEYS, "Bad.")
    worker.load(1, 2**32, TRANSFER)
    assert take(worker, 1)[1].error is ErrorCode.BAD_KEYS


def test_wrong_lengths_and_an_id_in_use_are_errors_of_the_caller(fake: FakeDaemon, worker: WorkerClient) -> None:
    for wrong in ((0, bytes(31), bytes(4)), (0, bytes(32), bytes(3)), (1, bytes(32), bytes(4))):
        with pytest.raises(ValueError, match=r"whole number|4 for each|groups 0 to 0, not 1"):
            worker.store(1, [GroupTransfer(*wrong)])
    assert worker.unfinished == 0
    fake.hold_jobs = True
    worker.store(1, TRANSFER)
    with pytest.raises(ValueError, match="unfinished"):
        worker.load(1, 2**32, TRANSFER)


def test_a_wait_may_have_no_end(fake: FakeDaemon, worker: WorkerClient) -> None:
    fake.hold_jobs = True
    worker.store(1, TRANSFER)
    timer = threading.Timer(0.1, fake.finish, [1])
    timer.start()
    assert [result.job_id for result in worker.wait_results(float("inf"))] == [1]
    timer.join(5)


def fence_in_thread(worker: WorkerClient, job_ids: list[int]) -> threading.Thread:
    thread = threading.Thread(target=worker.fence, args=(job_ids, 0.1))
    thread.start()
    return thread


def test_a_fence_waits_for_loads_beyond_its_deadline(fake: FakeDaemon, worker: WorkerClient) -> None:
    fake.hold_jobs = True
    worker.load(1, 2**32, TRANSFER)
    wait_until(lambda: fake.seen_jobs(loads=True))
    thread = fence_in_thread(worker, [1])
    thread.join(0.4)
    assert thread.is_alive()
    assert worker.ready, "a load alone is no reason to end the session"
    fake.finish(1)
    thread.join(5)
    assert not thread.is_alive()
    assert worker.take_results()[0].ok


def test_fence_ends_stores_and_waits_for_loads(fake: FakeDaemon, worker: WorkerClient) -> None:
    fake.hold_jobs = True
    fake.close_on_eof = False
    worker.store(1, TRANSFER)
    worker.load(2, 2**32, TRANSFER)
    wait_until(lambda: fake.seen_jobs(loads=True))
    old = fake.peer(m.Role.WORKER)
    thread = fence_in_thread(worker, [1, 2])
    wait_until(lambda: worker._results)
    assert [result.job_id for result in worker.take_results()] == [1]
    assert thread.is_alive()
    assert worker.unfinished == 1
    assert len(fake.seen(m.Register)) == 1, "the memory is the old session's until then"
    fake.do(lambda: fake.release(old))
    thread.join(5)
    assert not thread.is_alive()
    assert [(result.job_id, result.ok) for result in worker.take_results()] == [(2, False)]
    wait_until(lambda: len(fake.seen(m.Register)) == 2 and worker.ready)
    fake.hold_jobs, fake.drop_publications = False, True
    worker.store(1, TRANSFER)
    assert take(worker, 1)[1].ok, "results that are dropped are asked for"


def test_after_unregister_no_job_is_taken(fake: FakeDaemon, worker: WorkerClient) -> None:
    assert worker.unregister(5)
    assert not worker.ready
    worker.store(1, TRANSFER)
    assert not worker.take_results()[0].ok
    fake.end_session(m.Role.WORKER)
    wait_until(lambda: len(fake.seen(m.Hello)) == 2)
    assert len(fake.seen(m.Register)) == 1


def test_unregister_without_an_answer_ends_the_session_and_says_so(fake: FakeDaemon, worker: WorkerClient) -> None:
    fake.answers[m.Unregister] = lambda *_: None
    assert not worker.unregister(0.1)
    wait_until(lambda: not fake.peers or len(fake.seen(m.Hello)) == 2)
    assert len(fake.seen(m.Register)) == 1
