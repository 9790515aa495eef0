"""A disk tier over files in memory, whose threads' work is done when a test says so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from mmap import mmap
from pathlib import Path
from random import Random
from typing import cast

import numpy as np

from kvoffd.pool.checksums import digest
from kvoffd.tiers.disk import DiskOptions, DiskTier
from kvoffd.tiers.header import Block, BlockGroup, make_block_group
from kvoffd.tiers.tier import Result, Tier
from tests.kit.clock import Clock
from tests.kit.memory_disk import MemoryDisk, ReadsWithoutThreads, WorkersWithoutThreads, names_of

ONE, OTHER = b"1" * 32, b"2" * 32
SLOT_BYTES, SLOTS = 64 << 10, 64
GROUP = make_block_group(ONE, 0, 0, (12_000,))
"""A slot of 16 KiB."""
REGION_BYTES = 128 << 10
SIZE_BYTES = 5 * REGION_BYTES
"""Four regions, of eight such slots each, and room for the rest."""


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block_of(number: int, group: BlockGroup = GROUP, first: int = 0, version: int = 0) -> Block:
    """A block whose bytes are a function of its name and version."""
    sums = tuple(digest(memoryview(bytes_of(number, group, rank, version))) for rank in range(len(group.lengths)))
    return Block(group, key_of(number), (first,) * len(sums), sums)


def bytes_of(number: int, group: BlockGroup, rank: int, version: int = 0) -> bytes:
    seed = f"{group.fingerprint!r} {group.group_index} {number} {rank} {version}"
    return Random(seed).randbytes(group.lengths[rank])


class Listener:
    """A listener that keeps what it hears, and notes what cannot be."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, bytes]] = set()
        self.kinds: Counter[str] = Counter()

    def blocks_stored(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        names = {(group.tag, key) for key in keys}
        assert not names & self.blocks
        self.blocks |= names

    def blocks_removed(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        self.blocks -= {(group.tag, key) for key in keys}

    def answered(self, *found: object) -> None:
        raise AssertionError("a disk is not asked")

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        assert sentence.endswith(".")
        self.kinds[str(kind)] += 1


class DiskRig:
    def __init__(self, files: MemoryDisk | None = None, size_bytes: int = SIZE_BYTES, **options: int) -> None:
        self.files, self.size_bytes = files or MemoryDisk(), size_bytes
        self.options = DiskOptions(**{"region_bytes": REGION_BYTES, "writers": 1, **options})
        self.clock = Clock()
        self.pool = memoryview(mmap(-1, SLOTS * SLOT_BYTES))
        self.posted: deque[Callable[[], None]] = deque()
        self.generations: dict[bytes, int] = {}
        self.in_call = False
        self.open()

    def open(self) -> None:
        """A daemon begins. What the last one has left lies in the files."""
        self.listener = Listener()
        self.tier = DiskTier(
            Path("/"),
            self.size_bytes,
            pool=self.pool,
            clock=self.clock,
            post=self.posted.append,
            listener=self.listener,
            generation=lambda fingerprint: self.generations.get(fingerprint, 0),
            options=self.options,
            calls=self.files,
            wall_clock=self.clock,
            make_reads=ReadsWithoutThreads,
            make_workers=WorkersWithoutThreads,
        )
        self.work()
        self.listener.blocks = {(group.tag, key) for group, key in names_of(self.tier)}

    def kill(self) -> None:
        """kill -9, and the next daemon."""
        self.posted.clear()
        self.files.locked = False
        self.open()

    def cut_power(self, random: Random) -> None:
        self.files.lose_power(random)
        self.kill()

    def restart(self) -> None:
        assert self.tier.close(1.0)
        self.open()

    @property
    def writes(self) -> WorkersWithoutThreads:
        return cast("WorkersWithoutThreads", self.tier._writes)

    @property
    def reads(self) -> ReadsWithoutThreads:
        return cast("ReadsWithoutThreads", self.tier._reads)

    @property
    def notes(self) -> WorkersWithoutThreads:
        return cast("WorkersWithoutThreads", self.tier._clearing.threads)

    def work(self) -> None:
        busy = True
        while busy:
            busy = bool(self.writes.waiting or self.reads.added or self.notes.waiting or self.posted)
            self.writes.work()
            self.reads.work()
            self.notes.work()
            self.deliver()

    def deliver(self) -> None:
        """Call in the daemon's thread what was posted to it."""
        while self.posted:
            self.posted.popleft()()

    def fill(self, block: Block, version: int = 0) -> list[int]:
        """Put a block's bytes into the first slots of the pool; returns their offsets."""
        number = int.from_bytes(block.key, "big")
        for rank, length in enumerate(block.group.lengths):
            at = rank * SLOT_BYTES
            self.pool[at : at + length] = bytes_of(number, block.group, rank, version)
        return [rank * SLOT_BYTES for rank in range(len(block.group.lengths))]

    def begin_write(self, block: Block, version: int = 0) -> list[Result] | None:
        """Begin to write from slots of its own; the list gets the result."""
        ends: list[Result] = []
        self.in_call = True
        offsets = self.fill(block, version)
        taken = self.tier.write(block, offsets, self._end(ends))
        self.in_call = False
        return ends if taken else None

    def write(self, *blocks: Block, version: int = 0) -> list[Result | None]:
        """Write blocks one after another."""
        found: list[Result | None] = []
        for block in blocks:
            ends = self.begin_write(block, version)
            self.work()
            found.append(ends[0] if ends else None)
        return found

    def _end(self, ends: list[Result]) -> Callable[..., None]:
        def ended(result: Result, block: Block | None = None) -> None:
            assert not self.in_call, "it ended within the call"
            assert not ends, "it ended twice"
            ends.append(result)

        return ended

    def begin_read(self, block: Block, patience_s: float = 5.0, slot: int = 16) -> list[Result] | None:
        ends: list[Result] = []
        offsets = [(slot + rank) * SLOT_BYTES for rank in range(len(block.group.lengths))]
        self.in_call = True
        taken = self.tier.read(block.group, block.key, offsets, patience_s, self._end(ends))
        self.in_call = False
        return ends if taken else None

    def read(self, block: Block, version: int = 0) -> Result | None:
        """Read a block and compare it; None where it is not there."""
        if (ends := self.begin_read(block)) is None:
            return None
        self.work()
        if ends[0] is Result.DONE:
            number = int.from_bytes(block.key, "big")
            for rank, length in enumerate(block.group.lengths):
                at = (16 + rank) * SLOT_BYTES
                assert self.pool[at : at + length] == bytes_of(number, block.group, rank, version)
        return ends[0]

    def there(self, numbers: Sequence[int], group: BlockGroup = GROUP) -> list[int]:
        """Those of the numbers whose blocks are there."""
        found = self.tier.find(group, [key_of(number) for number in numbers], prefix=False).states
        return [number for number, state in zip(numbers, found, strict=True) if state]

    def remove(self, *numbers: int, group: BlockGroup = GROUP) -> None:
        self.tier.remove(group, [key_of(number) for number in numbers])

    def reset(self, fingerprint: bytes) -> int:
        """As a reset does that is noted; returns the namespace's generation then."""
        self.generations[fingerprint] = generation = self.generations.get(fingerprint, 0) + 1
        self.tier.remove_all(fingerprint)
        return generation

    def check(self) -> None:
        """The books are right, and the listener knows what is there."""
        tier = self.tier
        names = {(group.tag, key) for group, key in names_of(tier)}
        assert self.listener.blocks == names
        assert (
            tier.stats().blocks
            == len(names)
            == tier._map._index.index.used
            == sum(int(np.count_nonzero(region.group_numbers)) for region in tier._map.regions.values())
        )
        assert tier.stats().used_bytes == sum(group.nbytes for group, _ in names_of(tier))
        held = sum(map(len, tier._map.to_overwrite.values())) + len(names) + len(tier._map.put_aside)
        pinned = {
            (number, place)
            for number, region in tier._map.regions.items()
            for place, pins in enumerate(region.pins)
            if pins and not region.groups[place]
        }
        assert int(tier._map.slots.in_use.sum()) == held + len(pinned)
