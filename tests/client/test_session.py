"""The clients on a transport of paper and a clock of numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import pytest

from kvoffd_client import (
    ClientOptions,
    LookupFuture,
    NamespaceSpec,
    Registration,
    SchedulerClient,
    SharedMemory,
    WorkerClient,
    scheduler_client,
)
from kvoffd_client.session import (
    BACKOFF_ABSENT_S,
    BACKOFF_MIN_S,
    BACKOFF_REFUSED_S,
    GPU_REGISTER_S,
    Phase,
    Session,
)
from kvoffd_client.worker_client import (
    DARK_PATIENCE_S,
    JOB_PATIENCE_S,
    SUBMIT_BYTES,
    Job,
    Size,
    submit_of,
)
from kvoffd_proto import codec, lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import session_topic
from kvoffd_proto.messages import PROTOCOL_VERSION, GroupTransfer, PageRef, TensorLayout
from tests.kit.fake_daemon import RequestT
from tests.kit.submitted import jobs_in

SPEC = NamespaceSpec.named("paper", groups=[m.GroupSpec("full_attention", 8)])
OPTIONS = ClientOptions()
LIMITS = m.Limits(100_000, 5000, 1000, 10, 100, 10_000, 4, 64)
EPOCH, SESSION_ID = 77, 5
KEYS = [m.GroupKeys(0, b"k" * 64)]
TRANSFER = [GroupTransfer(0, b"k" * 64, bytes(8))]


class PaperLink:
    """Writes down what a session does."""

    def __init__(self) -> None:
        self.time = 0.0
        self.sent: list[m.AnyRequest] = []
        self.attached: list[int] = []
        self.topics: list[bytes] = []
        self.drains = 0
        self.is_open = False
        self.opens = 0
        self.refuse_to_open = False
        self.full = False
        self.full_after: int | None = None
        """Messages that it still takes; None for all."""

    def start(self, session: Session) -> None:
        self._session = session

    lock: AbstractContextManager[object] = nullcontext()

    def now(self) -> float:
        return self.time

    def notify(self) -> None: ...

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        return ready()

    def stop(self) -> None:
        self._session.on_close(self.time)

    def open(self) -> None:
        self.opens += 1
        if self.refuse_to_open:
            raise ConnectionRefusedError(111, "Connection refused")
        self.is_open = True

    def connect(self, route: bytes, topics: Sequence[bytes]) -> None:
        self.route = route
        self.topics = list(topics)

    def attach(self, message: lifeline.Attach, fd: int) -> None:
        self.attached.append(message.segment_id)

    def send(self, frame: bytes) -> bool:
        if self.full or self.full_after == 0:
            return False
        if self.full_after is not None:
            self.full_after -= 1
        self.sent.append(codec.decode_request(frame))
        return True

    def disconnect(self, *, drain: bool) -> None:
        self.is_open = False
        self.drains += drain

    def last(self, kind: type[RequestT]) -> RequestT:
        return next(message for message in reversed(self.sent) if isinstance(message, kind))

    def count(self, kind: type[m.Request]) -> int:
        return sum(isinstance(message, kind) for message in self.sent)


def greet(session: SchedulerClient | WorkerClient, now: float, epoch: int = EPOCH) -> None:
    session.on_lifeline_message(lifeline.Greeting(PROTOCOL_VERSION, epoch, SESSION_ID, b"t" * 16), now)


def open_namespace(session: SchedulerClient | WorkerClient, link: PaperLink, now: float, epoch: int = EPOCH) -> None:
    session.tick(now)
    greet(session, now, epoch)
    hello = link.last(m.Hello)
    session.on_reply(m.Welcome(hello.request_id, SESSION_ID, LIMITS, 1000), now)
    session.on_reply(m.NamespaceOpened(link.last(m.OpenNamespace).request_id, True), now)


def register(worker: WorkerClient, link: PaperLink, now: float) -> None:
    asked = link.last(m.Register)
    worker.on_reply(m.Registered(asked.request_id, asked.registration_id, [64]), now)


def connect(session: SchedulerClient | WorkerClient, link: PaperLink, now: float, epoch: int = EPOCH) -> None:
    open_namespace(session, link, now, epoch)
    if isinstance(session, WorkerClient):
        for segment in range(2):
            session.on_lifeline_message(lifeline.Attached(segment), now)
        register(session, link, now)


@pytest.fixture
def link() -> PaperLink:
    return PaperLink()


@pytest.fixture
def new_scheduler(link: PaperLink) -> SchedulerClient:
    return SchedulerClient(
        "/paper", SPEC, name="paper", subscribe_events=True, options=OPTIONS, transport=link, rng=random.Random(1)
    )


@pytest.fixture
def new_worker(link: PaperLink) -> WorkerClient:
    with SharedMemory(4096) as first, SharedMemory(4096) as second:
        registration = Registration(0, 1, (first, second), (TensorLayout(0, 0, 64, 4),), ((PageRef(0, 64),),))
        return WorkerClient("/paper", SPEC, registration, options=OPTIONS, transport=link, rng=random.Random(1))


@pytest.fixture
def scheduler(new_scheduler: SchedulerClient, link: PaperLink) -> SchedulerClient:
    """Connected at time 0."""
    connect(new_scheduler, link, 0.0)
    return new_scheduler


@pytest.fixture
def worker(new_worker: WorkerClient, link: PaperLink) -> WorkerClient:
    """Connected at time 0."""
    connect(new_worker, link, 0.0)
    return new_worker


def look_up(scheduler: SchedulerClient, link: PaperLink, now: float, groups: list[m.GroupKeys] = KEYS) -> LookupFuture:
    link.time = now
    return scheduler.lookup(groups)


def submit(worker: WorkerClient, link: PaperLink, now: float, *jobs: Job) -> None:
    link.time = now
    worker.submit(jobs)


def completions(sequence: int, *results: int | m.JobResult) -> m.Completions:
    """Of these results, or of jobs of these ids that were ok."""
    every = [one if isinstance(one, m.JobResult) else m.JobResult(one, True, 64, 0.1) for one in results]
    return m.Completions(sequence, 500, every)


def publish(worker: WorkerClient, batch: m.Completions, now: float) -> None:
    worker.on_publication(session_topic(EPOCH, SESSION_ID), bytes(8), codec.encode(batch), now)


# --- connecting ----------------------------------------------------------------------------------


def test_a_refused_segment_is_a_refusal_with_the_daemons_sentence(new_worker: WorkerClient, link: PaperLink) -> None:
    open_namespace(new_worker, link, 0.0)
    new_worker.on_lifeline_message(lifeline.AttachRefused(0, ErrorCode.UNSAFE_SEGMENT, "Seal it."), 0.0)
    assert new_worker.refusal.code is ErrorCode.UNSAFE_SEGMENT
    assert "Seal it." in (new_worker.problem or "")
    assert not link.is_open


def test_descriptors_are_attached_one_after_the_other(new_worker: WorkerClient, link: PaperLink) -> None:
    """The kernel bounds those of a user that are on their way, and the stream's buffer is small."""
    open_namespace(new_worker, link, 0.0)
    for segment in range(2):
        assert link.attached == list(range(segment + 1))
        new_worker.on_lifeline_message(lifeline.Attached(segment), 0.0)
    assert link.count(m.Register) == 1
    new_worker.on_lifeline_message(lifeline.Attached(7), 0.0)
    assert not link.is_open, "that was not sent"


def test_pauses_grow_with_failed_connections_and_refusals(new_scheduler: SchedulerClient, link: PaperLink) -> None:
    now, pauses = 0.0, []

    def pause(longest: float, step: int, first: float = BACKOFF_MIN_S) -> None:
        """It is between a half and the whole of the first one, doubled this often, up to the longest."""
        nonlocal now
        pauses.append(new_scheduler.wake_at() - now)
        full = min(longest, first * 2**step)
        assert full / 2 <= pauses[-1] <= full
        now = new_scheduler.wake_at()

    def find_nobody(step: int) -> None:
        link.refuse_to_open = True
        new_scheduler.tick(now)
        pause(BACKOFF_ABSENT_S, step)
        link.refuse_to_open = False

    for step in range(12):
        find_nobody(step)
    assert link.opens == 12
    assert "/paper" in (new_scheduler.problem or "")
    for step in range(8):
        new_scheduler.tick(now)
        assert link.is_open
        new_scheduler.on_lifeline_end(now)
        pause(OPTIONS.backoff_max_s, step)
        find_nobody(0)
    for step in (0, 1, 2, 3, 4, 5, 5, None, 0):
        if step is None:  # the next daemon may take it
            find_nobody(0)
            continue
        new_scheduler.tick(now)
        new_scheduler.on_lifeline_message(lifeline.Refused(ErrorCode.TOO_MANY, "Full."), now)
        pause(BACKOFF_REFUSED_S, step, OPTIONS.backoff_max_s)
    assert len(set(pauses)) == len(pauses), "no two clients are in step"


def test_a_daemon_that_fails_is_unreachable_until_it_answers(new_scheduler: SchedulerClient, link: PaperLink) -> None:
    assert not new_scheduler.unreachable, "it was not tried yet"
    link.refuse_to_open = True
    new_scheduler.tick(0.0)
    assert new_scheduler.unreachable
    link.refuse_to_open = False
    connect(new_scheduler, link, 1.0)
    assert not new_scheduler.unreachable
    look_up(new_scheduler, link, 2.0)
    new_scheduler.tick(2.0 + OPTIONS.unresponsive_after_s)
    assert new_scheduler.unreachable


def test_a_forgotten_token_makes_the_client_connect_again(scheduler: SchedulerClient, link: PaperLink) -> None:
    look_up(scheduler, link, 0.0)
    scheduler.on_reply(m.Error(link.last(m.Lookup).request_id, ErrorCode.BAD_TOKEN, "Unknown."), 0.1)
    assert not scheduler.ready
    connect(scheduler, link, 5.0)
    assert scheduler.ready


@pytest.mark.parametrize("step", ["hello", "namespace"])
def test_a_wrong_answer_in_the_handshake_ends_it(new_scheduler: SchedulerClient, link: PaperLink, step: str) -> None:
    new_scheduler.tick(0.0)
    greet(new_scheduler, 0.0)
    if step == "namespace":
        hello = link.last(m.Hello)
        new_scheduler.on_reply(m.Welcome(hello.request_id, SESSION_ID, LIMITS, 0), 0.0)
    new_scheduler.on_reply(m.Done(link.sent[-1].request_id), 0.0)
    assert not link.is_open
    assert "Done" in (new_scheduler.problem or "")


def test_refused_messages_are_logged_once_a_minute(
    scheduler: SchedulerClient, link: PaperLink, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(130):
        scheduler.on_reply(m.Error(2**40, ErrorCode.BAD_KEYS, f"Not {number % 2}."), float(number))
    assert [text.split(": ")[1] for text in caplog.messages] == ["Not 0."] * 3


def test_a_registration_of_gpu_memory_may_take_long(
    new_worker: WorkerClient, link: PaperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_worker, "memory_on_gpu", True)
    open_namespace(new_worker, link, 0.0)
    for segment in range(2):
        new_worker.on_lifeline_message(lifeline.Attached(segment), 0.0)
    new_worker.tick(GPU_REGISTER_S - 0.1)
    register(new_worker, link, GPU_REGISTER_S - 0.1)
    assert new_worker.ready


# --- silence -------------------------------------------------------------------------------------


def test_a_silent_daemon_is_asked_again_after_a_full_queue(scheduler: SchedulerClient, link: PaperLink) -> None:
    look_up(scheduler, link, 0.0)
    link.full = True
    asked, now = link.count(m.Hello), 0.0
    while now < OPTIONS.unresponsive_after_s + 0.1:
        now += 0.1
        scheduler.tick(now)
    assert not scheduler.ready
    link.full = False
    assert scheduler.wake_at() <= now + OPTIONS.request_timeout_s
    scheduler.tick(scheduler.wake_at())
    assert link.count(m.Hello) == asked + 1
    scheduler.on_reply(m.Done(link.last(m.Hello).request_id), now)
    assert scheduler.ready


@pytest.mark.parametrize("loads", [[], [Job(2, TRANSFER, 1 << 32)]], ids=["stores-only", "beside-a-load"])
def test_a_silent_daemon_loses_stores_unless_a_load_runs(
    worker: WorkerClient, link: PaperLink, loads: list[Job]
) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER), *loads)
    now = 0.0
    while now < JOB_PATIENCE_S + OPTIONS.unresponsive_after_s + 0.1:
        now += 0.1
        worker.tick(now)
    assert not worker.ready
    assert link.is_open == bool(loads)
    assert [result.job_id for result in worker._results if not result.ok] == ([] if loads else [1])


# --- lookups and leases --------------------------------------------------------------------------


def answer_lookup(scheduler: SchedulerClient, link: PaperLink, now: float, states: list[bytes], pinned: int) -> None:
    lookup = link.last(m.Lookup)
    scheduler.on_reply(m.LookupReply(lookup.request_id, lookup.lease_id, states, pinned, 10_000), now)


def test_a_lookup_released_before_its_answer_holds_nothing(scheduler: SchedulerClient, link: PaperLink) -> None:
    """Its release goes behind it, so that there is a lease that it ends; if that does not go out, a second later."""
    scheduler.release(look_up(scheduler, link, 0.0).lease_id)
    assert [type(message) for message in link.sent[-2:]] == [m.Lookup, m.Release]
    future = look_up(scheduler, link, 0.0, KEYS)
    link.full = True
    scheduler.release(future.lease_id)
    assert link.count(m.Release) == 1
    answer_lookup(scheduler, link, 0.1, [b"\2\2"], 2)
    assert (future.done, future.pinned, future.alive) == (True, 0, False)
    link.full = False
    scheduler.tick(1.1)
    assert link.last(m.Release).lease_ids == [future.lease_id]
    scheduler.tick(1.9)
    assert link.count(m.Release) == 2
    assert not scheduler._leases


def test_releases_that_did_not_go_out_go_out_together(scheduler: SchedulerClient, link: PaperLink) -> None:
    """The daemon stood still for so long that the queue to it was full."""
    futures = [look_up(scheduler, link, 0.0) for _ in range(3)]
    for asked in [one for one in link.sent if isinstance(one, m.Lookup)]:
        scheduler.on_reply(m.LookupReply(asked.request_id, asked.lease_id, [b"\2\2"], 2, 10_000), 0.0)
    link.full = True
    for future in futures[:2]:
        scheduler.release(future.lease_id)
    assert look_up(scheduler, link, 0.0).failed, "it was not sent, and has no lease"
    link.full = False
    scheduler.release(futures[2].lease_id)
    assert link.last(m.Release).lease_ids == [future.lease_id for future in futures]


def test_an_invalidation_and_a_report_that_did_not_go_out_are_not_lost(
    scheduler: SchedulerClient, link: PaperLink
) -> None:
    link.full = True
    scheduler.invalidate(KEYS)
    assert not scheduler.report(1000.0, 1, 0), "so its caller keeps the counts"
    assert not scheduler.hint(m.HintAction.RETAIN, KEYS), "so its caller says that it is lost"
    assert (link.count(m.Invalidate), link.count(m.ReportEngine)) == (0, 0)
    link.full = False
    scheduler.tick(1.1)
    assert link.last(m.Invalidate).groups == KEYS
    scheduler.tick(2.2)
    assert link.count(m.Invalidate) == 1
    assert scheduler.report(1000.0, 1, 0)
    assert scheduler.hint(m.HintAction.RETAIN, KEYS)
    assert link.last(m.Hint).groups == KEYS


def test_a_lookup_is_done_after_all_that_is_read_of_it(
    scheduler: SchedulerClient, link: PaperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers hold no lock."""
    seen: list[tuple[object, ...]] = []

    class Watched(LookupFuture):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "done":
                seen.append((self.states, self.pinned, self.failed, self.alive, self.answered_at))
            super().__setattr__(name, value)

    monkeypatch.setattr(scheduler_client, "LookupFuture", Watched)
    for released in (False, True):
        found = look_up(scheduler, link, 0.0)
        if released:
            scheduler.release(found.lease_id)
        answer_lookup(scheduler, link, 0.1, [b"\2\2"], 2)
    look_up(scheduler, link, 0.0)
    answer_lookup(scheduler, link, 0.1, [], 0)
    ready = [b"\2\2"]
    assert seen == [(ready, 2, False, True, 0.1), (ready, 0, False, False, 0.1), ([], 0, True, False, 0.1)]


@pytest.mark.parametrize("states", [[], [b"\2"], [b"\2\2", b"\2"], [b"\2\2\2"]])
def test_an_answer_of_a_wrong_shape_is_a_miss(scheduler: SchedulerClient, link: PaperLink, states: list[bytes]) -> None:
    future = look_up(scheduler, link, 0.0, KEYS)
    answer_lookup(scheduler, link, 0.1, states, 1)
    assert future.failed
    assert not link.is_open


def test_a_reply_that_was_lost_does_not_make_a_daemon_silent(scheduler: SchedulerClient, link: PaperLink) -> None:
    look_up(scheduler, link, 0.0)
    scheduler.tick(OPTIONS.request_timeout_s)
    scheduler.on_reply(m.Done(link.last(m.Hello).request_id), OPTIONS.request_timeout_s)
    scheduler.tick(OPTIONS.unresponsive_after_s + 1.0)
    assert scheduler.ready
    assert link.count(m.Hello) == 2


def test_a_lease_is_stale_after_half_of_its_life(scheduler: SchedulerClient, link: PaperLink) -> None:
    found = look_up(scheduler, link, 1.0)
    answer_lookup(scheduler, link, 1.5, [b"\2\1"], 1)
    assert (found.done, found.failed, found.pinned, found.alive, found.leading_ready()) == (True, False, 1, True, 1)
    link.time = 5.9
    assert found.alive
    link.time = 6.0
    assert not found.alive
    scheduler.release(found.lease_id)
    assert link.last(m.Release).lease_ids == [found.lease_id]


def test_what_needs_no_answer_is_sent_to_a_daemon_that_does_not_answer(
    scheduler: SchedulerClient, link: PaperLink
) -> None:
    """It stands still, and reads it when it continues: what is free, what is unusable, hints, how many lookups were
    late."""
    found = look_up(scheduler, link, 0.0)
    answer_lookup(scheduler, link, 0.0, [b"\2\2"], 2)
    look_up(scheduler, link, 1.0)
    scheduler.tick(1.0 + OPTIONS.unresponsive_after_s)
    assert not scheduler.ready
    scheduler.release(found.lease_id)
    scheduler.invalidate(KEYS)
    assert scheduler.hint(m.HintAction.RELEASE, KEYS)
    scheduler.report(1.0, 0, 0, late_lookups=1)
    assert [type(one) for one in link.sent[-4:]] == [m.Release, m.Invalidate, m.Hint, m.ReportEngine]
    scheduler.on_lifeline_end(1.0 + OPTIONS.unresponsive_after_s)
    assert not scheduler.hint(m.HintAction.RELEASE, KEYS), "without a session"


def test_leases_die_with_their_connection(scheduler: SchedulerClient, link: PaperLink) -> None:
    future = look_up(scheduler, link, 0.1, KEYS)
    answer_lookup(scheduler, link, 0.1, [b"\2\2"], 2)
    scheduler.on_lifeline_end(0.2)
    assert not future.alive
    connect(scheduler, link, 3.0)


def test_the_limits_of_a_daemon_end_with_its_session(scheduler: SchedulerClient, link: PaperLink) -> None:
    scheduler._limits = msgspec.structs.replace(LIMITS, max_frame_bytes=1)
    scheduler.on_lifeline_end(0.2)
    connect(scheduler, link, 3.0, EPOCH + 1)
    assert scheduler._phase is Phase.OPEN


def test_full_queues_and_frames_too_large_are_misses_at_once(scheduler: SchedulerClient, link: PaperLink) -> None:
    assert look_up(scheduler, link, 0.0, [m.GroupKeys(0, bytes(LIMITS.max_frame_bytes))]).failed
    link.full = True
    assert look_up(scheduler, link, 0.0, KEYS).failed
    link.full = False
    assert not look_up(scheduler, link, 0.0, KEYS).failed


# --- jobs ----------------------------------------------------------------------------------------


def test_a_job_gets_exactly_one_result_whatever_is_published_twice(worker: WorkerClient, link: PaperLink) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER))
    publish(worker, completions(1, 1), 0.1)
    submit(worker, link, 0.2, Job(1, TRANSFER))  # the id is free again
    publish(worker, completions(1, 1), 0.3)
    assert [result.job_id for result in worker._results] == [1]
    assert list(worker._jobs) == [1]
    assert worker.credit_bytes == 500


def test_a_gap_is_replayed_and_each_batch_counts_once(worker: WorkerClient, link: PaperLink) -> None:
    for job_id in (1, 2, 3):
        submit(worker, link, 0.0, Job(job_id, TRANSFER))
    publish(worker, completions(2, 2), 0.1)
    replay = link.last(m.Results)
    assert replay.acknowledged == 0
    worker.on_reply(m.ResultsReply(replay.request_id, [completions(1, 1), completions(2, 2)], [3]), 0.2)
    assert sorted(result.job_id for result in worker._results) == [1, 2]
    assert list(worker._jobs) == [3]
    submit(worker, link, 0.3, Job(4, TRANSFER))
    assert link.last(m.Submit).acknowledged == 2
    worker._cancel([4])
    assert link.last(m.Cancel).acknowledged == 2


def test_old_jobs_are_asked_after_until_the_question_goes_out(worker: WorkerClient, link: PaperLink) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER))
    submit(worker, link, 0.6, Job(2, TRANSFER))
    publish(worker, completions(1, 1), 0.7)
    worker.tick(JOB_PATIENCE_S)
    assert link.count(m.Results) == 0
    link.full = True
    worker.tick(0.6 + JOB_PATIENCE_S)
    link.full = False
    worker.tick(0.6 + 2 * JOB_PATIENCE_S)
    assert link.count(m.Results) == 1


def test_results_that_come_only_when_asked_for_are_asked_for_soon(worker: WorkerClient, link: PaperLink) -> None:
    """Until one is published again."""

    def asked_at(job_id: int, sent_at: float) -> float:
        """When the job's result is asked for; it comes then."""
        worker.tick(sent_at)
        submit(worker, link, sent_at, Job(job_id, TRANSFER))
        now = worker.wake_at()
        worker.tick(now)
        worker.on_reply(m.ResultsReply(link.last(m.Results).request_id, [completions(job_id, job_id)], []), now)
        return round(now - sent_at, 3)

    assert [asked_at(1, 0.0), asked_at(2, 5.0), asked_at(3, 6.0)] == [JOB_PATIENCE_S, DARK_PATIENCE_S, DARK_PATIENCE_S]
    submit(worker, link, 7.0, Job(4, TRANSFER))
    publish(worker, completions(4, 4), 7.01)
    assert asked_at(5, 8.0) == JOB_PATIENCE_S


def test_a_job_that_the_daemon_does_not_know_fails(worker: WorkerClient, link: PaperLink) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER))
    worker.tick(JOB_PATIENCE_S)
    submit(worker, link, 1.0, Job(2, TRANSFER))
    worker.on_reply(m.ResultsReply(link.last(m.Results).request_id, [], []), 1.1)
    assert [(result.job_id, result.ok, result.error) for result in worker._results] == [(1, False, ErrorCode.INTERNAL)]
    assert list(worker._jobs) == [2]


def test_jobs_in_flight_are_bounded_by_the_daemons_limit(worker: WorkerClient, link: PaperLink) -> None:
    for job_id in range(LIMITS.max_jobs_in_flight + 1):
        submit(worker, link, 0.0, Job(job_id, TRANSFER))
    assert [result.error for result in worker._results] == [ErrorCode.TOO_MANY]


def test_at_the_limit_stores_are_refused_before_loads(worker: WorkerClient, link: PaperLink) -> None:
    """A prompt whose load is refused is computed."""
    for job_id in range(LIMITS.max_jobs_in_flight - 1):
        submit(worker, link, 0.0, Job(job_id, TRANSFER))
    store, load = Job(1000, TRANSFER), Job(1001, TRANSFER, lease_id=2**32)
    submit(worker, link, 0.0, store, load)
    assert [(result.job_id, result.error) for result in worker._results] == [(1000, ErrorCode.TOO_MANY)]
    assert load.job_id in worker._jobs


def test_jobs_that_do_not_go_out_fail_at_once(worker: WorkerClient, link: PaperLink) -> None:
    link.full = True
    submit(worker, link, 0.0, Job(1, TRANSFER))
    assert [result.error for result in worker._results] == [ErrorCode.TOO_MANY]


def test_unregister_waits_for_abandoned_stores(worker: WorkerClient, link: PaperLink) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER))
    worker._abandon_stores(worker._jobs, 0.1)
    outcome = list[bool]()
    worker._unregister(outcome, 0.2, 1.0)
    assert outcome == [False]
    worker.on_released(0.3)
    worker._unregister(outcome, 0.4, 1.0)
    assert outcome == [False, True]


def test_a_closed_client_does_not_say_that_the_memory_is_free(worker: WorkerClient, link: PaperLink) -> None:
    """Closing it waits for no copy."""
    submit(worker, link, 0.0, Job(1, TRANSFER, 1 << 32))
    worker.close()
    assert not worker.unregister(1.0)


def test_loads_end_with_a_daemon_that_dies_while_it_is_asked_for_the_memory(
    worker: WorkerClient, link: PaperLink
) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER, 1 << 32))
    outcome = list[bool]()
    worker._unregister(outcome, 0.1, 1.0)
    worker.on_lifeline_end(0.2)
    assert outcome == [False]
    assert [one.error for one in worker.take_results()] == [ErrorCode.SESSION_ENDED]


@pytest.mark.parametrize("answers", [True, False])
def test_a_daemon_that_gives_no_sign_of_life_is_not_asked_for_its_memory_for_long(
    worker: WorkerClient, link: PaperLink, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    waits = list[float]()

    def wait(ready: Callable[[], bool], timeout_s: float) -> bool:
        waits.append(timeout_s)
        if answers and len(waits) == 1:
            worker.on_reply(m.ResultsReply(link.last(m.Results).request_id, [], []), 0.1)
        return ready()

    monkeypatch.setattr(link, "wait", wait)
    assert not worker.unregister(10.0)
    assert waits == [2.0, *[8.0] * answers]
    assert not link.is_open


@pytest.mark.parametrize("answers", [True, False])
def test_a_fence_waits_cancels_drops_the_session_waits_for_loads(
    worker: WorkerClient,
    link: PaperLink,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: bool,
) -> None:
    """It waits less for stores if the daemon does not answer at all."""
    submit(worker, link, 0.0, Job(1, TRANSFER), Job(2, TRANSFER, 2**32), Job(3, TRANSFER))
    waits: list[tuple[float, int, bool]] = []

    def wait(ready: Callable[[], bool], timeout_s: float) -> bool:
        waits.append((timeout_s, link.count(m.Cancel), link.is_open))
        if answers and len(waits) == 2:
            worker.on_reply(m.ResultsReply(link.last(m.Results).request_id, [], [1, 2, 3]), 0.1)
        if waits[-3:] == [(10.0, 1, False)] * 3:
            worker.on_released(30.0)
        return ready()

    monkeypatch.setattr(link, "wait", wait)
    worker.fence([1, 2], 2.0)
    of_stores = [(0.05, 0, True), (0.5, 1, True), *[(1.5, 1, True)] * answers]
    assert waits == [*of_stores, *[(10.0, 1, False)] * 3]
    assert link.last(m.Cancel).job_ids == [1, 2]
    assert [result.job_id for result in worker._results] == [1, 3, 2], "stores at once, the load with its memory"
    assert sum("Still waiting for loads" in line for line in caplog.messages) == 2


def test_a_fence_cancels_nothing_while_its_caller_is_busy(
    worker: WorkerClient, link: PaperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER), Job(2, TRANSFER))
    waits: list[tuple[float, int]] = []

    def wait(ready: Callable[[], bool], timeout_s: float) -> bool:
        waits.append((timeout_s, link.count(m.Cancel)))
        if len(waits) in (3, 6):
            publish(worker, completions(1 + len(waits) // 6, len(waits) // 3), 0.0)
        return ready()

    monkeypatch.setattr(link, "wait", wait)
    worker.fence([1], 2.0, lambda: True)
    assert waits == [(0.05, 0), (0.005, 0), (0.005, 0)], "it ends with the store"
    busy = iter([True, False])
    worker.fence([2], 2.0, lambda: next(busy))
    assert waits[3:] == [(0.05, 0), (0.005, 0), (0.5, 1)]


def test_garbage_on_the_events_socket_is_asked_for_again(worker: WorkerClient, link: PaperLink) -> None:
    worker.on_publication(session_topic(EPOCH, SESSION_ID), bytes(8), b"\xc1", 0.1)
    assert link.count(m.Results) == 1


# --- jobs in parts -----------------------------------------------------------------------------------


SMALL = msgspec.structs.replace(LIMITS, max_keys_per_submit=4)


def jobs_sent(link: PaperLink) -> list[list[Job]]:
    """By message."""
    return [jobs_in(message) for message in link.sent if isinstance(message, m.Submit)]


MANY = [GroupTransfer(0, bytes(32 * 10), bytes(4 * 10))]
"""Ten keys of one block: three parts."""


def test_a_large_job_goes_out_in_parts_and_has_one_result(worker: WorkerClient, link: PaperLink) -> None:
    worker._limits = SMALL
    submit(worker, link, 0.0, Job(1, MANY))
    for sequence, (part,) in enumerate(jobs_sent(link), 1):
        assert not worker._results
        failed = [m.GroupKeys(0, b"k" * 32)] if sequence == 2 else []
        error = ErrorCode.NO_SPACE if failed else None
        result = m.JobResult(part.job_id, not failed, 10, 0.5, error, failed)
        publish(worker, completions(sequence, result), 1.0)
    assert worker._results == [m.JobResult(1, False, 30, 1.5, ErrorCode.NO_SPACE, [m.GroupKeys(0, b"k" * 32)])]
    submit(worker, link, 0.0, Job(2, MANY, 2**32))
    parts = [load for (load,) in jobs_sent(link)[3:]]
    assert [load.keep_lease for load in parts] == [True, True, False], "the last part ends the lease"
    for sequence, part in enumerate(parts, 4):
        publish(worker, completions(sequence, m.JobResult(part.job_id, True, 10, 0.5)), 1.0)
    assert [(result.ok, result.bytes) for result in worker._results[1:]] == [(True, 30)]
    assert not worker._jobs


def test_jobs_that_one_message_has_no_room_for_go_out_in_several(worker: WorkerClient, link: PaperLink) -> None:
    worker._limits = SMALL
    submit(worker, link, 0.0, *(Job(number, TRANSFER) for number in range(5)))
    assert [[job.job_id for job in jobs] for jobs in jobs_sent(link)] == [[0, 1], [2, 3], [4]]


def test_stores_with_tokens_go_out_in_messages_of_their_own(worker: WorkerClient, link: PaperLink) -> None:
    tells = [one._replace(parents=bytes(64), tokens=bytes(64)) for one in TRANSFER]
    jobs = Job(0, TRANSFER), Job(1, TRANSFER), Job(2, tells), Job(3, TRANSFER, 2**32), Job(4, tells), Job(5, TRANSFER)
    submit(worker, link, 0.0, *jobs)
    messages = [message for message in link.sent if isinstance(message, m.Submit)]
    sent = [[*message.stores.job_ids, *message.loads.job_ids] for message in messages]
    assert sent == [[0, 1], [2, 4, 3], [5]]
    assert [[one.group for one in message.stores.groups] for message in messages] == [[0]] * 3


def test_the_parts_of_a_job_are_the_job() -> None:
    """Nothing is lost, nothing is there twice, and no part is larger than the daemon takes."""
    for seed in range(200):
        check_parts(random.Random(seed))


UNEQUAL = NamespaceSpec.named(
    "unequal", groups=[m.GroupSpec("full_attention", tokens) for tokens in (0, 2, 300)], key_bytes=32
)


def check_parts(rng: random.Random) -> None:
    groups = []
    for group, spec in enumerate(UNEQUAL.groups):
        count, first = rng.choice((0, rng.randrange(1, 60))), rng.randrange(4)
        end = rng.randrange(4 * count - 3, 4 * count + 1)
        if not count:
            groups.append(GroupTransfer(group, b"", b""))
        elif end > first:
            links = (rng.randbytes(32 * count), rng.randbytes(4 * spec.tokens_per_block * count))
            keys, ids = rng.randbytes(32 * count), rng.randbytes(4 * (end - first))
            groups.append(GroupTransfer(group, keys, ids, first, *links[: 2 * (rng.random() < 0.7)]))
    lease, prompt = rng.choice((None, 2**32)), rng.randbytes(32)
    job = Job(1, [one._replace(before=b"" if lease else prompt) for one in groups], lease)
    most = Size(10, rng.choice((500, 3_000, 50_000)))
    if not job.size(UNEQUAL).keys:
        return
    parts = job.parts(UNEQUAL, 4, most, 100)
    assert [part.job_id for part in parts] == list(range(100, 100 + len(parts)))
    for one in groups:
        cut = [some for part in parts for some in part.groups if some.group == one.group]
        assert [block for some in cut for block in covered(some)] == covered(one)
        for field in ("keys", "parents", "tokens"):
            assert b"".join(getattr(some, field) for some in cut) == getattr(one, field)
        befores = [prompt, *(some.keys[-32:] for some in cut)][: len(cut)]
        assert [some.before for some in cut] == ([b""] * len(cut) if lease else befores)
    for part in parts:
        size = part.size(UNEQUAL)
        assert size.fits(most) or size.keys == 1
        assert size.keys, "the daemon refuses a message with an empty job"
        message = submit_of(1, b"r" * 16, 32, [part])
        assert len(codec.encode(message)) <= size.nbytes + SUBMIT_BYTES
        (sent,) = jobs_in(message)
        assert sent.groups == part.groups


def test_a_job_of_groups_with_unequal_tokens_goes_out_in_frames_that_the_daemon_takes(
    worker: WorkerClient, link: PaperLink
) -> None:
    """By the mean of its keys, each of the last ones has less than it has."""
    spec = NamespaceSpec.named("unequal", groups=[m.GroupSpec("full_attention", tokens) for tokens in (1, 2000)])
    worker._namespace, worker._limits = spec, msgspec.structs.replace(LIMITS, max_frame_bytes=50_000)
    groups = [
        GroupTransfer(at, bytes(32 * 50), bytes(4 * 50), 0, bytes(32 * 50), bytes(4 * tokens * 50))
        for at, tokens in enumerate((1, 2000))
    ]
    submit(worker, link, 0.0, Job(1, groups))
    sent = [(part.group, len(part.keys) // 32) for (job,) in jobs_sent(link) for part in job.groups]
    assert not worker._results
    assert sent == [(0, 50), (1, 5), *[(1, 6)] * 7, (1, 3)]


def test_jobs_of_many_groups_go_out_in_frames_that_the_daemon_takes(worker: WorkerClient, link: PaperLink) -> None:
    """Each group of a message has numbers for each of its jobs."""
    worker._namespace = NamespaceSpec.named("many", groups=[m.GroupSpec("full_attention", 0)] * 60)
    worker._limits = msgspec.structs.replace(LIMITS, max_frame_bytes=50_000, max_jobs_in_flight=60)
    jobs = [Job(at, [GroupTransfer(at, bytes(32), bytes(4), before=bytes(31) + b"x")]) for at in range(60)]
    submit(worker, link, 0.0, *jobs)
    assert not worker._results
    assert [job.job_id for jobs in jobs_sent(link) for job in jobs] == [*range(60)]
    assert len(jobs_sent(link)) > 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (Job(1, []), "has no keys"),
        (Job(1, [GroupTransfer(0, b"", b"")]), "has no keys"),
        (Job(-1, TRANSFER), "Job ids are numbers from 0"),
        (Job("1", TRANSFER), "Job ids are numbers from 0"),  # type: ignore[arg-type]
        (Job(True, TRANSFER), "Job ids are numbers from 0"),
        (Job(1, TRANSFER, 0), "has no lease of a lookup, but 0"),
        (Job(1, TRANSFER, 2**32, 1), "keep_lease is True or False, not 1"),  # type: ignore[arg-type]
        (Job(1, TRANSFER * 2), "A group comes twice"),
        (Job(1, [GroupTransfer("0", b"k" * 64, bytes(8))]), "group is an int, not str"),  # type: ignore[arg-type]
        (Job(1, [GroupTransfer(False, b"k" * 64, bytes(8))]), "group is an int, not bool"),
        (Job(1, [GroupTransfer(1, b"k" * 64, bytes(8))]), "groups 0 to 0, not 1"),
        (Job(1, [GroupTransfer(0, "k" * 64, bytes(8))]), "are bytes, end to end, not str"),  # type: ignore[arg-type]
        (Job(1, [GroupTransfer(0, b"k" * 63, bytes(8))]), "whole number"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(7))]), "4 for each"),
        (Job(1, [GroupTransfer(0, b"k" * 64, [0, 1])]), "4 for each"),  # type: ignore[arg-type]
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(4))]), "1 block ids from block 0 on do not fit 2 keys"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(12), -1)]), "from block -1 on do not fit"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(8), 0.0)]), "first_block is an int, not float"),  # type: ignore[arg-type]
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(8), False)]), "first_block is an int, not bool"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(8), 0, bytes(32))]), "2 keys have 64 bytes of parents, or none"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(8), 0, bytes(64), bytes(60))]), "2 keys have 64 bytes of tokens"),
        (Job(1, [GroupTransfer(0, b"k" * 64, bytes(8), before=b"k")]), "32 bytes of the key before them"),
    ],
)
def test_a_job_that_is_none_is_refused_before_any_is_sent(
    worker: WorkerClient, link: PaperLink, wrong: Job, sentence: str
) -> None:
    """The daemon refuses a message as a whole: all jobs of the step would fail."""
    with pytest.raises(ValueError, match=sentence):
        submit(worker, link, 0.0, Job(7, TRANSFER), wrong)
    for sole in (-1, 2**62, "1", True):
        with pytest.raises(ValueError, match="sole is a number from 0"):
            worker.submit([Job(7, TRANSFER)], sole=sole)  # type: ignore[arg-type]
    assert (worker.unfinished, worker._sent, worker._results, link.count(m.Submit)) == (0, {}, [], 0)


@pytest.mark.parametrize("code", [ErrorCode.BAD_KEYS, ErrorCode.BAD_BLOCK_IDS])
def test_a_job_that_the_daemon_refuses_fails_alone(worker: WorkerClient, link: PaperLink, code: ErrorCode) -> None:
    """The daemon refuses a message as a whole and has begun no job of it, so the others are sent again."""
    link.time = 0.0
    worker.submit([Job(1, TRANSFER), Job(2, TRANSFER, 1 << 32), Job(3, TRANSFER)], sole=7)
    worker.tick(JOB_PATIENCE_S)
    asked = link.last(m.Results)
    worker.on_reply(m.Error(link.last(m.Submit).request_id, code, "Not 2."), 1.1)
    first, *alone = [one for one in link.sent if isinstance(one, m.Submit)]
    assert [[job.job_id for job in jobs] for jobs in jobs_sent(link)] == [[2, 1, 3], [1], [2], [3]]
    assert {one.sole for one in alone} == {first.sole} == {7}
    worker.on_reply(m.ResultsReply(asked.request_id, [], []), 1.1)
    assert not worker._results, "the daemon was asked before they went out again"
    worker.on_reply(m.Error(alone[1].request_id, code, "Not 2."), 1.2)
    publish(worker, completions(1, 1, 3), 1.3)
    assert [(one.job_id, one.error) for one in worker._results] == [(2, code), (1, None), (3, None)]
    assert (len([one for one in link.sent if isinstance(one, m.Submit)]), worker._sent) == (4, {})


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_REGISTRATION, ErrorCode.TOO_MANY])
def test_a_refusal_of_no_single_job_fails_all(worker: WorkerClient, link: PaperLink, code: ErrorCode) -> None:
    submit(worker, link, 0.0, Job(1, TRANSFER), Job(2, TRANSFER))
    worker.on_reply(m.Error(link.last(m.Submit).request_id, code, "No."), 0.1)
    assert [(one.job_id, one.error) for one in worker._results] == [(1, code), (2, code)]
    assert link.count(m.Submit) == 1


def test_true_is_no_block_id() -> None:
    """struct packs it as 1, the block of another request."""
    with pytest.raises(ValueError, match="not True or False"):
        GroupTransfer.of([b"k" * 32] * 2, [0, True])


@pytest.mark.parametrize("first", [-1, 2**32])
def test_a_group_without_keys_has_no_first_block(worker: WorkerClient, link: PaperLink, first: int) -> None:
    """It is no number of a message, so the job would be known and never sent."""
    worker._namespace = NamespaceSpec.named("two", groups=[m.GroupSpec("full_attention", 0)] * 2)
    with pytest.raises(ValueError, match=f"0 block ids from block {first} on do not fit 0 keys"):
        submit(worker, link, 0.0, Job(1, [*TRANSFER, GroupTransfer(1, b"", b"", first)]))
    assert (worker.unfinished, worker._sent, link.count(m.Submit)) == (0, {}, 0)


def covered(part: GroupTransfer) -> list[tuple[bytes, int, bytes]]:
    """Key, place in the key and block id of every block."""
    found = []
    for number in range(len(part.block_ids) // m.BLOCK_ID_BYTES):
        at = part.first_block + number
        key = part.keys[at // 4 * 32 : (at // 4 + 1) * 32]
        assert len(key) == 32
        found.append((key, at % 4, part.block_ids[number * 4 : number * 4 + 4]))
    return found


def test_a_large_lookup_is_asked_in_parts_under_one_lease(scheduler: SchedulerClient, link: PaperLink) -> None:
    scheduler._limits = msgspec.structs.replace(LIMITS, max_keys_per_request=3)
    groups = [m.GroupKeys(0, bytes(range(160))), m.GroupKeys(0, bytes(range(64)))]
    future = look_up(scheduler, link, 0.0, groups)
    parts = [message for message in link.sent if isinstance(message, m.Lookup)]
    assert {part.lease_id for part in parts} == {parts[0].lease_id}
    assert [[(one.group, len(one.keys) // 32) for one in part.groups] for part in parts] == [
        [(0, 3)],
        [(0, 2), (0, 1)],
        [(0, 1)],
    ]
    answers = [([b"\2\2\2"], 3), ([b"\2\0", b"\2"], 5), ([b"\0"], 5)]  # pinned under the lease by then
    for part, (states, pinned) in zip(parts, answers, strict=True):
        assert not future.done
        scheduler.on_reply(m.LookupReply(part.request_id, part.lease_id, states, pinned, 10_000), 0.1)
    assert (future.states, future.pinned, future.alive) == ([b"\2\2\2\2\0", b"\2\0"], 5, True)
    assert list(scheduler._leases) == [future.lease_id]
    scheduler.tick(1.5)
    assert future.alive


def test_what_a_late_answer_pinned_is_released(scheduler: SchedulerClient, link: PaperLink) -> None:
    """The daemon stood still for longer than a request is awaited, and pins for ten minutes."""
    look_up(scheduler, link, 0.0)
    asked = link.last(m.Lookup)
    scheduler.tick(OPTIONS.request_timeout_s)
    sent = len(link.sent)
    scheduler.on_reply(m.LookupReply(asked.request_id, asked.lease_id, [b"\2", b"\2"], 2, 600_000), 9.0)
    assert [message.lease_ids for message in link.sent[sent:] if isinstance(message, m.Release)] == [[asked.lease_id]]


def test_a_lookup_with_a_refused_part_holds_nothing(scheduler: SchedulerClient, link: PaperLink) -> None:
    scheduler._limits = msgspec.structs.replace(LIMITS, max_keys_per_request=1)
    future = look_up(scheduler, link, 0.0, KEYS)
    first, second = (message for message in link.sent if isinstance(message, m.Lookup))
    scheduler.on_reply(m.LookupReply(first.request_id, first.lease_id, [b"\2"], 1, 10_000), 0.1)
    scheduler.on_reply(m.Error(second.request_id, ErrorCode.TOO_MANY, "Too many."), 0.1)
    assert future.failed
    release = link.last(m.Release)
    assert release.lease_ids == [future.lease_id]
    assert not scheduler._leases


def test_a_lookup_whose_first_part_is_refused_holds_nothing_of_the_others(
    scheduler: SchedulerClient, link: PaperLink
) -> None:
    """Also if the answer of an earlier part comes when a later one could not be sent."""
    scheduler._limits = msgspec.structs.replace(LIMITS, max_keys_per_request=1)
    future = look_up(scheduler, link, 0.0, KEYS)
    first, second = (message for message in link.sent if isinstance(message, m.Lookup))
    scheduler.on_reply(m.Error(first.request_id, ErrorCode.TOO_MANY, "Too many."), 0.1)
    assert future.failed
    answered = len(link.sent)
    scheduler.on_reply(m.LookupReply(second.request_id, second.lease_id, [b"\2"], 1, 10_000), 0.2)
    assert [one.lease_ids for one in link.sent[answered:] if isinstance(one, m.Release)] == [[future.lease_id]]

    link.full_after = 1
    future = look_up(scheduler, link, 1.0, KEYS)
    assert future.failed, "its second part was not sent"
    link.full_after = None
    sent = link.last(m.Lookup)
    scheduler.on_reply(m.LookupReply(sent.request_id, sent.lease_id, [b"\2"], 1, 10_000), 1.1)
    assert link.last(m.Release).lease_ids == [future.lease_id]


# --- calls that make no sense ------------------------------------------------------------------------


WRONG_CALLS: dict[str, tuple[Callable[[SchedulerClient], object], str]] = {
    "text for keys": (lambda one: one.lookup([m.GroupKeys(0, "k" * 64)]), "are bytes, end to end, not str"),  # type: ignore[arg-type]
    "list of keys": (lambda one: one.lookup([m.GroupKeys(0, [bytes(32)])]), "are bytes, end to end, not list"),  # type: ignore[arg-type]
    "part of a key": (lambda one: one.lookup([m.GroupKeys(0, bytes(33))]), "33 bytes are not a whole number of keys"),
    "unknown group": (lambda one: one.lookup([m.GroupKeys(1, bytes(32))]), "groups 0 to 0, not 1"),
    "too many groups": (lambda one: one.lookup(KEYS * 65), "64 groups at most, not 65"),
    "peer": (lambda one: one.lookup(KEYS, peer="x" * 254), r"Lookup.peer: Expected `str` of length <= 253\.$"),
    "giver": (lambda one: one.lookup(KEYS, giver=-1), r"Lookup.giver: Expected `int` >= 0\.$"),
    "type that has no bytes": (lambda one: one.lookup(KEYS, giver=object()), "Lookup: .*unsupported"),  # type: ignore[arg-type]
    "number too large": (lambda one: one.lookup(KEYS, giver=1 << 70), "Lookup: can't serialize ints"),
    "keys in use": (lambda one: one.show_used([m.GroupKeys(1, bytes(32))]), "groups 0 to 0, not 1"),
    "lease": (lambda one: one.release(7), r"Release.lease_ids\[0\]: Expected `int` >= 4294967296"),
    "invalid keys": (lambda one: one.invalidate([m.GroupKeys(0, bytes(31))]), "whole number of keys"),
    "action": (lambda one: one.hint("keep", KEYS), "Hint.action: Invalid enum value 'keep'"),  # type: ignore[arg-type]
    "hinted keys": (lambda one: one.hint(m.HintAction.RETAIN, [m.GroupKeys(0, bytes(31))]), "whole number of keys"),
    "priority": (lambda one: one.hint(m.HintAction.RETAIN, KEYS, 101), "Hint.priority: Expected `int` <= 100"),
    "time": (lambda one: one.hint(m.HintAction.RETAIN, KEYS, 1, -1.0), "Hint.ttl_s: Expected `float` >= 0"),
    "rate": (lambda one: one.report(-1.0, 0, 0), "ReportEngine.prefill_tokens_per_second: Expected `float` >= 0"),
    "prompt": (
        lambda one: one.report_prompt(m.PromptReport("x" * 129, 0.0, 1, 1, 1, 0, 0, "missed")),
        r"ReportPrompts.prompts\[0\]\[0\]: Expected `str` of length <= 128",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_and_changes_nothing(scheduler: SchedulerClient, link: PaperLink, name: str) -> None:
    """The daemon would refuse it in its log only, or the keys of others with it."""
    call, sentence = WRONG_CALLS[name]
    sent = len(link.sent)
    with pytest.raises(ValueError, match=sentence):
        call(scheduler)
    assert (len(link.sent), scheduler._unanswered, scheduler._pending, len(scheduler._reports)) == (sent, {}, {}, 0)
