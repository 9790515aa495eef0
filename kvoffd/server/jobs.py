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
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from math import inf
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import BlockTokens
from kvoffd.cache.tickets import Check, LoadTicket, StoreTicket
from kvoffd.config import Config
from kvoffd.errors import BadBlockIds, BadKeys, KvoffdError, NotReady, UnknownLease
from kvoffd.observe.logging import RareWarnings
from kvoffd.pool.pool import Pool
from kvoffd.server.handlers import answers
from kvoffd.server.memory import Host
from kvoffd.server.sessions import Registration, Session
from kvoffd.transfer.engine import SlotChecksums, Transfer
from kvoffd.transfer.plan import BlockCopy, Direction, GroupLayout, Outcome, Plan, plan_blocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    TOKEN_ID_BYTES,
    BadColumns,
    Cancel,
    CancelReply,
    GroupKeys,
    JobResult,
    JobSpan,
    Loads,
    Stores,
    Submit,
)

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)

ID_LIMIT = 2**31
QUIET_S = 0.05
"""Engines that have copied nothing for so long do not copy."""
MAX_UNACKNOWLEDGED_BYTES = 2 << 20
"""Of a session's results, of which one may name thousands of keys. One ResultsReply has all of them."""

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


# --- what a message asks for ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class GroupPart:
    """What the stores, or the loads, of a message name of one group. It is sound."""

    group: int
    layout: GroupLayout
    keys: bytes
    """Of all its jobs, in their order, end to end."""
    split: list[bytes]
    """The same, one by one."""
    block_ids: npt.NDArray[np.int32]
    """[m] engine blocks."""
    spans: list[JobSpan]
    """Of the jobs that name the group, in their order."""
    parents: bytes
    """Of each key, end to end; empty where no store sent them."""
    token_ids: bytes
    """Of each key's block, end to end; empty where no store sent them."""
    first_blocks: Mapping[int, int]
    """By number of a key, the engine block from which on it is written, where that is not the first."""
    starts: Sequence[int] | None
    """Of a store: the first key of each job; None where the policy has no say."""

    def tokens(self) -> Mapping[bytes, BlockTokens]:
        """By key, its parent and token ids, which its store sent."""
        size, each = len(self.parents) // len(self.split), len(self.token_ids) // len(self.split)
        return {
            key: BlockTokens(self.parents[at * size : (at + 1) * size], self.token_ids[at * each : (at + 1) * each])
            for at, key in enumerate(self.split)
        }

    def put_by_job(self, numbers: Sequence[int], found: dict[int, list[GroupKeys]]) -> None:
        """Put the keys of these numbers, ascending, among those of their jobs."""
        for span in self.spans:
            some = numbers[bisect_left(numbers, span.key) : bisect_left(numbers, span.keys_end)]
            if some:
                found[span.job].append(GroupKeys(self.group, b"".join([self.split[number] for number in some])))


def checked_parts(
    registration: Registration, batch: Stores | Loads, *, storing: bool, is_offered: bool = True
) -> list[GroupPart]:
    """What some jobs ask for, by group; ``is_offered``: the policy may refuse stores. Raises KvoffdError where one of
    them is not in order."""
    namespace, jobs, parts = registration.namespace, len(batch.job_ids), list[GroupPart]()
    named: set[int] = set()
    for part in batch.groups:
        group = part.group
        if not 0 <= group < len(namespace.groups) or len(part.keys) % namespace.key_bytes:
            namespace.check(group, part.keys)  # which raises
        if any(other.group == group for other in parts):
            raise BadKeys(f"Group {group} comes twice; put its keys into one part, or send two messages.")
        keys: list[bytes] = np.frombuffer(part.keys, namespace.key_type).tolist()
        layout = registration.layouts[group]
        try:
            spans = part.spans(jobs, namespace.key_bytes, layout.blocks_per_key, store=storing)
        except BadColumns as error:
            kind = BadBlockIds if error.code is ErrorCode.BAD_BLOCK_IDS else BadKeys
            raise kind(str(error)) from None
        named.update([span.job for span in spans])
        block_ids = np.frombuffer(part.block_ids, dtype="<i4")
        # One comparison: a negative id is a large one without its sign.
        limit = min(layout.block_limit, ID_LIMIT)
        if block_ids.size and int(block_ids.view(np.uint32).max()) >= limit:
            wrong = block_ids[(block_ids < 0) | (block_ids >= limit)][0]
            raise BadBlockIds(
                f"Block id {wrong} lies outside the registered tensors; name blocks from 0 to {layout.block_limit - 1}."
            )
        if len(set(keys)) < len(keys) and any(len(set(keys[at:end])) < end - at for _, at, end, *_ in spans):
            raise BadKeys(f"A key of group {group} occurs twice in one job; send each key once.")
        if not storing:
            ids = block_ids.tolist()
            if len(set(ids)) < len(ids) and any(len(set(ids[at:end])) < end - at for _, _, _, at, end, _ in spans):
                raise BadBlockIds(f"Group {group} loads into an engine block twice; name each block once.")
        if part.parents and len(part.parents) != len(part.keys):
            raise BadKeys(f"{len(part.parents)} bytes of parents for {len(part.keys)} bytes of keys; send all or none.")
        tokens = namespace.groups[group].tokens_per_block
        if part.tokens and len(part.tokens) != len(keys) * tokens * TOKEN_ID_BYTES:
            sent = f"{len(part.tokens)} bytes of token ids for {len(keys)} keys of {tokens} tokens"
            raise BadKeys(f"{sent}; send all or none.")
        parts.append(
            GroupPart(
                group,
                layout,
                part.keys,
                keys,
                block_ids,
                spans,
                part.parents,
                part.tokens,
                first_blocks={span.key: span.first_block for span in spans if span.first_block},
                starts=[span.key for span in spans] if storing and is_offered else None,
            )
        )
    if len(named) < jobs:
        raise BadBlockIds("A job has no keys and no block ids; leave it out.")
    return parts


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
    copies: list[BlockCopy] = field(default_factory=list, init=False)
    nbytes: int = field(default=0, init=False)
    """That it copies."""
    checksums: SlotChecksums | None = field(default=None, init=False)
    transfer: Transfer | None = field(default=None, init=False)
    answered: bool = field(default=False, init=False)
    """It has its results. Where its copy hangs it still holds its slots and the client's memory."""

    @property
    def pieces(self) -> int:
        """That it copies at most."""
        return sum([copy.block_ids.size * len(copy.layout.layers) for copy in self.copies])

    def plan(self) -> Plan:
        return plan_blocks(self.direction, self.copies)

    def withdraw(self) -> bool:
        """Take its transfer out of the queue. False where there is none, or its copy has begun."""
        transfer, queues = self.transfer, self.registration.memory.engine.queues
        return transfer is not None and queues[self.direction].cancel(transfer)


@dataclass(eq=False)
class StoreBatch(Job):
    """The stores of one message. Checksums are by part and key."""

    direction = Direction.STORE
    parts: Sequence[GroupPart]
    ticket: StoreTicket | None = field(default=None, init=False)
    copied_bytes: list[int] = field(default_factory=list, init=False)
    """By store."""

    def begin(self, cache: Cache, pool: Pool) -> None:
        """Take slots for what is absent. ``abort`` undoes it, also where it raises."""
        registration = self.registration
        self.copied_bytes = [0] * len(self.ids)
        places: list[tuple[int, int]] = []
        self.ticket = cache.begin_store(registration.namespace, registration.rank, self.parts)
        for part, stored in zip(self.parts, self.ticket.parts, strict=True):
            if not stored.copy:
                continue
            layout, length = part.layout, stored.group.lengths[registration.rank]
            places += zip(stored.offsets.tolist(), repeat(length))
            slots = stored.offsets + np.uint64(pool.mapping.address)
            if len(stored.copy) < len(part.split):
                of_copied, slots = slots, np.zeros(len(part.split), np.uint64)
                slots[stored.copy] = of_copied
            self.copies.append(BlockCopy(layout, part.block_ids, slots, part.first_blocks))
            for span in part.spans:
                at, end = (bisect_left(stored.copy, number) for number in (span.key, span.keys_end))
                blocks = (end - at) * layout.blocks_per_key
                if at < end and stored.copy[at] == span.key:
                    blocks -= span.first_block
                self.copied_bytes[span.job] += blocks * layout.block_bytes
        self.nbytes = sum(self.copied_bytes)
        if places:
            self.checksums = SlotChecksums(pool.digests, places, [0] * len(places), pool_address=pool.mapping.address)

    def end(self, cache: Cache, seconds: float, error: ErrorCode | None, *, hangs: bool = False) -> list[JobResult]:
        """The copy has ended: where ``error`` is None all was copied that found space, and its blocks become readable.
        Returns a result for each store.

        ``hangs``: the copy may still write. Others may store its keys elsewhere in the pool; ``abort`` is to follow.
        """
        assert self.ticket is not None
        if hangs:
            cache.drop_unfinished(self.ticket)
        elif error is not None:
            self.abort(cache)
        else:
            found = iter(self.checksums.sums if self.checksums is not None else ())
            checksums = [list(islice(found, len(stored.copy))) for stored in self.ticket.parts]
            tokens: dict[bytes, BlockTokens] = {}
            for part in self.parts:
                if part.parents and part.token_ids:
                    tokens.update(part.tokens())
            cache.commit_store(self.ticket, checksums, tokens)
            if not self.session.operator:
                self.registration.namespace.counters.stored_bytes += self.nbytes
        failed: defaultdict[int, list[GroupKeys]] = defaultdict(list)
        rejected: defaultdict[int, list[GroupKeys]] = defaultdict(list)
        for part, stored in zip(self.parts, self.ticket.parts, strict=True):
            lost, refused = stored.no_space, stored.rejected
            if stored.duplicates:  # a key that comes twice fares the same both times
                lost, refused = (_with_again(part.split, some, stored.duplicates) for some in (lost, refused))
            if error is not None:  # a store whose keys were all there lost nothing
                lost = sorted({*lost, *stored.copy, *stored.duplicates}.difference(refused))
            if lost or refused:
                part.put_by_job(lost, failed)
                part.put_by_job(refused, rejected)
        code = ErrorCode.SESSION_ENDED if self.session.ended else error or ErrorCode.NO_SPACE
        copied = [0] * len(self.ids) if error is not None else self.copied_bytes
        return [
            JobResult(job_id, False, nbytes, seconds, code, failed[number], rejected.get(number, []))
            if number in failed
            else JobResult(job_id, True, nbytes, seconds, rejected=rejected.get(number, []))
            for number, (job_id, nbytes) in enumerate(zip(self.ids, copied, strict=True))
        ]

    def abort(self, cache: Cache) -> None:
        """Give the slots back: what is in them counts for nothing."""
        if self.ticket is not None:
            cache.abort_store(self.ticket)


def _with_again(keys: Sequence[bytes], numbers: Sequence[int], again: Sequence[int]) -> list[int]:
    """The numbers, and those ``again`` of the same keys, ascending."""
    named = {keys[number] for number in numbers}
    return sorted([*numbers, *(number for number in again if keys[number] in named)])


@dataclass(eq=False)
class LoadJob(Job):
    """A load. Tickets are by part, checksums those of ``checks``."""

    direction = Direction.LOAD
    parts: Sequence[tuple[GroupPart, JobSpan]]
    lease_id: int
    keep_lease: bool
    tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[Check] = field(default_factory=list, init=False)
    """Slots that are compared with their checksums."""
    failed: list[GroupKeys] = field(default_factory=list, init=False)
    """Keys that are known to be not ready, or not whole."""
    error: ErrorCode | None = field(default=None, init=False)
    """Why it cannot be done, where that is known before it is copied."""

    def begin(self, cache: Cache, pool: Pool, *, verify: bool) -> None:
        """Hold the slots; nothing is copied where a block is not ready. ``abort`` undoes it.

        ``verify``: all slots are compared with their checksums, else those that nobody has compared since an earlier
        daemon wrote them.
        """
        registration = self.registration
        whose = registration.namespace, registration.rank, self.lease_id
        size = registration.namespace.key_bytes
        for part, span in self.parts:
            keys, first = part.keys[span.key * size : span.keys_end * size], span.first_block
            try:
                ticket = cache.begin_load(*whose, part.group, keys, first)
            except (NotReady, UnknownLease) as refusal:
                missing = refusal.missing if isinstance(refusal, NotReady) else range(span.keys_end - span.key)
                self.failed.append(GroupKeys(part.group, b"".join([part.split[span.key + at] for at in missing])))
                self.error = refusal.code
                continue
            self.tickets.append(ticket)
            block_ids = part.block_ids[span.block : span.blocks_end]
            tokens_per_block = registration.namespace.groups[part.group].tokens_per_block
            ticket.tokens = block_ids.size * tokens_per_block // part.layout.blocks_per_key
            if verify or first or cache.unverified_slots:
                self.checks += cache.checks_of_load(ticket, verify, first)
            slots = ticket.offsets + np.uint64(pool.mapping.address)
            self.copies.append(BlockCopy(part.layout, block_ids, slots, {0: first} if first else {}))
            self.nbytes += block_ids.size * part.layout.block_bytes
        if self.error is not None:
            self.copies, self.checks, self.nbytes = [], [], 0
        if self.checks:
            places = [(check.offset, check.length) for check in self.checks]
            expected = [check.checksum for check in self.checks]
            self.checksums = SlotChecksums(pool.digests, places, [0] * len(places), expected)

    def abort(self, cache: Cache) -> None:
        """Hold nothing any more; the lease lives on."""
        cache.end_load(self.tickets)

    def end(self, cache: Cache, seconds: float, error: ErrorCode | None, *, hangs: bool = False) -> list[JobResult]:
        """The copy has ended, well where ``error`` is None. Returns the result."""
        assert not hangs, "its bytes may still land"
        if self.checksums is not None:
            for check, found in zip(self.checks, self.checksums.sums, strict=True):
                if found:
                    apply_check(cache, check, found)
        if cache.mismatches:
            # What somebody else found wrong in the meantime is wrong for this load too.
            corrupt = [GroupKeys(one.group.index, keys) for one in self.tickets if (keys := cache.corrupt_keys(one))]
            self.failed += corrupt
            error = ErrorCode.CHECKSUM if corrupt else error
        copied_bytes = self.nbytes if error is None else 0
        error = error or self.error
        counts = error is None and not self.session.operator
        cache.end_load(self.tickets, counts=counts, ends_lease=error is None and not self.keep_lease)
        if counts:
            self.registration.namespace.counters.loaded_bytes += copied_bytes
        if error is not None and self.session.ended:
            error = ErrorCode.SESSION_ENDED
        return [JobResult(self.ids[0], error is None, copied_bytes, seconds, error, self.failed)]


_wrong_slots = RareWarnings(logger, logging.ERROR)


def apply_check(cache: Cache, check: Check, checksum: int) -> bool:
    """Act on the checksum that a slot's bytes have; False, and a line in the log once a minute, where it is wrong."""
    record = cache.table.records[check.slot]
    key = record["key"][: record["key_bytes"]].tobytes()
    if cache.check(check.slot, check.generation, checksum):
        return True
    _wrong_slots.warn(
        "The bytes of key %s (group %d, rank %d) at pool offset %d do not match their checksum: the block is dropped "
        "and its slot not used any more; %d slots were found wrong so far. Something wrote over them, or the machine's "
        "memory fails.",
        key.hex(),
        record["group"],
        record["rank"],
        check.offset,
        cache.mismatches,
    )
    return False


class Jobs:
    """The jobs of all sessions, from their acceptance until their copy has ended."""

    def __init__(self, config: Config, cache: Cache, pool: Pool, host: Host) -> None:
        self._config = config
        self._cache = cache
        self._pool = pool
        self._host = host
        self.running: dict[Job, None] = {}
        """All whose copy may still touch memory, oldest first."""
        self.quiet_at = -inf
        """When engines will have copied nothing for ``QUIET_S``; ``inf`` while they copy."""
        self.verify_due = 0.0
        """From 1 on a load compares all its slots: ``verify_share`` of the loads do."""
        self.with_results: dict[int, Session] = {}
        """Sessions with results that were not published yet, by id."""
        self.counters = {direction: DirectionCounters() for direction in Direction}
        self.cancelled_stores = 0
        """Stores that a Cancel ended before their copy began."""

    @property
    def unfinished(self) -> int:
        return sum(len(job.ids) for job in self.running)

    def start(self, job: StoreBatch | LoadJob) -> None:
        """Run a job. It ends, maybe at once, whatever becomes of its copy."""
        session = job.session
        session.jobs.update(dict.fromkeys(job.ids, job))
        session.in_flight += len(job.ids)
        session.pieces += job.pieces
        assert job.registration.on_closed is None, "memory that is being closed takes no jobs"
        job.registration.jobs += 1
        self.running[job] = None
        self.quiet_at = inf
        if not job.copies:
            self.finished(job, Outcome.DONE)
            return
        job.transfer = Transfer(
            job.direction,
            job.plan,
            job.accepted_at + self._config.limits.job_deadline_s,
            lambda _, outcome: self._host.post(lambda: self.finished(job, outcome)),
            lambda _: self.finished(job, Outcome.DEADLINE, hangs=True),
            job.checksums,
        )
        try:
            job.registration.memory.engine.queues[job.direction].submit(job.transfer)
        except Exception:
            # It is accepted and holds slots: whatever went wrong, its end must free them.
            logger.exception("A transfer could not be handed to the copy engine; its job fails.")
            self.finished(job, Outcome.FAILED)

    def finished(self, job: StoreBatch | LoadJob, outcome: Outcome, *, hangs: bool = False) -> None:
        """The copy has ended: nothing touches the job's slots and the client's memory any more.

        ``hangs``: it has not, long after its deadline. A store has its results all the same, see above.
        """
        if hangs and isinstance(job, LoadJob):
            return
        session, now, error = job.session, self._host.now(), ERROR_OF_OUTCOME.get(outcome)
        seconds = job.transfer.copy_s if job.transfer is not None else 0.0
        # The client may have given its blocks to another request the moment it closed its lifeline, so what was copied
        # of them counts only if the lifeline is still open now, after the copy.
        if isinstance(job, StoreBatch) and error is None and (session.ended or not session.lifeline.alive()):
            error = ErrorCode.CANCELLED
        try:
            if job.answered:
                job.abort(self._cache)
            else:
                results = job.end(self._cache, seconds, error, hangs=hangs)
        except Exception:
            # What it held stays held: nobody knows what of it may be read, or given to others.
            logger.exception("The end of a copy failed inside the daemon; its jobs fail.")
            results = [JobResult(job_id, False, 0, seconds, ErrorCode.INTERNAL) for job_id in job.ids]
        if not job.answered:
            job.answered = True
            nbytes, counters = sum([result.bytes for result in results]), self.counters[job.direction]
            counters.jobs += len(results)
            counters.failed_jobs += len(results) - sum([result.ok for result in results])
            counters.bytes += nbytes
            if isinstance(job, StoreBatch):
                session.stored_bytes += nbytes
            else:
                session.loaded_bytes += nbytes
            for job_id in job.ids:
                del session.jobs[job_id]
            session.completions.pending += results
            self.with_results[session.id] = session
        if hangs:
            return
        del self.running[job]
        self.quiet_at = inf if self.running else now + QUIET_S
        session.in_flight -= len(job.ids)
        session.pieces -= job.pieces
        job.transfer = None  # they refer to each other
        job.registration.jobs -= 1
        if job.registration.on_closed is not None:
            job.registration.close_if_idle()
        if session.ended:
            session.release_if_idle()

    def abandon(self, jobs: Iterable[Job]) -> None:
        """Stop jobs, in this order: those that wait now, those that run at their next step."""
        for job in dict.fromkeys(jobs):
            if job.transfer is not None and not job.withdraw():
                job.transfer.must_end(Outcome.FAILED)


# --- requests -------------------------------------------------------------------------------------


@answers(Submit)
def submit(service: Service, session: Session, message: Submit) -> None:
    """Accept stores and loads, all or none. Their results are the answer."""
    cache, pool, jobs, limits = service.cache, service.pool, service.jobs, service.config.limits
    stores, loads, log, accepted_at = message.stores, message.loads, session.completions, service.clock()
    log.acknowledge(message.acknowledged)
    registration = session.registrations[message.registration_id]
    of_loads = checked_parts(registration, loads, storing=False)
    of_stores = checked_parts(registration, stores, storing=True, is_offered=not session.operator)
    ids = [*stores.job_ids, *loads.job_ids]
    if len(set(ids)) < len(ids) or not session.jobs.keys().isdisjoint(ids):
        raise KvoffdError.of(ErrorCode.DUPLICATE_JOB)
    if not len(loads.job_ids) == len(loads.lease_ids) == len(loads.keep_lease):
        raise BadKeys(
            f"{len(loads.job_ids)} loads, {len(loads.lease_ids)} leases and {len(loads.keep_lease)} times whether "
            "to keep them; send one of each for each load."
        )
    parts = (*of_loads, *of_stores)
    keys = sum([len(part.split) for part in parts])
    pieces = sum([part.block_ids.size * len(part.layout.layers) for part in parts])
    of_memory = sum([layout.block_limit * len(layout.layers) for layout in registration.layouts])
    for count, most, what in (
        (len(ids), limits.max_jobs_per_message, "jobs in one message"),
        (keys, limits.max_keys_per_submit, "keys in one message"),
        (session.in_flight + len(ids), limits.max_jobs_in_flight, "jobs in flight with these"),
        (session.pieces + pieces, max(limits.max_pieces_in_flight, 2 * of_memory), "pieces in flight with these"),
    ):
        if count > most:
            why = f"{count} {what}; {most} are allowed. Send several messages, or wait for results."
            raise KvoffdError(why, ErrorCode.TOO_MANY)
    if log.nbytes >= MAX_UNACKNOWLEDGED_BYTES:
        raise KvoffdError("The session does not acknowledge its results; do so in each Submit.", ErrorCode.TOO_MANY)
    wanted: list[list[tuple[GroupPart, JobSpan]]] = [[] for _ in loads.job_ids]
    for part in of_loads:
        for span in part.spans:
            wanted[span.job].append((part, span))
    begun: list[StoreBatch | LoadJob] = []
    try:
        for job_id, lease_id, keep, asked in zip(loads.job_ids, loads.lease_ids, loads.keep_lease, wanted, strict=True):
            load = LoadJob((job_id,), session, registration, accepted_at, asked, lease_id, keep)
            begun.append(load)
            jobs.verify_due += service.config.verify_share
            verify = jobs.verify_due >= 1.0
            jobs.verify_due -= verify
            load.begin(cache, pool, verify=verify)
        if stores.job_ids:
            batch = StoreBatch(stores.job_ids, session, registration, accepted_at, of_stores)
            begun.append(batch)
            batch.begin(cache, pool)
    except BaseException:
        for job in begun:
            job.abort(cache)
        raise
    for job in begun:
        jobs.start(job)


@answers(Cancel)
def cancel(service: Service, session: Session, message: Cancel) -> CancelReply:
    """Fail jobs that have not started. Returns the ids of these, and those given whose bytes move, or will.

    Stores that are copied together are cancelled together, all of them when one is to be. Unknown ids have ended and
    are in neither list.
    """
    session.completions.acknowledge(message.acknowledged)
    cancelled: list[int] = []
    running: list[int] = []
    wanted: dict[Job, list[int]] = {}
    for job_id in dict.fromkeys(message.job_ids):
        if job_id in session.jobs:
            wanted.setdefault(session.jobs[job_id], []).append(job_id)
    for job, ids in wanted.items():
        if job.withdraw():
            cancelled.extend(job.ids)
            if isinstance(job, StoreBatch):
                service.jobs.cancelled_stores += len(job.ids)
        else:
            running.extend(ids)
    return CancelReply(message.request_id, cancelled, running)
