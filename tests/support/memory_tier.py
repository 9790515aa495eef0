"""A tier in memory whose device outlives it: for tests, and for the simulator. Nothing in it happens by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvoffd.tiers.tier import DeviceTier, OnDone, TierBlock, TierKey, TierListener, TierResult, TierStats


class Memory(Protocol):
    """Access to the pool's bytes."""

    def peek(self, offset: int, length: int) -> bytes: ...

    def poke(self, offset: int, data: bytes) -> None: ...

    def sum_of(self, offset: int, length: int) -> int: ...


@dataclass
class Device:
    """What is there when the daemon is gone: by name, least recently used first, blocks and their bytes by rank."""

    blocks: dict[TierKey, tuple[TierBlock, list[bytes]]] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """A read or write that the tier has accepted."""

    block: TierBlock
    offsets: list[int]
    on_done: OnDone
    deadline: float = float("inf")
    reading: bool = False
    forgotten: bool = False


class MemoryTier(DeviceTier):
    """Keeps what it is given. A job waits until ``end`` is called for it; ``later`` is told of each.

    Args:
        device: its content, also of an earlier tier.
        memory: the pool.
        size_bytes: blocks beyond it push the least recently used out.
        most_jobs: jobs that may wait; more are not taken.
    """

    name = "memory:test"

    def __init__(
        self,
        device: Device,
        memory: Memory,
        size_bytes: int = 2**40,
        most_jobs: int = 2**30,
        later: Callable[[Job], None] = lambda _: None,
    ) -> None:
        self.device = device
        self.listener: TierListener | None = None
        self.jobs: dict[Job, None] = {}
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.draining = self.hangs = False
        self._memory = memory
        self._size_bytes = size_bytes
        self._most_jobs = most_jobs
        self._later = later
        self._news: list[Callable[[TierListener], None]] = []

    # --- Tier ------------------------------------------------------------------------------------

    def groups(self) -> Collection[tuple[bytes, int]]:
        return {(name.fingerprint, name.group) for name in self.device.blocks}

    def index(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        blocks = self.device.blocks
        return {name.key: blocks[name][0] for name in blocks if name[:2] == (fingerprint, group)}

    def readable(self, fingerprint: bytes, group: int) -> Mapping[bytes, TierBlock]:
        return {} if self.hangs else self.index(fingerprint, group)

    def write(self, block: TierBlock, offsets: Sequence[int], on_done: OnDone) -> bool:
        under_way = {job.block.id for job in self.jobs if not job.reading and not job.forgotten}
        if self.draining or block.id in self.device.blocks or block.id in under_way:
            return False
        return self._take(Job(block, list(offsets), on_done))

    def read(self, block_id: TierKey, offsets: Sequence[int], deadline: float, on_done: OnDone) -> bool:
        found = self.device.blocks.get(block_id)
        if found is None or self.hangs:
            return False
        return self._take(Job(found[0], list(offsets), on_done, deadline, reading=True))

    def _take(self, job: Job) -> bool:
        if len(self.jobs) >= self._most_jobs:
            self.counts["refused"] += 1
            return False
        self.jobs[job] = None
        self._later(job)
        return True

    def touch(self, block_ids: Iterable[TierKey]) -> None:
        for block_id in block_ids:
            if (found := self.device.blocks.pop(block_id, None)) is not None:
                self.device.blocks[block_id] = found

    def remove(self, block_ids: Iterable[TierKey]) -> int:
        names = dict.fromkeys(block_ids)
        gone = [block_id for block_id in names if self.device.blocks.pop(block_id, None)]
        for job in self.jobs:
            job.forgotten |= not job.reading and job.block.id in names
        self._removed(gone)
        return len(gone)

    def remove_namespace(self, fingerprint: bytes) -> int:
        for job in self.jobs:
            job.forgotten |= not job.reading and job.block.id.fingerprint == fingerprint
        return self.remove([name for name in self.device.blocks if name.fingerprint == fingerprint])

    @property
    def full_bytes(self) -> int:
        return self.stats().used_bytes if self.counts["evicted"] else 0

    def tick(self) -> None:
        self.tell()

    def stats(self) -> TierStats:
        used = sum(block.nbytes for block, _ in self.device.blocks.values())
        reads = sum(job.reading for job in self.jobs)
        counts = self.counts
        return TierStats(
            self._size_bytes,
            used,
            used,
            len(self.device.blocks),
            counts["read"],
            counts["read_bytes"],
            counts["written"],
            counts["written_bytes"],
            counts["evicted"],
            counts["refused"],
            reads,
            len(self.jobs) - reads,
            0,
            0,
            0.0,
            dict(self.errors),
        )

    def drain(self) -> None:
        self.draining = True

    def close(self, deadline_s: float) -> bool:
        for job in list(self.jobs):
            del self.jobs[job]
            self.before_done(job)
            job.on_done(TierResult.CANCELLED)
        return True

    # --- for who plays the device ----------------------------------------------------------------

    def end(self, job: Job, now: float = 0.0, fault: TierResult | None = None) -> None:
        """Do a job or let it fail, and call its ``on_done``."""
        result = fault or (TierResult.DEADLINE if now >= job.deadline else self._do(job))
        del self.jobs[job]
        self.before_done(job)
        self.counts[result.value] += 1
        if job.reading and result in (TierResult.CORRUPT, TierResult.FAILED):
            self.remove([job.block.id])
            self._error(result.value, "A block could not be read.")
        self.tell()
        job.on_done(result)

    @property
    def has_news(self) -> bool:
        """Whether there is news that the listener has not been given yet."""
        return bool(self._news)

    def before_done(self, job: Job) -> None:
        """Called when a job has moved its last byte."""

    def end_all(self, now: float = 0.0, fault: TierResult | None = None) -> None:
        """End all waiting jobs, also those that begin meanwhile."""
        while self.jobs:
            self.end(next(iter(self.jobs)), now, fault)
        self.tell()

    def spoil(self, block_id: TierKey) -> None:
        """Flip one bit of a stored block."""
        block, shards = self.device.blocks[block_id]
        place = next(rank for rank, shard in enumerate(shards) if shard)
        spoilt = shards[place][:-1] + bytes([shards[place][-1] ^ 1])
        self.device.blocks[block_id] = (block, [*shards[:place], spoilt, *shards[place + 1 :]])

    def tell(self) -> None:
        """Give the listener all news since the last call."""
        while self._news:
            news = self._news.pop(0)
            if self.listener is not None:
                news(self.listener)

    def _do(self, job: Job) -> TierResult:
        block = job.block
        if not job.reading:
            if job.forgotten:
                return TierResult.GONE
            self._make_room(block.nbytes)
            shards = zip(job.offsets, block.shards, strict=True)
            self.device.blocks[block.id] = (
                block,
                [self._memory.peek(offset, shard.length) for offset, shard in shards],
            )
            self.counts["written"] += 1
            self.counts["written_bytes"] += block.nbytes
            self._news.append(lambda listener: listener.tier_stored(self, block))
            return TierResult.DONE
        found = self.device.blocks.get(block.id)
        if found is None:
            return TierResult.GONE
        for offset, shard, data in zip(job.offsets, block.shards, found[1], strict=True):
            self._memory.poke(offset, data)
            if self._memory.sum_of(offset, shard.length) != shard.checksum:
                return TierResult.CORRUPT
        self.counts["read"] += 1
        self.counts["read_bytes"] += block.nbytes
        self.touch([block.id])
        return TierResult.DONE

    def _make_room(self, nbytes: int) -> None:
        blocks = self.device.blocks
        held = sum(block.nbytes for block, _ in blocks.values())
        gone: list[TierKey] = []
        for name, (block, _) in list(blocks.items()):
            if held + nbytes <= self._size_bytes:
                break
            del blocks[name]
            held -= block.nbytes
            gone.append(name)
        self.counts["evicted"] += len(gone)
        self._removed(gone)

    def _removed(self, gone: list[TierKey]) -> None:
        if gone:
            self._news.append(lambda listener: listener.tier_removed(self, gone))

    def _error(self, kind: str, sentence: str) -> None:
        self.errors[kind] += 1
        self._news.append(lambda listener: listener.tier_error(self, kind, sentence))
