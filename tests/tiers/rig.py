"""What stands around a tier in the tests: a pool, a daemon's thread that runs when told to, a listener that folds."""

from __future__ import annotations

import mmap
import queue
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from kvoffd.pool.checksums import digest
from kvoffd.tiers.tier import Tier, TierBlock, TierKey, TierResult, TierShard

SLOT_BYTES = 32 << 10
PATIENCE_S = 60.0

ONE = b"1" * 32
OTHER = b"2" * 32


class Maker(ABC):
    """Opens one kind of tier. Whatever it opens has the same device below, so that opening again is a restart."""

    capacity_bytes: int
    """What it holds, about, of blocks."""
    exact_order = True
    """Whether the very oldest goes first; among several devices it is the oldest of one."""

    @abstractmethod
    def open(self, rig: TierRig) -> Tier:
        """The tier. The one before must be closed."""

    def work(self, tier: Tier) -> None:  # noqa: B027 - threads work by themselves
        """Does what the device has to do."""


class Fold:
    """A listener that keeps what it is told, and notes what cannot be.

    What is wrong is kept in ``wrong`` and not raised, since a tier survives callbacks that raise.
    """

    def __init__(self) -> None:
        self.blocks: set[TierKey] = set()
        self.errors: list[tuple[str, str]] = []
        self.wrong: list[str] = []

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        self.expect(block.id not in self.blocks, "stored twice")
        self.blocks.add(block.id)

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        for block_id in ids:
            self.expect(block_id in self.blocks, "removed, and was not there")
            self.blocks.discard(block_id)

    def tier_answered(
        self, tier: Tier, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]
    ) -> None:
        self.expect(False, "a disk is not asked")

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        self.expect(kind.replace("_", "").isalpha() and kind.count("_") <= 1, f"{kind!r} is no kind of error")
        self.expect(sentence.endswith("."), f"{sentence!r} is no sentence")
        self.errors.append((kind, sentence))

    def expect(self, holds: bool, otherwise: str) -> None:
        """Notes what does not hold."""
        if not holds:
            self.wrong.append(otherwise)

    @property
    def kinds(self) -> Counter[str]:
        """How often each error was told."""
        return Counter(kind for kind, _ in self.errors)


@dataclass
class Ending:
    """A callback, and what came of it."""

    rig: TierRig
    results: list[TierResult] = field(default_factory=list)

    def __call__(self, result: TierResult) -> None:
        self.rig.fold.expect(not self.rig.in_call, "on_done came from within a call")
        self.rig.fold.expect(not self.results, "on_done came twice")
        self.results.append(result)
        self.rig.under_way -= 1

    @property
    def result(self) -> TierResult | None:
        """How it ended; None while it did not."""
        return self.results[0] if self.results else None


class TierRig:
    """A pool of slots around one tier. Calls of the tier go through here."""

    def __init__(self, maker: Maker, slots: int = 64) -> None:
        self.maker = maker
        self.now = 1000.0
        self.wall = 1_800_000_000.0
        self.pool = memoryview(mmap.mmap(-1, slots * SLOT_BYTES))
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.fold = Fold()
        self.under_way = 0
        self.in_call = False
        self._free = list(range(0, slots * SLOT_BYTES, SLOT_BYTES))
        self.tier = maker.open(self)
        self.fold.blocks = self.ids()

    def clock(self) -> float:
        """The daemon's."""
        return self.now

    # --- the pool --------------------------------------------------------------------------------

    def fill(self, block: TierBlock, seed: int) -> list[int]:
        """Pool offsets at which the block lies, as ``block_of`` made it."""
        offsets = self.room(len(block.shards))
        for rank, (shard, offset) in enumerate(zip(block.shards, offsets, strict=True)):
            self.pool[offset : offset + shard.length] = content(block.id, rank, shard.length, seed)
        return offsets

    def room(self, count: int) -> list[int]:
        """Slots of the pool, filled with something."""
        offsets = [self._free.pop() for _ in range(count)]
        for offset in offsets:
            self.pool[offset : offset + SLOT_BYTES] = b"\xee" * SLOT_BYTES
        return offsets

    def free(self, offsets: Sequence[int]) -> None:
        """Takes slots back."""
        self._free.extend(offsets)

    # --- the tier --------------------------------------------------------------------------------

    def write(self, block: TierBlock, seed: int = 0) -> Ending | None:
        """Begins to write a block; None where it is not taken. Its pool slots are free when it has ended."""
        offsets = self.fill(block, seed)
        ending = Ending(self)
        self.in_call = True
        taken = self.tier.write(block, offsets, _then(ending, lambda: self.free(offsets)))
        self.in_call = False
        if not taken:
            self.free(offsets)
            return None
        self.under_way += 1
        return ending

    def read(self, block: TierBlock, seed: int = 0, deadline: float = float("inf")) -> Ending | None:
        """Begins to read a block; None where it is not taken. What comes DONE is compared with what it must be."""
        offsets = self.room(len(block.shards))
        ending = Ending(self)

        def compare() -> None:
            if ending.result is TierResult.DONE:
                for rank, (shard, offset) in enumerate(zip(block.shards, offsets, strict=True)):
                    found = bytes(self.pool[offset : offset + shard.length])
                    expected = content(block.id, rank, shard.length, seed)
                    self.fold.expect(found == expected, "DONE, and other bytes")
            self.free(offsets)

        self.in_call = True
        taken = self.tier.read(block.id, offsets, deadline, _then(ending, compare))
        self.in_call = False
        if not taken:
            self.free(offsets)
            return None
        self.under_way += 1
        return ending

    def has(self, block_id: TierKey) -> bool:
        """Whether it can be read now."""
        return block_id.key in self.tier.index(block_id.fingerprint, block_id.group)

    def ids(self) -> set[TierKey]:
        """All that can be read now."""
        groups = self.tier.groups()
        assert len(set(groups)) == len(groups)
        return {TierKey(*group, key) for group in groups for key in self.tier.index(*group)}

    def settle(self) -> None:
        """Runs the daemon's thread until nothing is under way and nothing is left to tell."""
        self.maker.work(self.tier)
        while self.under_way or not self.posted.empty():
            self.posted.get(timeout=PATIENCE_S)()
            self.maker.work(self.tier)
        self.check()

    def check(self) -> None:
        """What must hold whenever all was told."""
        assert not self.fold.wrong
        assert self.fold.blocks == self.ids()
        stats = self.tier.stats()
        assert stats.blocks == len(self.ids())
        assert stats.used_bytes <= stats.size_bytes
        assert stats.physical_bytes <= stats.size_bytes

    def close(self) -> bool:
        """Closes the tier and tells what there is to tell."""
        closed = self.tier.close(PATIENCE_S)
        while not self.posted.empty():
            self.posted.get()()
        assert not self.fold.wrong
        return closed

    def restart(self) -> None:
        """A daemon goes in good order, another comes."""
        assert self.close()
        self.open()

    def after_death(self) -> TierRig:
        """Another process, which opens what is there. Nothing of this one may be used any more."""
        heir = TierRig.__new__(TierRig)
        heir.__dict__.update(self.__dict__)
        heir.pool = memoryview(mmap.mmap(-1, len(self.pool)))
        heir._free = list(range(0, len(self.pool), SLOT_BYTES))
        heir.in_call = False
        heir.open()
        return heir

    def open(self) -> None:
        """Another daemon opens what is there."""
        self.posted = queue.SimpleQueue()
        self.under_way = 0
        self.fold = Fold()
        self.tier = self.maker.open(self)
        self.fold.blocks = self.ids()
        while not self.posted.empty():
            self.posted.get()()


def _then(ending: Ending, after: Callable[[], None]) -> Callable[[TierResult], None]:
    def done(result: TierResult) -> None:
        ending(result)
        after()

    return done


def content(block_id: TierKey, rank: int, length: int, seed: int) -> bytes:
    """Bytes of a shard: other ones for every name, rank and seed."""
    return Random(repr((block_id, rank, seed))).randbytes(length)


def block_of(
    number: int, lengths: Sequence[int] = (10_000,), fingerprint: bytes = ONE, group: int = 0, seed: int = 0
) -> TierBlock:
    """A block whose shards have these lengths."""
    block_id = TierKey(fingerprint, group, number.to_bytes(32, "big"))
    shards = (
        TierShard(length, number % 3, digest(memoryview(content(block_id, rank, length, seed))))
        for rank, length in enumerate(lengths)
    )
    return TierBlock(block_id, tuple(shards))
