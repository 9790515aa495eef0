"""Stores and loads: accepted whole or refused whole, copied by an engine, answered by exactly one completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.cache.pins import LoadTicket, StoreTicket
from kvoffd.errors import BadBlockIds, BadKeys, NotReady
from kvoffd.observe.meters import RateMeter
from kvoffd.server.registration import Registration
from kvoffd.server.session import Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Direction, Outcome, Transfer
from kvoffd.transfer.plan import Plan, check_blocks, concatenate, plan_copy
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import BLOCK_ID_BYTES, GroupKeys, GroupTransfer, JobResult, Load, Store

logger = logging.getLogger(__name__)

_ERROR_OF_OUTCOME = {
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.DEADLINE: ErrorCode.DEADLINE,
    Outcome.FAILED: ErrorCode.COPY_FAILED,
    Outcome.CORRUPT: ErrorCode.CHECKSUM,
}


@dataclass(eq=False)
class Job:
    """An accepted store or load."""

    id: int
    session: Session
    registration: Registration
    direction: Direction
    accepted_at: float
    nbytes: int = 0
    store_tickets: list[StoreTicket] = field(default_factory=list)
    load_tickets: list[LoadTicket] = field(default_factory=list)
    failed: list[GroupKeys] = field(default_factory=list)
    """Keys that are known to fail before a byte moves: no room for a store's, not ready for a load's."""
    inspection: SlotChecksums | None = None
    """A store's checksums, by ticket and key; a load's, of ``looks``."""
    looks: list[ChecksumCheck] = field(default_factory=list)
    """Slots that a load compares with their checksums."""
    transfer: Transfer | None = None
    answered: bool = False
    """It has its completion, but its copy hangs and still holds its slots and its registration's memory."""


@dataclass
class DirectionCounters:
    """What happened to the jobs of one direction."""

    jobs: int = 0
    failed_jobs: int = 0
    bytes: int = 0
    rate: RateMeter = field(default_factory=RateMeter)


class JobRunner:
    """Turns Store and Load into transfers and transfers into completions.

    ``post`` carries a finished transfer from whatever thread the engine runs in back to the thread that runs
    this object; it calls ``transfer_done`` there. ``verify_share`` of the loads compare all their slots with their
    checksums; the others only those that nobody has verified since an earlier daemon wrote them.

    A copy on a GPU that hangs does not come back at its deadline. A store of that kind is answered all the same: the
    engine's blocks are only read, and the slots hold nothing that anyone may read. They stay taken, and the
    registration mapped, until the copy has ended after all. A load of that kind is not answered: its bytes may still
    land in the engine's blocks, which the engine keeps until it has the completion or the lifeline has ended.
    """

    def __init__(
        self,
        cache: BlockCache,
        pool_address: int,
        clock: Callable[[], float],
        deadline_s: float,
        post: Callable[[Job, Outcome], None],
        verify_share: float = 0.0,
    ) -> None:
        self._cache = cache
        self._pool_address = pool_address
        self._clock = clock
        self._deadline_s = deadline_s
        self._post = post
        self._verify_share = verify_share
        self._verify_due = 0.0
        self._running: dict[Job, None] = {}
        self._ended_at = float("-inf")
        self._told: dict[int, Session] = {}
        self.counters = {Direction.STORE: DirectionCounters(), Direction.LOAD: DirectionCounters()}

    @property
    def unfinished(self) -> int:
        """Accepted jobs that have not ended."""
        return len(self._running)

    def busy(self, within_s: float) -> bool:
        """Whether a job is unfinished, or was so many seconds ago."""
        return bool(self._running) or self._clock() - self._ended_at < within_s

    def take_told(self) -> list[Session]:
        """Sessions with results that no flush has published yet."""
        told = list(self._told.values())
        self._told.clear()
        return told

    def store(self, session: Session, registration: Registration, message: Store) -> None:
        """Accept a store, or raise KvoffdError and change nothing."""
        namespace = registration.namespace
        block_ids = _check(registration, message.groups, Direction.STORE)
        job = Job(message.job_id, session, registration, Direction.STORE, self._clock())
        plans: list[Plan] = []
        try:
            for part, ids in zip(message.groups, block_ids, strict=True):
                ticket = self._cache.begin_store(
                    namespace,
                    registration.rank,
                    part.group,
                    part.keys,
                    part.first_block,
                    job.store_tickets,
                    registration.memory.node,
                )
                job.store_tickets.append(ticket)
                if ticket.dropped:
                    job.failed.append(GroupKeys(part.group, _pick(part.keys, namespace.key_bytes, ticket.dropped)))
                plans.append(self._plan(registration, part, ids, Direction.STORE, ticket.copy, ticket.offsets))
            plan = concatenate(plans)
            job.inspection = self._inspect_store(job, plan)
        except BaseException:
            for ticket in job.store_tickets:
                self._cache.abort_store(ticket)
            raise
        self._start(job, plan)

    def load(self, session: Session, registration: Registration, message: Load) -> None:
        """Accept a load, or raise KvoffdError and change nothing. A block that is not there fails the accepted job."""
        namespace = registration.namespace
        block_ids = _check(registration, message.groups, Direction.LOAD)
        job = Job(message.job_id, session, registration, Direction.LOAD, self._clock())
        plans: list[Plan] = []
        try:
            for part, ids in zip(message.groups, block_ids, strict=True):
                try:
                    ticket = self._cache.begin_load(
                        namespace, registration.rank, message.lease_id, part.group, part.keys, part.first_block
                    )
                except NotReady as refusal:
                    job.failed.append(GroupKeys(part.group, _pick(part.keys, namespace.key_bytes, refusal.missing)))
                    continue
                job.load_tickets.append(ticket)
                every = range(len(ticket.offsets))
                plans.append(self._plan(registration, part, ids, Direction.LOAD, every, ticket.offsets))
            plan = concatenate([] if job.failed else plans)
            if not job.failed:
                job.inspection = self._inspect_load(job)
        except BaseException:
            self._cache.end_load(job.load_tickets, ok=False)
            raise
        self._start(job, plan)

    def cancel(self, jobs: Iterable[Job]) -> tuple[list[int], list[int]]:
        """Fail what has not started. Returns the ids of those, and of those whose bytes are moving."""
        cancelled: list[int] = []
        running: list[int] = []
        for job in jobs:
            if job.transfer is not None and job.registration.memory.engine.cancel(job.transfer):
                cancelled.append(job.id)
            else:
                running.append(job.id)
        return cancelled, running

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Stop jobs whose session is gone: those that wait now, those that run at their next step."""
        for job in jobs:
            engine = job.registration.memory.engine
            if job.transfer is not None and not engine.cancel(job.transfer):
                engine.abandon(job.transfer)

    def abandon_all(self) -> None:
        """Stop every job, oldest first, as when the daemon's own deadline for stopping has passed."""
        self.abandon(list(self._running))

    def transfer_done(self, job: Job, outcome: Outcome) -> None:
        """End ``job``: commit or give back its blocks, and put its completion into its session's log."""
        if job.answered:
            for ticket in job.store_tickets:
                self._cache.abort_store(ticket)
            self._release(job)
            job.session.copy_came_back(job)
            return
        done = outcome is Outcome.DONE
        # The client may have given its blocks to another request the moment it closed its lifeline, so what was
        # copied counts only if the lifeline is still open now, after the copy.
        if job.direction is Direction.STORE and done and (job.session.ended or not job.session.lifeline.alive()):
            done, outcome = False, Outcome.CANCELLED
        if job.direction is Direction.LOAD and not self._judge_load(job):
            done, outcome = False, Outcome.CORRUPT
        error: ErrorCode | None = None if done else _ERROR_OF_OUTCOME[outcome]
        if done and job.failed:
            error = ErrorCode.NO_ROOM if job.direction is Direction.STORE else ErrorCode.NOT_READY
        if job.session.ended and error is not None:
            error = ErrorCode.SESSION_ENDED
        if job.direction is Direction.STORE:
            self._end_store(job, done)
        else:
            self._cache.end_load(job.load_tickets, ok=done and not job.failed)
        self._answer(job, error, job.nbytes if done else 0)
        self._release(job)
        job.session.job_ended(job.id)

    def transfer_overdue(self, job: Job) -> None:
        """The job's copy hangs beyond its deadline: answer it if it is a store. See the class."""
        if job.direction is not Direction.STORE or job.answered or job not in self._running:
            return
        job.answered = True
        for ticket in job.store_tickets:
            if ticket.blocks:
                job.failed.append(GroupKeys(ticket.group, b"".join(block.key for block in ticket.blocks)))
            # So that others may store these keys, elsewhere in the pool.
            self._cache.drop_incomplete(ticket.blocks)
        self._answer(job, ErrorCode.SESSION_ENDED if job.session.ended else ErrorCode.DEADLINE, 0)
        job.session.job_hangs(job)

    # --- inside ----------------------------------------------------------------------------------

    def _plan(
        self,
        registration: Registration,
        part: GroupTransfer,
        block_ids: npt.NDArray[np.int32],
        direction: Direction,
        chosen: Sequence[int],
        offsets: Sequence[int],
    ) -> Plan:
        layout = registration.layouts[part.group]
        keys = len(part.keys) // registration.namespace.key_bytes
        slots = np.array(offsets, dtype=np.uint64) + np.uint64(self._pool_address)
        if len(chosen) == keys:
            return plan_copy(layout, direction, block_ids, part.first_block, slots)
        indices = np.array(chosen, dtype=np.int64)
        addresses = np.zeros(keys, dtype=np.uint64)
        addresses[indices] = slots
        mask = np.zeros(keys, dtype=np.bool_)
        mask[indices] = True
        return plan_copy(layout, direction, block_ids, part.first_block, addresses, mask)

    def _start(self, job: Job, plan: Plan) -> None:
        job.nbytes = plan.nbytes
        job.registration.job_started()
        job.session.jobs[job.id] = job
        if job.direction is Direction.STORE:
            job.session.store_bytes += job.nbytes
        self._running[job] = None
        if not plan.pieces:
            if job.inspection is not None:
                job.inspection.run(lambda: None)
            self.transfer_done(job, Outcome.DONE)
            return
        deadline = job.accepted_at + self._deadline_s
        job.transfer = Transfer(
            job.direction,
            plan,
            deadline,
            lambda _, outcome, __: self._post(job, outcome),
            lambda _: self.transfer_overdue(job),
            job.inspection,
        )
        try:
            job.registration.memory.engine.submit(job.transfer)
        except Exception:
            # It is accepted and holds slots: whatever went wrong, its completion must let them go.
            logger.exception("A transfer could not be handed to the copy engine; its job fails.")
            self.transfer_done(job, Outcome.FAILED)

    def _inspect_store(self, job: Job, plan: Plan) -> SlotChecksums | None:
        rank, sizes = job.registration.rank, job.registration.namespace.shard_bytes(job.registration.rank)
        assert sizes is not None, f"rank {rank} has registered"
        slots = [(offset, sizes[ticket.group]) for ticket in job.store_tickets for offset in ticket.offsets]
        if not slots:
            return None
        return SlotChecksums(
            self._cache.slots.digests,
            slots,
            whole_after=plan.whole_after.tolist(),
            pool_address=self._pool_address,
        )

    def _inspect_load(self, job: Job) -> SlotChecksums | None:
        self._verify_due += self._verify_share
        every = self._verify_due >= 1.0
        self._verify_due -= every
        integrity = self._cache.integrity
        job.looks = [look for ticket in job.load_tickets for look in integrity.checks_of_load(ticket, every)]
        if not job.looks:
            return None
        slots = [(look.offset, look.length) for look in job.looks]
        return SlotChecksums(self._cache.slots.digests, slots, [look.checksum for look in job.looks])

    def _judge_load(self, job: Job) -> bool:
        """Act on what the load's slots hashed to; False where it was given wrong bytes, or nearly was."""
        if job.inspection is not None and job.looks:
            for look, found in zip(job.looks, job.inspection.sums, strict=True):
                if found and not self._cache.integrity.apply(look, found):
                    logger.error("%s", wrong_bytes(look))
        if not self._cache.integrity.mismatches:
            return True
        # What somebody else found wrong in the meantime is wrong for this load too.
        corrupt: dict[int, list[bytes]] = {}
        for ticket in job.load_tickets:
            for block, shard in zip(ticket.blocks, ticket.shards, strict=True):
                if shard.corrupt:
                    corrupt.setdefault(block.group, []).append(block.key)
        job.failed += [GroupKeys(group, b"".join(keys)) for group, keys in corrupt.items()]
        return not corrupt

    def _end_store(self, job: Job, done: bool) -> None:
        namespace = job.registration.namespace
        sums = iter(job.inspection.sums if job.inspection is not None else ())
        for ticket in job.store_tickets:
            ticket.checksums = list(islice(sums, len(ticket.offsets)))
            if done:
                self._cache.commit_store(ticket)
            else:
                self._cache.abort_store(ticket)
                if ticket.copy:
                    job.failed.append(GroupKeys(ticket.group, b"".join(block.key for block in ticket.blocks)))
        if done:
            namespace.counters.stored_bytes += job.nbytes

    def _answer(self, job: Job, error: ErrorCode | None, copied: int) -> None:
        session, counters = job.session, self.counters[job.direction]
        counters.jobs += 1
        counters.failed_jobs += error is not None
        counters.bytes += copied
        counters.rate.add(copied)
        if job.direction is Direction.LOAD and error is None:
            job.registration.namespace.counters.loaded_bytes += copied
        if job.direction is Direction.STORE:
            session.store_bytes -= job.nbytes
        seconds = max(0.0, self._clock() - job.accepted_at)
        session.completions.add(JobResult(job.id, error is None, copied, seconds, error, job.failed))
        self._told[session.id] = session

    def _release(self, job: Job) -> None:
        """Nothing touches the job's slots and its registration's memory any more."""
        self._running.pop(job, None)
        self._ended_at = self._clock()
        job.registration.job_ended()


def wrong_bytes(look: ChecksumCheck) -> str:
    """What the log says of a slot that does not hold what was stored in it."""
    return (
        f"The bytes of key {look.block.key.hex()} (group {look.block.group}, rank {look.rank}) at pool offset "
        f"{look.offset} are not those that were stored: the block is dropped and its slot not used any more. "
        "Something wrote over them, or the machine's memory fails."
    )


def _check(
    registration: Registration, parts: Sequence[GroupTransfer], direction: Direction
) -> list[npt.NDArray[np.int32]]:
    """Check all of a job before anything changes; return the block ids (int32, [m]) per part."""
    storing = direction is Direction.STORE
    seen: set[int] = set()
    block_ids: list[npt.NDArray[np.int32]] = []
    for part in parts:
        keys = registration.namespace.split(part.group, part.keys, distinct=storing)
        if part.group in seen:
            raise BadKeys(f"Group {part.group} is named twice in one job; put its keys into one part.")
        seen.add(part.group)
        if len(part.block_ids) % BLOCK_ID_BYTES:
            raise BadBlockIds(f"Block ids are int32; {len(part.block_ids)} bytes are not a whole number of them.")
        ids = np.frombuffer(part.block_ids, dtype="<i4")
        check_blocks(registration.layouts[part.group], ids, len(keys), part.first_block, storing)
        block_ids.append(ids)
    return block_ids


def _pick(keys: bytes, key_bytes: int, indices: Iterable[int]) -> bytes:
    return b"".join(keys[i * key_bytes : (i + 1) * key_bytes] for i in indices)
