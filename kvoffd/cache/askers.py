"""Whose prompts have asked for a block: one giver of hints, or several.

A hint may release a block only if no prompt of another giver has asked for it, by a lookup that found it or that came
before it was stored. Whatever is not known counts as several.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import READY, BlockIds
from kvoffd.cache.namespace import Group

NOBODY, SEVERAL = 0, 2**32 - 1
LEAST_ENTRIES, MOST_ENTRIES = 1 << 12, 1 << 20
"""Entries of keys that were asked for and not there, 8 bytes each; 8 for each of the pool's slot numbers if between."""
FULL_DIVISOR = 8
"""Once 1/8 of the entries may be in use, those from before the last time are forgotten."""
_MIX, _MIX_GROUP = np.uint64(0x9E3779B97F4A7C15), 0xC2B2AE3D27D4EB4F


class Askers:
    """Givers by block, and by key while a key has no block.

    Keys without a block are found by a hash, without a check: two that share an entry have several askers.
    """

    def __init__(self, slots: int) -> None:
        bits = max(LEAST_ENTRIES, min(MOST_ENTRIES, 8 * slots)).bit_length() - 1
        self._shift, self._most = np.uint64(64 - bits), (1 << bits) // FULL_DIVISOR
        self._of = np.zeros(slots, np.uint32)
        """[slots] giver of the block's only prompts, or SEVERAL."""
        self._recent, self._before = np.zeros(1 << bits, np.uint32), np.zeros(1 << bits, np.uint32)
        """[entries] giver of the only prompts that asked for the key: since the entries were last full, and before."""
        self._used = 0

    def asked(self, group: Group, keys: bytes, states: bytes, ready: BlockIds, giver: int) -> BlockIds:
        """Record that a prompt asked for keys with these states; 0: its giver is unknown. ``ready``: the READY ones'
        blocks. Returns those of them for which no prompt of this giver had asked alone."""
        others = ready[self._of[ready] != giver] if giver else ready
        self._of[others] = SEVERAL
        if len(ready) < len(states):
            absent = self._places(group, keys)[np.frombuffer(states, np.uint8) != READY]
            found = self._at(absent)
            alone = ((found == NOBODY) | (found == giver)) if giver else np.zeros(len(found), np.bool_)
            self._recent[absent] = np.where(alone, np.uint32(giver), np.uint32(SEVERAL))
            self._used += len(absent)
            if self._used >= self._most:
                self._used, self._before, self._recent = 0, self._recent, np.zeros_like(self._recent)
        return others

    def stored(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Record that keys for which prompts have asked got blocks."""
        found = self._at(self._places(group, keys))
        found[found == NOBODY] = SEVERAL
        self._of[blocks] = found

    def share(self, blocks: BlockIds) -> None:
        """Record that others than one giver's prompts use blocks."""
        self._of[blocks] = SEVERAL

    def are_alone(self, blocks: BlockIds, giver: int) -> npt.NDArray[np.bool_]:
        """Return whether only prompts of this giver have asked for each block."""
        alone: npt.NDArray[np.bool_] = self._of[blocks] == (giver or SEVERAL + 1)
        return alone

    def _places(self, group: Group, keys: bytes) -> npt.NDArray[np.uint64]:
        ends = np.frombuffer(keys, np.uint8).reshape(-1, group.key_bytes)[:, -8:]
        mixed = np.ascontiguousarray(ends).view("<u8").ravel() ^ np.uint64(group.number * _MIX_GROUP & 2**64 - 1)
        return (mixed * _MIX) >> self._shift

    def _at(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        recent, before = self._recent[places], self._before[places]
        one = np.maximum(recent, before)  # where one of them is NOBODY, or both are alike
        return np.where((recent == NOBODY) | (before == NOBODY) | (recent == before), one, np.uint32(SEVERAL))
