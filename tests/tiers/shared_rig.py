"""A shared tier over a little memory, for tests."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random

from kvoffd.pool.checksums import digest
from kvoffd.tiers.shared.shared_tier import SharedTier
from kvoffd.tiers.shared.store import Credentials, open_store
from kvoffd.tiers.tier import Answer, Tier, TierBlock, TierKey, TierResult, TierShard
from tests.kit.waiting import wait_until

ONE, OTHER = b"1" * 32, b"2" * 32
SLOT_BYTES = 1 << 20
SLOTS = 24


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class SharedRig:
    """A node: a pool of ``SLOTS`` slots, and its tier. What the threads post is delivered by ``until``.

    Asking may take long, since a busy machine is no fault; for tests of that deadline ``ask_deadline_s`` is another.
    """

    def __init__(
        self,
        url: str,
        password: str = "",
        ask_deadline_s: float = 2.0,
        generations: Mapping[bytes, int] | None = None,
        user: str = "",
    ) -> None:
        self.pool = memoryview(bytearray(SLOTS * SLOT_BYTES))
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.kinds: Counter[str] = Counter()
        self.results: list[TierResult] = []
        self.read_block: TierBlock | None = None
        self.answered: dict[tuple[bytes, int, bytes], bool] = {}
        self.tier = SharedTier(
            url,
            open_store(url, Credentials(user, password)),
            pool=self.pool,
            digest=digest,
            clock=time.monotonic,
            post=self._posted.put,
            listener=self,
            ask_deadline_s=ask_deadline_s,
            generations=generations,
        )

    def tier_stored(self, tier: Tier, block: TierBlock) -> None:
        raise AssertionError("nothing is told of what a shared tier has")

    def tier_removed(self, tier: Tier, ids: Sequence[TierKey]) -> None:
        raise AssertionError("nothing is told of what a shared tier has")

    def tier_answered(
        self, tier: Tier, fingerprint: bytes, group: int, keys: Sequence[bytes], found: Sequence[bool]
    ) -> None:
        self.answered.update({(fingerprint, group, key): there for key, there in zip(keys, found, strict=True)})

    def tier_error(self, tier: Tier, kind: str, sentence: str) -> None:
        self.kinds[kind] += 1

    def until(self, condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
        def delivered() -> bool:
            while not self._posted.empty():
                self._posted.get()()
            return condition()

        wait_until(delivered, deadline_s, explain=lambda: (self.kinds, self.tier.counters), interval_s=0.001)

    def reachable(self) -> SharedRig:
        self.until(lambda: self.tier.reachable)
        return self

    def fill(self, slot: int, length: int, seed: int) -> int:
        """Fill a slot; returns its checksum."""
        view = self.pool[slot * SLOT_BYTES : slot * SLOT_BYTES + length]
        view[:] = Random(seed).randbytes(length)
        return digest(view)

    def block(
        self, number: int, lengths: Sequence[int] = (5000,), fingerprint: bytes = ONE, group: int = 0, first: int = 0
    ) -> TierBlock:
        """A block whose bytes are put into the first slots."""
        shards = [
            TierShard(length, first, self.fill(slot, length, 100 * number + slot))
            for slot, length in enumerate(lengths)
        ]
        return TierBlock(TierKey(fingerprint, group, key_of(number)), tuple(shards))

    def write(self, block: TierBlock) -> TierResult | None:
        """Write a block from the first slots, and wait for the end; None where it is not taken."""
        ended: list[TierResult] = []
        if not self.tier.write(block, [slot * SLOT_BYTES for slot in range(len(block.shards))], ended.append):
            return None
        self.until(lambda: bool(ended))
        return ended[0]

    def store(self, *blocks: TierBlock) -> None:
        assert {self.write(block) for block in blocks} <= {TierResult.DONE, TierResult.PRESENT}

    def store_some(self, count: int) -> list[TierBlock]:
        """Write the first so many blocks, one after another from the same slots."""
        blocks = []
        for number in range(count):
            blocks.append(self.block(number))
            self.store(blocks[-1])
        return blocks

    def ask(self, *blocks: TierBlock, prefix: bool = False) -> list[Answer]:
        """Ask and wait for the answers."""
        fingerprint, group, _ = blocks[0].id
        keys = [block.id.key for block in blocks]
        unknown = [
            key
            for key, answer in zip(keys, self.tier.answers(fingerprint, group, keys), strict=True)
            if answer is Answer.UNKNOWN
        ]
        if unknown:
            lengths = [shard.length for shard in blocks[0].shards]
            self.tier.ask(1, fingerprint, group, lengths, unknown, prefix=prefix)
        self.until(lambda: Answer.ASKED not in self.tier.answers(fingerprint, group, keys))
        return self.tier.answers(fingerprint, group, keys)

    def ask_anew(self, *blocks: TierBlock) -> list[Answer]:
        """Ask, whatever was answered before."""
        self.tier.remove_namespace(blocks[0].id.fingerprint)
        return self.ask(*blocks)

    def begin_read(self, block: TierBlock, deadline_s: float = 5.0, slot: int = 8) -> list[TierResult] | None:
        """Begin to read into slots from ``slot`` on; the list gets the result."""
        ended: list[TierResult] = []

        def done(result: TierResult) -> None:
            if result is TierResult.DONE:
                self.read_block = self.tier.contents(block)
            ended.append(result)

        offsets = [(slot + number) * SLOT_BYTES for number in range(len(block.shards))]
        return ended if self.tier.read(block.id, offsets, time.monotonic() + deadline_s, done) else None

    def load(self, block: TierBlock, deadline_s: float = 5.0) -> TierResult | None:
        """Ask, read and compare; None where it is not there."""
        self.read_block = None
        if self.ask(block) != [Answer.YES] or (ended := self.begin_read(block, deadline_s)) is None:
            return None
        self.until(lambda: bool(ended))
        if ended[0] is TierResult.DONE:
            assert self.read_block == block
            for slot, shard in enumerate(block.shards, 8):
                assert digest(self.pool[slot * SLOT_BYTES : slot * SLOT_BYTES + shard.length]) == shard.checksum
        return ended[0]

    def close(self) -> bool:
        return self.tier.close(10.0)
