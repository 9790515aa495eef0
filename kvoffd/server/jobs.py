"""Runs jobs: each is handed to a copy engine and ended exactly once, whatever happens in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.session_memory import copy_bytes
from kvoffd.server.engine_memory import Post
from kvoffd.server.session import Job, Session
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import Direction, Outcome, Plan
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

QUIET_S = 0.05
"""Engines that have copied nothing for so long do not copy."""

ERROR_OF_OUTCOME = {
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.DEADLINE: ErrorCode.DEADLINE,
    Outcome.FAILED: ErrorCode.COPY_FAILED,
    Outcome.CORRUPT: ErrorCode.CHECKSUM,
}


class JobRunner:
    """Jobs of all sessions, from their acceptance to their end.

    ``post`` carries the end of a copy from whatever thread the engine runs in to the thread that runs this object.

    A copy on a GPU that hangs does not come back at its deadline. A store of that kind is answered all the same: the
    engine's blocks are only read, and the slots hold nothing that anyone may read. They stay taken, and the
    registration mapped, until the copy has ended after all. A load of that kind is not answered: its bytes may still
    land in the engine's blocks, which the engine keeps until it has the completion or the lifeline has ended.
    """

    def __init__(self, cache: BlockCache, clock: Callable[[], float], deadline_s: float, post: Post) -> None:
        self._cache = cache
        self.clock = clock
        self._deadline_s = deadline_s
        self._post = post
        self._running: dict[Job, None] = {}
        self._ended_at = float("-inf")

    @property
    def unfinished(self) -> int:
        return sum(len(job.ids) for job in self._running)

    def busy(self) -> bool:
        """Whether a job is unfinished, or was ``QUIET_S`` ago."""
        return bool(self._running) or self.clock() - self._ended_at < QUIET_S

    def start(self, job: Job, plan: Plan) -> None:
        """Run a job that was accepted. It ends, maybe at once, whatever becomes of its copy."""
        job.nbytes = plan.nbytes
        job.client_memory.job_started()
        job.session.jobs.update(dict.fromkeys(job.ids, job))
        job.session.pieces += job.pieces
        job.charged_bytes = copy_bytes(len(job.ids), job.pieces)
        self._cache.memory.take(job.session.id, job.charged_bytes)
        self._running[job] = None
        if not plan.pieces:
            outcome = job.checksums.run(lambda: None) if job.checksums is not None else None
            self.transfer_done(job, outcome or Outcome.DONE)
            return
        job.transfer = Transfer(
            job.direction,
            plan,
            job.accepted_at + self._deadline_s,
            lambda _, outcome, __: self._post(lambda: self.transfer_done(job, outcome)),
            lambda _: self.transfer_overdue(job),
            job.checksums,
            # Processes take turns, as they do at the sockets; one that the kernel does not tell has its sessions do so.
            owner=job.session.peer.process or -job.session.id,
        )
        try:
            job.client_memory.memory.engine.submit(job.transfer)
        except Exception:
            # It is accepted and holds slots: whatever went wrong, its end must let them go.
            logger.exception("A transfer could not be handed to the copy engine; its job fails.")
            self.transfer_done(job, Outcome.FAILED)

    def cancel(self, session: Session, job_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """Fail what has not started. Returns the ids of that, and those given whose bytes move, or will.

        Stores that are copied together are cancelled together, all of them when one is to be. Ids that are no
        unfinished job's are ignored.
        """
        cancelled: list[int] = []
        running: list[int] = []
        wanted: dict[Job, list[int]] = {}
        for job_id in dict.fromkeys(job_ids):
            if job_id in session.jobs:
                wanted.setdefault(session.jobs[job_id], []).append(job_id)
        for job, ids in wanted.items():
            if job.transfer is not None and job.client_memory.memory.engine.cancel(job.transfer):
                cancelled.extend(job.ids)
            else:
                running.extend(ids)
        return cancelled, running

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Stop jobs whose session is gone: those that wait now, those that run at their next step."""
        for job in dict.fromkeys(jobs):
            engine = job.client_memory.memory.engine
            if job.transfer is not None and not engine.cancel(job.transfer):
                engine.abandon(job.transfer)

    def abandon_all(self) -> None:
        """Stop every job, oldest first, as when the daemon's own deadline for stopping has passed."""
        self.abandon(list(self._running))

    def transfer_done(self, job: Job, outcome: Outcome) -> None:
        """The copy has ended: nothing touches the job's slots and the client's memory any more."""
        if job.answered:
            self.abort_stores(job)
        else:
            # The client may have given its blocks to another request the moment it closed its lifeline, so what was
            # copied counts only if the lifeline is still open now, after the copy.
            storing = job.direction is Direction.STORE
            if storing and outcome is Outcome.DONE and (job.session.ended or not job.session.lifeline.alive()):
                outcome = Outcome.CANCELLED
            job.end(outcome)
        self._running.pop(job, None)
        self._cache.memory.take(job.session.id, -job.charged_bytes)
        self._ended_at = self.clock()
        job.client_memory.job_ended()
        job.session.job_ended(job)
        job.transfer = None  # they refer to each other, and full collections are off (GC_THRESHOLDS)

    def transfer_overdue(self, job: Job) -> None:
        """The job's copy hangs beyond its deadline. See the class."""
        if job.answered or job not in self._running or job.direction is Direction.LOAD:
            return
        for ticket in job.store_tickets:
            self._cache.drop_incomplete(ticket.blocks)  # others may store its keys elsewhere in the pool
        job.answer_overdue()
        job.answered = True
        job.session.job_hangs(job)

    def commit_stores(self, job: Job) -> None:
        """Make the blocks readable that a job has copied. Its checksums are by ticket and key."""
        checksums = iter(job.checksums.sums if job.checksums is not None else ())
        for ticket in job.store_tickets:
            ticket.checksums = list(islice(checksums, len(ticket.copy)))
            self._cache.commit_store(ticket)

    def abort_stores(self, job: Job) -> None:
        """Give the slots of a job back, whose bytes count for nothing."""
        for ticket in job.store_tickets:
            self._cache.abort_store(ticket)
