"""A table of what a store answered about keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import CHAR_P, NUMBER, VOID_P, declare, native

_OF_ANSWERS = VOID_P, NUMBER, CHAR_P, NUMBER, CHAR_P, NUMBER, NUMBER, VOID_P, VOID_P
declare(answers_find=(None, *_OF_ANSWERS), answers_note=(None, *_OF_ANSWERS))

UNKNOWN = 3
"""State of a key in addition to those of ``find``: nobody asked for it recently."""
MAX_ANSWERS = 262_144
"""Cached answers, of 16 bytes each."""
WINDOW = 16
"""See answers.c."""


class Answers:
    """Answers of a store by tag and key, each with a time. A new one replaces the oldest of ``WINDOW`` neighbours."""

    def __init__(self) -> None:
        self._native, self._places = native(), MAX_ANSWERS
        self._table = np.empty((self._places + WINDOW, 2), np.uint64)
        self._table.fill(0)  # touches the pages now, not in the first lookups
        self.clear()

    def clear(self) -> None:
        self._seed = os.urandom(16)  # what was noted is not found any more

    def find(self, tag: int, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Return the state of each key, UNKNOWN if none was noted, and the time noted with it."""
        states, at = np.full(len(keys), UNKNOWN, np.uint8), np.zeros(len(keys))
        self._call(self._native.answers_find, tag, keys, states, at)
        return states, at

    def note(self, tag: int, keys: Sequence[bytes], states: npt.ArrayLike, at: npt.ArrayLike) -> None:
        each = np.full(len(keys), states, np.uint8), np.full(len(keys), at, np.float64)
        self._call(self._native.answers_note, tag, keys, *each)

    def _call(self, call: Callable[..., None], tag: int, keys: Sequence[bytes], *columns: npt.NDArray[Any]) -> None:
        if keys:
            joined, size = b"".join(keys), len(keys[0])
            assert len(joined) == len(keys) * size
            whose = self._table.ctypes.data, self._places, self._seed, tag
            call(*whose, joined, len(keys), size, *(column.ctypes.data for column in columns))
