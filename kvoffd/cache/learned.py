"""The policy ``learned``: what comes back, after how long, and what it costs to keep. The work is done in C."""

from __future__ import annotations

import math
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, BlockTable
from kvoffd.cache.policies.learned import MEMORY_REQUESTS, SEED_BYTES, UNIT_TOKENS, Known
from kvoffd.cache.policy import BATCH, REJECTED, Chain, Group
from kvoffd.system.native import native

_OFFER = struct.Struct("=dQ")
MAX_LEARNED_GROUPS = 4096
"""Groups that asked for as much as the pool holds, and that are known to have."""


class Learned:
    """``struct learned``, which knows blocks by their numbers.

    Args:
        blocks: has the keys of blocks.
    """

    def __init__(self, pool_bytes: int, blocks: BlockTable) -> None:
        self._native = native()
        self._pool_bytes, self._blocks = pool_bytes, blocks
        self._learned_of: dict[int, None] = {}
        """Numbers of groups that asked for as much as the pool holds: what was learned is of their keys too."""
        self._at = self._native.learned_new(pool_bytes, os.urandom(SEED_BYTES))
        if not self._at:
            raise MemoryError
        self._close = weakref.finalize(self, self._native.learned_free, self._at)
        self.known = Known.from_address(self._at)

    def requested(self, chains: Sequence[Chain]) -> None:
        nbytes = keys = 0
        for group, joined, _ in chains:
            tokens = group.namespace.groups[group.group].tokens_per_block or UNIT_TOKENS
            count = self._native.learned_note(self._at, *_keys(group, joined), group.block_bytes, tokens)
            keys += count
            nbytes += count * group.block_bytes
        if keys and (requests := self._native.learned_pass(self._at, keys, nbytes)):
            self._native.learned_learn(self._at, math.exp(-requests / MEMORY_REQUESTS))

    def insert(self, group: Group, blocks: BlockIds) -> None:
        root_first = np.ascontiguousarray(blocks[::-1])
        keys = _keys(group, self._blocks.keys(root_first, group.key_bytes))
        handles = root_first + np.uint32(1)  # C has 0 for none
        twice = self._native.learned_insert(self._at, *keys, group.block_bytes, handles.ctypes.data, False)
        assert not twice, "inserted twice"

    def remove(self, group: Group, blocks: BlockIds) -> None:
        keys = _keys(group, self._blocks.keys(blocks[::-1], group.key_bytes))
        unknown = self._native.learned_remove(self._at, *keys, np.empty(len(blocks), np.uint32).ctypes.data)
        assert not unknown, "removed what is not there"

    def candidates(self, below: float = inf) -> Iterator[BlockIds]:
        given, most = 0, BATCH
        while True:
            blocks = np.empty(most, np.uint32)
            found = self._native.learned_candidates(self._at, below, blocks.ctypes.data, most)
            if found > given:
                yield blocks[given:found] - np.uint32(1)
            if found < most:
                return
            given, most = found, 4 * most

    def admit(self, group: Group, keys: bytes, starts: Sequence[int]) -> npt.NDArray[np.float64]:
        begins, count = np.array(starts, np.uint64), len(keys) // group.key_bytes
        found = np.empty(count * _OFFER.size, np.uint8)
        made = self._native.learned_offers(
            *(self._at, *_keys(group, keys), group.block_bytes),
            *(begins.ctypes.data, len(begins), found.ctypes.data),
        )
        runs = list(_OFFER.iter_unpack(found[: made * _OFFER.size].tobytes()))
        scores = np.repeat([score for score, _ in runs], [length for _, length in runs])
        if not self._is_learned_of(group):
            scores[scores != REJECTED] = inf
        return scores

    def _is_learned_of(self, group: Group) -> bool:
        """Whether what was learned is of this group's keys, too: its namespace asked for as much as the pool holds."""
        if group.number in self._learned_of:
            return True
        if group.namespace.counters.keys_asked * group.block_bytes < self._pool_bytes:
            return False
        self._learned_of[group.number] = None
        if len(self._learned_of) > MAX_LEARNED_GROUPS:
            del self._learned_of[next(iter(self._learned_of))]
        return True

    def rejected(self, group: Group, keys: bytes) -> None:
        self._native.learned_declined(self._at, *_keys(group, keys))


def _keys(group: Group, keys: bytes) -> tuple[int, bytes, int, int]:
    """Keys as C takes them: the same in another group are others."""
    return group.number, keys, len(keys) // group.key_bytes, group.key_bytes
