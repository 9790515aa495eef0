"""Whose prompts have asked for a block: one giver of hints, or several.

A hint may release a block only if no prompt of another giver has asked for it, by a lookup that found it or that came
before it was stored. Whatever is not known counts as several. Implemented in ``askers.c``.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvoffd.cache.block_table import BlockIds, packed
from kvoffd.cache.namespace import Group
from kvoffd.system.native import CHAR_P, KEYS, NUMBER, VOID_P, declare, native
from kvoffd.system.structures import ASKERS

declare(
    askers_asked=(None, VOID_P, *KEYS, CHAR_P, CHAR_P, NUMBER, NUMBER),
    askers_stored=(None, VOID_P, *KEYS, CHAR_P),
)

SEVERAL = 2**32 - 1
LEAST_ENTRIES, MOST_ENTRIES = 1 << 12, 1 << 20
"""Entries of keys that were asked for and not there, 8 bytes each; 8 for each of the pool's slot numbers if between."""
FULL_DIVISOR = 8
"""Once 1/8 of the entries may be in use, those from before the last time are forgotten."""


class _Askers(ctypes.Structure):
    """``struct askers`` of askers.c."""

    __slots__ = ()
    _fields_ = ASKERS


class Askers:
    """Givers by block, and by key while a key has no block.

    Keys without a block are found by a hash, without a check: two that share an entry have several askers.
    """

    def __init__(self, slots: int) -> None:
        bits = max(LEAST_ENTRIES, min(MOST_ENTRIES, 8 * slots)).bit_length() - 1
        self._native = native()
        self._of = np.zeros(slots, np.uint32)
        """[slots] giver of the block's only prompts, or SEVERAL."""
        self._entries = np.zeros((2, 1 << bits), np.uint32)
        """[2, entries] giver of the only prompts that asked for the key: since the entries were last full, and before;
        they change places then."""
        recent, before = self._entries
        self._fields = _Askers(
            at_of=self._of.ctypes.data,
            at_recent=recent.ctypes.data,
            at_before=before.ctypes.data,
            bits=bits,
            used=0,
            most=(1 << bits) // FULL_DIVISOR,
        )
        self._at = ctypes.addressof(self._fields)

    def asked(self, group: Group, keys: bytes, states: bytes, ready: BlockIds, giver: int) -> None:
        """Record that a prompt asked for keys with these states; 0: its giver is unknown. ``ready``: the READY ones'
        blocks."""
        which = group.number, keys, len(states), group.key_bytes
        self._native.askers_asked(self._at, *which, states, packed(ready), len(ready), giver)

    def stored(self, group: Group, blocks: BlockIds, keys: bytes) -> None:
        """Record that keys for which prompts have asked got blocks."""
        self._native.askers_stored(self._at, group.number, keys, len(blocks), group.key_bytes, packed(blocks))

    def share(self, blocks: BlockIds) -> None:
        """Record that others than one giver's prompts use blocks."""
        self._of[blocks] = SEVERAL

    def are_alone(self, blocks: BlockIds, giver: int) -> npt.NDArray[np.bool_]:
        """Return whether only prompts of this giver, 0 if unknown, have asked for each block."""
        return self._of[blocks] == giver if giver else np.zeros(len(blocks), np.bool_)
