"""A job goes out after its event and not before, and can be taken back until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvoffd_client.ordered_sender import OrderedSender
from kvoffd_client.worker_client import Job
from kvoffd_proto.errors import ErrorCode
from tests.kit.waiting import LONGER_THAN_A_TEST_S, wait_until

WAIT_S = 10.0


class FakeEvent:
    """Happens when the test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.waited_for = threading.Event()
        self.error: Exception | None = None

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self.happened.wait(LONGER_THAN_A_TEST_S)
        if self.error is not None:
            raise self.error


class Gpu:
    """Events in the order in which they were recorded, and what was sent."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.sent: list[int] = []
        self.failed: list[tuple[int, ErrorCode]] = []
        self.sender = OrderedSender(self.record)

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.events.append(event)
        return event

    def submit(self, *job_ids: int) -> FakeEvent:
        self.sender.submit(
            [Job(job_id, ()) for job_id in job_ids],
            lambda jobs: self.sent.extend([job.job_id for job in jobs]),
            lambda job, code: self.failed.append((job.job_id, code)),
        )
        return self.events[-1]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.sender.close()
    for event in gpu.events:
        event.happened.set()
    gpu.sender._thread.join(WAIT_S)
    assert not gpu.sender._thread.is_alive()


def test_a_job_taken_back_is_never_sent(gpu: Gpu) -> None:
    first, second = gpu.submit(1), gpu.submit(2)
    gpu.submit(3).happened.set()
    assert first.waited_for.wait(WAIT_S)
    time.sleep(0.05)
    assert gpu.sender.withdraw([1, 2, 99]) == [1, 2], "neither has been sent"
    assert (gpu.sender.waiting, gpu.sent) == ([3], [])
    first.happened.set()
    second.happened.set()
    wait_until(lambda: {3}.isdisjoint(gpu.sender.waiting))
    assert gpu.sent == [3]
    assert gpu.failed == [(1, ErrorCode.CANCELLED), (2, ErrorCode.CANCELLED)]
    assert gpu.sender.withdraw([3]) == []


def test_the_others_of_a_step_are_sent_when_some_are_taken_back(gpu: Gpu) -> None:
    event = gpu.submit(1, 2, 3)
    assert gpu.sender.withdraw([2]) == [2]
    assert gpu.sender.waiting == [1, 3]
    event.happened.set()
    wait_until(lambda: {1, 3}.isdisjoint(gpu.sender.waiting))
    assert (gpu.sent, gpu.failed) == ([1, 3], [(2, ErrorCode.CANCELLED)])


def test_a_caller_that_takes_jobs_back_may_give_them_time(gpu: Gpu) -> None:
    gpu.submit(1).happened.set()
    event = gpu.submit(2)
    assert gpu.sender.withdraw([1], LONGER_THAN_A_TEST_S) == []
    threading.Timer(0.05, event.happened.set).start()
    assert gpu.sender.withdraw([2], WAIT_S) == []
    assert gpu.sent == [1, 2]
    gpu.submit(3)
    assert gpu.sender.withdraw([3], 0.02) == [3]


def test_a_mark_says_when_all_before_it_was_done(gpu: Gpu) -> None:
    first = gpu.submit(1)
    mark = gpu.sender.mark()
    gpu.submit(2)
    first.happened.set()
    wait_until(lambda: {1}.isdisjoint(gpu.sender.waiting))
    assert mark.ended_at is None
    before = time.monotonic()
    gpu.events[1].happened.set()
    wait_until(lambda: mark.ended_at is not None)
    assert before <= (mark.ended_at or 0) <= time.monotonic()
    gpu.events[2].happened.set()
    wait_until(lambda: {2}.isdisjoint(gpu.sender.waiting))
    assert gpu.sent == [1, 2]


def test_what_is_taken_back_while_it_is_sent_is_sent(gpu: Gpu) -> None:
    """Who takes a job back waits for the daemon only where it was sent: it must know."""
    begun, goes_on, taken = threading.Event(), threading.Event(), list[list[int]]()

    def send(jobs: list[Job]) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)

    gpu.sender.submit([Job(1, ())], send, lambda job, code: gpu.failed.append((job.job_id, code)))
    gpu.events[0].happened.set()
    assert begun.wait(WAIT_S)
    thread = threading.Thread(target=lambda: taken.append(gpu.sender.withdraw([1])))
    thread.start()
    thread.join(0.05)
    assert not taken
    goes_on.set()
    thread.join(WAIT_S)
    assert (taken, gpu.failed) == ([[]], [])


def test_an_id_may_be_used_again_while_the_thread_waits_for_the_old_one(gpu: Gpu) -> None:
    old = gpu.submit(1)
    assert old.waited_for.wait(WAIT_S)
    gpu.sender.withdraw([1])
    new = gpu.submit(1)
    old.happened.set()
    assert new.waited_for.wait(WAIT_S)
    assert gpu.sent == []
    new.happened.set()
    wait_until(lambda: {1}.isdisjoint(gpu.sender.waiting))
    assert gpu.sent == [1]


def test_a_failed_gpu_or_message_fails_jobs_and_not_the_thread(gpu: Gpu) -> None:
    event = gpu.submit(1)
    event.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    event.happened.set()
    wait_until(lambda: {1}.isdisjoint(gpu.sender.waiting))
    assert (gpu.sent, gpu.failed) == ([], [(1, ErrorCode.CANCELLED)])
    gpu.submit(2).happened.set()
    wait_until(lambda: {2}.isdisjoint(gpu.sender.waiting))
    assert gpu.sent == [2]

    def send(jobs: list[Job]) -> None:
        raise ValueError("a bug")

    gpu.sender.submit([Job(3, ()), Job(4, ())], send, lambda job, code: gpu.failed.append((job.job_id, code)))
    gpu.events[-1].happened.set()
    wait_until(lambda: {3, 4}.isdisjoint(gpu.sender.waiting))
    assert gpu.failed[1:] == [(3, ErrorCode.CANCELLED), (4, ErrorCode.CANCELLED)]


def test_closing_does_not_wait_for_a_gpu_that_hangs(gpu: Gpu) -> None:
    event = gpu.submit(1)
    assert event.waited_for.wait(WAIT_S)
    gpu.sender.close()
    event.happened.set()
    gpu.sender._thread.join(WAIT_S)
    assert gpu.sent == []
