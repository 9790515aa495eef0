"""Stops asking a store that fails, and finds out when it is back."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

MOST_FAILURES = 3
"""Failures or slow answers of one kind of work, one after another, that open the breaker."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 3.0
"""Pause before the first probe and the longest between two, each up to a quarter shorter or longer. A server
that is back is used within 5 s, with what a probe may take."""


class Breaker:
    """Open, it lets nobody through but a probe every few seconds. For any thread.

    Work is to ask, read or write: a server may do one and not the other, and answers a probe all the same. So failures
    are counted apart, and only what succeeds forgets its own: after a probe, one more of what opened it opens it again.
    """

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._pause_s = 0.0
        self._probe_at = 0.0
        self.open = True
        """Also at the start: the first probe is due at once."""
        self.opened = 0
        """Times that it was opened since the store was reached first."""

    def succeeded(self, work: str) -> None:
        with self._lock:
            self._failures.pop(work, None)
            if not self._failures:
                self._pause_s = 0.0

    def failed(self, work: str, *, at_once: bool = False) -> None:
        """Note a failure; ``at_once`` opens it, as where nobody listens or the password is wrong."""
        with self._lock:
            self._failures[work] += 1
            if not self.open and (at_once or self._failures[work] >= MOST_FAILURES):
                self.open = True
                self.opened += 1
                self._pause()

    def probe_succeeded(self) -> None:
        self.open = False

    def probe_failed(self) -> None:
        with self._lock:
            self._pause()

    def _pause(self) -> None:
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) or FIRST_PAUSE_S
        self._probe_at = self._clock() + self._pause_s * (0.75 + 0.5 * self._jitter())

    @property
    def probe_in_s(self) -> float:
        """Seconds until a probe is due; 0 for now. Of an open breaker."""
        return max(0.0, self._probe_at - self._clock())
