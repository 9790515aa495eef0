"""What an eviction policy over numbered blocks does."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from math import inf
from struct import pack
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import NO_BLOCK, WITH_SLOTS, BlockIds
from kvoffd.cache.namespace import Namespace
from kvoffd.pool.allocator import NO_NODE, PAGE_BYTES
from kvoffd_proto.stats import LearnedStats

REJECTED = -1.0
"""Score of a key that is not to be stored, whatever space there is."""
GHOST_PART = 50
"""What is remembered of keys without blocks may take one part in so many of the pool's bytes."""
BATCH, MAX_BATCH = 128, 8192
"""Candidates that are given at once: at first, and once many were passed over."""


class Group:
    """One group of a namespace, between two resets.

    Args:
        number: no other group of this daemon has it.
        index: its number in the namespace.
    """

    def __init__(self, number: int, namespace: Namespace, index: int) -> None:
        self.number, self.namespace, self.index, self.key_bytes = number, namespace, index, namespace.key_bytes
        self.tokens = namespace.groups[index].tokens_per_block
        """Of a block; 0 where its group does not say."""
        self.dead = False
        """The namespace was reset: its blocks are swept out."""
        self.unswept: list[int] = []
        """Numbers that this group of its namespace had before resets, as long as some of those blocks may be there."""
        self.blocks_in = dict.fromkeys(WITH_SLOTS, 0)
        """By state, the number of blocks that have slots."""
        self._list = array("I", [NO_BLOCK, NO_BLOCK])
        """``struct block_list`` of blocks.h."""
        self.set_sizes([], [])

    def set_sizes(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        """By rank, the bytes of a block's shards, and of their slots; none while a rank has not registered."""
        self.lengths, self.sizes, self.block_bytes = lengths, sizes, sum(sizes)
        whose = self.number, self.namespace.number, self.index, self.key_bytes
        nodes = [self.namespace.nodes.get(rank) for rank in range(len(sizes))]
        by_rank = [pack("=Ii", size, NO_NODE if at is None else at) for size, at in zip(sizes, nodes, strict=True)]
        list_at, _ = self._list.buffer_info()
        self.packed = pack("=Q6I", list_at, *whose, len(sizes), self.block_bytes // PAGE_BYTES) + b"".join(by_rank)
        """``struct block_group`` of blocks.h."""


class Chain(NamedTuple):
    """What a request asked for of one group."""

    group: Group
    keys: bytes
    """End to end, root of the prefix first."""
    ready: BlockIds
    """Those of its blocks that it found READY and that still are, in that order."""
    run: int = 0
    """Keys that it found READY before the first that was not."""


class Policy(Protocol):
    """Knows requests, and the READY blocks in the order in which they should go; nothing of pins, slots or sizes."""

    def requested(self, chains: Sequence[Chain]) -> None:
        """Note a request. A chain's tail becomes older than its root."""

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Add blocks that became READY, the least recently used first: a chain's tail before its root."""

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Remove blocks, in any order, a chain's tail before its root if it is to be quick."""

    def first(self, count: int, below: float = inf) -> BlockIds:
        """The blocks that should go first, of those whose score is lower: so many, if there are."""

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        """All of these, some at a time. Any change of the policy ends it."""

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Lengths of runs of keys that a store offers and that have no block, each with the score of its keys: only
        blocks with a lower one give way to them.

        ``starts``: where the keys of each chain begin, the first at 0.
        """

    @property
    def lowest(self) -> float:
        """The lowest score of a block at the last ``admit``, or a lower one."""

    def rejected(self, group: Group, keys: bytes) -> None:
        """Offered keys scored less than the blocks that would have had to go."""

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        """The chance of each key to be asked for again before so many bytes more are; 1 where nothing tells."""

    @property
    def accessed_bytes(self) -> int:
        """Bytes that were asked for so far; 0 where the policy tells no chances."""

    @property
    def ghosts(self) -> int:
        """Keys without a block that are remembered."""

    @property
    def nbytes(self) -> int:
        """Memory of what is known."""

    def describe(self) -> LearnedStats:
        """What was learned."""

    def state(self) -> bytes:
        """The statistics, for a successor; empty where there are none."""

    def restore(self, state: bytes) -> None:
        """Go on with an earlier policy's statistics, before anything else. Raises ValueError where they are no use."""


class InOrder:
    """Half of a policy whose blocks a function of C writes to an address, so many at most, in the order in which they
    should go; it returns how many it wrote.

    They are copied out of a buffer: to ask each new array for its address takes longer.
    """

    def __init__(self, write: Callable[[float, int, int], int]) -> None:
        self._write = write
        self._make_buffer(MAX_BATCH)

    def _make_buffer(self, count: int) -> None:
        self._buffer = np.empty(count, np.uint32)
        self._buffer_at = self._buffer.ctypes.data

    def first(self, count: int, below: float = inf) -> BlockIds:
        if count > len(self._buffer):
            self._make_buffer(count)
        return self._buffer[: self._write(below, self._buffer_at, count)].copy()

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        given, most = 0, BATCH
        while (found := self.first(most, below)).size > given:
            yield found[given:]
            given, most = len(found), 4 * most


def make_policy(name: str, pool_bytes: int, slots: int) -> Policy:
    """A new policy, one of ``kvoffd.cache.POLICY_NAMES``, for a pool of so many bytes and slot numbers. Raises
    ValueError for others."""
    from kvoffd.cache.learned import Learned
    from kvoffd.cache.queues import Queues

    if name == "learned":
        return Learned(pool_bytes)
    if name == "arc":
        return Queues(slots, pool_bytes)
    if name == "lru":
        return Queues(slots)
    raise ValueError(f"There is no policy {name!r}.")
