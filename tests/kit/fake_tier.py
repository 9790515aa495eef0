"""A tier in memory whose answers, reads and writes come when a test says so, and as it says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from mmap import mmap
from zlib import crc32

from kvoffd.tiers.header import Block, BlockGroup
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT, Found, ReadEnd, Result, Tier, TierListener, TierStats


def checksum(data: memoryview | bytes) -> int:
    return crc32(data) + 1


class PoolBytes:
    def __init__(self, size: int) -> None:
        self.view = memoryview(mmap(-1, size))

    def peek(self, offset: int, length: int) -> bytes:
        return bytes(self.view[offset : offset + length])

    def poke(self, offset: int, data: bytes) -> None:
        self.view[offset : offset + len(data)] = data

    def sum_of(self, offset: int, length: int) -> int:
        return checksum(self.view[offset : offset + length])


@dataclass(eq=False)
class Job:
    """A read or write under way. ``block``: of a write."""

    group: BlockGroup
    key: bytes
    offsets: Sequence[int]
    on_end: Callable[..., None]
    block: Block | None = None
    removed: bool = False
    """The block was removed since it began."""
    is_awaited: Callable[[], bool] = lambda: True
    """Of a read."""


class FakeTier(Tier):
    """Keeps blocks by tag and key, the one that goes next first.

    Args:
        most_blocks: it has room for; 0 for any number.
        most_jobs: reads, and writes, that it takes at a time.
        asks: what it has is known only when ``answer`` was called, as of a store that nodes share.
    """

    def __init__(
        self,
        memory: PoolBytes,
        listener: TierListener,
        *,
        name: str = "disk:/fake",
        most_blocks: int = 0,
        most_jobs: int = 2**30,
        asks: bool = False,
    ) -> None:
        super().__init__(name, listener)
        self.memory, self.listener = memory, listener
        self.blocks: dict[tuple[int, bytes], tuple[Block, list[bytes]]] = {}
        self.jobs: dict[Job, None] = {}
        self.known: dict[tuple[int, bytes], bool | None] = {}
        """By tag and key that was asked for: whether it is there; None before the answer."""
        self.questions: list[tuple[BlockGroup, bytes]] = []
        self.asked: list[bytes] = []
        """All keys that were ever asked for."""
        self.removals: list[tuple[bytes, bool]] = []
        """What was removed, and whether for all nodes."""
        self.hangs = self.refuses = False
        """``refuses``: writes alone."""
        self.most_bytes = 2**40
        """Larger blocks are not written."""
        self.written_blocks = self.evicted_blocks = 0
        self._most_blocks, self.most_jobs, self._asks = most_blocks, most_jobs, asks
        self._news: deque[Callable[[], None]] = deque()

    def available(self) -> bool:
        return not self.hangs

    def takes(self, group: BlockGroup, key: bytes) -> bool:
        return group.nbytes <= self.most_bytes

    def refuses_writes(self) -> bool:
        return self.refuses

    def find(self, group: BlockGroup, keys: Sequence[bytes], *, prefix: bool) -> Found:
        return Found(bytes(self._find(group, key) for key in keys))

    def _find(self, group: BlockGroup, key: bytes) -> int:
        name = group.tag, key
        there = name in self.blocks and self.blocks[name][0].group == group
        if self.hangs:
            return ABSENT
        if not self._asks:
            return PRESENT if there else ABSENT
        if name not in self.known:
            self.known[name] = None
            self.questions.append((group, key))
            self.asked.append(key)
        known = self.known[name]
        return ASKED if known is None else PRESENT if known else ABSENT

    def answer(self) -> None:
        questions, self.questions = self.questions, []
        for group in dict.fromkeys(group for group, _ in questions):
            keys = [key for one, key in questions if one == group]
            found = [(group.tag, key) in self.blocks for key in keys]
            self.known.update(((group.tag, key), there) for key, there in zip(keys, found, strict=True))
            self.listener.answered(self, group, keys, found, None)

    def wants(self, group: BlockGroup, keys: Sequence[bytes]) -> list[bool]:
        writing = {(job.group.tag, job.key) for job in self.jobs if job.block is not None and not job.removed}
        return [(group.tag, key) not in self.blocks and (group.tag, key) not in writing for key in keys]

    def read(
        self,
        group: BlockGroup,
        key: bytes,
        offsets: Sequence[int],
        patience_s: float,
        on_end: ReadEnd,
        is_awaited: Callable[[], bool] = lambda: True,
    ) -> bool:
        if self._find(group, key) != PRESENT or sum(job.block is None for job in self.jobs) >= self.most_jobs:
            return False
        self.jobs[Job(group, key, offsets, on_end, is_awaited=is_awaited)] = None
        return True

    def write(self, block: Block, offsets: Sequence[int], on_end: Callable[[Result], None]) -> bool:
        (wanted,) = self.wants(block.group, [block.key])
        writes = sum(job.block is not None for job in self.jobs)
        if not wanted or self.hangs or self.refuses or not self.takes(block.group, block.key):
            return False
        if writes >= self.most_jobs:
            return False
        self.jobs[Job(block.group, block.key, offsets, on_end, block=block)] = None
        return True

    def spare(self, group: BlockGroup, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (found := self.blocks.pop((group.tag, key), None)) is not None:
                self.blocks[group.tag, key] = found

    def remove(self, group: BlockGroup, keys: Sequence[bytes], *, for_all_nodes: bool = False) -> None:
        self.removals += [(key, for_all_nodes) for key in keys]
        self._remove({(group.tag, key) for key in keys}, tell=True)

    def remove_all(self, fingerprint: bytes | None) -> int:
        self.known.clear()
        if self._asks:
            return 0
        names = {name for name, (block, _) in self.blocks.items() if fingerprint in (None, block.group.fingerprint)}
        for job in self.jobs:
            job.removed |= fingerprint in (None, job.group.fingerprint)
        self._remove(names, tell=False)
        return len(names)

    def _remove(self, names: set[tuple[int, bytes]], *, tell: bool) -> None:
        for job in self.jobs:
            job.removed |= (job.group.tag, job.key) in names
        for name in names:
            if (found := self.blocks.pop(name, None)) is not None and tell:
                self._tell_removed(found[0])

    def _tell_removed(self, block: Block) -> None:
        if not self._asks:
            self._news.append(lambda: self.listener.blocks_removed(self, block.group, [block.key]))

    @property
    def lifetime_bytes(self) -> int:
        return sum(block.group.nbytes for block, _ in self.blocks.values()) if self.evicted_blocks else 0

    def tick(self) -> None:
        self.settle()

    def stats(self) -> TierStats:
        used = sum(block.group.nbytes for block, _ in self.blocks.values())
        writes = sum(job.block is not None for job in self.jobs)
        return TierStats(1 << 30, used, queued_writes=writes, written_blocks=self.written_blocks)

    def close(self, deadline_s: float) -> bool:
        self.end_all()
        return True

    # --- what tests do ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Give the listener all news."""
        while self._news:
            self._news.popleft()()

    def end(self, job: Job, *, fault: Result | None = None) -> None:
        """Do a job or let it fail, and call its ``on_end``. A read that is awaited is done where it were UNWANTED."""
        del self.jobs[job]
        result = fault if fault and not (fault is Result.UNWANTED and job.is_awaited()) else Result.DONE
        if job.block is not None:
            self._end_write(job, job.block, result)
        else:
            self._end_read(job, result)
        self.settle()

    def _end_write(self, job: Job, block: Block, result: Result) -> None:
        if result is Result.DONE and not job.removed:
            data = [self.memory.peek(*one) for one in zip(job.offsets, block.group.lengths, strict=True)]
            while self._most_blocks and len(self.blocks) >= self._most_blocks:
                self.evicted_blocks += 1
                name = next(iter(self.blocks))
                self._remove({name}, tell=True)
            self.blocks[block.group.tag, block.key] = block, data
            self.known[block.group.tag, block.key] = True
            self.written_blocks += 1
            if not self._asks:
                self._news.append(lambda: self.listener.blocks_stored(self, block.group, [block.key]))
        job.on_end(result)

    def _end_read(self, job: Job, result: Result) -> None:
        name = job.group.tag, job.key
        found = self.blocks.get(name)
        if result is Result.DONE and (found is None or job.removed):
            result = Result.GONE
        block = None
        if result is Result.DONE and found is not None:
            block, data = found
            for offset, length, part, expected in zip(
                job.offsets, block.group.lengths, data, block.checksums, strict=True
            ):
                self.memory.poke(offset, part[:length])
                if checksum(part) != expected:
                    result = Result.CORRUPT
        if result in (Result.CORRUPT, Result.FAILED, Result.GONE):
            self._remove({name}, tell=True)
        self.known.pop(name, None)
        if result is Result.DONE:
            self.known[name] = True
            self.spare(job.group, [job.key])
        job.on_end(result, block if result is Result.DONE else None)

    def end_all(self, *, fault: Result | None = None) -> int:
        """End all jobs, those included that begin because of it; returns how many there were."""
        count = 0
        while self.jobs:
            self.end(next(iter(self.jobs)), fault=fault)
            count += 1
        return count

    def spoil(self, group: BlockGroup, key: bytes) -> None:
        _, data = self.blocks[group.tag, key]
        at = next(number for number, part in enumerate(data) if part)
        data[at] = data[at][:-1] + bytes([data[at][-1] ^ 1])
