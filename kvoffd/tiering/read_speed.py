"""How fast blocks come up from one source, and so how long those take that lookups wait for."""

from __future__ import annotations

from collections.abc import Callable
from math import exp

SAMPLE_S = 0.05
"""Length of a sample of the speed, at least."""
MEMORY_S = 1.0
"""A sample that is this much reading old weighs a third of a new one."""
FEWEST_BLOCKS = 8
"""A sample counts only if at least this many blocks were being read all the time: what comes alone says how long one
block takes, not how many come in a second."""
ENOUGH_S, ENOUGH_BYTES = 0.25, 32 * 2**20
"""The speed is known once samples of this length, or of this size, were taken."""
PROGRESS_S = 0.25
"""Until then, what came since reading began tells the speed, after this long."""
SILENCE_S = 0.5
"""If nothing has come for this long the speed counts as one block in that time."""


class ReadSpeed:
    """The speed of reading from one source, from what it has read.

    Attributes:
        measured: bytes a second, by samples of the last seconds of reading; 0 while it is not known.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.measured = 0.0
        self._bytes = self._seconds = 0.0
        """Sums over the samples, older ones with less weight."""
        self._reading_since: float | None = None
        self._since_began = 0
        """Bytes that came since then."""
        self._block_bytes = 0
        """Size of the largest block that is or was read since then."""
        self._came_at = 0.0
        """When a block came last, or reading began."""
        self._sample_at = 0.0
        """When the sample began."""
        self._sample_bytes = 0

    def begin(self, nbytes: int) -> None:
        """Note that reading a block of this size begins."""
        if self._reading_since is None:
            self._reading_since = self._came_at = self._sample_at = self._clock()
            self._since_began = self._sample_bytes = self._block_bytes = 0
        self._block_bytes = max(self._block_bytes, nbytes)

    def end(self, came_bytes: int, left: int) -> None:
        """Note that reading a block has ended, ``came_bytes`` is 0 if it failed, and that ``left`` others are read."""
        now = self._clock()
        self._since_began += came_bytes
        self._sample_bytes += came_bytes
        if came_bytes:
            self._came_at = now
        if left < FEWEST_BLOCKS:
            self._sample_at, self._sample_bytes = now, 0
        elif (seconds := now - self._sample_at) >= SAMPLE_S:
            kept = exp(-seconds / MEMORY_S)
            self._bytes = kept * self._bytes + self._sample_bytes
            self._seconds = kept * self._seconds + seconds
            self._sample_at, self._sample_bytes = now, 0
            if self._seconds >= ENOUGH_S or self._bytes >= ENOUGH_BYTES:
                self.measured = self._bytes / self._seconds
        if not left:
            self._reading_since = None

    @property
    def current(self) -> float:
        """Bytes a second as of now: the measured speed, or progress where nothing was measured, and less than both if
        nothing comes. 0 while neither is known."""
        if self._reading_since is None:
            return self.measured
        now = self._clock()
        elapsed, silence, speed = now - self._reading_since, now - self._came_at, self.measured
        if not speed and elapsed >= PROGRESS_S:
            speed = (self._since_began + self._block_bytes) / elapsed
        if silence >= SILENCE_S and speed:
            speed = min(speed, self._block_bytes / silence)
        return speed
