"""The interface of eviction policies over numbered blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds
from kvoffd.cache.namespace import Group
from kvoffd_proto.stats import LearnedStats

REJECTED = -1.0
"""Score of a key that must not be stored, even if there is space."""
GHOST_DIVISOR = 50
"""Keys without blocks may take 1/50 of the pool's bytes in memory."""
BATCH, MAX_BATCH = 128, 8192
"""Sizes of the first batch of an order's blocks, and of a policy's first buffer."""


class Chain(NamedTuple):
    """Keys of one group that a request looked up."""

    group: Group
    keys: bytes
    """Concatenated, root of the prefix first."""
    ready: BlockIds
    """Blocks that were READY at the lookup and still are, in the order of the keys."""
    ready_prefix: int = 0
    """Keys that were READY before the first that was not."""
    findable: int = sys.maxsize
    """Keys before the first that no pool of any size could have had, as far as is known."""


class Admission(NamedTuple):
    """A policy's answer to a store that offers keys."""

    runs: Sequence[tuple[int, float]]
    """Lengths of the runs that the keys are split into, and the score of each one's keys, perhaps REJECTED: only blocks
    with a lower score may be evicted for them."""
    lowest: float
    """Lower bound of the blocks' scores."""


class Policy(Protocol):
    """Orders READY blocks for eviction, based on requests. It knows nothing of pins, slots or slot sizes."""

    def requested(self, chains: Sequence[Chain]) -> None:
        """Record a request. A chain's tail becomes older than its root."""

    def insert(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Add blocks that became READY, the least recently used first: a chain's tail before its root."""

    def follow(self, before: int, blocks: BlockIds) -> None:
        """Make blocks, root first, older than the one before them in their prompt, if it was inserted or used before
        them: a prompt that is stored in steps has the same order as one that is stored at once."""

    def remove(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Remove blocks, in any order; fastest if a chain's tail comes before its root."""

    def first(self, count: int, below: float = inf) -> BlockIds:
        """Return the first ``count`` blocks to evict among those with a score below ``below``."""

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        """Give keys that a store offers, and that have no block, a score. ``starts``: index of the first key of each
        chain; the first is 0."""

    def rejected(self, group: Group, keys: bytes) -> None:
        """Offered keys were rejected: by ``admit``, or as the blocks to evict had higher scores."""

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        """Return each key's chance of reuse before ``within_bytes`` more bytes are requested; 1 if unknown."""

    def remember(self, nbytes: int) -> None:
        """Remember keys without a block until this much more is requested, because tiers keep blocks for that long."""

    @property
    def accessed_bytes(self) -> int:
        """Bytes requested so far; 0 if the policy does not estimate chances."""

    @property
    def ghosts(self) -> int:
        """Number of remembered keys without a block."""

    @property
    def nbytes(self) -> int:
        """Memory of the policy."""

    def describe(self) -> LearnedStats:
        """Return statistics of what was learned."""

    def state(self) -> bytes:
        """Return the state for the next daemon; empty if there is none."""

    def restore(self, state: bytes) -> None:
        """Continue with the state of an earlier policy; call it first. Raises ValueError if the state is unusable."""


class BufferedOrder:
    """Base of policies whose order a C function writes into a buffer.

    Results are copied out of the same buffer each time: asking a new array for its address takes longer.

    Args:
        write: the function. Its arguments are the score that blocks must be below, an address, and the most blocks to
            write there, the first to evict first; it returns how many it wrote.
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


class AdmitsAll(BufferedOrder):
    """Base of policies that admit everything that a store offers, keep no state over a restart, and cannot tell a key's
    chance to be used again."""

    accessed_bytes = 0

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> Admission:
        return Admission([(len(keys) // group.key_bytes, inf)], -inf)

    def rejected(self, group: Group, keys: bytes) -> None:
        raise AssertionError("nothing is rejected")

    def chance(self, group: Group, keys: bytes, within_bytes: int) -> npt.NDArray[np.float64]:
        return np.ones(len(keys) // group.key_bytes)

    def remember(self, nbytes: int) -> None:
        """Do nothing: no key's chance is known."""

    def describe(self) -> LearnedStats:
        return LearnedStats()

    def state(self) -> bytes:
        return b""

    def restore(self, state: bytes) -> None:
        """Do nothing: this policy has no state."""
