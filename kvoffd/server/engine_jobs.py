"""Stores and loads of workers, once they are accepted: answered by exactly one completion each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.hooks import BlockTokens
from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.cache.pins import LoadTicket
from kvoffd.config import Config
from kvoffd.errors import NotReady
from kvoffd.observe.meters import RateMeter
from kvoffd.server.jobs import ERROR_OF_OUTCOME, JobRunner
from kvoffd.server.session import Job, Registration, Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.plan import Direction, Outcome, Plan, concatenate, plan_blocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import GroupKeys, GroupTransfer, JobResult

logger = logging.getLogger(__name__)


@dataclass
class DirectionCounters:
    """What happened to the jobs of one direction."""

    jobs: int = 0
    failed_jobs: int = 0
    bytes: int = 0
    rate: RateMeter = field(default_factory=RateMeter)


@dataclass(eq=False)
class EngineJobs:
    """What the stores and loads of all sessions have in common, and what is counted of them."""

    config: Config
    cache: BlockCache
    pool_address: int
    runner: JobRunner
    counters: dict[Direction, DirectionCounters] = field(init=False)
    unsent_stores: int = 0
    """Stores that clients dropped at a fence before they had sent them."""
    cancelled_stores: int = 0
    with_results: dict[int, Session] = field(default_factory=dict, init=False)
    """Sessions with results that no flush has published yet, by id."""
    _verify_due: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.counters = {direction: DirectionCounters() for direction in Direction}

    def verifies_next_load(self) -> bool:
        """Whether the next load compares all its slots with their checksums: ``verify_share`` of the loads do.

        The others compare only those that nobody has verified since an earlier daemon wrote them.
        """
        self._verify_due += self.config.verify_share
        due = self._verify_due >= 1.0
        self._verify_due -= due
        return due


@dataclass(eq=False)
class _EngineJob(Job):
    """Stores or a load."""

    client_memory: Registration
    owner: EngineJobs

    def run(self, plan: Plan, pieces: int) -> None:
        """Hand an accepted job over to be copied; it counts as ``pieces``."""
        self.pieces = pieces
        self.owner.runner.start(self, plan)

    def answer(self, results: Sequence[JobResult]) -> None:
        """Put completions into the session's log, and count them."""
        owner, session = self.owner, self.session
        counters = owner.counters[self.direction]
        copied_bytes = sum([result.bytes for result in results])
        counters.jobs += len(results)
        counters.failed_jobs += len(results) - sum([result.ok for result in results])
        counters.bytes += copied_bytes
        counters.rate.add(copied_bytes)
        session.completions.add(results)
        owner.with_results[session.id] = session

    @property
    def seconds(self) -> float:
        """Since its acceptance."""
        return max(0.0, self.owner.runner.clock() - self.accepted_at)

    def client_error(self, error: ErrorCode) -> ErrorCode:
        """What the client gets for ``error``: the end of its session, once that is over."""
        return ErrorCode.SESSION_ENDED if self.session.ended else error


@dataclass(eq=False)
class StoredGroup:
    """What the stores of one message copy of one group, as arrays.

    Attributes:
        group: index of the group.
        keys: of all its stores, in their order.
        block_ids: [m] engine blocks, int32.
        position: [m] as ``plan_blocks`` has it, in ``keys``.
        stores: [n] indices of the stores that have keys in it, ascending.
        first_key: [n] where in ``keys`` those of each of them begin.
        first_id: [n] where in ``block_ids`` those of each of them begin.
        first_blocks: by key, how many engine blocks are left out at its start, where there are any.
        parts: of each of its stores, where any told tokens.
    """

    group: int
    keys: Sequence[bytes]
    block_ids: npt.NDArray[np.int32]
    position: npt.NDArray[np.int64]
    stores: npt.NDArray[np.int64]
    first_key: npt.NDArray[np.int64]
    first_id: npt.NDArray[np.int64]
    first_blocks: dict[int, int]
    parts: Sequence[GroupTransfer] = ()

    def tokens(self) -> Mapping[bytes, BlockTokens]:
        """By key, its parent and token ids, where its store told them."""
        found: dict[bytes, BlockTokens] = {}
        for part, first in zip(self.parts, self.first_key.tolist(), strict=False):
            if not part.parents or not part.tokens:
                continue
            size = len(self.keys[first])
            count = len(part.keys) // size
            per_key = len(part.tokens) // count
            for at in range(count):
                parent = part.parents[at * size : (at + 1) * size]
                found[self.keys[first + at]] = BlockTokens(parent, part.tokens[at * per_key : (at + 1) * per_key])
        return found

    def keys_by_store(self, numbers: Iterable[int]) -> Iterator[tuple[int, GroupKeys]]:
        """The keys of some numbers, ascending, by the index of the store that they are of."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        of_store = self.stores[np.searchsorted(self.first_key, chosen, side="right") - 1]
        for store in dict.fromkeys(of_store.tolist()):
            picked = chosen[of_store == store].tolist()
            yield store, GroupKeys(self.group, b"".join([self.keys[number] for number in picked]))


@dataclass(eq=False)
class StoreJobs(_EngineJob):
    """Stores of one message that are copied together. Their checksums are by ticket and key, tickets by group."""

    direction = Direction.STORE
    groups: Sequence[StoredGroup]
    copied_bytes: npt.NDArray[np.int64] = field(init=False)
    """Of each store, [stores]."""

    def begin(self) -> Plan:
        """Take slots for what is absent, and plan the copy. Whatever it raises, it has changed nothing."""
        # Not once it is planned: to take slots in a full pool is part of what the stores cost their engine.
        self.accepted_at = self.owner.runner.clock()
        self.copied_bytes = np.zeros(len(self.ids), dtype=np.int64)
        try:
            plan = concatenate([self._plan(part) for part in self.groups])
        except BaseException:
            self.owner.runner.abort_stores(self)
            raise
        self._take_checksums(plan)
        self.session.store_bytes += plan.nbytes
        return plan

    def _plan(self, part: StoredGroup) -> Plan:
        registration, owner = self.client_memory, self.owner
        layout = registration.layouts[part.group]
        whose = registration.namespace, registration.rank, part.group
        node, starts = registration.memory.node, part.first_key.tolist()
        ticket = owner.cache.begin_stores(*whose, part.keys, part.first_blocks, self.store_tickets, node, starts)
        self.store_tickets.append(ticket)
        slots = np.array(ticket.offsets, dtype=np.uint64) + np.uint64(owner.pool_address)
        block_bytes = int(layout.page_bytes.sum())
        if len(ticket.copy) == len(part.keys):
            counts = np.diff(part.first_id, append=part.block_ids.size)
            self.copied_bytes[part.stores] += counts * block_bytes
            return plan_blocks(layout, self.direction, part.block_ids, part.position, slots)
        addresses = np.zeros(len(part.keys), dtype=np.uint64)
        chosen = np.zeros(len(part.keys), dtype=np.bool_)
        indices = np.array(ticket.copy, dtype=np.int64)
        addresses[indices] = slots
        chosen[indices] = True
        copied = chosen[part.position // layout.blocks_per_key]
        self.copied_bytes[part.stores] += np.add.reduceat(copied.astype(np.int64), part.first_id) * block_bytes
        return plan_blocks(layout, self.direction, part.block_ids, part.position, addresses, chosen)

    def _take_checksums(self, plan: Plan) -> None:
        owner = self.owner
        slots: list[tuple[int, int]] = []
        for ticket in self.store_tickets:
            length = ticket.namespace.shard_length(ticket.rank, ticket.group)
            slots += [(offset, length) for offset in ticket.offsets]
        if slots:
            whole_after = plan.whole_after.tolist()
            digests = owner.cache.slots.digests
            self.checksums = SlotChecksums(digests, slots, whole_after=whole_after, pool_address=owner.pool_address)

    def end(self, outcome: Outcome) -> None:
        if outcome is not Outcome.DONE:
            self.owner.runner.abort_stores(self)
            self._fail(ERROR_OF_OUTCOME[outcome])
            return
        for part, ticket in zip(self.groups, self.store_tickets, strict=True):
            ticket.tokens = part.tokens()
        self.owner.runner.commit_stores(self)
        self.client_memory.namespace.counters.stored_bytes += self.nbytes
        self._complete(ErrorCode.NO_ROOM, self.copied_bytes.tolist(), self._failed(after_copy=False))

    def answer_overdue(self) -> None:
        self._fail(ErrorCode.DEADLINE)

    def _fail(self, error: ErrorCode) -> None:
        # A store whose keys were all there lost nothing.
        self._complete(error, [0] * len(self.ids), self._failed(after_copy=True))

    def _failed(self, *, after_copy: bool) -> dict[int, list[GroupKeys]]:
        """The keys that found no room and, where the copy failed, those that it was to copy, by store."""
        lost = [ticket.dropped for ticket in self.store_tickets]
        if after_copy:
            lost = [
                sorted({*ticket.dropped, *ticket.copy, *ticket.again}.difference(ticket.declined))
                for ticket in self.store_tickets
            ]
        return self._by_store(lost)

    def _by_store(self, numbers: Sequence[Sequence[int]]) -> dict[int, list[GroupKeys]]:
        found: dict[int, list[GroupKeys]] = {}
        for part, chosen in zip(self.groups, numbers, strict=True):
            for store, keys in part.keys_by_store(chosen) if chosen else ():
                found.setdefault(store, []).append(keys)
        return found

    def _complete(self, error: ErrorCode, copied: Sequence[int], failed: dict[int, list[GroupKeys]]) -> None:
        """Answer the stores: with ``error`` those that are in ``failed``, with the keys that are not in the pool."""
        self.session.store_bytes -= self.nbytes
        seconds, error = self.seconds, self.client_error(error)
        declined = self._by_store([ticket.declined for ticket in self.store_tickets])
        self.answer(
            [
                JobResult(job_id, False, nbytes, seconds, error, failed[index], declined.get(index, []))
                if index in failed
                else JobResult(job_id, True, nbytes, seconds, declined=declined.get(index, []))
                for index, (job_id, nbytes) in enumerate(zip(self.ids, copied, strict=True))
            ]
        )


@dataclass(eq=False)
class LoadJob(_EngineJob):
    """A load. Its checksums are those of ``checks``."""

    direction = Direction.LOAD
    lease_id: int
    keep_lease: bool = False
    failed: list[GroupKeys] = field(default_factory=list, init=False)
    """Keys that are known to be not ready, or not whole."""
    load_tickets: list[LoadTicket] = field(default_factory=list, init=False)
    checks: list[ChecksumCheck] = field(default_factory=list, init=False)
    """Slots that are compared with their checksums."""

    def begin(self, groups: Sequence[GroupTransfer], block_ids: Sequence[npt.NDArray[np.int32]]) -> Plan:
        """Hold the slots, and plan the copy: an empty one where a block is not ready, which fails the accepted load.

        Whatever it raises, it has changed nothing.
        """
        self.accepted_at = self.owner.runner.clock()
        try:
            plans = [self._plan(part, ids) for part, ids in zip(groups, block_ids, strict=True)]
        except BaseException:
            self.owner.cache.end_load(self.load_tickets, ok=False)
            raise
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

    def _plan(self, part: GroupTransfer, block_ids: npt.NDArray[np.int32]) -> Plan:
        registration, cache = self.client_memory, self.owner.cache
        namespace = registration.namespace
        try:
            ticket = cache.begin_load(
                namespace, registration.rank, self.lease_id, part.group, part.keys, part.first_block
            )
        except NotReady as refusal:
            size = namespace.key_bytes
            missing = [part.keys[number * size : (number + 1) * size] for number in refusal.missing]
            self.failed.append(GroupKeys(part.group, b"".join(missing)))
            return concatenate([])
        self.load_tickets.append(ticket)
        slots = np.array(ticket.offsets, dtype=np.uint64) + np.uint64(self.owner.pool_address)
        position = np.arange(part.first_block, part.first_block + block_ids.size, dtype=np.int64)
        return plan_blocks(registration.layouts[part.group], self.direction, block_ids, position, slots)

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
        else:
            error = self.client_error(error)
        self.answer([JobResult(job, error is None, copied_bytes, self.seconds, error, self.failed) for job in self.ids])

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
