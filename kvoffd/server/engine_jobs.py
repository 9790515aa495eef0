"""Stores and loads of workers: accepted whole or refused whole, answered by exactly one completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.cache.pins import LoadTicket
from kvoffd.config import Config
from kvoffd.errors import BadBlockIds, BadKeys, KvoffdError, NotReady
from kvoffd.observe.meters import RateMeter
from kvoffd.server.jobs import ERROR_OF_OUTCOME, JobRunner
from kvoffd.server.session import Job, Registration, Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Direction, Outcome
from kvoffd.transfer.plan import Plan, check_blocks, concatenate, plan_copy
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import BLOCK_ID_BYTES, GroupKeys, GroupTransfer, JobResult, Load, Store

logger = logging.getLogger(__name__)

MAX_UNACKNOWLEDGED_RESULTS = 65536
MAX_UNACKNOWLEDGED_BYTES = 16 * 1024**2


@dataclass
class DirectionCounters:
    """What happened to the jobs of one direction."""

    jobs: int = 0
    failed_jobs: int = 0
    bytes: int = 0
    rate: RateMeter = field(default_factory=RateMeter)


class EngineJobs:
    """Accepts stores and loads, and counts them.

    ``verify_share`` of the loads compare all their slots with their checksums; the others only those that nobody has
    verified since an earlier daemon wrote them.
    """

    def __init__(
        self, config: Config, cache: BlockCache, pool_address: int, clock: Callable[[], float], runner: JobRunner
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.counters = {Direction.STORE: DirectionCounters(), Direction.LOAD: DirectionCounters()}
        self.with_results: dict[int, Session] = {}
        """Sessions with results that no flush has published yet, by id."""
        self._max_jobs_in_flight = config.max_jobs_in_flight
        self._verify_share = config.verify_share
        self._verify_due = 0.0
        self._pool_address = pool_address
        self._runner = runner

    def take_sessions_with_results(self) -> list[Session]:
        """The sessions that have results to publish, which are forgotten here."""
        sessions = list(self.with_results.values())
        self.with_results.clear()
        return sessions

    def check_limits(self, session: Session, job_id: int) -> None:
        """Raise KvoffdError where the session has too much under way for one more job, or a job of this id."""
        if job_id in session.jobs:
            raise KvoffdError(ErrorCode.DUPLICATE_JOB.sentence, ErrorCode.DUPLICATE_JOB)
        if len(session.jobs) >= self._max_jobs_in_flight:
            raise KvoffdError(f"The session has {len(session.jobs)} jobs in flight, its limit.", ErrorCode.TOO_MANY)
        log = session.completions
        if len(log) >= MAX_UNACKNOWLEDGED_RESULTS or log.kept_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise KvoffdError("The session does not acknowledge its completions; send Heartbeat.", ErrorCode.TOO_MANY)

    def store(self, session: Session, registration: Registration, message: Store) -> None:
        """Accept a store, or raise KvoffdError and change nothing."""
        namespace = registration.namespace
        block_ids = _check(registration, message.groups, Direction.STORE)
        job = StoreJob(message.job_id, session, registration, self.clock(), self)
        plans: list[Plan] = []
        try:
            for part, ids in zip(message.groups, block_ids, strict=True):
                ticket = self.cache.begin_store(
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
            job.checksums = self._checksums_of_store(job, plan)
        except BaseException:
            for ticket in job.store_tickets:
                self.cache.abort_store(ticket)
            raise
        session.store_bytes += plan.nbytes
        self._runner.start(job, plan)

    def load(self, session: Session, registration: Registration, message: Load) -> None:
        """Accept a load, or raise KvoffdError and change nothing. A block that is not there fails the accepted job."""
        namespace = registration.namespace
        block_ids = _check(registration, message.groups, Direction.LOAD)
        job = LoadJob(message.job_id, session, registration, self.clock(), self)
        plans: list[Plan] = []
        try:
            for part, ids in zip(message.groups, block_ids, strict=True):
                try:
                    ticket = self.cache.begin_load(
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
                job.checksums = self._checksums_of_load(job)
        except BaseException:
            self.cache.end_load(job.load_tickets, ok=False)
            raise
        self._runner.start(job, plan)

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

    def _checksums_of_store(self, job: StoreJob, plan: Plan) -> SlotChecksums | None:
        registration = job.client_memory
        sizes = registration.namespace.shard_bytes(registration.rank)
        assert sizes is not None, f"rank {registration.rank} has registered"
        slots = [(offset, sizes[ticket.group]) for ticket in job.store_tickets for offset in ticket.offsets]
        if not slots:
            return None
        return SlotChecksums(
            self.cache.slots.digests,
            slots,
            whole_after=plan.whole_after.tolist(),
            pool_address=self._pool_address,
        )

    def _checksums_of_load(self, job: LoadJob) -> SlotChecksums | None:
        self._verify_due += self._verify_share
        every = self._verify_due >= 1.0
        self._verify_due -= every
        integrity = self.cache.integrity
        job.checks = [check for ticket in job.load_tickets for check in integrity.checks_of_load(ticket, every)]
        if not job.checks:
            return None
        slots = [(check.offset, check.length) for check in job.checks]
        return SlotChecksums(self.cache.slots.digests, slots, [check.checksum for check in job.checks])


@dataclass(eq=False)
class _EngineJob(Job):
    """A store or load."""

    client_memory: Registration
    owner: EngineJobs
    failed: list[GroupKeys] = field(default_factory=list, init=False)
    """Keys that are known to fail before a byte moves: no room for a store's, not ready for a load's."""

    def answer(self, error: ErrorCode | None, copied_bytes: int) -> None:
        """Put the job's completion into its session's log, and count it."""
        owner, session = self.owner, self.session
        counters = owner.counters[self.direction]
        counters.jobs += 1
        counters.failed_jobs += error is not None
        counters.bytes += copied_bytes
        counters.rate.add(copied_bytes)
        if error is not None and session.ended:
            error = ErrorCode.SESSION_ENDED
        seconds = max(0.0, owner.clock() - self.accepted_at)
        session.completions.add(JobResult(self.id, error is None, copied_bytes, seconds, error, self.failed))
        owner.with_results[session.id] = session


@dataclass(eq=False)
class StoreJob(_EngineJob):
    """A store. Its checksums are by ticket and key."""

    direction = Direction.STORE

    def end(self, outcome: Outcome) -> None:
        """Make its blocks readable or give their slots back, and complete it."""
        done = outcome is Outcome.DONE
        checksums = iter(self.checksums.sums if self.checksums is not None else ())
        for ticket in self.store_tickets:
            ticket.checksums = list(islice(checksums, len(ticket.offsets)))
            if done:
                self.owner.cache.commit_store(ticket)
            else:
                self.owner.cache.abort_store(ticket)
                if ticket.copy:
                    self.failed.append(GroupKeys(ticket.group, b"".join(block.key for block in ticket.blocks)))
        if done:
            self.client_memory.namespace.counters.stored_bytes += self.nbytes
        error = None if done else ERROR_OF_OUTCOME[outcome]
        if done and self.failed:
            error = ErrorCode.NO_ROOM
        self.session.store_bytes -= self.nbytes
        self.answer(error, self.nbytes if done else 0)

    def answer_overdue(self) -> bool:
        """Complete it, and let others store its keys elsewhere in the pool."""
        for ticket in self.store_tickets:
            if ticket.blocks:
                self.failed.append(GroupKeys(ticket.group, b"".join(block.key for block in ticket.blocks)))
            self.owner.cache.drop_incomplete(ticket.blocks)
        self.session.store_bytes -= self.nbytes
        self.answer(ErrorCode.DEADLINE, 0)
        return True


@dataclass(eq=False)
class LoadJob(_EngineJob):
    """A load. Its checksums are those of ``checks``."""

    direction = Direction.LOAD
    load_tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[ChecksumCheck] = field(default_factory=list, init=False)
    """Slots that are compared with their checksums."""

    def end(self, outcome: Outcome) -> None:
        """Let its blocks go, and complete it."""
        if not self._apply_checksums():
            outcome = Outcome.CORRUPT
        done = outcome is Outcome.DONE
        error = None if done else ERROR_OF_OUTCOME[outcome]
        if done and self.failed:
            error = ErrorCode.NOT_READY
        self.owner.cache.end_load(self.load_tickets, ok=error is None)
        copied_bytes = self.nbytes if done else 0
        if error is None:
            self.client_memory.namespace.counters.loaded_bytes += copied_bytes
        self.answer(error, copied_bytes)

    def _apply_checksums(self) -> bool:
        """Act on what the slots hashed to; False where the load was given wrong bytes, or nearly was."""
        cache = self.owner.cache
        if self.checksums is not None and self.checks:
            for check, found in zip(self.checks, self.checksums.sums, strict=True):
                if found and not cache.integrity.apply(check, found):
                    logger.error("%s", wrong_bytes(check))
        if not cache.integrity.mismatches:
            return True
        # What somebody else found wrong in the meantime is wrong for this load too.
        corrupt: dict[int, list[bytes]] = {}
        for ticket in self.load_tickets:
            for block, shard in zip(ticket.blocks, ticket.shards, strict=True):
                if shard.corrupt:
                    corrupt.setdefault(block.group, []).append(block.key)
        self.failed += [GroupKeys(group, b"".join(keys)) for group, keys in corrupt.items()]
        return not corrupt


def wrong_bytes(check: ChecksumCheck) -> str:
    """What the log says of a slot that does not hold what was stored in it."""
    return (
        f"The bytes of key {check.block.key.hex()} (group {check.block.group}, rank {check.rank}) at pool offset "
        f"{check.offset} are not those that were stored: the block is dropped and its slot not used any more. "
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
