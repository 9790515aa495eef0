"""The threads of a shared tier that read and write blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from kvoffd.pool.checksums import digest
from kvoffd.tiers.breaker import Work
from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.store import GetRequest, PutRequest, Received, Store, StoreError, StoreFault
from kvoffd.tiers.tier import ReadEnd, Result, WriteEnd

if TYPE_CHECKING:
    from kvoffd.tiers.shared import SharedTier

LATE_SHARE = 0.75
"""Part of a read's patience after which a failed read is not retried."""
WRITE_S = 10.0
"""Limit for writing a few blocks, or for removing a thousand."""


@dataclass(slots=True, eq=False)
class ObjectRead:
    """Reads a block into views of the pool, one per shard.

    Attributes:
        stored: the group as in the store, with the fleet generation.
        is_awaited: see ``Tier.read``.
        retried: whether this is a retry after a lost connection.
    """

    group: BlockGroup
    stored: BlockGroup
    key: bytes
    views: Sequence[memoryview]
    patience_s: float
    on_end: ReadEnd
    is_awaited: Callable[[], bool]
    retried: bool = False


class ObjectReadEnd(NamedTuple):
    """End of an ``ObjectRead``.

    Attributes:
        block: as in the store; None unless it is DONE.
        overloaded: whether it FAILED since the store answered that it is overloaded. Then there is no retry, and
            nothing is wrong with the block.
    """

    result: Result
    block: Block | None = None
    overloaded: bool = False


@dataclass(slots=True, eq=False)
class ObjectWrite:
    """Writes a block from views of the pool, one per shard. ``stored``: the block as in the store."""

    group: BlockGroup
    stored: Block
    views: Sequence[memoryview]
    on_end: WriteEnd


@dataclass(slots=True, eq=False)
class Removal:
    """Removes blocks, as far as possible. One that stays is read like any other: a miss if its bytes are wrong, and a
    failed load if it holds less than the load needs. ``stored``: the group as in the store."""

    stored: BlockGroup
    keys: Sequence[bytes]


BlockWork: TypeAlias = ObjectRead | ObjectWrite | Removal


def take_batch(store: Store, waiting: deque[BlockWork]) -> list[BlockWork]:
    """Take half of the waiting blocks, since another thread takes the rest: at least a quarter of what a connection
    takes at once, at most all of that. Or take one removal."""
    most = min(store.blocks_at_once, max(store.blocks_at_once // 4, len(waiting) // 2))
    batch = [waiting.popleft()]
    if isinstance(batch[0], Removal):
        return batch
    nbytes = batch[0].group.nbytes
    while waiting and len(batch) < most and not isinstance(waiting[0], Removal):
        nbytes += waiting[0].group.nbytes
        if nbytes > store.bytes_at_once:
            break
        batch.append(waiting.popleft())
    return batch


class StoreThread:
    """Code of a shared tier's thread, with its own connection to the store."""

    def __init__(self, tier: SharedTier, store: Store, clock: Callable[[], float]) -> None:
        self.tier, self.breaker, self.store, self.clock = tier, tier.breaker, store, clock

    def report(self, error: Exception, work: Work | None = None) -> None:
        """Report a failure to the tier, and have the breaker count it for this kind of work, if one is given. Two
        failures do not count: a write that the server answers with a refusal, and an invalid stored generation."""
        if not isinstance(error, StoreError):  # a bug in the store's code
            self.store.close()
            why = f"It failed unexpectedly: {error!r}; please report the log's traceback."
            cause, error = error, StoreError(StoreFault.INTERNAL, why)
            error.__cause__ = cause
        if self.tier.closed:
            return
        if error.kind is StoreFault.GENERATION:
            work = None  # nothing is wrong with other namespaces
        refuses_writes = work == "write" and error.kind.is_answer
        if work is not None and not refuses_writes:
            self.breaker.failed(work, at_once=error.is_lasting)
        self.tier.post(partial(self.tier.failed, error, refuses_writes=refuses_writes))


class BlockThread(StoreThread):
    """Reads, writes and removes blocks."""

    def reads(self, batch: list[ObjectRead]) -> Iterator[ObjectReadEnd]:
        """Yield the results of a batch, in order. What follows a read that failed is tried again."""
        unfinished = deque(batch)
        while unfinished:
            if self.tier.closed or self.breaker.open:
                unfinished.popleft()
                yield ObjectReadEnd(Result.CANCELLED if self.tier.closed else Result.FAILED)
                continue
            for end in self._read(list(unfinished)):  # at least one
                unfinished.popleft()
                yield end

    def _read(self, unfinished: Sequence[ObjectRead]) -> Iterator[ObjectReadEnd]:
        """Yield the results of the first reads, up to one that is not awaited, or fails."""
        if not (reads := list(takewhile(lambda read: read.is_awaited(), unfinished))):
            yield ObjectReadEnd(Result.UNWANTED)
            return
        requests = [GetRequest(read.stored, read.key, read.views) for read in reads]
        patience_s, came_at = min(read.patience_s for read in reads), self.clock()
        overloaded = served = 0
        try:
            self.store.connect()
            found = self.store.get(requests, patience_s)
            for read, received in zip(reads, found, strict=True):
                if isinstance(received, StoreError):  # this one alone: the bucket is overloaded, or the server busy
                    overloaded += 1
                    self.report(received)
                    yield ObjectReadEnd(Result.FAILED, overloaded=True)
                    continue
                served += 1
                self.breaker.succeeded("read")
                came_at = self.clock()
                if received is None:
                    yield ObjectReadEnd(Result.GONE)
                    continue
                block = _verified(read, received)
                if block is None:
                    # It may answer another request, and so may all that follows on the connection.
                    self.store.close()
                    yield ObjectReadEnd(Result.CORRUPT)
                    return
                yield ObjectReadEnd(Result.DONE, block)
            if overloaded and not served:  # all of it is overloaded: one failure for the batch
                self.breaker.failed("read")
        except Exception as error:
            self.report(error, "read")
            # A connection that stalled for part of the patience is lost; another may serve in time.
            late = isinstance(error, StoreError) and error.kind is StoreFault.TIMEOUT
            late = late and self.clock() - came_at >= LATE_SHARE * patience_s
            yield ObjectReadEnd(Result.DEADLINE if late else Result.FAILED)

    def writes(self, batch: list[ObjectWrite | Removal]) -> list[Result]:
        """Return the results of a batch, which ``take_batch`` made: writes, or one removal."""
        try:
            if not self.breaker.open and not self.tier.closed:
                self.store.connect()
                if isinstance(removal := batch[0], Removal):
                    self.store.remove(removal.stored, removal.keys, self.clock() + WRITE_S)
                    return [Result.DONE]
                return self._write(cast(list[ObjectWrite], batch))
        except Exception as error:
            self.report(error, "write")
        return [Result.CANCELLED if self.tier.closed else Result.FAILED] * len(batch)

    def _write(self, writes: Sequence[ObjectWrite]) -> list[Result]:
        deadline = self.clock() + WRITE_S
        there = self.store.touch([write.stored for write in writes], deadline)
        absent = [
            PutRequest(write.stored, write.views) for write, known in zip(writes, there, strict=True) if not known
        ]
        stored = self.store.put(absent, deadline)
        if False in stored:
            why = "It accepts no more blocks now; see Redis's maxmemory-policy or the bucket's quota."
            self.report(StoreError(StoreFault.FULL, why), "write")
        self.breaker.succeeded("write")
        results = iter(stored)  # of those that were absent, in their order
        return [Result.EXISTED if known else Result.DONE if next(results) else Result.FAILED for known in there]


def _verified(read: ObjectRead, received: Received) -> Block | None:
    """Return the block that was read; None if it is another one, or header or bytes are damaged."""
    block = received.block
    if block is None or (block.group, block.key) != (read.stored, read.key) or not all(block.checksums):
        return None
    found = zip(read.views, received.checksums or repeat(0, len(read.views)), block.checksums, strict=True)
    right = all((taken or digest(view)) == checksum for view, taken, checksum in found)
    return block if right else None
