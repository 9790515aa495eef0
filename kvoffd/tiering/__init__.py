"""Between the pool and the tiers below it: what is written to a tier and when, what is brought up, how much at once.

Here are the settings; ``tiering`` has lookups and what is brought up, ``writer`` what is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WriteMode(StrEnum):
    """What is written to a tier."""

    ALWAYS = "always"
    """Every block, as soon as it is ready; again when it is used, if it was lost there."""
    REUSE = "reuse"
    """A block that was found by a lookup, so that it has been of use twice; and while the tier is idle, what is next to
    be evicted."""
    EVICT = "evict"
    """What is next to be evicted."""
    NEVER = "never"
    """Nothing. The tier is only read."""


@dataclass(frozen=True)
class TieringSettings:
    """How much may happen at once.

    Attributes:
        mode: what is written.
        per_day_bytes: bound on writing; 0 for none.
        deadline_s: time for a tier to read a block once it is the block's turn; later it is absent.
        trickle_bytes: what is written from one tick to the next while engines copy, which goes first.
    """

    mode: WriteMode = WriteMode.REUSE
    per_day_bytes: int = 0
    deadline_s: float = 5.0
    trickle_bytes: int = 8 * 2**20
