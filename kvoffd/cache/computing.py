"""Keys that a prompt lacks while another prompt, which came first, computes their blocks.

A router that sends prompts with one beginning to one engine would save these, or a wait; more memory would not.
Implemented in ``computing.c``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

from kvoffd.cache.namespace import ABSENT_REASONS, Group, MissReason
from kvoffd.system.native import KEYS, NUMBER, VOID_P, declare, native
from kvoffd.system.structures import COMPUTING

declare(
    computing_asked=(None, VOID_P, *KEYS, VOID_P, *(NUMBER,) * 5),
    computing_offered=(None, VOID_P, *KEYS),
)

MOST_S = 60
"""Time after which a key that a prompt lacked, and no engine has offered since, is not being computed any more."""
BITS, NEAR = 16, 8
"""2^BITS keys of 16 bytes are remembered; a new one replaces the oldest of NEAR neighbours."""
_REPLACED = sum(1 << reason for reason in ABSENT_REASONS | {MissReason.TIER_DOWN})
"""Set of the reasons that COMPUTING replaces, a bit for each."""


class _Fields(ctypes.Structure):
    """``struct computing`` of computing.c."""

    __slots__ = ()
    _fields_ = COMPUTING


class Computing:
    """Keys that prompts lack. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._native, self._clock = native(), clock
        self._lacked = np.zeros(((1 << BITS) + NEAR - 1, 2), np.uint64)
        seed = (ctypes.c_uint64 * 2).from_buffer_copy(os.urandom(16))
        self._fields = _Fields(at_lacked=self._lacked.ctypes.data, bits=BITS, seed=seed)
        self._at = ctypes.addressof(self._fields)

    def mark_computing(self, group: Group, keys: bytes, reasons: bytearray, prompt_hash: int) -> None:
        """Set the reasons of absent keys that another prompt is computing to COMPUTING, and record the others: this
        prompt computes them.

        ``prompt_hash``: 32 bits, the same at each lookup of the prompt.
        """
        at = (ctypes.c_uint8 * len(reasons)).from_buffer(reasons)
        which = group.number, keys, len(reasons), group.key_bytes
        when, changes = (int(self._clock()), MOST_S), (_REPLACED, MissReason.COMPUTING)
        self._native.computing_asked(self._at, *which, ctypes.addressof(at), prompt_hash, *when, *changes)

    def offered(self, group: Group, keys: bytes) -> None:
        """Record that an engine offers keys for storing: what is not there afterwards is so for another reason."""
        self._native.computing_offered(self._at, group.number, keys, len(keys) // group.key_bytes, group.key_bytes)
