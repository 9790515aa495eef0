"""How a disk tier uses its device."""

from __future__ import annotations

from typing import NamedTuple


class DiskOptions(NamedTuple):
    """How a disk is used."""

    reads_in_flight: int = 16
    """Calls at a time; also the number of threads."""
    writes_in_flight: int = 2
    """Of those at most so many are writes: they slow reads down."""
    queued_reads: int = 65536
    """More are not taken."""
    queued_writes: int = 64
    """More are not taken, those that run included."""
    merge_bytes: int = 2 << 20
    """Neighbours are read or written in one call of up to so many bytes."""
    write_patience_s: float = 0.5
    """Under reads without end, a write waits so long for its turn."""
    hang_timeout_s: float = 10.0
    """A call that does not come back after so long hangs."""
    region_bytes: int | None = None
    """For a new file; chosen by its size when None."""
