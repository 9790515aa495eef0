"""Blocks that operators write: copied from attached memory, compared with their checksums, then ready."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Namespace
from kvoffd.cache.pins import StoreTicket
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError, OutOfBounds
from kvoffd.server.engine_memory import EngineMemory, MemoryMapper
from kvoffd.server.session import Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.engine import Direction, Outcome, Transfer
from kvoffd.transfer.plan import Plan
from kvoffd_proto.blocks import PUT_NO_ROOM, PUT_PRESENT, PUT_STORED, PutBlocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle

logger = logging.getLogger(__name__)

MAX_PUTS = 4
"""Of one session at a time: enough to fill one segment while another is copied."""

PUT_OF_POOL = 4
"""One part in so many may be written by one request: until its end nobody can evict that."""

Ended = Callable[[bytes | KvoffdError], None]
"""Told how a put ended: the state of each key, or why nothing was done."""

_ERROR_OF_OUTCOME = {
    Outcome.CANCELLED: ErrorCode.CANCELLED,
    Outcome.DEADLINE: ErrorCode.DEADLINE,
    Outcome.FAILED: ErrorCode.COPY_FAILED,
}


class Staging:
    """A mapped segment of an operator. Unmapped when its session has ended and no put reads it any more."""

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.address, self.size_bytes = memory.spans[0]
        self._puts = 0
        self._closing = False

    def begin(self) -> None:
        """A put reads it."""
        self._puts += 1

    def end(self) -> None:
        """A put reads it no more."""
        self._puts -= 1
        self._close_if_idle()

    def close(self) -> None:
        """Unmap it as soon as nobody reads it."""
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closing and not self._puts:
            self.memory.close(lambda: None)


@dataclass(eq=False)
class BlockWrite:
    """One request under way."""

    session: Session
    namespace: Namespace
    group: int
    keys: list[bytes]
    staging: Staging
    ended: Ended
    tickets: list[StoreTicket] = field(default_factory=list)
    """By rank."""
    expected: list[int] = field(default_factory=list)
    """Checksums, in the order of the tickets' keys to copy."""
    inspection: SlotChecksums | None = None
    transfer: Transfer | None = None
    nbytes: int = 0


class PutRunner:
    """Turns PutBlocks into transfers and their ends into replies. ``post`` is as JobRunner's."""

    def __init__(
        self,
        cache: BlockCache,
        memory: MemoryMapper,
        pool_address: int,
        clock: Callable[[], float],
        deadline_s: float,
        post: Callable[[BlockWrite, Outcome], None],
    ) -> None:
        self._cache = cache
        self._memory = memory
        self._pool_address = pool_address
        self._clock = clock
        self._deadline_s = deadline_s
        self._post = post
        self._most_bytes = cache.slots.pool_bytes // PUT_OF_POOL
        self._running: dict[BlockWrite, None] = {}
        self.put_blocks = 0
        """Blocks that were written."""
        self.put_bytes = 0
        """Bytes copied for them."""

    @property
    def unfinished(self) -> int:
        """Puts that have not ended."""
        return len(self._running)

    def put(self, session: Session, namespace: Namespace, message: PutBlocks, most_stagings: int, ended: Ended) -> None:
        """Start a put, or raise KvoffdError and change nothing. ``ended`` is called once, maybe at once."""
        if sum(put.session is session for put in self._running) >= MAX_PUTS:
            raise KvoffdError(f"{MAX_PUTS} puts of the session run; wait for their replies.", ErrorCode.TOO_MANY)
        keys = namespace.split(message.group, message.keys, distinct=True)
        lengths = self._check(namespace, message, keys)
        staging = self._staging(session, message, most_stagings)
        put = BlockWrite(session, namespace, message.group, keys, staging, ended)
        try:
            plan = self._plan(put, message, lengths)
        except BaseException:
            for ticket in put.tickets:
                self._cache.abort_store(ticket)
            raise
        self._start(put, plan)

    def _check(self, namespace: Namespace, message: PutBlocks, keys: list[bytes]) -> list[int]:
        """The length of each rank's shards, if the request fits the namespace's geometry."""
        lengths: list[int] = []
        for rank in range(namespace.world_size):
            namespace.slot_bytes(rank, message.group)
            sizes = namespace.shard_bytes(rank)
            assert sizes is not None, "slot_bytes() has looked"
            lengths.append(sizes[message.group])
        if not keys or len(message.shards) != len(keys):
            raise BadKeys(f"There are {len(keys)} keys and shards of {len(message.shards)} blocks; send both of each.")
        if any(len(shards) != namespace.world_size for shards in message.shards):
            raise BadGeometry(f"A block of this namespace has {namespace.world_size} shards; put all of them at once.")
        for shards in message.shards:
            for rank, shard in enumerate(shards):
                if shard.offset_bytes + lengths[rank] > message.segment_bytes:
                    raise OutOfBounds(
                        f"A shard of {lengths[rank]} bytes at {shard.offset_bytes} ends outside its segment of "
                        f"{message.segment_bytes} bytes."
                    )
        described = namespace.shards(0)
        if described is not None and message.first_block >= described[message.group].blocks_per_key:
            raise BadGeometry(f"A key of the group has no engine block {message.first_block}.")
        if (wanted := sum(lengths) * len(keys)) > self._most_bytes and len(keys) > 1:
            raise KvoffdError(
                f"The blocks have {wanted} bytes together, and one request may bring {self._most_bytes}; put fewer at "
                "a time.",
                ErrorCode.TOO_LARGE,
            )
        return lengths

    def _staging(self, session: Session, message: PutBlocks, most: int) -> Staging:
        """The mapped segment that a request names."""
        known = session.staging.get(message.segment_id)
        if known is not None:
            if known.size_bytes != message.segment_bytes:
                raise BadGeometry(f"Segment {message.segment_id} was mapped with {known.size_bytes} bytes.")
            return known
        if message.segment_id not in session.segments:
            raise KvoffdError(f"No descriptor was attached as segment {message.segment_id}.", ErrorCode.UNKNOWN_SEGMENT)
        if len(session.staging) >= most:
            raise KvoffdError(f"The session puts from {most} segments, its limit; use one again.", ErrorCode.TOO_MANY)
        mapped: list[EngineMemory | KvoffdError] = []
        handle = MemfdHandle(message.segment_id, message.segment_bytes)
        self._memory.map(b"", [handle], session.segments, mapped.append)
        (memory,) = mapped  # host memory is mapped at once
        if isinstance(memory, KvoffdError):
            raise memory
        session.close_segment(message.segment_id)
        staging = session.staging[message.segment_id] = Staging(memory)
        return staging

    def _plan(self, put: BlockWrite, message: PutBlocks, lengths: list[int]) -> Plan:
        """Take slots, and say what goes where."""
        sources: list[int] = []
        slots: list[tuple[int, int]] = []
        for rank, length in enumerate(lengths):
            node = put.namespace.nodes.get(rank)  # where the rank's own stores want them
            ticket = self._cache.begin_store(
                put.namespace, rank, message.group, message.keys, message.first_block, put.tickets, node
            )
            put.tickets.append(ticket)
            for number, offset in zip(ticket.copy, ticket.offsets, strict=True):
                shard = message.shards[number][rank]
                sources.append(put.staging.address + shard.offset_bytes)
                slots.append((offset, length))
                put.expected.append(int.from_bytes(shard.checksum, "big"))
        sizes = np.array([length for _, length in slots], dtype=np.uint64)
        destinations = np.array([offset for offset, _ in slots], dtype=np.uint64) + np.uint64(self._pool_address)
        put.nbytes = sum(length for _, length in slots)
        if slots:
            digests = self._cache.slots.digests
            put.inspection = SlotChecksums(digests, slots, put.expected, pool_address=self._pool_address)
        copied = sizes > 0  # a rank without a layer in the group has a slot and no bytes
        return Plan(destinations[copied], np.array(sources, dtype=np.uint64)[copied], sizes[copied], put.nbytes)

    def _start(self, put: BlockWrite, plan: Plan) -> None:
        self._running[put] = None
        put.staging.begin()
        if not plan.pieces:
            outcome = put.inspection.run(lambda: None) if put.inspection is not None else None
            self.transfer_done(put, outcome or Outcome.DONE)
            return
        put.transfer = Transfer(
            Direction.STORE,
            plan,
            self._clock() + self._deadline_s,
            lambda _, outcome, __: self._post(put, outcome),
            checksums=put.inspection,
        )
        try:
            put.staging.memory.engine.submit(put.transfer)
        except Exception:
            # It holds slots: whatever went wrong, its end must let them go.
            logger.exception("A put could not be handed to the copy engine; it fails.")
            self.transfer_done(put, Outcome.FAILED)

    def transfer_done(self, put: BlockWrite, outcome: Outcome) -> None:
        """End ``put``: make its blocks readable, or give their slots back."""
        if put.session.ended:
            outcome = Outcome.CANCELLED  # nobody hears of it
        done = outcome is Outcome.DONE
        sums = iter(put.inspection.sums if put.inspection is not None else ())
        for ticket in put.tickets:
            if done:
                ticket.checksums = [next(sums) for _ in ticket.copy]
                self._cache.commit_store(ticket)
            else:
                self._cache.abort_store(ticket)
        del self._running[put]
        put.staging.end()
        if put.session.ended:
            return
        if done:
            put.ended(self._states(put))
        elif outcome is Outcome.CORRUPT:
            put.ended(KvoffdError(_wrong_bytes(put), ErrorCode.CHECKSUM))
        else:
            code = _ERROR_OF_OUTCOME[outcome]
            put.ended(KvoffdError(code.sentence, code))

    def _states(self, put: BlockWrite) -> bytes:
        """What became of each key. One that found no room for a shard of some rank is not left half stored."""
        states = bytearray([PUT_PRESENT]) * len(put.keys)
        for ticket in put.tickets:
            for number in ticket.copy:
                states[number] = PUT_STORED
        lacking = {number for ticket in put.tickets for number in ticket.dropped}
        for number in lacking:
            states[number] = PUT_NO_ROOM
        if lacking:
            self._cache.drop_incomplete(
                block
                for ticket in put.tickets
                for number, block in zip(ticket.copy, ticket.blocks, strict=True)
                if number in lacking
            )
        self.put_blocks += states.count(PUT_STORED)
        self.put_bytes += put.nbytes
        return bytes(states)

    def end_session(self, session: Session) -> None:
        """Stop its puts; unmap its segments when the last of them has ended."""
        for put in [put for put in self._running if put.session is session]:
            engine = put.staging.memory.engine
            if put.transfer is not None and not engine.cancel(put.transfer):
                engine.abandon(put.transfer)
        for staging in session.staging.values():
            staging.close()
        session.staging.clear()


def _wrong_bytes(put: BlockWrite) -> str:
    assert put.inspection is not None
    wrong = "a block"
    found = list(zip(put.inspection.sums, put.expected, strict=True))
    at = 0
    for ticket in put.tickets:
        for number in ticket.copy:
            if found[at][0] not in (0, found[at][1]):
                wrong = f"key {put.keys[number].hex()} (rank {ticket.rank})"
            at += 1
    return f"The bytes of {wrong} do not have the checksum that was given for them; nothing was put."
