"""Between the pool and the tiers below it: what is written to a tier and when, what is brought up, how much at once.

Here are the settings; ``tiering`` has lookups and what is brought up, ``writer`` what is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class WriteMode(StrEnum):
    """What is written to a tier."""

    AUTO = "auto"
    """Every block while the tier has space; once it is full, what is likely to come back, within the budget."""
    ALWAYS = "always"
    """Every block, also in place of others."""
    NEVER = "never"
    """Nothing. The tier is only read."""


@dataclass(frozen=True)
class TieringSettings:
    """How much may happen at once.

    Attributes:
        mode: what is written.
        per_day_bytes: bound on writing; 0 for none.
        deadline_s: time for a tier to read a block once it is the block's turn; later it is absent.
        trickle_bytes: what is written from one tick to the next while engines copy or wait for blocks, which go first.
    """

    mode: WriteMode = WriteMode.AUTO
    per_day_bytes: int = 0
    deadline_s: float = 5.0
    trickle_bytes: int = 8 * 2**20
