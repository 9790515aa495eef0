"""Compares slots with their checksums in the background: an earlier daemon's first, then all on request.

It also computes checksums that stores left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

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
# Slots that one step looks at: the loop does nothing else while it does.
_STEP_SLOTS = 1024


class Scrubber:
    """Chooses the next slots and acts on their checksums, in the service's thread. The caller reads the bytes."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._begin_pass(np.empty(0, np.uint32))

    def _begin_pass(self, slots: npt.NDArray[np.uint32]) -> None:
        self._slots = slots
        """Slots of the current or last pass: those in use when it began."""
        self._done = 0
        """Number of them that were compared, or were freed since."""
        self._step_end: int | None = None
        """``_done`` after the step that is being read; None if none is, or if it is a step of unverified slots, which
        are of no pass."""
        self._checked_slots = self._checked_bytes = self._mismatches = 0
        self._started_at, self._seconds = self._clock(), 0.0

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` may have slots to read. A step that was not finished is read again."""
        return self._cache.blocks.unverified_slots > 0 or self._is_running

    @property
    def _is_running(self) -> bool:
        """Whether a pass is running; its last step too is part of it."""
        return self._done < len(self._slots)

    @answers(a.Scrub)
    def scrub(self, session: Session, message: a.Scrub) -> a.ScrubReply:
        """Start a scrub of all ready blocks, or report its progress."""
        if message.start:
            self.start()
        return self.report(message.request_id)

    def start(self) -> None:
        """Start a pass over all slots unless one is running."""
        if not self._is_running:
            self._begin_pass(np.flatnonzero(self._cache.slots.in_use).astype(np.uint32))

    def next_step(self) -> list[Check]:
        """Return slots to read, about ``STEP_BYTES``, for ``finish_step``; it may be empty.

        Slots that were not verified yet come before those of the pass.
        """
        self._step_end = None
        integrity = self._cache.integrity
        return _first(integrity.checks(integrity.next_unverified(_STEP_SLOTS))) or self._next_of_pass()

    def _next_of_pass(self) -> list[Check]:
        """Return those of the next slots of the pass that are to be read. If none is, these slots are done."""
        if not self._is_running:
            return []
        slots = self._slots[self._done : self._done + _STEP_SLOTS]
        checks = _first([check for check in self._cache.integrity.checks(slots) if check.checksum])
        if checks:
            self._step_end = self._done + int(np.flatnonzero(slots == checks[-1].slot)[0]) + 1
        else:
            self._advance(self._done + len(slots))
        return checks

    def finish_step(self, checks: Sequence[Check], checksums: Sequence[int]) -> None:
        """Act on the checksums of a step's slots."""
        for check, found in zip(checks, checksums, strict=True):
            sound = apply_check(self._cache, check, found)
            if self._step_end is not None:
                self._checked_slots += 1
                self._checked_bytes += check.length
                self._mismatches += not sound
        if self._step_end is not None:
            self._advance(self._step_end)
            self._step_end = None

    def _advance(self, done: int) -> None:
        """Set how many slots of the pass are done. With the last one the pass ends."""
        self._done = done
        if not self._is_running:
            self._end_pass()

    def report(self, request_id: int) -> a.ScrubReply:
        """Return the progress of the running pass, or the result of the last one; all 0 without any."""
        seconds = max(0.0, self._clock() - self._started_at) if self._is_running else self._seconds
        counts = self._checked_slots, self._checked_bytes, self._mismatches
        return a.ScrubReply(request_id, self._is_running, len(self._slots), self._done, *counts, seconds)

    def _end_pass(self) -> None:
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
