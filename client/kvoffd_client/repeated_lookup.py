"""Looks keys up until those on disks and in stores have come up, without losing the blocks between two lookups."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffd_client.scheduler_client import LookupFuture, SchedulerClient

PENDING_PAUSE_S = 0.002
"""Pause between two lookups of keys that are being promoted."""


class RepeatedLookup:
    """The lookups of one caller. The lease of one is released when the next has been answered, and the last by
    ``release``, however ``wait`` ended."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        self._lookups: list[LookupFuture] = []
        """Those whose leases are to be released: the last one and, until that is answered, the one before."""

    @property
    def last(self) -> LookupFuture | None:
        """The last lookup, unless its lease was released."""
        return self._lookups[-1] if self._lookups else None

    def wait(self, look_up: Callable[[bool], LookupFuture], timeout_s: float) -> LookupFuture | None:
        """Look up until no key is pending, or for the time given; return the last lookup, or None if it has no answer.

        Args:
            look_up: sends the lookup, given whether it is a repetition.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._lookups.append(found := look_up(bool(self._lookups)))
            if not found.wait(max(0.0, deadline - time.monotonic())) or found.failed:
                return None
            while len(self._lookups) > 1:
                self._release_first()
            if not found.pending or (left := deadline - time.monotonic()) <= 0:
                return found
            time.sleep(min(PENDING_PAUSE_S, left))

    def release(self) -> None:
        """Release all leases. Repeatable."""
        while self._lookups:
            self._release_first()

    def _release_first(self) -> None:
        self._scheduler.release(self._lookups[0].lease_id)
        del self._lookups[0]
