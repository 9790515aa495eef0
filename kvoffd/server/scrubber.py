"""Compares slots with their checksums while nobody asks for them: an earlier daemon's first, then all on request.

Takes the checksums too that stores ended without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.tickets import Check
from kvoffd.server.jobs import apply_check
from kvoffd_proto import admin as a
from kvoffd_proto.units import format_duration, format_size

logger = logging.getLogger(__name__)

# A millisecond or so of reading, between which engines have the memory for themselves.
STEP_BYTES = 32 << 20
# Slots looked up at a time on the event loop: free ones cost nothing but that.
_STEP_SLOTS = 1024


class Scrubber:
    """Chooses the slots to read next and acts on their checksums, in the service's thread. Others read the bytes."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._slots = np.empty(0, np.uint32)
        """Slots that were in use when the pass over all began."""
        self._begin()

    def _begin(self) -> None:
        self._done = self._in_step = 0
        """Of the pass: slots that were looked at, and those of them that are being read."""
        self._checked_slots = self._checked_bytes = self._mismatches = 0
        self._started_at, self._seconds = self._clock(), 0.0

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` has something to read, or may have."""
        return self._cache.unverified_slots > 0 or self._done < len(self._slots)

    def start(self) -> None:
        """Begin a pass over all slots, unless one is running."""
        if self._done == len(self._slots):
            self._slots = np.flatnonzero(self._cache.slots.in_use).astype(np.uint32)
            self._begin()

    def next_step(self) -> list[Check]:
        """Slots to read now, about ``STEP_BYTES``; none where nothing was found. End it by ``finish_step``."""
        checks = _first(self._cache.checks(self._cache.next_unverified(_STEP_SLOTS)))
        while not checks and self._done < len(self._slots):
            some = self._slots[self._done : self._done + _STEP_SLOTS]
            checks = _first([check for check in self._cache.checks(some) if check.checksum])
            last = np.flatnonzero(some == checks[-1].slot)[0] + 1 if checks else len(some)
            self._done += int(last)
            self._in_step = len(checks)
            if not checks and self._done == len(self._slots):
                self._end()
        return checks

    def finish_step(self, checks: Sequence[Check], checksums: Sequence[int]) -> None:
        """Act on the checksums of a step's slots."""
        for check, found in zip(checks, checksums, strict=True):
            sound = apply_check(self._cache, check, found)
            if self._in_step and check.checksum:
                self._checked_slots += 1
                self._checked_bytes += check.length
                self._mismatches += not sound
        if self._in_step:
            self._in_step = 0
            if self._done == len(self._slots):
                self._end()

    def report(self, request_id: int) -> a.ScrubReply:
        """How far the running pass is, or how the last one ended; all 0 where there was none."""
        slots, done = len(self._slots), self._done - self._in_step
        running = done < slots
        seconds = max(0.0, self._clock() - self._started_at) if running else self._seconds
        counts = self._checked_slots, self._checked_bytes, self._mismatches
        return a.ScrubReply(request_id, running, slots, done, *counts, seconds)

    def _end(self) -> None:
        self._seconds = max(0.0, self._clock() - self._started_at)
        logger.info(
            "Scrubbed: %d slots (%s) were compared with their checksums in %s, %d were wrong.",
            self._checked_slots,
            format_size(self._checked_bytes),
            format_duration(self._seconds),
            self._mismatches,
        )


def _first(checks: Sequence[Check]) -> list[Check]:
    """The first of them, until they have ``STEP_BYTES``."""
    step: list[Check] = []
    nbytes = 0
    for check in checks:
        if nbytes >= STEP_BYTES:
            break
        step.append(check)
        nbytes += check.length
    return step
