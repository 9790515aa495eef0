"""A store whose copy does not come back: it is answered, and lets go of its keys but of nobody else's blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffd.cache.pins import StoreTicket
from kvoffd.config import Config, Limits
from kvoffd.errors import KvoffdError
from kvoffd.server.engine_jobs import EngineJobs, StoredGroup, StoreJobs
from kvoffd.server.jobs import JobRunner
from kvoffd.server.session import CompletionLog, Lifeline, Peer, Session
from kvoffd.server.submission import Submission
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import Outcome, build_layouts
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import PageRef, TensorLayout
from kvoffd_proto.messages import GroupTransfer, Store, Submit
from tests.kit.cache_harness import SLOT_UNIT, CacheHarness, begin_store, keys_of, made

WRITING, READY, ABSENT = 1, 2, 0


def hung_store(rig: CacheHarness, runner: JobRunner, keys: bytes) -> StoreJobs:
    """A store of an engine's that was accepted, and whose copy hangs."""
    namespace = rig.cache.namespaces[0]
    session = SimpleNamespace(
        id=1,
        ended=False,
        store_bytes=0,
        completions=CompletionLog(1, 1),
        job_hangs=lambda job: None,
        job_ended=lambda job: None,
    )
    registration = SimpleNamespace(namespace=namespace, job_ended=lambda: None)
    owner = EngineJobs(Config(), rig.cache, 0, runner)
    one = np.zeros(1, dtype=np.int64)
    group = StoredGroup(0, namespace.split(0, keys), np.arange(2, dtype=np.int32), np.arange(2), one, one, one, {})
    job = StoreJobs((1,), cast(Any, session), cast(Any, registration), owner, [group])
    job.store_tickets.append(begin_store(rig.cache, namespace, 0, 0, keys))
    runner._running[job] = None
    return job


def runner_of(rig: CacheHarness) -> JobRunner:
    return JobRunner(rig.cache, rig.clock, 30.0, lambda call: None)


def test_its_keys_are_free_for_others_and_its_slots_are_not() -> None:
    rig = CacheHarness()
    namespace, runner = rig.open(), runner_of(rig)
    job = hung_store(rig, runner, keys_of(1, 2))
    free = rig.slots.free_bytes
    runner.transfer_overdue(job)
    assert job.session.completions.flush(0) is not None
    (completions,) = job.session.completions.replay()
    (result,) = completions.results
    assert (result.ok, result.error) == (False, ErrorCode.DEADLINE)
    assert rig.states(namespace, keys_of(1, 2)) == [ABSENT, ABSENT]
    assert rig.slots.free_bytes == free
    rig.put(namespace, keys_of(1))
    assert rig.states(namespace, keys_of(1, 2)) == [READY, ABSENT]
    runner.transfer_done(job, Outcome.FAILED)
    assert rig.states(namespace, keys_of(1, 2)) == [READY, ABSENT]
    assert rig.slots.free_bytes == free + namespace.slot_bytes(0, 0)
    rig.cache.pool_usage()


def test_what_others_stored_under_its_keys_stays() -> None:
    rig = CacheHarness()
    namespace, runner = rig.open(), runner_of(rig)
    job = hung_store(rig, runner, keys_of(1))
    made(rig.cache.clear(namespace))
    rig.put(namespace, keys_of(1))
    runner.transfer_overdue(job)
    assert rig.states(namespace, keys_of(1)) == [READY]


def test_a_store_that_hangs_is_in_flight_until_its_copy_has_ended() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    runner = runner_of(rig)
    job = hung_store(rig, runner, keys_of(1))
    jobs = EngineJobs(Config(limits=Limits(max_jobs_in_flight=1)), rig.cache, 0, runner)
    registration = cast(Any, SimpleNamespace(namespace=namespace))
    session = Session(1, b"t" * 16, Peer(0, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1), hanging={job})
    submission = Submission(jobs, session, Submit(1, b"t" * 16, b"r" * 16), 0)
    with pytest.raises(KvoffdError) as refusal:
        submission.check(registration, Store(2, []), storing=True)
    assert refusal.value.code is ErrorCode.TOO_MANY
    session.hanging.clear()
    submission.check(registration, Store(2, []), storing=True)


def test_the_pieces_of_all_jobs_of_a_session_are_bounded() -> None:
    rig = CacheHarness()
    namespace = rig.open()
    jobs = EngineJobs(Config(limits=Limits(max_pieces_in_flight=100)), rig.cache, 0, runner_of(rig))
    session = Session(1, b"t" * 16, Peer(0, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1))
    layout = SimpleNamespace(page_bytes=np.ones(30), blocks_per_key=1)
    registration = cast(Any, SimpleNamespace(namespace=namespace, layouts=[layout]))
    store = Store(2, [GroupTransfer(0, keys_of(1, 2), bytes(8))])
    submission = Submission(jobs, session, Submit(1, b"t" * 16, b"r" * 16), 0)
    assert submission.check(registration, store, storing=True) == 60
    session.pieces = 41
    with pytest.raises(KvoffdError, match="have 41 pieces") as refusal:
        submission.check(registration, store, storing=True)
    assert refusal.value.code is ErrorCode.TOO_MANY
    session.pieces = 40
    layout.page_bytes = np.ones(1)
    assert submission.check(registration, store, storing=True) == 16, "a key counts as eight at least"


def test_the_time_of_a_job_begins_before_its_slots_are_taken() -> None:
    rig = CacheHarness()
    namespace, runner = rig.open(), runner_of(rig)
    transfers: list[Transfer] = []
    registration = SimpleNamespace(
        namespace=namespace,
        rank=0,
        layouts=build_layouts([(2**30, SLOT_UNIT)], [TensorLayout(0, 0, SLOT_UNIT, 1)], [[PageRef(0, SLOT_UNIT)]], 1),
        memory=SimpleNamespace(node=None, engine=SimpleNamespace(submit=transfers.append)),
        job_started=lambda: None,
    )
    begin_stores = rig.cache.begin_stores

    def slow_begin_stores(*arguments: Any) -> StoreTicket:
        rig.clock.now += 2.0
        return begin_stores(*arguments)

    rig.cache.begin_stores = slow_begin_stores  # type: ignore[method-assign]
    session = Session(1, b"t" * 16, Peer(1, 0, 0), Lifeline(), 0.0, CompletionLog(1, 1))
    session.registrations[b"r" * 16] = cast(Any, registration)
    jobs = EngineJobs(Config(), rig.cache, 0, runner)
    accepted_at = rig.clock.now
    message = Submit(1, b"t" * 16, b"r" * 16, [Store(1, [GroupTransfer(0, keys_of(1), bytes(4))])])
    submission = Submission(jobs, session, message, 0)
    submission.run()
    assert not submission.refused
    job = session.jobs[1]
    assert (job.accepted_at, transfers[0].deadline) == (accepted_at, accepted_at + 30.0)
