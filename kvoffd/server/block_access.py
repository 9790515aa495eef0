"""What operators may do with single blocks: list them, read them, and write them from attached memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.namespace import Block, Namespace
from kvoffd.cache.session_memory import LISTED_KEY_BYTES, copy_bytes
from kvoffd.config import Config
from kvoffd.errors import BadGeometry, BadKeys, KvoffdError, OutOfBounds
from kvoffd.server.engine_memory import EngineMemory, MemoryMapper
from kvoffd.server.jobs import ERROR_OF_OUTCOME, JobRunner
from kvoffd.server.session import ClientMemory, Job, Session
from kvoffd.transfer.checksums import SlotChecksums
from kvoffd.transfer.plan import Direction, Outcome, Plan
from kvoffd_proto.blocks import PUT_NO_ROOM, PUT_PRESENT, PUT_STORED, PutBlocks
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.handles import MemfdHandle
from kvoffd_proto.messages import PIECES_PER_KEY, Role

MAX_WRITES = 4
"""Requests of one session at a time: enough to fill one segment while another is copied."""

WRITE_OF_POOL = 4
"""One part in so many may be written by one request: until its end nobody can evict that."""


class BlockAccess:
    """Lets operators in, and pages through listings of blocks."""

    def __init__(self, config: Config, cache: BlockCache) -> None:
        self._access = config.block_access
        self._uids = config.block_uids or (0, os.geteuid())
        self._cache = cache
        self.got_blocks = 0

    def admit(self, session: Session, *, write: bool) -> None:
        """Raise KvoffdError unless the session is an administrator's who may read blocks, or write them too."""
        if session.role is not Role.ADMIN:
            raise KvoffdError(f"Blocks are opened by the role admin, not {session.role}.", ErrorCode.WRONG_ROLE)
        if self._access == "off" or (write and self._access == "read"):
            wanted, verb = ("write", "writes") if write else ("read", "reads")
            raise KvoffdError(
                f"Nobody {verb} single blocks of this daemon, whose block_access is {self._access!r}; start it with "
                f"block_access = {wanted!r} if operators are to do that.",
                ErrorCode.FORBIDDEN,
            )
        if session.peer.uid not in self._uids:
            raise KvoffdError(
                f"User {session.peer.uid} may not open blocks of this daemon; add the uid to block_uids.",
                ErrorCode.FORBIDDEN,
            )

    def page(
        self, session: Session, namespace: Namespace, group: int, prefix: str, start: int, limit: int
    ) -> tuple[list[Block], int, int]:
        """One page of the session's one listing, which ``start`` 0 makes anew.

        Returns the blocks that are still there, where the next page begins (0: nowhere), and the keys noted at first.
        Raises BadGeometry, BadKeys for a prefix that is not hex digits.
        """
        namespace.check_group(group)
        index = namespace.index[group]
        if not start:
            whole, odd = _prefix(prefix)
            found = list(index)
            if whole:
                found = [key for key in found if key.startswith(whole)]
            if odd is not None:
                found = [key for key in found if len(key) > len(whole) and key[len(whole)] >> 4 == odd]
            self._keep_listing(session, found)
        listing, end = session.listing, start + limit
        present = [block for block in index.find(b"".join(listing[start:end])) if block is not None]
        if end >= len(listing):
            self._keep_listing(session, [])
            end = 0
        return present, end, len(listing)

    def _keep_listing(self, session: Session, keys: list[bytes]) -> None:
        self._cache.memory.claim(session.id, LISTED_KEY_BYTES * (len(keys) - len(session.listing)))
        session.listing = keys


def _prefix(digits: str) -> tuple[bytes, int | None]:
    """Whole bytes of a prefix in hex, and the half byte after them, where there is one."""
    try:
        return bytes.fromhex(digits[: len(digits) & ~1]), int(digits[-1], 16) if len(digits) % 2 else None
    except ValueError:
        raise KvoffdError(
            f"{digits[:80]!r} is not the beginning of a key; give hex digits.", ErrorCode.BAD_KEYS
        ) from None


@dataclass(eq=False)
class BlockWriter:
    """Accepts PutBlocks: blocks are copied from attached memory, compared with their checksums, then ready."""

    config: Config
    cache: BlockCache
    memory: MemoryMapper
    pool_address: int
    runner: JobRunner
    put_blocks: int = field(default=0, init=False)
    put_bytes: int = field(default=0, init=False)
    _ids: Iterator[int] = field(default_factory=lambda: count(1), init=False)

    def write(
        self, session: Session, namespace: Namespace, message: PutBlocks, answer: Callable[[bytes | KvoffdError], None]
    ) -> None:
        """Accept a write, or raise KvoffdError and change nothing.

        ``answer`` is called once, maybe at once, with the state of each key, or with why nothing was done.
        """
        # A write whose copy hangs has its answer, but still holds its slots.
        if session.unfinished >= MAX_WRITES:
            raise KvoffdError(
                f"{MAX_WRITES} puts of the session are running; wait for their replies.", ErrorCode.TOO_MANY
            )
        keys = namespace.split(message.group, message.keys, distinct=True)
        pieces = len(keys) * namespace.world_size * PIECES_PER_KEY
        self.cache.memory.check(session.id, copy_bytes(1, pieces))
        lengths = self._check(namespace, message, keys)
        staging = self._staging(session, message)
        job = BlockWrite((next(self._ids),), session, staging, self, keys, answer)
        job.accepted_at = self.runner.clock()
        job.pieces = pieces
        try:
            plan = self._plan(job, namespace, message, lengths)
        except BaseException:
            self.runner.abort_stores(job)
            raise
        self.runner.start(job, plan)

    def _check(self, namespace: Namespace, message: PutBlocks, keys: list[bytes]) -> list[int]:
        """The length of each rank's shards, if the request fits the namespace's geometry."""
        lengths: list[int] = []
        for rank in range(namespace.world_size):
            namespace.slot_bytes(rank, message.group)  # raises where the rank has not registered
            lengths.append(namespace.shard_length(rank, message.group))
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
        max_bytes = self.cache.slots.pool_bytes // WRITE_OF_POOL
        if (wanted := sum(lengths) * len(keys)) > max_bytes and len(keys) > 1:
            raise KvoffdError(
                f"The blocks have {wanted} bytes together, and one request may carry {max_bytes}; put fewer at a time.",
                ErrorCode.TOO_LARGE,
            )
        return lengths

    def _staging(self, session: Session, message: PutBlocks) -> ClientMemory:
        known = session.staging.get(message.segment_id)
        if known is not None:
            known.check_whole(self.runner.clock())
            if known.mapped_bytes != message.segment_bytes:
                raise BadGeometry(f"Segment {message.segment_id} was mapped with {known.mapped_bytes} bytes.")
            return known
        if message.segment_id not in session.segments:
            raise KvoffdError(f"No descriptor was attached as segment {message.segment_id}.", ErrorCode.UNKNOWN_SEGMENT)
        if len(session.staging) >= (limit := self.config.max_registrations):
            raise KvoffdError(f"The session puts from {limit} segments, its limit; reuse one.", ErrorCode.TOO_MANY)
        mapped: list[EngineMemory | KvoffdError] = []
        handle = MemfdHandle(message.segment_id, message.segment_bytes)
        # Memory of the host is mapped at once.
        self.memory.map(b"", session.peer.uid, [handle], session.segments, mapped.append)
        (memory,) = mapped
        if isinstance(memory, KvoffdError):
            raise memory
        os.close(session.segments.pop(message.segment_id))
        staging = session.staging[message.segment_id] = ClientMemory(memory)
        return staging

    def _plan(self, job: BlockWrite, namespace: Namespace, message: PutBlocks, lengths: list[int]) -> Plan:
        sources: list[int] = []
        slots: list[tuple[int, int]] = []
        ((address, _),) = job.client_memory.memory.spans
        for rank, length in enumerate(lengths):
            node = namespace.nodes.get(rank)  # where the rank's own stores want them
            ticket = self.cache.begin_stores(
                namespace, rank, message.group, job.keys, {0: message.first_block}, job.store_tickets, node
            )
            job.store_tickets.append(ticket)
            for number, offset in zip(ticket.copy, ticket.offsets, strict=True):
                shard = message.shards[number][rank]
                sources.append(address + shard.offset_bytes)
                slots.append((offset, length))
                job.expected.append(int.from_bytes(shard.checksum, "big"))
        sizes = np.array([length for _, length in slots], dtype=np.uint64)
        destinations = np.array([offset for offset, _ in slots], dtype=np.uint64) + np.uint64(self.pool_address)
        if slots:
            digests = self.cache.slots.digests
            job.checksums = SlotChecksums(digests, slots, job.expected, pool_address=self.pool_address)
        copied = sizes > 0  # a rank without a layer in the group has a slot and no bytes
        nbytes = sum(length for _, length in slots)
        return Plan(destinations[copied], np.array(sources, dtype=np.uint64)[copied], sizes[copied], nbytes)


@dataclass(eq=False)
class BlockWrite(Job):
    """Blocks that an operator writes. Its store tickets are by rank."""

    direction = Direction.STORE
    owner: BlockWriter
    keys: list[bytes]
    answer: Callable[[bytes | KvoffdError], None]
    expected: list[int] = field(default_factory=list, init=False)
    """Checksums, in the order of the tickets' keys to copy."""

    def end(self, outcome: Outcome) -> None:
        done = outcome is Outcome.DONE
        (self.owner.runner.commit_stores if done else self.owner.runner.abort_stores)(self)
        if self.session.ended:
            return
        if done:
            self.answer(self._states())
        elif outcome is Outcome.CORRUPT:
            self.answer(KvoffdError(self._wrong_bytes(), ErrorCode.CHECKSUM))
        else:
            code = ERROR_OF_OUTCOME[outcome]
            self.answer(KvoffdError.of(code))

    def answer_overdue(self) -> None:
        if not self.session.ended:
            self.answer(KvoffdError.of(ErrorCode.DEADLINE))

    def _states(self) -> bytes:
        """What became of each key. One that found no room for a shard of some rank is not left half stored."""
        states = bytearray([PUT_PRESENT]) * len(self.keys)
        for ticket in self.store_tickets:
            for number in ticket.copy:
                states[number] = PUT_STORED
        lacking = {number for ticket in self.store_tickets for number in ticket.dropped}
        for number in lacking:
            states[number] = PUT_NO_ROOM
        if lacking:
            self.owner.cache.drop_incomplete(
                block
                for ticket in self.store_tickets
                for number, block in zip(ticket.copy, ticket.blocks, strict=True)
                if number in lacking
            )
        self.owner.put_blocks += states.count(PUT_STORED)
        self.owner.put_bytes += self.nbytes
        return bytes(states)

    def _wrong_bytes(self) -> str:
        assert self.checksums is not None
        found = zip(self.checksums.sums, self.expected, strict=True)
        wrong = "a block"
        for ticket in self.store_tickets:
            for number in ticket.copy:
                checksum, expected = next(found)
                if checksum not in (0, expected):
                    wrong = f"key {self.keys[number].hex()} (rank {ticket.rank})"
        return f"The bytes of {wrong} do not match the checksum given for them; nothing was put."
