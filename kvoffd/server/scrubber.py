"""Compares slots with their checksums in the background: an earlier daemon's first, then all on request.

It also computes checksums that stores left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.tickets import Check
from kvoffd.server.handlers import answers
from kvoffd.server.jobs import apply_check
from kvoffd.server.session import Session
from kvoffd_proto import admin as a
from kvoffd_proto.units import format_duration, format_size

logger = logging.getLogger(__name__)

# Reading this takes about a millisecond; between steps engines have the memory bandwidth for themselves.
STEP_BYTES = 32 << 20
# Slots examined at a time on the event loop.
_STEP_SLOTS = 1024


class Scrubber:
    """Chooses the next slots and acts on their checksums, in the service's thread. The caller reads the bytes."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._slots = np.empty(0, np.uint32)
        """Slots of the current pass: those in use when it began."""
        self._begin()

    def _begin(self) -> None:
        self._examined = 0
        """Slots of the pass that are done, as those freed since it began, or are in the step that is being read."""
        self._being_read = 0
        """Number of slots in that step; 0 if none is being read, or if its slots are unverified ones, of no pass."""
        self._checked_slots = self._checked_bytes = self._mismatches = 0
        self._started_at, self._seconds = self._clock(), 0.0

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` may have slots to read."""
        return self._cache.blocks.unverified_slots > 0 or self._examined < len(self._slots)

    @answers(a.Scrub)
    def scrub(self, session: Session, message: a.Scrub) -> a.ScrubReply:
        """Start a scrub of all ready blocks, or report its progress."""
        if message.start:
            self.start()
        return self.report(message.request_id)

    def start(self) -> None:
        """Start a pass over all slots unless one is running."""
        if self._examined == len(self._slots):
            self._slots = np.flatnonzero(self._cache.slots.in_use).astype(np.uint32)
            self._begin()

    def next_step(self) -> list[Check]:
        """Return slots to read, about ``STEP_BYTES``, for ``finish_step``; it may be empty.

        Slots that were not verified yet come before those of the pass.
        """
        self._being_read = 0
        integrity = self._cache.integrity
        return _first(integrity.checks(integrity.next_unverified(_STEP_SLOTS))) or self._next_of_pass()

    def _next_of_pass(self) -> list[Check]:
        """Return the next slots of the pass to read. If none is left, end it."""
        while self._examined < len(self._slots):
            slots = self._slots[self._examined : self._examined + _STEP_SLOTS]
            if checks := _first([check for check in self._cache.integrity.checks(slots) if check.checksum]):
                self._examined += int(np.flatnonzero(slots == checks[-1].slot)[0]) + 1
                self._being_read = len(checks)
                return checks
            self._examined += len(slots)
            if self._examined == len(self._slots):
                self._end()
        return []

    def finish_step(self, checks: Sequence[Check], checksums: Sequence[int]) -> None:
        """Act on the checksums of a step's slots."""
        for check, found in zip(checks, checksums, strict=True):
            sound = apply_check(self._cache, check, found)
            if self._being_read:
                self._checked_slots += 1
                self._checked_bytes += check.length
                self._mismatches += not sound
        if self._being_read:
            self._being_read = 0
            if self._examined == len(self._slots):
                self._end()

    def report(self, request_id: int) -> a.ScrubReply:
        """Return the progress of the running pass, or the result of the last one; all 0 without any."""
        slots, done = len(self._slots), self._examined - self._being_read
        running = done < slots
        seconds = max(0.0, self._clock() - self._started_at) if running else self._seconds
        counts = self._checked_slots, self._checked_bytes, self._mismatches
        return a.ScrubReply(request_id, running, slots, done, *counts, seconds)

    def _end(self) -> None:
        self._seconds = max(0.0, self._clock() - self._started_at)
        logger.info(
            "Scrubbed %d slots (%s) in %s; %d did not match their checksums.",
            self._checked_slots,
            format_size(self._checked_bytes),
            format_duration(self._seconds),
            self._mismatches,
        )


def _first(checks: Sequence[Check]) -> list[Check]:
    """Return the first checks, up to about ``STEP_BYTES``."""
    step: list[Check] = []
    nbytes = 0
    for check in checks:
        if nbytes >= STEP_BYTES:
            break
        step.append(check)
        nbytes += check.length
    return step
