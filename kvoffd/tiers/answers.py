"""A table of what a store answered about keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffd.system.native import CHAR_P, NUMBER, VOID_P, declare, native
from kvoffd.tiers.tier import ABSENT, ASKED, PRESENT

_OF_ANSWERS = VOID_P, NUMBER, CHAR_P, NUMBER, CHAR_P, NUMBER, NUMBER, VOID_P, VOID_P
declare(answers_find=(None, *_OF_ANSWERS), answers_note=(None, *_OF_ANSWERS))

YES_S, NO_S, HIDDEN_S = 2.0, 1.0, 30.0
"""Time for which an answer is cached, and for which a block that was removed, or is corrupt, is hidden."""
UNKNOWN = 3
"""State of a key in addition to those of ``find``: nobody asked for it recently."""
MAX_ANSWERS = 262_144
"""Cached answers, of 16 bytes each."""
WINDOW = 16
"""See answers.c."""


class Answers:
    """Answers of a store by tag and key, each with a time. A new one replaces the oldest of ``WINDOW`` neighbours.

    | state   | its time      | it is UNKNOWN again                                       |
    |---------|---------------|-----------------------------------------------------------|
    | PRESENT | when answered | YES_S later; believed, and read, ``believed_s``           |
    | ASKED   | when asked    | NO_S after ``ask_deadline_s``, from which on it is ABSENT |
    | ABSENT  | until when    | at that time                                              |

    An ABSENT for longer than NO_S stands whatever the store answers: the block is hidden.

    Args:
        ask_deadline_s: time in which the store must answer.
        believed_s: see ``Store``.
    """

    def __init__(self, clock: Callable[[], float], ask_deadline_s: float, believed_s: float) -> None:
        self._clock, self._ask_deadline_s, self._believed_s = clock, ask_deadline_s, believed_s
        self._native, self._places = native(), MAX_ANSWERS
        self._table = np.empty((self._places + WINDOW, 2), np.uint64)
        self._table.fill(0)  # touches the pages now, not in the first lookups
        self.clear()

    def clear(self) -> None:
        self._seed = os.urandom(16)  # what was noted is not found any more

    def states(self, tag: int, keys: Sequence[bytes]) -> bytearray:
        (states, at), now = self._find(tag, keys), self._clock()
        is_asked, ask_ends = states == ASKED, at + self._ask_deadline_s
        until = np.where(is_asked, ask_ends + NO_S, np.where(states == PRESENT, at + YES_S, at))
        # An ask without an answer in time was a miss; the next lookup may ask again a little later.
        states[is_asked & (ask_ends <= now)] = ABSENT
        states[until <= now] = UNKNOWN
        return bytearray(states)

    def are_believed(self, tag: int, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each block existed so recently that it is not offered again, and that a read is tried."""
        states, at = self._find(tag, keys)
        believed: list[bool] = ((states == PRESENT) & (self._clock() < at + self._believed_s)).tolist()
        return believed

    def record(self, tag: int, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Record a store's answers, but for blocks that are hidden."""
        now, there = self._clock(), np.frombuffer(bytes(found), np.bool_)
        before, until = self._find(tag, keys)
        is_hidden = (before == ABSENT) & (until > now + NO_S)
        states = np.where(there & ~is_hidden, PRESENT, ABSENT)
        self._note(tag, keys, states, np.where(is_hidden, until, np.where(there, now, now + NO_S)))

    def asked(self, tag: int, keys: Sequence[bytes]) -> None:
        """Record that the store is being asked for keys."""
        self._note(tag, keys, ASKED, self._clock())

    def hide(self, tag: int, keys: Sequence[bytes], seconds: float) -> None:
        """Have blocks count as absent for this time; if it is longer than NO_S, whatever the store answers."""
        self._note(tag, keys, ABSENT, self._clock() + seconds)

    def _find(self, tag: int, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Return the state of each key, UNKNOWN if none was noted, and the time noted with it."""
        states, at = np.full(len(keys), UNKNOWN, np.uint8), np.zeros(len(keys))
        self._call(self._native.answers_find, tag, keys, states, at)
        return states, at

    def _note(self, tag: int, keys: Sequence[bytes], states: npt.ArrayLike, at: npt.ArrayLike) -> None:
        each = np.full(len(keys), states, np.uint8), np.full(len(keys), at, np.float64)
        self._call(self._native.answers_note, tag, keys, *each)

    def _call(self, call: Callable[..., None], tag: int, keys: Sequence[bytes], *columns: npt.NDArray[Any]) -> None:
        if keys:
            joined, size = b"".join(keys), len(keys[0])
            assert len(joined) == len(keys) * size
            whose = self._table.ctypes.data, self._places, self._seed, tag
            call(*whose, joined, len(keys), size, *(column.ctypes.data for column in columns))
