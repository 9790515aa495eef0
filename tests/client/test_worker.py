"""Jobs, fences and the end of a registration on real sockets."""

from __future__ import annotations

import threading
import time

import pytest

from kvoffd_client import WorkerClient
from kvoffd_client.worker_client import GroupTransfer
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from tests.kit.fake_daemon import FakeDaemon
from tests.kit.waiting import wait_until

TRANSFER = [GroupTransfer(0, bytes(32), bytes(4))]


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
        with pytest.raises(ValueError, match=r"whole number|but not 1"):
            worker.store(1, [GroupTransfer(*wrong)])
    assert worker.unfinished == 0
    fake.hold_jobs = True
    worker.store(1, TRANSFER)
    with pytest.raises(ValueError, match="unfinished"):
        worker.load(1, 2**32, TRANSFER)


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
