"""Measures how fast a source delivers blocks, to estimate the waits of lookups."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

SAMPLE_S = 0.05
"""Least length of a speed sample."""
MEMORY_S = 1.0
"""Seconds of reading after which a sample's weight falls to 1/e."""
MIN_BLOCKS = 8
"""Least number of concurrent reads throughout a valid sample: a lone read shows how long a block takes, not how many
come per second."""
ENOUGH_S, ENOUGH_BYTES = 0.25, 32 * 2**20
"""Length or size of samples from which on the speed counts as known."""
PROGRESS_S = 0.25
"""Time after the start of reading from which on its progress gives the speed while no samples do."""
SILENCE_S = 0.5
"""Time without a block after which the speed counts as at most one block in that time."""


class ReadSpeed:
    """The reading speed of one source.

    A *burst* lasts from the start of a read while none runs until none runs again.

    Attributes:
        measured: bytes per second in samples of the last seconds of reading; 0 if unknown.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.measured = 0.0
        self._sampled_bytes = self._sampled_seconds = 0.0
        """Sums over the samples, with less weight for older ones."""
        self._sample_at = 0.0
        """Time when the current sample began."""
        self._sample_bytes = 0
        """Bytes received since then."""
        self._burst_at: float | None = None
        """Time when the current burst began; None between bursts."""
        self._burst_bytes = 0
        """Bytes received since then."""
        self._block_bytes = 0
        """Size of the largest block whose read began in the burst."""
        self._came_at = 0.0
        """Time when a block was last received, or the burst began."""

    def begin(self, nbytes: int) -> None:
        """Record the start of a read of this size."""
        if self._burst_at is None:
            self._burst_at = self._came_at = self._sample_at = self._clock()
            self._burst_bytes = self._sample_bytes = self._block_bytes = 0
        self._block_bytes = max(self._block_bytes, nbytes)

    def end(self, came_bytes: int, left: int) -> None:
        """Record the end of a read, with 0 ``came_bytes`` if it failed, and the number of reads ``left``."""
        now = self._clock()
        self._burst_bytes += came_bytes
        self._sample_bytes += came_bytes
        if came_bytes:
            self._came_at = now
        if left < MIN_BLOCKS:
            self._sample_at, self._sample_bytes = now, 0
        elif (seconds := now - self._sample_at) >= SAMPLE_S:
            weight = exp(-seconds / MEMORY_S)
            self._sampled_bytes = weight * self._sampled_bytes + self._sample_bytes
            self._sampled_seconds = weight * self._sampled_seconds + seconds
            self._sample_at, self._sample_bytes = now, 0
            if self._sampled_seconds >= ENOUGH_S or self._sampled_bytes >= ENOUGH_BYTES:
                self.measured = self._sampled_bytes / self._sampled_seconds
        if not left:
            self._burst_at = None

    @property
    def current(self) -> float:
        """Current bytes per second: the measured speed, or else the progress so far; less in silence; 0 if unknown."""
        if self._burst_at is None:
            return self.measured
        now = self._clock()
        elapsed, silence, speed = now - self._burst_at, now - self._came_at, self.measured
        if not speed and elapsed >= PROGRESS_S:  # as if the largest block came now: no burst is without progress
            speed = (self._burst_bytes + self._block_bytes) / elapsed
        if silence >= SILENCE_S and speed:
            speed = min(speed, self._block_bytes / silence)
        return speed
