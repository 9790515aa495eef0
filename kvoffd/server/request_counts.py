"""Counts of requests, of errors, and of replies that could not be sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvoffd.observe.meters import HOUR_S, CounterWindows
from kvoffd_proto.errors import ErrorCode

_REQUESTS = "requests"
"""Name of a counter besides the names of error codes."""


class RequestCounts:
    """Counts since the daemon's start, and in the last hour.

    Attributes:
        errors: by code, in lower case.
        replies_dropped: by reason, ``gone`` or ``unread``.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = 0
        self.errors: Counter[str] = Counter()
        self.replies_dropped: Counter[str] = Counter()
        self._gained = CounterWindows(clock)
        """Increases of requests, and of errors by code."""

    def count_error(self, code: ErrorCode) -> None:
        self.errors[code.name.lower()] += 1

    def tick(self) -> None:
        self._gained.sample({_REQUESTS: self.requests, **self.errors})

    def in_last_hour(self) -> tuple[int, dict[str, int]]:
        """Return the last hour's requests, and its errors by code."""
        _, gained = self._gained.gained(HOUR_S, {_REQUESTS: self.requests, **self.errors})
        counts = {name: int(count) for name, count in gained.items() if count}
        return counts.pop(_REQUESTS, 0), counts
