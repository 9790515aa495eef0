"""Stores and loads: a Submit is accepted or refused as a whole, and each accepted job has exactly one result.

The stores of one message are one copy, each load is another. Copy engines have their own threads, and report the end of
a copy by ``Host.post``.

A copy that hangs on a GPU does not end at its deadline. A store gets its result all the same: the copy only reads the
engine's blocks, and its slots are not readable. They stay allocated, and the registration mapped, until the copy ends.
A load gets none: it may still write to the engine's blocks, which the engine keeps until it has the result or the
lifeline has ended.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, repeat
from math import inf
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import Cache
from kvoffd.cache.hooks import NO_TOKENS, BlockTokens
from kvoffd.cache.prompts import Offered
from kvoffd.cache.tickets import Check, LoadTicket, StorePart, StoreTicket
from kvoffd.config import Config
from kvoffd.errors import BadBlockIds, BadKeys, KvoffdError, NotReady, UnknownLease
from kvoffd.observe.meters import HOUR_S, CounterWindows
from kvoffd.pool.pool import Pool
from kvoffd.server.handlers import answers
from kvoffd.server.host import Host
from kvoffd.server.session import Registration, Session
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd.transfer.engine import SlotChecksums, Transfer
from kvoffd.transfer.plan import BlockCopy, CopyEnd, Direction, GroupLayout, Plan, plan_blocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import (
    TOKEN_ID_BYTES,
    BadColumns,
    Cancel,
    Done,
    GroupKeys,
    JobResult,
    JobSpan,
    Loads,
    Stores,
    Submit,
)

logger = logging.getLogger(__name__)

QUIET_S = 0.05
"""Time without a copy after which engines count as idle."""
MAX_UNACKNOWLEDGED_BYTES = 2 << 20
"""Limit of a session's unacknowledged results, all of which fit a ResultsReply. One may name thousands of keys."""

ERROR_OF_END = {
    CopyEnd.CANCELLED: ErrorCode.CANCELLED,
    CopyEnd.DEADLINE: ErrorCode.DEADLINE,
    CopyEnd.FAILED: ErrorCode.COPY_FAILED,
    CopyEnd.CORRUPT: ErrorCode.CHECKSUM,
}


@dataclass
class DirectionCounters:
    """Counters of one direction's jobs."""

    jobs: int = 0
    failed_jobs: int = 0
    bytes: int = 0


# --- parts of a message ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class GroupPart:
    """One group's keys and blocks in the stores, or the loads, of a message, after all checks."""

    group: int
    layout: GroupLayout
    keys: list[bytes]
    """Keys of all its jobs, in order."""
    packed_keys: bytes
    """The same, end to end."""
    block_ids: npt.NDArray[np.int32]
    """[m] engine blocks."""
    spans: list[JobSpan]
    """Which of the keys and block ids are whose: one for each job with this group, in order."""
    parents: bytes
    """Parents of the keys, end to end; empty if no store sent them."""
    token_ids: bytes
    """Token ids of the keys' blocks, end to end; empty if no store sent them."""
    first_blocks: Mapping[int, int]
    """Engine blocks skipped at a key's start, by number of the key, if not 0."""

    def tokens_by_key(self) -> Mapping[bytes, BlockTokens]:
        """Return the parent and the token ids of each key, if the stores sent both."""
        size, each = len(self.parents) // len(self.keys), len(self.token_ids) // len(self.keys)
        return {
            key: BlockTokens(self.parents[at * size : (at + 1) * size], self.token_ids[at * each : (at + 1) * each])
            for at, key in enumerate(self.keys)
        }

    def add_by_job(self, numbers: Sequence[int], found: dict[int, list[GroupKeys]]) -> None:
        """Add the keys with these ascending numbers to their jobs' lists."""
        for span in self.spans:
            own = numbers[bisect_left(numbers, span.keys_begin) : bisect_left(numbers, span.keys_end)]
            if own:
                found[span.job].append(GroupKeys(self.group, b"".join([self.keys[number] for number in own])))


def checked_parts(registration: Registration, batch: Stores | Loads, *, storing: bool) -> list[GroupPart]:
    """Check jobs and return their parts by group. Raises KvoffdError."""
    namespace, jobs, parts = registration.namespace, len(batch.job_ids), list[GroupPart]()
    not_empty: set[int] = set()
    for part in batch.groups:
        group = part.group
        if not 0 <= group < len(namespace.specs) or len(part.keys) % namespace.key_bytes:
            namespace.check(group, part.keys)  # raises
        if any(other.group == group for other in parts):
            raise BadKeys(f"Group {group} comes twice; put its keys into one part, or send two messages.")
        keys: list[bytes] = np.frombuffer(part.keys, namespace.key_type).tolist()
        layout = registration.layouts[group]
        try:
            spans = part.spans(jobs, namespace.key_bytes, layout.blocks_per_key, store=storing)
        except BadColumns as error:
            kind = BadBlockIds if error.code is ErrorCode.BAD_BLOCK_IDS else BadKeys
            raise kind(str(error)) from None
        not_empty.update([span.job for span in spans])
        block_ids = np.frombuffer(part.block_ids, dtype="<i4")
        limit = layout.block_limit
        # One comparison: a negative id is an unsigned number above every limit.
        if block_ids.size and int(block_ids.view(np.uint32).max()) >= limit:
            wrong = block_ids[(block_ids < 0) | (block_ids >= limit)][0]
            raise BadBlockIds(f"Block id {wrong} is outside the registered tensors; use ids from 0 to {limit - 1}.")
        if len(set(keys)) < len(keys) and _one_repeats(keys, [(one.keys_begin, one.keys_end) for one in spans]):
            raise BadKeys(f"A key of group {group} occurs twice in one job; send each key once.")
        if not storing:
            ids = block_ids.tolist()
            if len(set(ids)) < len(ids) and _one_repeats(ids, [(one.blocks_begin, one.blocks_end) for one in spans]):
                raise BadBlockIds(f"Group {group} loads into an engine block twice; name each block once.")
        if part.parents and len(part.parents) != len(part.keys):
            raise BadKeys(f"{len(part.parents)} bytes of parents for {len(part.keys)} bytes of keys; send all or none.")
        tokens = namespace.specs[group].tokens_per_block
        if part.tokens and len(part.tokens) != len(keys) * tokens * TOKEN_ID_BYTES:
            sent = f"{len(part.tokens)} bytes of token ids for {len(keys)} keys of {tokens} tokens"
            raise BadKeys(f"{sent}; send all or none.")
        parts.append(
            GroupPart(
                group=group,
                layout=layout,
                keys=keys,
                packed_keys=part.keys,
                block_ids=block_ids,
                spans=spans,
                parents=part.parents,
                token_ids=part.tokens,
                first_blocks={span.keys_begin: span.first_block for span in spans if span.first_block},
            )
        )
    if len(not_empty) < jobs:
        raise BadBlockIds("A job has neither keys nor block ids; leave it out.")
    return parts


def _one_repeats(items: Sequence[object], jobs: Iterable[tuple[int, int]]) -> bool:
    """Return whether an item occurs twice in one of the jobs' ranges of items."""
    return any(len(set(items[begin:end])) < end - begin for begin, end in jobs)


# --- jobs -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class JobCopy(ABC):
    """The copy of accepted jobs, until it touches no memory any more: of the stores of one message, or of a load."""

    direction: ClassVar[Direction]

    ids: Sequence[int]
    """Ids of its jobs, which the client chose, unique among the session's unfinished ones."""
    session: Session
    registration: Registration
    accepted_at: float
    """Start of its deadline: before the evictions for its slots, since its engine waits for them too."""
    block_copies: list[BlockCopy] = field(default_factory=list, init=False)
    nbytes: int = field(default=0, init=False)
    """Bytes to copy."""
    pieces: int = field(default=0, init=False)
    """Upper bound of the pieces to copy, set when it is started."""
    checksums: SlotChecksums | None = field(default=None, init=False)
    transfer: Transfer | None = field(default=None, init=False)
    hangs: bool = field(default=False, init=False)
    """Whether it is a store whose copy hangs: it has its results, and still uses its slots and the client's memory."""

    def plan(self) -> Plan:
        return plan_blocks(self.direction, self.block_copies)

    def withdraw(self) -> bool:
        """Remove its transfer from the queue; return False if there is none, or its copy has begun."""
        transfer, queues = self.transfer, self.registration.memory.engine.queues
        return transfer is not None and queues[self.direction].cancel(transfer)

    @abstractmethod
    def end(self, cache: Cache, seconds: float, error: ErrorCode | None) -> list[JobResult]:
        """Have its blocks be used, or drop them if there is an ``error``. Return a result for each job."""

    @abstractmethod
    def abort(self, cache: Cache) -> None:
        """Give its slots back unused."""


@dataclass(eq=False)
class StoreBatch(JobCopy):
    """The stores of one message. Checksums are in the order of parts and keys."""

    direction = Direction.STORE
    parts: Sequence[GroupPart]
    sole: int
    """``Submit.sole``: only stores with this number may add shards to the blocks that it begins; 0 for none."""
    tickets: Sequence[StoreTicket] = field(default=(), init=False)
    """One for each part. Their lists, such as ``copy``, are numbers of the part's keys."""
    copied_bytes: list[int] = field(default_factory=list, init=False)
    """Bytes to copy for each store."""

    def begin(self, cache: Cache, pool: Pool) -> None:
        """Take slots for absent keys. ``abort`` undoes it, even after an error."""
        registration = self.registration
        self.copied_bytes = [0] * len(self.ids)
        places: list[tuple[int, int]] = []
        parts = [
            StorePart(
                group=one.group,
                keys=one.packed_keys,
                first_blocks=one.first_blocks,
                # Each job's keys are one chain, of a prompt of its own; ``before`` is the key before it there.
                starts=[span.keys_begin for span in one.spans],
                before={span.keys_begin: span.before for span in one.spans if span.before},
                prompts=[span.job for span in one.spans],
            )
            for one in self.parts
        ]
        self.tickets = cache.stores.begin(registration.namespace, registration.rank, parts, self.sole)
        for part, ticket in zip(self.parts, self.tickets, strict=True):
            if not ticket.copy:
                continue
            layout, length = part.layout, ticket.group.lengths[registration.rank]
            places += zip(ticket.offsets.tolist(), repeat(length))
            slots = ticket.offsets + np.uint64(pool.mapping.address)
            if len(ticket.copy) < len(part.keys):  # 0 for a key that is not copied
                of_all = np.zeros(len(part.keys), np.uint64)
                of_all[ticket.copy] = slots
                slots = of_all
            self.block_copies.append(BlockCopy(layout, part.block_ids, slots, part.first_blocks))
            for span in part.spans:
                at, end = (bisect_left(ticket.copy, number) for number in (span.keys_begin, span.keys_end))
                blocks = (end - at) * layout.blocks_per_key
                if at < end and ticket.copy[at] == span.keys_begin:
                    blocks -= span.first_block
                self.copied_bytes[span.job] += blocks * layout.block_bytes
        self.nbytes = sum(self.copied_bytes)
        if places:
            self.checksums = SlotChecksums(pool.digests, places, [0] * len(places), pool_address=pool.mapping.address)

    def end(self, cache: Cache, seconds: float, error: ErrorCode | None) -> list[JobResult]:
        """Commit the copied blocks, or drop them if there is an ``error``. Return a result for each store.

        If its copy hangs, its keys may be stored in other slots from now on, and ``abort`` must follow.
        """
        if self.hangs:
            cache.stores.drop_unfinished(self.tickets)
        elif error is not None:
            self.abort(cache)
        else:
            found = iter(self.checksums.sums if self.checksums is not None else ())
            checksums = [list(islice(found, len(ticket.copy))) for ticket in self.tickets]
            # By part: groups have equal keys, whose parents and tokens may differ.
            tokens = [part.tokens_by_key() if part.parents and part.token_ids else NO_TOKENS for part in self.parts]
            cache.stores.commit(self.tickets, checksums, tokens)
            self.registration.namespace.counters.stored_bytes += self.nbytes
        # A key was there, or is stored, lost or rejected; one that a message repeats is what its first occurrence is.
        lost_of: defaultdict[int, list[GroupKeys]] = defaultdict(list)
        rejected_of: defaultdict[int, list[GroupKeys]] = defaultdict(list)
        for part, ticket in zip(self.parts, self.tickets, strict=True):
            lost, rejected = ticket.no_space, ticket.rejected
            if ticket.duplicates:
                lost, rejected = (_with_repeats(part.keys, one, ticket.duplicates) for one in (lost, rejected))
            if error is not None:  # what was to be copied is lost too; what was there before is in none of these
                lost = sorted({*lost, *ticket.copy, *ticket.duplicates}.difference(rejected))
            if lost or rejected:
                part.add_by_job(lost, lost_of)
                part.add_by_job(rejected, rejected_of)
        code = ErrorCode.SESSION_ENDED if self.session.ended else error or ErrorCode.NO_SPACE
        results = []
        for number, (job_id, nbytes) in enumerate(zip(self.ids, self.copied_bytes, strict=True)):
            keys, copied = lost_of.get(number, []), nbytes if error is None else 0
            why = code if keys else None
            results.append(JobResult(job_id, not keys, copied, seconds, why, keys, rejected_of.get(number, [])))
        return results

    def abort(self, cache: Cache) -> None:
        """Free the slots; their content is not used."""
        cache.stores.abort(self.tickets)


def _with_repeats(keys: Sequence[bytes], numbers: Sequence[int], repeats: Sequence[int]) -> list[int]:
    """Return the numbers, and those of ``repeats`` with the same keys, ascending."""
    named = {keys[number] for number in numbers}
    return sorted([*numbers, *(number for number in repeats if keys[number] in named)])


@dataclass(eq=False)
class LoadJob(JobCopy):
    """A load, with a ticket for each part, and checksums of ``checks``."""

    direction = Direction.LOAD
    parts: Sequence[tuple[GroupPart, JobSpan]]
    lease_id: int
    keep_lease: bool
    tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[Check] = field(default_factory=list, init=False)
    """Slots to compare with their checksums."""
    failed: list[GroupKeys] = field(default_factory=list, init=False)
    """Keys that are not ready, or corrupt."""
    refusal: ErrorCode | None = field(default=None, init=False)
    """Error of a load that fails without a copy."""

    def begin(self, cache: Cache, pool: Pool, *, verify: bool) -> None:
        """Hold the slots. If a block is not ready, nothing is copied. ``abort`` undoes it.

        ``verify``: compare all slots with their checksums, instead of only those that an earlier daemon wrote and that
        were not compared since.
        """
        registration = self.registration
        owner = registration.namespace, registration.rank, self.lease_id
        size = registration.namespace.key_bytes
        for part, span in self.parts:
            keys, first = part.packed_keys[span.keys_begin * size : span.keys_end * size], span.first_block
            block_ids = part.block_ids[span.blocks_begin : span.blocks_end]
            tokens_per_block = registration.namespace.specs[part.group].tokens_per_block
            tokens = block_ids.size * tokens_per_block // part.layout.blocks_per_key
            try:
                ticket = cache.begin_load(*owner, part.group, keys, first, tokens=tokens)
            except (NotReady, UnknownLease) as refusal:
                missing = refusal.missing if isinstance(refusal, NotReady) else range(span.keys_end - span.keys_begin)
                self.failed.append(GroupKeys(part.group, b"".join([part.keys[span.keys_begin + at] for at in missing])))
                self.refusal = refusal.code
                continue
            self.tickets.append(ticket)
            # Also with ``first``: the engine lacks the bytes before, and cannot compare the checksum itself.
            if verify or first or cache.blocks.unverified_slots:
                self.checks += cache.integrity.checks_of_load(ticket, verify, first)
            slots = ticket.offsets + np.uint64(pool.mapping.address)
            self.block_copies.append(BlockCopy(part.layout, block_ids, slots, {0: first} if first else {}))
            self.nbytes += block_ids.size * part.layout.block_bytes
        if self.refusal is not None:
            self.block_copies, self.checks, self.nbytes = [], [], 0
        if self.checks:
            places = [(check.offset, check.length) for check in self.checks]
            expected = [check.checksum for check in self.checks]
            self.checksums = SlotChecksums(pool.digests, places, [0] * len(places), expected)

    def abort(self, cache: Cache) -> None:
        """Release the slots and keep the lease."""
        cache.end_load(self.tickets)

    def end(self, cache: Cache, seconds: float, error: ErrorCode | None) -> list[JobResult]:
        """End the load after its copy and return its result; ``error`` is that of the copy."""
        if self.checksums is not None:
            for check, found in zip(self.checks, self.checksums.sums, strict=True):
                if found:  # else the copy ended before the slot was read
                    apply_check(cache, check, found)
        if cache.integrity.mismatches:  # else no slot was ever found corrupt
            # Another load or the scrubber may have found a block of this load corrupt since it began.
            corrupt = [
                GroupKeys(one.group.index, keys) for one in self.tickets if (keys := cache.integrity.corrupt_keys(one))
            ]
            self.failed += corrupt
            error = ErrorCode.CHECKSUM if corrupt else error
        error = error or self.refusal
        is_success = error is None
        copied_bytes = self.nbytes if is_success else 0
        cache.end_load(self.tickets, is_success=is_success, ends_lease=is_success and not self.keep_lease)
        self.registration.namespace.counters.loaded_bytes += copied_bytes
        if error is not None and self.session.ended:
            error = ErrorCode.SESSION_ENDED
        return [JobResult(self.ids[0], is_success, copied_bytes, seconds, error, self.failed)]


_wrong_slots = RareWarnings(logger, logging.ERROR)


def apply_check(cache: Cache, check: Check, checksum: int) -> bool:
    """Act on the computed checksum of a slot; if it is wrong, return False and log that, at most once a minute."""
    record = cache.table.records[check.slot]
    key = record["key"][: record["key_bytes"]].tobytes()
    if cache.integrity.check(check.slot, check.sequence, checksum):
        return True
    _wrong_slots.warn(
        "The bytes of key %s (group %d, rank %d) at pool offset %d do not match their checksum: the block is dropped, "
        "and its slot is not used any more; %d mismatches so far. Something overwrote the slot, or the machine's "
        "memory fails.",
        key.hex(),
        record["group"],
        record["rank"],
        check.offset,
        cache.integrity.mismatches,
    )
    return False


class Jobs:
    """The jobs of all sessions, from acceptance until their copies have ended."""

    def __init__(self, config: Config, cache: Cache, pool: Pool, host: Host) -> None:
        self._config = config
        self._cache = cache
        self._pool = pool
        self._host = host
        self.running: dict[JobCopy, None] = {}
        """Copies that may still touch memory, oldest first."""
        self._unanswered: dict[Session, dict[int, JobCopy]] = {}
        """Copies of the jobs without a result by job id, of the sessions that have any; several jobs may share one."""
        self.quiet_at = -inf
        """Time at which engines will have been idle for ``QUIET_S``; ``inf`` while they copy."""
        self.verify_due = 0.0
        """Sum of ``verify_share`` over loads; at 1 a load compares all its slots."""
        self.with_results: dict[int, Session] = {}
        """Sessions with unpublished results, by id. The session table, which publishes them, empties it."""
        self.counters = {direction: DirectionCounters() for direction in Direction}
        self._windows = {direction: CounterWindows(host.now) for direction in Direction}
        self.cancelled_stores = 0
        """Number of stores that were cancelled before their copy began."""

    @property
    def engines_busy(self) -> bool:
        """Whether engines copy, or did in the last ``QUIET_S``."""
        return self._host.now() < self.quiet_at

    @property
    def unfinished(self) -> int:
        """Number of jobs whose copies may still touch memory."""
        return sum(len(copy.ids) for copy in self.running)

    def of(self, session: Session) -> Mapping[int, JobCopy]:
        """Return the copies of a session's jobs without a result, by job id."""
        return self._unanswered.get(session, {})

    def tick(self) -> None:
        for direction, counters in self.counters.items():
            self._windows[direction].sample(asdict(counters))

    def in_last_hour(self, direction: Direction) -> DirectionCounters:
        """Return what was counted in the last hour."""
        _, gained = self._windows[direction].gained(HOUR_S, asdict(self.counters[direction]))
        return DirectionCounters(**{name: int(count) for name, count in gained.items()})

    @answers(Submit)
    def submit(self, session: Session, message: Submit) -> None:
        """Accept stores and loads, all or none. Their results are published instead of a reply."""
        cache, pool, accepted_at = self._cache, self._pool, self._host.now()
        stores, loads = message.stores, message.loads
        session.completions.acknowledge(message.acknowledged)
        registration = session.registrations[message.registration_id]
        namespace = registration.namespace
        load_parts = checked_parts(registration, loads, storing=False)
        store_parts = checked_parts(registration, stores, storing=True)
        self._check_jobs(session, registration, message, (*load_parts, *store_parts))
        parts_of_load: list[list[tuple[GroupPart, JobSpan]]] = [[] for _ in loads.job_ids]
        for part in load_parts:
            for span in part.spans:
                parts_of_load[span.job].append((part, span))
        begun: list[JobCopy] = []
        try:
            for job_id, lease_id, keep, its_parts in zip(
                loads.job_ids, loads.lease_ids, loads.keep_lease, parts_of_load, strict=True
            ):
                load = LoadJob((job_id,), session, registration, accepted_at, its_parts, lease_id, keep)
                begun.append(load)
                self.verify_due += self._config.verify_share
                verify = self.verify_due >= 1.0
                if verify:
                    self.verify_due -= 1.0
                load.begin(cache, pool, verify=verify)
            if stores.job_ids:
                batch = StoreBatch(stores.job_ids, session, registration, accepted_at, store_parts, message.sole)
                begun.append(batch)
                batch.begin(cache, pool)
                if registration.rank == 0 and not namespace.of_bench:  # once: all ranks offer the same
                    groups = [(namespace.groups[part.group], part.packed_keys) for part in store_parts]
                    first = store_parts[0]
                    cache.prompts.offered(Offered(namespace, groups, first.keys, first.parents, first.token_ids))
        except BaseException:
            for copy in begun:
                copy.abort(cache)
            raise
        for copy in begun:
            self.start(copy)

    def _check_jobs(
        self, session: Session, registration: Registration, message: Submit, parts: Sequence[GroupPart]
    ) -> None:
        """Check the jobs of a message besides its parts, and how much they are. Raises KvoffdError."""
        stores, loads, limits = message.stores, message.loads, self._config.limits
        ids = [*stores.job_ids, *loads.job_ids]
        if len(set(ids)) < len(ids) or not self.of(session).keys().isdisjoint(ids):
            raise KvoffdError.of(ErrorCode.DUPLICATE_JOB)
        if not len(loads.job_ids) == len(loads.lease_ids) == len(loads.keep_lease):
            raise BadKeys(
                f"The message has {len(loads.job_ids)} loads, {len(loads.lease_ids)} lease_ids and "
                f"{len(loads.keep_lease)} values of keep_lease; send one of each for each load."
            )
        keys = sum([len(part.keys) for part in parts])
        pieces = sum([part.block_ids.size * len(part.layout.layers) for part in parts])
        # Only a client that copies its blocks several times at once exceeds twice this.
        memory_pieces = sum([layout.block_limit * len(layout.layers) for layout in registration.layouts])
        for count, most, what in (
            (len(ids), limits.max_jobs_per_message, "jobs in one message"),
            (keys, limits.max_keys_per_submit, "keys in one message"),
            (session.in_flight + len(ids), limits.max_jobs_in_flight, "jobs in flight with these"),
            (
                session.pieces + pieces,
                max(limits.max_pieces_in_flight, 2 * memory_pieces),
                "pieces in flight with these",
            ),
        ):
            if count > most:
                why = f"{count} {what}; the limit is {most}. Send several messages, or wait for results."
                raise KvoffdError(why, ErrorCode.TOO_MANY)
        if session.completions.nbytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise KvoffdError("The session does not acknowledge its results; do so in each Submit.", ErrorCode.TOO_MANY)

    @answers(Cancel)
    def cancel(self, session: Session, message: Cancel) -> Done:
        """Fail jobs whose copy has not begun; the stores of one message together. Unknown ids have ended."""
        session.completions.acknowledge(message.acknowledged)
        count = 0
        copies = self.of(session)
        for copy in dict.fromkeys(copies[job_id] for job_id in message.job_ids if job_id in copies):
            if copy.withdraw():
                count += len(copy.ids)
                if copy.direction is Direction.STORE:
                    self.cancelled_stores += len(copy.ids)
        return Done(message.request_id, count)

    def start(self, copy: JobCopy) -> None:
        """Run a copy. It ends in any case, perhaps before this returns."""
        session = copy.session
        self._unanswered.setdefault(session, {}).update(dict.fromkeys(copy.ids, copy))
        session.in_flight += len(copy.ids)
        copy.pieces = sum([part.block_ids.size * len(part.layout.layers) for part in copy.block_copies])
        session.pieces += copy.pieces
        assert not copy.registration.closing, "a registration that is being closed accepts no copies"
        copy.registration.copies += 1
        self.running[copy] = None
        self.quiet_at = inf
        if not copy.block_copies:
            self.finished(copy, CopyEnd.DONE)
            return
        copy.transfer = Transfer(
            copy.direction,
            copy.plan,
            deadline=copy.accepted_at + self._config.limits.job_deadline_s,
            on_done=lambda _, end: self._host.post(lambda: self.finished(copy, end)),
            on_overdue=lambda _: self.overdue(copy),  # called by the engine's ``tick``, in this thread
            checksums=copy.checksums,
            session=session.id,
            nbytes=copy.nbytes,
        )
        try:
            copy.registration.memory.engine.queues[copy.direction].submit(copy.transfer)
        except Exception:
            # The job is accepted and has slots, so it must end.
            logger.exception("The copy engine did not accept a transfer; its job fails.")
            self.finished(copy, CopyEnd.FAILED)

    def overdue(self, copy: JobCopy) -> None:
        """Answer a store whose copy hangs; a load must wait for its copy. See the top of this file."""
        if copy.direction is Direction.STORE:
            copy.hangs = True
            self._answer(copy, ErrorCode.DEADLINE)

    def finished(self, copy: JobCopy, end: CopyEnd) -> None:
        """End a copy that does not touch slots or the client's memory any more."""
        session, now, error = copy.session, self._host.now(), ERROR_OF_END.get(end)
        # A client may reuse its blocks as soon as it has closed its lifeline, so the copied bytes count only if the
        # lifeline is still open after the copy.
        if copy.direction is Direction.STORE and error is None and (session.ended or not session.lifeline.alive()):
            error = ErrorCode.CANCELLED
        if not copy.hangs:
            self._answer(copy, error)
        else:
            try:
                copy.abort(self._cache)
            except Exception:
                logger.exception("Freeing the slots of a copy that had hung failed inside the daemon; they are lost.")
        del self.running[copy]
        self.quiet_at = inf if self.running else now + QUIET_S
        session.in_flight -= len(copy.ids)
        session.pieces -= copy.pieces
        copy.transfer = None  # breaks a reference cycle
        copy.registration.copies -= 1
        if copy.registration.closing:
            copy.registration.close_if_idle()
        if session.ended:
            session.release_if_idle()

    def _answer(self, copy: JobCopy, error: ErrorCode | None) -> None:
        """Commit or drop a copy's blocks, count its results, and have them published."""
        session, counters = copy.session, self.counters[copy.direction]
        seconds = copy.transfer.copy_s if copy.transfer is not None else 0.0
        try:
            results = copy.end(self._cache, seconds, error)
        except Exception:
            # Its slots are not freed: it is unknown whether they may be read or reused.
            logger.exception("Ending a copy failed inside the daemon; its jobs fail.")
            results = [JobResult(job_id, False, 0, seconds, ErrorCode.INTERNAL) for job_id in copy.ids]
        nbytes = sum([result.bytes for result in results])
        counters.jobs += len(results)
        counters.failed_jobs += len(results) - sum([result.ok for result in results])
        counters.bytes += nbytes
        if copy.direction is Direction.STORE:
            session.stored_bytes += nbytes
        else:
            session.loaded_bytes += nbytes
        unanswered = self._unanswered[session]
        for job_id in copy.ids:
            del unanswered[job_id]
        if not unanswered:
            del self._unanswered[session]
        session.completions.pending += results
        self.with_results[session.id] = session

    def abandon(self, copies: Iterable[JobCopy]) -> None:
        """Stop copies in the given order, each once. Queued ones end now, running ones at their next step."""
        for copy in dict.fromkeys(copies):
            if copy.transfer is not None and not copy.withdraw():
                copy.transfer.must_end(CopyEnd.FAILED)
