"""A shared tier over a little memory, for tests."""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import partial
from random import Random
from typing import ClassVar

from kvoffd.pool.checksums import digest
from kvoffd.tiers.fleet_clears import Raise
from kvoffd.tiers.generations import Generations, Resets
from kvoffd.tiers.header import Block, BlockGroup, make_block_group, stored_group
from kvoffd.tiers.names import block_name
from kvoffd.tiers.shared import SharedTier
from kvoffd.tiers.store import Credentials, open_store
from kvoffd.tiers.tier import Result, Tier
from tests.kit.waiting import wait_until

ONE, OTHER = b"1" * 32, b"2" * 32
LOOK_S, TOGETHER_S = 0.005, 0.001
"""Longest pause between two looks, as most that is waited for is posted; and between calls that are posted together."""
SLOT_BYTES = 1 << 20
SLOTS = 24
SHARDS: dict[tuple[int, ...], list[bytes]] = {}
"""The bytes of blocks, by their checksums."""


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Answer(IntEnum):
    """What is known of whether a block is there."""

    NO, YES, ASKED, UNKNOWN = range(4)


def name_of(block: Block, generation: int) -> bytes:
    """Of its object."""
    return block_name(stored_group(block.group, generation), block.key)


class SharedRig:
    """A node: a pool of ``SLOTS`` slots, and its tier. What the threads post is delivered by ``until``.

    Asking may take long, since a busy machine is no fault; for tests of that deadline ``ask_deadline_s`` is another.
    The fixture ``every_node_closes`` closes it.
    """

    opened: ClassVar[list[SharedRig]] = []

    def __init__(
        self,
        url: str,
        password: str = "",
        ask_deadline_s: float = 10.0,
        generations: Mapping[bytes, int] | None = None,
        user: str = "",
    ) -> None:
        self.opened.append(self)
        self.pool = memoryview(bytearray(SLOTS * SLOT_BYTES))
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.kinds: Counter[str] = Counter()
        self.read_block: Block | None = None
        self.tier = SharedTier(
            url,
            open_store(url, Credentials(user, password)),
            pool=self.pool,
            clock=time.monotonic,
            post=self._posted.put,
            listener=self,
            ask_deadline_s=ask_deadline_s,
            generations=Generations(Resets(followed=dict(generations or {}))),
        )

    def blocks_stored(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        raise AssertionError("nothing is reported of what a shared tier has")

    def blocks_removed(self, tier: Tier, group: BlockGroup, keys: Sequence[bytes]) -> None:
        raise AssertionError("nothing is reported of what a shared tier has")

    def answered(
        self, tier: Tier, group: BlockGroup, keys: Sequence[bytes], found: Sequence[bool], question: object
    ) -> None:
        assert len(keys) == len(found) > 0

    def error(self, tier: Tier, kind: str, sentence: str) -> None:
        self.kinds[kind] += 1

    def until(self, condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
        def delivered() -> bool:
            self.tier.tick()
            self._deliver(0.0)
            if condition():
                return True
            self._deliver(LOOK_S)
            return condition()  # before another tick, which may change it again

        wait_until(delivered, deadline_s, explain=lambda: (self.kinds, self.tier.counters), interval_s=0.0)

    def _deliver(self, wait_s: float) -> None:
        """Wait for a call that was posted; make it, and those that were posted by a moment later."""
        with suppress(queue.Empty):
            self._posted.get(timeout=wait_s)()
            time.sleep(TOGETHER_S)
            while True:
                self._posted.get_nowait()()

    def reachable(self) -> SharedRig:
        self.until(lambda: self.tier.available())
        return self

    def block(
        self, number: int, lengths: Sequence[int] = (5000,), fingerprint: bytes = ONE, group: int = 0, first: int = 0
    ) -> Block:
        """A block whose bytes are a function of its number."""
        shards = [Random(100 * number + rank).randbytes(length) for rank, length in enumerate(lengths)]
        sums = tuple(digest(memoryview(shard)) for shard in shards)
        SHARDS[sums] = shards
        block_group = make_block_group(fingerprint, 0, group, tuple(lengths))
        return Block(block_group, key_of(number), (first,) * len(lengths), sums)

    def write(self, block: Block) -> Result | None:
        """Put a block into the first slots and write it, and wait for the end; None where it is not taken."""
        ended: list[Result] = []
        for slot, shard in enumerate(SHARDS[block.checksums]):
            self.pool[slot * SLOT_BYTES :][: len(shard)] = shard
        if not self.tier.write(block, [slot * SLOT_BYTES for slot in range(len(block.checksums))], ended.append):
            return None
        self.until(lambda: bool(ended))
        return ended[0]

    def store(self, *blocks: Block) -> None:
        assert {self.write(block) for block in blocks} <= {Result.DONE, Result.EXISTED}

    def store_some(self, count: int) -> list[Block]:
        """Write the first so many blocks."""
        blocks = [self.block(number) for number in range(count)]
        self.store(*blocks)
        return blocks

    def remove(self, block: Block) -> None:
        """For all nodes."""
        self.tier.remove(block.group, [block.key], for_all_nodes=True)

    def raise_generation(self, fingerprint: bytes) -> Raise:
        """Make all of a namespace void for all nodes; ended, with what went wrong."""
        one = self.tier.clears.raise_generation(fingerprint, self.tier.generations.next_of_all(fingerprint), 0)
        self.until(lambda: one.ended)
        return one

    def take_voided(self) -> set[bytes]:
        """Follow what was voided for all nodes; return the namespaces."""
        found = {*self.tier.generations.voided}
        for fingerprint in found:
            self.tier.generations.followed(fingerprint)
        return found

    def question(
        self, keys: Sequence[bytes], *, prefix: bool, fingerprint: bytes = ONE, length: int = 5000
    ) -> list[Answer]:
        """Ask for keys, without waiting."""
        found = self.tier.find(make_block_group(fingerprint, 0, 0, (length,)), keys, prefix=prefix)
        return list(map(Answer, found.states))

    def answers(self, fingerprint: bytes, keys: Sequence[bytes], group: int = 0) -> list[Answer]:
        return [Answer(one) for one in self.tier._answers.states(make_block_group(fingerprint, 0, group, ()).tag, keys)]

    def ask(self, *blocks: Block, prefix: bool = False) -> list[Answer]:
        """Ask and wait for the answers."""
        group, keys = blocks[0].group, [block.key for block in blocks]
        self.tier.find(group, keys, prefix=prefix)
        answers = partial(self.answers, group.fingerprint, keys, group.group_index)
        self.until(lambda: Answer.ASKED not in answers())
        return answers()

    def forget(self) -> None:
        """Forget all answers."""
        self.tier._answers.clear()

    def ask_anew(self, *blocks: Block, prefix: bool = False) -> list[Answer]:
        """Ask, whatever was answered before."""
        self.forget()
        return self.ask(*blocks, prefix=prefix)

    def begin_read(self, block: Block, patience_s: float = 5.0, slot: int = 8) -> list[Result] | None:
        """Begin to read into slots from ``slot`` on; the list gets the result."""
        ended: list[Result] = []

        def done(result: Result, found: Block | None) -> None:
            self.read_block = found
            ended.append(result)

        offsets = [(slot + number) * SLOT_BYTES for number in range(len(block.checksums))]
        return ended if self.tier.read(block.group, block.key, offsets, patience_s, done) else None

    def load(self, block: Block, patience_s: float = 5.0) -> Result | None:
        """Ask, read and compare; None where it is not there."""
        self.read_block = None
        if self.ask(block) != [Answer.YES] or (ended := self.begin_read(block, patience_s)) is None:
            return None
        self.until(lambda: bool(ended))
        if ended[0] is Result.DONE:
            assert self.read_block == block
            for slot, (length, checksum) in enumerate(zip(block.group.lengths, block.checksums, strict=True), 8):
                assert digest(self.pool[slot * SLOT_BYTES : slot * SLOT_BYTES + length]) == checksum
        return ended[0]

    def close(self) -> bool:
        return self.tier.close(10.0)
