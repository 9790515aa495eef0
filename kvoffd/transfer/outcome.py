"""How a transfer ended."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """How a transfer ended."""

    DONE = "done"
    """Every byte is in place."""
    CANCELLED = "cancelled"
    """It never started; nothing was written."""
    DEADLINE = "deadline"
    """Its time was over; the destination may be half written."""
    FAILED = "failed"
    """The copy failed or was abandoned; the destination may be half written."""
    CORRUPT = "corrupt"
    """A slot to load from does not hold what was stored in it; nothing was written."""
