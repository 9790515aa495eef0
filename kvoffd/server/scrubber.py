"""Compares slots with their checksums in the background: an earlier daemon's first, then all on request.

It also computes checksums that stores left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvoffd.cache.cache import Cache
from kvoffd.cache.integrity import LOOKED_AT_ONCE, LOOKS
from kvoffd.cache.tickets import Check
from kvoffd.server.handlers import answers
from kvoffd.server.jobs import apply_check
from kvoffd.server.session import Session
from kvoffd_proto import admin as a
from kvoffd_proto.units import format_duration, format_size

logger = logging.getLogger(__name__)

# Reading this takes about a millisecond; between steps engines have the memory bandwidth for themselves.
STEP_BYTES = 32 << 20
# Slots in use that one step looks at: the loop does nothing else while it does.
_STEP_SLOTS = 1024


class _Reached(NamedTuple):
    """Progress of a pass."""

    slot: int
    """Slot number at which it continues; the pass's end once it has ended."""
    used_slots: int
    """Number of slots in use below that."""


class Scrubber:
    """Chooses the next slots and acts on their checksums, in the service's thread. The caller reads the bytes."""

    def __init__(self, cache: Cache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._begin_pass(0, 0)

    def _begin_pass(self, used_slots: int, used_end: int) -> None:
        self._used_slots, self._used_end = used_slots, used_end
        """Number of slots that were in use when the current or last pass began, and the slot number behind them."""
        self._reached = _Reached(0, 0)
        self._step_reaches: _Reached | None = None
        """Progress of the pass after the step that is being read; None if none is, or if it is a step of
        unverified slots, which are of no pass."""
        self._checked_slots = self._checked_bytes = self._mismatches = 0
        self._started_at, self._seconds = self._clock(), 0.0

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` may have slots to read. A step that was not finished is read again."""
        return self._cache.blocks.unverified_slots > 0 or self._is_running

    @property
    def _is_running(self) -> bool:
        """Whether a pass is running; its last step too is part of it."""
        return self._reached.slot < self._used_end

    @answers(a.Scrub)
    def scrub(self, session: Session, message: a.Scrub) -> a.ScrubReply:
        """Start a scrub of all ready blocks, or report its progress."""
        if message.start:
            self.start()
        return self.report(message.request_id)

    def start(self) -> None:
        """Start a pass over all slots unless one is running."""
        if not self._is_running:
            slots = self._cache.slots
            self._begin_pass(slots.used_slots, slots.used_end)

    def next_step(self) -> list[Check]:
        """Return slots to read, about ``STEP_BYTES``, for ``finish_step``; it may be empty.

        Slots that were not verified yet come before those of the pass.
        """
        self._step_reaches = None
        integrity = self._cache.integrity
        return _first(integrity.checks(integrity.next_unverified(_STEP_SLOTS))) or self._next_of_pass()

    def _next_of_pass(self) -> list[Check]:
        """Return those of the next slots of the pass that are to be read. If none is, these slots are done.

        Slot numbers are looked at in small parts, as by ``Integrity.next_unverified``: all would block the loop.
        """
        in_use = self._cache.slots.in_use
        for _ in range(LOOKS):
            if not self._is_running:
                break
            begin, used_before = self._reached
            end = min(begin + LOOKED_AT_ONCE, self._used_end)
            slots = np.flatnonzero(in_use[begin:end])[:_STEP_SLOTS].astype(np.uint32) + np.uint32(begin)
            if len(slots) == _STEP_SLOTS:  # those behind are looked at next time
                end = int(slots[-1]) + 1
            if checks := _first([check for check in self._cache.integrity.checks(slots) if check.checksum]):
                last = checks[-1].slot
                used = used_before + int(np.searchsorted(slots, last)) + 1
                is_all = last == slots[-1]  # then nothing is in use between it and ``end``
                self._step_reaches = _Reached(end if is_all else last + 1, used)
                return checks
            self._advance(_Reached(end, used_before + len(slots)))
            if slots.size:  # they took a step's time
                break
        return []

    def finish_step(self, checks: Sequence[Check], checksums: Sequence[int]) -> None:
        """Act on the checksums of a step's slots."""
        for check, found in zip(checks, checksums, strict=True):
            sound = apply_check(self._cache, check, found)
            if self._step_reaches is not None:
                self._checked_slots += 1
                self._checked_bytes += check.length
                self._mismatches += not sound
        if self._step_reaches is not None:
            self._advance(self._step_reaches)
            self._step_reaches = None

    def _advance(self, reached: _Reached) -> None:
        """Set how far the pass has come. With the last slot it ends."""
        self._reached = reached
        if not self._is_running:
            self._seconds = max(0.0, self._clock() - self._started_at)
            logger.info(
                "Scrubbed %d slots (%s) in %s; %d did not match their checksums.",
                self._checked_slots,
                format_size(self._checked_bytes),
                format_duration(self._seconds),
                self._mismatches,
            )

    def report(self, request_id: int) -> a.ScrubReply:
        """Return the progress of the running pass, or the result of the last one; all 0 without any."""
        seconds = max(0.0, self._clock() - self._started_at) if self._is_running else self._seconds
        counts = self._checked_slots, self._checked_bytes, self._mismatches
        # Others may have been freed or allocated since it began.
        done = min(self._reached.used_slots, self._used_slots) if self._is_running else self._used_slots
        return a.ScrubReply(request_id, self._is_running, self._used_slots, done, *counts, seconds)


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
