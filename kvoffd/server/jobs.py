"""Stores and loads: a Submit is accepted whole or refused whole, and each accepted job has exactly one result.

The stores of one message are one copy, a load is a copy of its own. An engine copies in threads of its own, and
``Host.post`` brings the end of a copy back.

A copy on a GPU that hangs does not come back at its deadline. A store of that kind is answered all the same: the
engine's blocks are only read, and the slots hold nothing that anyone may read. They stay taken, and the registration
mapped, until the copy has ended after all. A load of that kind is not answered: its bytes may still land in the
engine's blocks, which the engine keeps until it has the result or the lifeline has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.cache.pins import LoadTicket, StoreTicket
from kvoffd.config import Config
from kvoffd.errors import BadBlockIds, BadKeys, KvoffdError, NotReady, UnknownLease
from kvoffd.observe.meters import RateMeter
from kvoffd.server.host import Host
from kvoffd.server.sessions import Registration, Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Transfer
from kvoffd.transfer.plan import (
    Direction,
    Outcome,
    Plan,
    blocks_outside,
    check_count,
    concatenate,
    outside_error,
    plan_blocks,
)
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    BLOCK_ID_BYTES,
    COUNT_BYTES,
    TOKEN_ID_BYTES,
    GroupBlocks,
    GroupKeys,
    JobResult,
    Loads,
    Stores,
    Submit,
)

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

QUIET_S = 0.05
"""Engines that have copied nothing for so long do not copy."""
MAX_UNACKNOWLEDGED_RESULTS = 16_384
"""Also because one ResultsReply has all of them."""
MAX_UNACKNOWLEDGED_KEY_BYTES = 2 << 20
"""Of the keys that these results name: 65,536 keys of 32 bytes. One result may name thousands."""

ERROR_OF_OUTCOME = {
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.DEADLINE: ErrorCode.DEADLINE,
    Outcome.FAILED: ErrorCode.COPY_FAILED,
    Outcome.CORRUPT: ErrorCode.CHECKSUM,
}


@dataclass
class DirectionCounters:
    """What happened to the jobs of one direction."""

    jobs: int = 0
    failed_jobs: int = 0
    bytes: int = 0
    rate: RateMeter = field(default_factory=RateMeter)


# --- what a message asks for ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one group in the stores, or in the loads, of a message. They are sound.

    Attributes:
        group: index of the group.
        keys: of all its jobs, in their order.
        block_ids: [m] engine blocks, int32.
        key_counts: [jobs] keys of each job; 0 where the job has none in this group.
        block_counts: [jobs] engine blocks of each job.
        first_blocks: [jobs] engine blocks of the job's first key that are left out at its start.
        parents: of each key, end to end; empty where no store told them.
        token_ids: of each key's block, end to end; empty where no store told them.
    """

    group: int
    keys: Sequence[bytes]
    block_ids: npt.NDArray[np.int32]
    key_counts: Ints
    block_counts: Ints
    first_blocks: Ints
    parents: bytes = b""
    token_ids: bytes = b""

    # Once for all jobs: every job looks into them.
    @cached_property
    def first_keys(self) -> Ints:
        """[jobs] where in ``keys`` those of each job begin."""
        return np.cumsum(self.key_counts) - self.key_counts

    @cached_property
    def first_ids(self) -> Ints:
        """[jobs] where in ``block_ids`` those of each job begin."""
        return np.cumsum(self.block_counts) - self.block_counts

    def positions(self, blocks_per_key: int) -> Ints:
        """[m] as ``plan_blocks`` has it: where in ``keys`` each block belongs."""
        begins = self.first_keys * blocks_per_key + self.first_blocks - self.first_ids
        return np.arange(self.block_ids.size, dtype=np.int64) + np.repeat(begins, self.block_counts)

    def by_job(self, numbers: Iterable[int]) -> Iterator[tuple[int, GroupKeys]]:
        """Some keys by their numbers, ascending: those of each job, with the job's index."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        of_job = np.searchsorted(np.cumsum(self.key_counts), chosen, side="right")
        for job in dict.fromkeys(of_job.tolist()):
            picked = chosen[of_job == job].tolist()
            yield job, GroupKeys(self.group, b"".join([self.keys[number] for number in picked]))

    def tokens(self) -> Mapping[bytes, BlockTokens]:
        """By key, its parent and token ids, where its store told them."""
        if not self.parents or not self.token_ids:
            return NO_TOKENS
        count = len(self.keys)
        size, each = len(self.parents) // count, len(self.token_ids) // count
        return {
            key: BlockTokens(self.parents[at * size : (at + 1) * size], self.token_ids[at * each : (at + 1) * each])
            for at, key in enumerate(self.keys)
        }

    def of_job(self, job: int) -> tuple[Sequence[bytes], npt.NDArray[np.int32]]:
        """Keys and engine blocks of one job."""
        key, block = int(self.first_keys[job]), int(self.first_ids[job])
        return (
            self.keys[key : key + int(self.key_counts[job])],
            self.block_ids[block : block + int(self.block_counts[job])],
        )


def checked_blocks(registration: Registration, batch: Stores | Loads, *, storing: bool) -> list[Blocks]:
    """The blocks of some jobs, by group. Raises KvoffdError where one of the jobs is not in order."""
    jobs = len(batch.job_ids)
    found = [_checked_part(registration, part, jobs, storing=storing) for part in batch.groups]
    by_group: dict[int, Ints] = {}
    for part in found:
        named = by_group.get(part.group, np.zeros(jobs, np.int64)) + (part.key_counts > 0)
        if (named > 1).any():
            raise BadKeys(f"A job names group {part.group} twice; put its keys into one part.")
        by_group[part.group] = named
    if jobs and not sum((part.key_counts for part in found), np.zeros(jobs, np.int64)).all():
        raise BadBlockIds("A job has no keys and no block ids; leave it out.")
    return found


def _checked_part(registration: Registration, part: GroupBlocks, jobs: int, *, storing: bool) -> Blocks:
    namespace = registration.namespace
    keys = namespace.split(part.group, part.keys)
    layout = registration.layouts[part.group]
    if len(part.block_ids) % BLOCK_ID_BYTES:
        raise BadBlockIds(f"Block ids are int32; {len(part.block_ids)} bytes are not a whole number of them.")
    block_ids = np.frombuffer(part.block_ids, dtype="<i4")
    key_counts, block_counts = _counts(part.key_counts, jobs, "keys"), _counts(part.block_counts, jobs, "blocks")
    first_blocks = _counts(part.first_blocks, jobs, "first blocks") if part.first_blocks else np.zeros(jobs, np.int64)
    told = part.parents, part.tokens
    blocks = Blocks(part.group, keys, block_ids, key_counts, block_counts, first_blocks, *told)
    if key_counts.sum() != len(keys) or block_counts.sum() != block_ids.size:
        raise BadKeys(
            f"The jobs have {key_counts.sum()} keys and {block_counts.sum()} blocks of group {part.group}, and "
            f"{len(keys)} keys and {block_ids.size} block ids were sent."
        )
    ends, whole = first_blocks + block_counts, key_counts * layout.blocks_per_key
    fit = (ends == whole) if storing else (ends <= whole) & (ends > whole - layout.blocks_per_key)
    fit &= (block_counts > 0) & (first_blocks < layout.blocks_per_key)
    for job in np.flatnonzero(~fit & ((key_counts > 0) | (block_counts > 0))).tolist():
        counts = int(block_counts[job]), int(key_counts[job]), int(first_blocks[job])
        check_count(layout, *counts, exact=storing)
    if (outside := blocks_outside(layout, block_ids)).size:
        raise outside_error(layout, int(block_ids[outside[0]]))
    if len(set(keys)) < len(keys) or not storing:
        for job in np.flatnonzero(key_counts).tolist():
            names, ids = blocks.of_job(job)
            if len(set(names)) < len(names):
                raise BadKeys(f"A key of group {part.group} occurs twice in one job; send each key once.")
            if not storing and np.unique(ids).size < ids.size:
                raise BadBlockIds(f"Group {part.group} loads into an engine block twice; name each block once.")
    _check_tokens(part, len(keys), namespace.groups[part.group].tokens_per_block)
    return blocks


def _counts(data: bytes, jobs: int, what: str) -> Ints:
    if len(data) != jobs * COUNT_BYTES:
        raise BadKeys(f"{len(data)} bytes are not the uint32 numbers of {what} of {jobs} jobs.")
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def _check_tokens(part: GroupBlocks, keys: int, tokens_per_block: int) -> None:
    """Raise BadKeys where parents or token ids are not those of as many keys."""
    if part.parents and len(part.parents) != len(part.keys):
        raise BadKeys(f"{len(part.parents)} bytes of parents for {len(part.keys)} bytes of keys; tell all or none.")
    if part.tokens and len(part.tokens) != keys * tokens_per_block * TOKEN_ID_BYTES:
        raise BadKeys(
            f"{len(part.tokens)} bytes of token ids for {keys} keys of {tokens_per_block} tokens; tell all or none."
        )


# --- jobs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A copy that was accepted, until it touches nothing any more: the stores of one message, or a load."""

    direction: ClassVar[Direction]

    ids: Sequence[int]
    """The client's jobs, each unique among the session's unfinished jobs."""
    session: Session
    registration: Registration
    accepted_at: float
    """Before slots are taken: to evict for it is part of what it costs its engine."""
    nbytes: int = field(default=0, init=False)
    pieces: int = field(default=0, init=False)
    """Of its plan, in ``max_pieces_in_flight``."""
    checksums: SlotChecksums | None = field(default=None, init=False)
    transfer: Transfer | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    """It has its results, but its copy hangs and still holds its slots and the client's memory."""

    def client_error(self, error: ErrorCode) -> ErrorCode:
        """What the client gets for ``error``: the end of its session, once that is over."""
        return ErrorCode.SESSION_ENDED if self.session.ended else error


@dataclass(eq=False)
class StoreBatch(Job):
    """The stores of one message. Tickets are by group, checksums by ticket and key."""

    direction = Direction.STORE
    groups: Sequence[Blocks]
    admit_all: bool
    """Whatever the policy says."""
    tickets: list[StoreTicket] = field(default_factory=list, init=False)
    copied_bytes: Ints = field(init=False)
    """[stores]"""

    def begin(self, cache: BlockCache, pool_address: int) -> Plan:
        """Take slots for what is absent, and plan the copy. ``abort`` undoes it, also where it raises."""
        self.copied_bytes = np.zeros(len(self.ids), dtype=np.int64)
        plan = concatenate([self._plan(cache, part, pool_address) for part in self.groups])
        slots: list[tuple[int, int]] = []
        for ticket in self.tickets:
            length = ticket.namespace.shard_length(ticket.rank, ticket.group)
            slots += [(offset, length) for offset in ticket.offsets]
        if slots:
            whole_after = plan.whole_after.tolist()
            digests = cache.slots.digests
            self.checksums = SlotChecksums(digests, slots, whole_after=whole_after, pool_address=pool_address)
        return plan

    def _plan(self, cache: BlockCache, part: Blocks, pool_address: int) -> Plan:
        registration = self.registration
        layout = registration.layouts[part.group]
        jobs = np.flatnonzero(part.key_counts)
        starts, firsts = part.first_keys[jobs].tolist(), part.first_blocks[jobs].tolist()
        first_blocks = {key: first for key, first in zip(starts, firsts, strict=True) if first}
        whose = registration.namespace, registration.rank, part.group
        chains = None if self.admit_all else starts
        ticket = cache.begin_stores(*whose, part.keys, first_blocks, self.tickets, registration.memory.node, chains)
        self.tickets.append(ticket)
        slots = np.array(ticket.offsets, dtype=np.uint64) + np.uint64(pool_address)
        positions = part.positions(layout.blocks_per_key)
        block_bytes = int(layout.page_bytes.sum())
        if len(ticket.copy) == len(part.keys):
            self.copied_bytes += part.block_counts * block_bytes
            return plan_blocks(layout, self.direction, part.block_ids, positions, slots)
        addresses = np.zeros(len(part.keys), dtype=np.uint64)
        chosen = np.zeros(len(part.keys), dtype=np.bool_)
        addresses[ticket.copy] = slots
        chosen[ticket.copy] = True
        of_job = np.repeat(np.arange(len(self.ids)), part.block_counts)
        copied = of_job[chosen[positions // layout.blocks_per_key]]
        self.copied_bytes += np.bincount(copied, minlength=len(self.ids)) * block_bytes
        return plan_blocks(layout, self.direction, part.block_ids, positions, addresses, chosen)

    def commit(self, cache: BlockCache) -> None:
        """Make the blocks readable."""
        checksums = iter(self.checksums.sums if self.checksums is not None else ())
        for part, ticket in zip(self.groups, self.tickets, strict=True):
            ticket.tokens = part.tokens()
            ticket.checksums = list(islice(checksums, len(ticket.copy)))
            cache.commit_store(ticket)
        self.registration.namespace.counters.stored_bytes += self.nbytes

    def abort(self, cache: BlockCache) -> None:
        """Give the slots back: what is in them counts for nothing."""
        for ticket in self.tickets:
            cache.abort_store(ticket)

    def results(self, seconds: float, error: ErrorCode | None) -> list[JobResult]:
        """One for each store. ``error``: why nothing was copied; None where all was that found space."""
        lost = [ticket.dropped for ticket in self.tickets]
        if error is not None:  # a store whose keys were all there lost nothing
            lost = [
                sorted({*ticket.dropped, *ticket.copy, *ticket.again}.difference(ticket.declined))
                for ticket in self.tickets
            ]
        code = self.client_error(error or ErrorCode.NO_ROOM)
        failed, declined = self._by_job(lost), self._by_job([ticket.declined for ticket in self.tickets])
        copied = [0] * len(self.ids) if error is not None else self.copied_bytes.tolist()
        return [
            JobResult(job_id, False, nbytes, seconds, code, failed[number], declined.get(number, []))
            if number in failed
            else JobResult(job_id, True, nbytes, seconds, declined=declined.get(number, []))
            for number, (job_id, nbytes) in enumerate(zip(self.ids, copied, strict=True))
        ]

    def _by_job(self, numbers: Sequence[Sequence[int]]) -> dict[int, list[GroupKeys]]:
        """Keys by the index of their store, given their numbers by group."""
        found: dict[int, list[GroupKeys]] = {}
        for part, chosen in zip(self.groups, numbers, strict=True):
            for job, keys in part.by_job(chosen) if chosen else ():
                found.setdefault(job, []).append(keys)
        return found


@dataclass(eq=False)
class LoadJob(Job):
    """A load. Tickets are by group, checksums those of ``checks``."""

    direction = Direction.LOAD
    lease_id: int
    keep_lease: bool
    tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[ChecksumCheck] = field(default_factory=list, init=False)
    """Slots that are compared with their checksums."""
    failed: list[GroupKeys] = field(default_factory=list, init=False)
    """Keys that are known to be not ready, or not whole."""
    error: ErrorCode | None = field(default=None, init=False)
    """Why it cannot be done, where that is known before it is copied."""

    def begin(
        self, cache: BlockCache, groups: Sequence[Blocks], number: int, pool_address: int, *, verify: bool
    ) -> Plan:
        """Hold the slots, and plan the copy; nothing is copied where a block is not ready. ``abort`` undoes it.

        ``number`` is the load's in ``groups``. ``verify``: all slots are compared with their checksums, else those
        that nobody has compared since an earlier daemon wrote them.
        """
        plans = [self._plan(cache, part, number, pool_address) for part in groups if part.key_counts[number]]
        if self.error is not None:
            return concatenate([])
        self.checks = [check for ticket in self.tickets for check in cache.integrity.checks_of_load(ticket, verify)]
        if self.checks:
            slots = [(check.offset, check.length) for check in self.checks]
            self.checksums = SlotChecksums(cache.slots.digests, slots, [check.checksum for check in self.checks])
        return concatenate(plans)

    def _plan(self, cache: BlockCache, part: Blocks, number: int, pool_address: int) -> Plan:
        registration = self.registration
        keys, block_ids = part.of_job(number)
        first_block = int(part.first_blocks[number])
        whose = registration.namespace, registration.rank, self.lease_id, part.group
        try:
            ticket = cache.begin_load(*whose, b"".join(keys), first_block)
        except (NotReady, UnknownLease) as refusal:
            missing = [keys[at] for at in refusal.missing] if isinstance(refusal, NotReady) else keys
            self.failed.append(GroupKeys(part.group, b"".join(missing)))
            self.error = refusal.code
            return concatenate([])
        self.tickets.append(ticket)
        blocks_per_key = registration.layouts[part.group].blocks_per_key
        ticket.tokens = block_ids.size * registration.namespace.groups[part.group].tokens_per_block // blocks_per_key
        slots = np.array(ticket.offsets, dtype=np.uint64) + np.uint64(pool_address)
        positions = np.arange(first_block, first_block + block_ids.size, dtype=np.int64)
        return plan_blocks(registration.layouts[part.group], self.direction, block_ids, positions, slots)

    def abort(self, cache: BlockCache) -> None:
        """Hold nothing any more; the lease lives on."""
        cache.end_load(self.tickets, ok=False)

    def end(self, cache: BlockCache, seconds: float, error: ErrorCode | None) -> list[JobResult]:
        """The copy has ended, well where ``error`` is None. Returns the result."""
        if not self._apply_checksums(cache):
            error = ErrorCode.CHECKSUM
        copied_bytes = self.nbytes if error is None else 0
        error = error or self.error
        if error is None:
            cache.count_load(self.tickets)
        cache.end_load(self.tickets, ok=error is None and not self.keep_lease)
        if error is None:
            self.registration.namespace.counters.loaded_bytes += copied_bytes
        else:
            error = self.client_error(error)
        return [JobResult(job, error is None, copied_bytes, seconds, error, self.failed) for job in self.ids]

    def _apply_checksums(self, cache: BlockCache) -> bool:
        """Act on what the slots hashed to; False where the load was given wrong bytes, or nearly was."""
        if self.checksums is not None and self.checks:
            for check, found in zip(self.checks, self.checksums.sums, strict=True):
                if found and not cache.integrity.apply(check, found):
                    logger.error("%s", wrong_bytes(check))
        if not cache.integrity.mismatches:
            return True
        # What somebody else found wrong in the meantime is wrong for this load too.
        corrupt: dict[int, list[bytes]] = {}
        for ticket in self.tickets:
            for block in ticket.blocks:
                if block.shard(ticket.rank).corrupt:
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


class Jobs:
    """The jobs of all sessions, from their acceptance until their copy has ended."""

    def __init__(self, config: Config, cache: BlockCache, pool_address: int, host: Host, credit_bytes: int) -> None:
        self._config = config
        self._cache = cache
        self._pool_address = pool_address
        self._host = host
        self._max_store_bytes = 2 * credit_bytes
        """Of a session's unfinished stores. Credits are a promise of the client; this is for one that breaks it."""
        self._running: dict[Job, None] = {}
        self._ended_at = float("-inf")
        self._verify_due = 0.0
        self.with_results: dict[int, Session] = {}
        """Sessions with results that were not published yet, by id."""
        self.counters = {direction: DirectionCounters() for direction in Direction}
        self.unsent_stores = 0
        """Stores that clients dropped at a fence before they had sent them."""
        self.cancelled_stores = 0

    @property
    def unfinished(self) -> int:
        return sum(len(job.ids) for job in self._running)

    def busy(self) -> bool:
        """Whether a job is unfinished, or was ``QUIET_S`` ago."""
        return bool(self._running) or self._host.now() - self._ended_at < QUIET_S

    # --- accepting --------------------------------------------------------------------------------

    def submit(self, session: Session, message: Submit) -> None:
        """Accept the jobs of a message, or raise KvoffdError and change nothing."""
        registration = session.registration(message.registration_id)
        accepted_at = self._host.now()
        registration.check_whole(accepted_at)
        self._check_counts(session, message)
        loads = checked_blocks(registration, message.loads, storing=False)
        stores = checked_blocks(registration, message.stores, storing=True)
        self._check_pieces(session, registration, loads + stores)
        begun: list[StoreBatch | LoadJob] = []
        plans: list[Plan] = []
        try:
            numbers = zip(message.loads.job_ids, message.loads.lease_ids, message.loads.keep_lease, strict=True)
            for number, (job_id, lease_id, keep_lease) in enumerate(numbers):
                load = LoadJob((job_id,), session, registration, accepted_at, lease_id, keep_lease)
                begun.append(load)
                plans.append(load.begin(self._cache, loads, number, self._pool_address, verify=self._verifies()))
            if message.stores.job_ids:
                batch = StoreBatch(
                    message.stores.job_ids, session, registration, accepted_at, stores, message.stores.admit_all
                )
                begun.append(batch)
                plans.append(batch.begin(self._cache, self._pool_address))
        except BaseException:
            for job in begun:
                job.abort(self._cache)
            raise
        for job, plan in zip(begun, plans, strict=True):
            self._start(job, plan)

    def _check_counts(self, session: Session, message: Submit) -> None:
        """Raise KvoffdError where there are too many jobs or keys, or a job of the same id is unfinished."""
        limits, loads = self._config.limits, message.loads
        ids = [*message.stores.job_ids, *loads.job_ids]
        if len(set(ids)) < len(ids) or not session.jobs.keys().isdisjoint(ids):
            raise KvoffdError.of(ErrorCode.DUPLICATE_JOB)
        if not len(loads.job_ids) == len(loads.lease_ids) == len(loads.keep_lease):
            raise BadKeys(
                f"{len(loads.job_ids)} loads, {len(loads.lease_ids)} leases and {len(loads.keep_lease)} times whether "
                "to keep them; send one of each for each load."
            )
        if len(ids) > (most := limits.max_jobs_per_message):
            raise KvoffdError(f"{len(ids)} jobs in one message; {most} are allowed. Send several.", ErrorCode.TOO_MANY)
        registration = session.registration(message.registration_id)
        parts = (*message.stores.groups, *loads.groups)
        keys = sum(len(part.keys) for part in parts) // registration.namespace.key_bytes
        if keys > (most := limits.max_keys_per_request):
            raise KvoffdError(f"{keys} keys in one message; {most} are allowed. Send several.", ErrorCode.TOO_MANY)
        if session.in_flight + len(ids) > limits.max_jobs_in_flight:
            raise KvoffdError(
                f"The session has {session.in_flight} jobs in flight; with these {len(ids)} it would be more than the "
                f"{limits.max_jobs_in_flight} allowed.",
                ErrorCode.TOO_MANY,
            )
        held = session.completions
        if len(held) >= MAX_UNACKNOWLEDGED_RESULTS or held.key_bytes >= MAX_UNACKNOWLEDGED_KEY_BYTES:
            raise KvoffdError("The session does not acknowledge its results; each Submit may.", ErrorCode.TOO_MANY)
        if message.stores.job_ids and session.store_bytes > self._max_store_bytes:
            raise KvoffdError(
                "The session's outstanding stores are far beyond its credit; wait for results.", ErrorCode.TOO_MANY
            )

    def _check_pieces(self, session: Session, registration: Registration, groups: Sequence[Blocks]) -> None:
        """Raise KvoffdError where the plans of the session's unfinished jobs would take too much memory."""
        layouts = registration.layouts
        pieces = sum(part.block_ids.size * layouts[part.group].page_bytes.size for part in groups)
        whole = sum(layout.block_limit * layout.page_bytes.size for layout in layouts)
        most = max(self._config.limits.max_pieces_in_flight, 2 * whole)
        if session.pieces + pieces > most:
            raise KvoffdError(
                f"The session's unfinished jobs have {session.pieces} pieces; with {pieces} more they would be more "
                f"than the {most} allowed. Wait for results.",
                ErrorCode.TOO_MANY,
            )

    def _verifies(self) -> bool:
        """Count one more load; True where it compares all its slots: ``verify_share`` of the loads do."""
        self._verify_due += self._config.verify_share
        due = self._verify_due >= 1.0
        self._verify_due -= due
        return due

    # --- running ----------------------------------------------------------------------------------

    def _start(self, job: StoreBatch | LoadJob, plan: Plan) -> None:
        """Run a job. It ends, maybe at once, whatever becomes of its copy."""
        session = job.session
        job.nbytes, job.pieces = plan.nbytes, plan.pieces
        if isinstance(job, StoreBatch):
            session.store_bytes += job.nbytes
        session.jobs.update(dict.fromkeys(job.ids, job))
        session.in_flight += len(job.ids)
        session.pieces += job.pieces
        job.registration.job_started()
        self._running[job] = None
        if not plan.pieces:
            outcome = job.checksums.run(lambda: None) if job.checksums is not None else None
            self.finished(job, outcome or Outcome.DONE)
            return
        job.transfer = Transfer(
            job.direction,
            plan,
            job.accepted_at + self._config.limits.job_deadline_s,
            lambda _, outcome, __: self._host.post(lambda: self.finished(job, outcome)),
            lambda _: self._overdue(job),
            job.checksums,
            owner=session.id,
        )
        try:
            job.registration.memory.engine.submit(job.transfer)
        except Exception:
            # It is accepted and holds slots: whatever went wrong, its end must free them.
            logger.exception("A transfer could not be handed to the copy engine; its job fails.")
            self.finished(job, Outcome.FAILED)

    def finished(self, job: StoreBatch | LoadJob, outcome: Outcome) -> None:
        """The copy has ended: nothing touches the job's slots and the client's memory any more."""
        session, cache = job.session, self._cache
        if job.answered:
            job.abort(cache)
        else:
            error = ERROR_OF_OUTCOME.get(outcome)
            if isinstance(job, LoadJob):
                self._answer(job, job.end(cache, self._seconds(job), error))
            else:
                # The client may have given its blocks to another request the moment it closed its lifeline, so what was
                # copied counts only if the lifeline is still open now, after the copy.
                if error is None and (session.ended or not session.lifeline.alive()):
                    error = ErrorCode.CANCELLED
                if error is None:
                    job.commit(cache)
                else:
                    job.abort(cache)
                self._answer(job, job.results(self._seconds(job), error))
        del self._running[job]
        self._ended_at = self._host.now()
        session.in_flight -= len(job.ids)
        session.pieces -= job.pieces
        job.transfer = None  # they refer to each other, and full collections are off (GC_THRESHOLDS)
        job.registration.job_ended()
        session.release_if_idle()

    def _overdue(self, job: StoreBatch | LoadJob) -> None:
        """The job's copy hangs beyond its deadline: a store is answered, see above."""
        if job.answered or job not in self._running or not isinstance(job, StoreBatch):
            return
        for ticket in job.tickets:
            self._cache.drop_incomplete(ticket.blocks)  # others may store its keys elsewhere in the pool
        self._answer(job, job.results(self._seconds(job), ErrorCode.DEADLINE))
        job.answered = True

    def _seconds(self, job: Job) -> float:
        return max(0.0, self._host.now() - job.accepted_at)

    def _answer(self, job: StoreBatch | LoadJob, results: Sequence[JobResult]) -> None:
        """Put results into the session's log, and count them."""
        session, counters = job.session, self.counters[job.direction]
        copied_bytes = sum([result.bytes for result in results])
        counters.jobs += len(results)
        counters.failed_jobs += len(results) - sum([result.ok for result in results])
        counters.bytes += copied_bytes
        counters.rate.add(copied_bytes)
        if isinstance(job, StoreBatch):
            session.store_bytes -= job.nbytes
        for job_id in job.ids:
            del session.jobs[job_id]
        session.completions.add(results)
        self.with_results[session.id] = session

    # --- stopping ---------------------------------------------------------------------------------

    def cancel(self, session: Session, job_ids: Iterable[int], unsent: int) -> tuple[list[int], list[int]]:
        """Fail what has not started. Returns the ids of that, and those given whose bytes move, or will.

        Stores that are copied together are cancelled together, all of them when one is to be. Ids that are no
        unfinished job's are ignored. ``unsent`` more stores were never sent, and are counted.
        """
        self.unsent_stores += unsent
        cancelled: list[int] = []
        running: list[int] = []
        wanted: dict[Job, list[int]] = {}
        for job_id in dict.fromkeys(job_ids):
            if job_id in session.jobs:
                wanted.setdefault(session.jobs[job_id], []).append(job_id)
        for job, ids in wanted.items():
            if job.transfer is not None and job.registration.memory.engine.cancel(job.transfer):
                cancelled.extend(job.ids)
                if isinstance(job, StoreBatch):
                    self.cancelled_stores += len(job.ids)
            else:
                running.extend(ids)
        return cancelled, running

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Stop jobs whose session is gone: those that wait now, those that run at their next step."""
        for job in dict.fromkeys(jobs):
            engine = job.registration.memory.engine
            if job.transfer is not None and not engine.cancel(job.transfer):
                engine.abandon(job.transfer)

    def abandon_all(self) -> None:
        """Stop every job, oldest first, as when the daemon's own deadline for stopping has passed."""
        self.abandon(list(self._running))
