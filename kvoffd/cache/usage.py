"""What the pool's bytes are used for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Pool bytes by use. free + writing + ready + leaving + inherited + quarantined = pool."""

    free_bytes: int
    writing_bytes: int
    ready_bytes: int
    leaving_bytes: int
    inherited_bytes: int
    """Of blocks of an earlier daemon that are still to be taken over."""
    pinned_bytes: int
    """Of the ready and leaving bytes, those that a lease, an operator or a running copy needs."""
    quarantined_bytes: int = 0
    """In slots that lost what was stored in them."""
