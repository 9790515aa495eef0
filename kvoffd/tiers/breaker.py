"""The circuit breaker of a store."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeAlias

Work: TypeAlias = Literal["ask", "read", "write"]
"""Kinds of work whose failures are counted each by itself."""
MAX_FAILURES = 3
"""Consecutive failures or slow answers of one kind of work that open the breaker."""
PAUSE_S = 1.5
"""Mean pause before a probe; it varies by a quarter. A server that returns is used within 5 s, including the probe."""


class Breaker:
    """Circuit breaker for a failing store. While open, it blocks all but a probe every second or two. Thread-safe.

    A server may do one kind of work and fail at another, and still answer probes. So failures are counted by kind, and
    only a success of that kind resets them: after a probe, one more failure of the kind that opened the breaker opens
    it again. A server that only fails to read or write is not ``silent``: it must still hear of a clear of all nodes.
    """

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failures: Counter[Work] = Counter()
        """Consecutive failures of each kind."""
        self.probe_at = 0.0
        """Time of the next probe while it is open."""
        self.open = True
        """Open at the start too: the first probe is due at once."""
        self.silent = True
        """Open because questions were not answered: none is asked."""
        self.opened = 0
        """Number of times that it opened since the store was first reached."""

    def succeeded(self, work: Work) -> None:
        with self._lock:
            self._failures.pop(work, None)

    def failed(self, work: Work, *, at_once: bool = False) -> bool:
        """Record a failure; return whether it has opened the breaker. ``at_once``: a single one does, as a refused
        connection or a wrong password."""
        with self._lock:
            self._failures[work] += 1
            opens = at_once or self._failures[work] >= MAX_FAILURES
            self.silent = self.silent or (opens and work == "ask")
            if not opens or self.open:
                return False
            self.open = True
            self.opened += 1
            self._pause()
            return True

    def reset(self) -> None:
        """Close it for another store."""
        with self._lock:
            self._failures.clear()
            self.open, self.silent, self.opened = False, False, 0

    def probed(self, answers: bool) -> None:
        """Record the result of a probe while the breaker was open."""
        with self._lock:
            self.open = self.silent = not answers
            if not answers:
                self._pause()

    def _pause(self) -> None:
        self.probe_at = self._clock() + PAUSE_S * (0.75 + 0.5 * self._jitter())
