"""What a copy loop in C and the Python around it say to each other while the loop runs without the interpreter's lock.

The loop goes on until all is copied, another owner's turn has come, somebody sets STOP, or some milliseconds are over
(LOOK_NS of ``pace.h``), so that deadlines are looked at.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

OTHERS_WAIT = 1
STOP = 2


class Slice(NamedTuple):
    """How much an owner may copy, or read for checksums, before another one that waits has its turn.

    A thread looks at this between the steps of its copier, so a turn ends with the step that reaches either figure.
    """

    nbytes: int
    pieces: int


class Pace(ctypes.Structure):
    """``struct pace`` of pace.h. ``look`` is written under the lane's lock only, its bits are OTHERS_WAIT and STOP."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("step_bytes", "step_pieces", "slice_bytes", "piece_cost")),
        ("copied", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("look", ctypes.c_uint32),
    )
    step_bytes: int
    step_pieces: int
    slice_bytes: int
    piece_cost: int
    copied: int
    used: int
    look: int

    @classmethod
    def of(cls, one_slice: Slice) -> Pace:
        """Return the pace of a copy that has not begun; its copier sets the steps."""
        return cls(slice_bytes=one_slice.nbytes, piece_cost=one_slice.nbytes // one_slice.pieces)
