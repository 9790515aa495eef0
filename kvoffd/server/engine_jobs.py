"""Stores and loads of workers: accepted whole or refused whole, answered by exactly one completion."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
from kvoffd_proto.messages import BLOCK_ID_BYTES, PIECES_PER_KEY, GroupKeys, GroupTransfer, JobResult, Load, Store

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


@dataclass(eq=False)
class EngineJobs:
    """Accepts stores and loads, and counts them."""

    config: Config
    cache: BlockCache
    pool_address: int
    runner: JobRunner
    counters: dict[Direction, DirectionCounters] = field(init=False)
    with_results: dict[int, Session] = field(default_factory=dict, init=False)
    """Sessions with results that no flush has published yet, by id."""
    _verify_due: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.counters = {direction: DirectionCounters() for direction in Direction}

    def check_limits(self, session: Session, registration: Registration, message: Store | Load) -> int:
        """Return the pieces that a job counts as. Raises KvoffdError, before anything is allocated for the job, where
        it is too large, the session has too much under way, or a job of this id.
        """
        job_id, config = message.job_id, self.config
        if job_id in session.jobs:
            raise KvoffdError(ErrorCode.DUPLICATE_JOB.sentence, ErrorCode.DUPLICATE_JOB)
        if (unfinished := len(session.jobs) + len(session.hanging)) >= config.max_jobs_in_flight:
            raise KvoffdError(f"The session has {unfinished} jobs in flight, its limit.", ErrorCode.TOO_MANY)
        log = session.completions
        if len(log) >= MAX_UNACKNOWLEDGED_RESULTS or log.kept_bytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise KvoffdError("The session does not acknowledge its completions; send Heartbeat.", ErrorCode.TOO_MANY)
        keys = sum(len(part.keys) for part in message.groups) // registration.namespace.key_bytes
        pieces = sum(_pieces(registration, part) for part in message.groups)
        if keys > config.max_keys_per_job or pieces > config.max_pieces_per_job:
            raise KvoffdError(
                f"The job has {keys} keys and {pieces} pieces, and {config.max_keys_per_job} and "
                f"{config.max_pieces_per_job} are allowed; send it as several jobs.",
                ErrorCode.TOO_MANY,
            )
        pieces = max(pieces, keys * PIECES_PER_KEY)
        if session.pieces + pieces > config.max_pieces_in_flight and session.pieces:
            raise KvoffdError(
                f"The session's unfinished jobs have {session.pieces} pieces; with this one's {pieces} they would be "
                f"more than the {config.max_pieces_in_flight} allowed. Wait for completions.",
                ErrorCode.TOO_MANY,
            )
        return pieces

    def start(self, job: StoreJob | LoadJob, groups: Sequence[GroupTransfer]) -> None:
        """Accept a job, or raise KvoffdError and change nothing. A block that is not there fails the accepted load."""
        # Not once it is planned: to take slots in a full pool is part of what the job costs its engine.
        job.accepted_at = self.runner.clock()
        registration = job.client_memory
        block_ids = _check(registration, groups, job.direction)
        plans: list[Plan] = []
        try:
            for part, ids in zip(groups, block_ids, strict=True):
                slots = job.take_slots(part)
                if slots is not None:
                    plans.append(self._plan(registration, part, ids, job.direction, *slots))
            plan = job.prepare(plans)
        except BaseException:
            job.give_slots_back()
            raise
        self.runner.start(job, plan)

    def verifies_next_load(self) -> bool:
        """Whether the next load compares all its slots with their checksums: ``verify_share`` of the loads do.

        The others compare only those that nobody has verified since an earlier daemon wrote them.
        """
        self._verify_due += self.config.verify_share
        due = self._verify_due >= 1.0
        self._verify_due -= due
        return due

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
        slots = np.array(offsets, dtype=np.uint64) + np.uint64(self.pool_address)
        if len(chosen) == keys:
            return plan_copy(layout, direction, block_ids, part.first_block, slots)
        indices = np.array(chosen, dtype=np.int64)
        addresses = np.zeros(keys, dtype=np.uint64)
        addresses[indices] = slots
        mask = np.zeros(keys, dtype=np.bool_)
        mask[indices] = True
        return plan_copy(layout, direction, block_ids, part.first_block, addresses, mask)


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
        seconds = max(0.0, owner.runner.clock() - self.accepted_at)
        session.completions.add(JobResult(self.id, error is None, copied_bytes, seconds, error, self.failed))
        owner.with_results[session.id] = session


@dataclass(eq=False)
class StoreJob(_EngineJob):
    """A store. Its checksums are by ticket and key."""

    direction = Direction.STORE

    def take_slots(self, part: GroupTransfer) -> tuple[Sequence[int], Sequence[int]]:
        """Take slots for the keys of one group that are absent. Returns which keys those are and the slots' offsets."""
        registration = self.client_memory
        node = registration.memory.node
        ticket = self.owner.runner.begin_store(self, registration.namespace, registration.rank, part, node)
        if ticket.dropped:
            self.failed.append(_pick(registration, part, ticket.dropped))
        return ticket.copy, ticket.offsets

    def give_slots_back(self) -> None:
        self.owner.runner.abort_stores(self)

    def prepare(self, plans: list[Plan]) -> Plan:
        """Return the whole copy, and arrange that the checksums of its slots are taken."""
        registration, owner, plan = self.client_memory, self.owner, concatenate(plans)
        sizes = registration.namespace.shard_bytes(registration.rank)
        assert sizes is not None, f"rank {registration.rank} has registered"
        slots = [(offset, sizes[ticket.group]) for ticket in self.store_tickets for offset in ticket.offsets]
        if slots:
            digests = owner.cache.slots.digests
            whole_after = plan.whole_after.tolist()
            self.checksums = SlotChecksums(digests, slots, whole_after=whole_after, pool_address=owner.pool_address)
        self.session.store_bytes += plan.nbytes
        return plan

    def end(self, outcome: Outcome) -> None:
        done = outcome is Outcome.DONE
        if done:
            self.owner.runner.commit_stores(self)
            self.client_memory.namespace.counters.stored_bytes += self.nbytes
            self._complete(ErrorCode.NO_ROOM if self.failed else None, self.nbytes)
        else:
            self.owner.runner.abort_stores(self)
            self._fail(ERROR_OF_OUTCOME[outcome])

    def answer_overdue(self) -> None:
        self._fail(ErrorCode.DEADLINE)

    def _fail(self, error: ErrorCode) -> None:
        self.failed += [
            GroupKeys(ticket.group, b"".join(block.key for block in ticket.blocks))
            for ticket in self.store_tickets
            if ticket.blocks
        ]
        self._complete(error, 0)

    def _complete(self, error: ErrorCode | None, copied_bytes: int) -> None:
        self.session.store_bytes -= self.nbytes
        self.answer(error, copied_bytes)


@dataclass(eq=False)
class LoadJob(_EngineJob):
    """A load. Its checksums are those of ``checks``."""

    direction = Direction.LOAD
    lease_id: int
    keep_lease: bool = False
    load_tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[ChecksumCheck] = field(default_factory=list, init=False)
    """Slots that are compared with their checksums."""

    def take_slots(self, part: GroupTransfer) -> tuple[Sequence[int], Sequence[int]] | None:
        """Hold the slots of one group's keys. Returns the keys' numbers and slot offsets; None where one lacks."""
        registration = self.client_memory
        try:
            ticket = self.owner.cache.begin_load(
                registration.namespace, registration.rank, self.lease_id, part.group, part.keys, part.first_block
            )
        except NotReady as refusal:
            self.failed.append(_pick(registration, part, refusal.missing))
            return None
        self.load_tickets.append(ticket)
        return range(len(ticket.offsets)), ticket.offsets

    def give_slots_back(self) -> None:
        self.owner.cache.end_load(self.load_tickets, ok=False)

    def prepare(self, plans: list[Plan]) -> Plan:
        """Return the whole copy, which is empty where a block is not ready, and choose what is verified before it."""
        if self.failed:
            return concatenate([])
        integrity = self.owner.cache.integrity
        every = self.owner.verifies_next_load()
        self.checks = [check for ticket in self.load_tickets for check in integrity.checks_of_load(ticket, every)]
        if self.checks:
            slots = [(check.offset, check.length) for check in self.checks]
            expected = [check.checksum for check in self.checks]
            self.checksums = SlotChecksums(self.owner.cache.slots.digests, slots, expected)
        return concatenate(plans)

    def end(self, outcome: Outcome) -> None:
        if not self._apply_checksums():
            outcome = Outcome.CORRUPT
        done = outcome is Outcome.DONE
        error = None if done else ERROR_OF_OUTCOME[outcome]
        if done and self.failed:
            error = ErrorCode.NOT_READY
        self.owner.cache.end_load(self.load_tickets, ok=error is None and not self.keep_lease)
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
        f"{check.offset} do not match their checksum: the block is dropped and its slot not used any more. "
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
        keys = registration.namespace.split(part.group, part.keys, distinct=True)
        if part.group in seen:
            raise BadKeys(f"Group {part.group} is named twice in one job; put its keys into one part.")
        seen.add(part.group)
        if len(part.block_ids) % BLOCK_ID_BYTES:
            raise BadBlockIds(f"Block ids are int32; {len(part.block_ids)} bytes are not a whole number of them.")
        ids = np.frombuffer(part.block_ids, dtype="<i4")
        check_blocks(registration.layouts[part.group], ids, len(keys), part.first_block, storing)
        if not storing and np.unique(ids).size < ids.size:
            raise BadBlockIds(f"Group {part.group} loads into an engine block twice; name each block once.")
        block_ids.append(ids)
    return block_ids


def _pieces(registration: Registration, part: GroupTransfer) -> int:
    """What the part's copy consists of, before neighbours are merged. Raises BadGeometry."""
    registration.namespace.check_group(part.group)
    return len(part.block_ids) // BLOCK_ID_BYTES * registration.layouts[part.group].page_bytes.size


def _pick(registration: Registration, part: GroupTransfer, indices: Iterable[int]) -> GroupKeys:
    size = registration.namespace.key_bytes
    return GroupKeys(part.group, b"".join(part.keys[i * size : (i + 1) * size] for i in indices))
