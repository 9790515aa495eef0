"""Requests of an engine's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.errors import KvoffdError
from kvoffd.server.registration import Registration
from kvoffd.server.session import Session
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode

if TYPE_CHECKING:
    from kvoffd.server.service import Service

MAX_UNACKNOWLEDGED_RESULTS = 65536
MAX_UNACKNOWLEDGED_BYTES = 16 * 1024**2


def store(service: Service, session: Session, message: m.Store) -> None:
    """Accept a store; its completion is the answer."""
    service.jobs.store(session, _admit_job(service, session, message), message)


def load(service: Service, session: Session, message: m.Load) -> None:
    """Accept a load; its completion is the answer."""
    service.jobs.load(session, _admit_job(service, session, message), message)


def cancel(service: Service, session: Session, message: m.Cancel) -> m.CancelReply:
    """Fail jobs that have not started. Unknown ids have ended and are in neither list."""
    jobs = [session.jobs[job_id] for job_id in dict.fromkeys(message.job_ids) if job_id in session.jobs]
    cancelled, running = service.jobs.cancel(jobs)
    return m.CancelReply(message.request_id, service.epoch, cancelled, running)


def _admit_job(service: Service, session: Session, message: m.Store | m.Load) -> Registration:
    """The checks that every job must pass before its own."""
    service.refuse_when_stopping()
    registration = service.registration_of(session, message.registration_id)
    if message.job_id in session.jobs:
        raise KvoffdError(ErrorCode.DUPLICATE_JOB.sentence, ErrorCode.DUPLICATE_JOB)
    if len(session.jobs) >= service.config.max_jobs_in_flight:
        raise KvoffdError(f"The session has {len(session.jobs)} jobs in flight, its limit.", ErrorCode.TOO_MANY)
    log = session.completions
    if len(log) >= MAX_UNACKNOWLEDGED_RESULTS or log.kept_bytes >= MAX_UNACKNOWLEDGED_BYTES:
        raise KvoffdError("The session does not acknowledge its completions; send Heartbeat.", ErrorCode.TOO_MANY)
    # Credits are a promise of the client; this is the bound behind it, for one that does not keep it.
    if isinstance(message, m.Store) and session.store_bytes > 2 * service.credit_bytes:
        raise KvoffdError(
            "The session's outstanding stores are far beyond its credit; wait for completions.", ErrorCode.TOO_MANY
        )
    service.check_key_count(registration.namespace, message.groups)
    return registration
