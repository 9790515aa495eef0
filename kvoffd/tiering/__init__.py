"""Movement of blocks between the pool and the tiers below it: what is written when, what is promoted, and how much.

The settings are here. ``writer`` writes blocks down, ``tier_lookups`` finds them there, ``promotions`` has what is to
come up, and ``promotion_source`` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WriteMode(StrEnum):
    """Selection of blocks that are written to a tier."""

    AUTO = "auto"
    """Every block while the tier has space; once it is full, blocks that are likely to be reused, within the budget."""
    ALWAYS = "always"
    """Every block, even if it replaces others."""
    NEVER = "never"
    """No block. The tier is only read."""


@dataclass(frozen=True)
class TieringSettings:
    """Limits of the work on tiers.

    Attributes:
        mode: which blocks are written.
        per_day_bytes: bytes that may be written per day; 0: no limit.
        deadline_s: time for a tier to read a block from the beginning of the block's turn; then it counts as absent.
        trickle_bytes: bytes that may be written per tick while engines, which have priority, copy or wait.
    """

    mode: WriteMode = WriteMode.AUTO
    per_day_bytes: int = 0
    deadline_s: float = 5.0
    trickle_bytes: int = 8 * 2**20
