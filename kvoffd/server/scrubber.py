"""Compares slots with their checksums while nobody asks for them: an earlier daemon's first, then all on request.

Takes the checksums too that stores ended without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvoffd.cache.cache import BlockCache
from kvoffd.cache.integrity import ChecksumCheck
from kvoffd.server.jobs import wrong_bytes
from kvoffd_proto import admin as a
from kvoffd_proto.units import format_duration, format_size

logger = logging.getLogger(__name__)

# A millisecond or so of reading, between which engines have the memory for themselves.
STEP_BYTES = 32 << 20
# Slots looked up at a time on the event loop: freed ones cost nothing but that.
_STEP_SLOTS = 1024


@dataclass
class _Run:
    """One pass over the slots that were in use when it began."""

    started_at: float
    offsets: Sequence[int]
    done: int = 0
    checked_slots: int = 0
    checked_bytes: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    step: set[int] = field(default_factory=set)
    """Offsets of the slots in the running step."""

    @property
    def running(self) -> bool:
        return self.done < len(self.offsets)


class Scrubber:
    """Chooses the slots to read next and acts on their checksums, in the service's thread. Others read the bytes."""

    def __init__(self, cache: BlockCache, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._run: _Run | None = None

    @property
    def has_work(self) -> bool:
        """Whether ``next_step`` has something to read, or may have."""
        return self._cache.integrity.has_unverified or (self._run is not None and self._run.running)

    def start(self) -> None:
        """Begin a pass over all slots, unless one is running."""
        if self._run is None or not self._run.running:
            self._run = _Run(self._clock(), self._cache.integrity.slots())

    def next_step(self) -> list[ChecksumCheck]:
        """Slots to read now, about ``STEP_BYTES``; none where nothing was found. End it by ``finish_step``."""
        integrity = self._cache.integrity
        checks: list[ChecksumCheck] = integrity.unverified(STEP_BYTES)
        run = self._run
        while not checks and run is not None and run.running:
            nbytes = 0
            stop = min(len(run.offsets), run.done + _STEP_SLOTS)
            while run.done < stop and nbytes < STEP_BYTES:
                found = integrity.checks_at(run.offsets[run.done : run.done + 1])
                checks += found
                nbytes += sum(check.length for check in found)
                run.done += 1
            run.step = {check.offset for check in checks}
            if not checks and not run.running:
                self._end(run)
        return checks

    def finish_step(self, checks: Sequence[ChecksumCheck], checksums: Sequence[int]) -> None:
        """Act on the checksums of a step's slots."""
        run = self._run if self._run is not None and self._run.step else None
        for check, found in zip(checks, checksums, strict=True):
            sound = self._cache.integrity.apply(check, found)
            if not sound:
                logger.error("%s", wrong_bytes(check))
            if run is not None and check.checksum:
                run.checked_slots += 1
                run.checked_bytes += check.length
                run.mismatches += not sound
        if run is not None:
            run.step.clear()
            if not run.running:
                self._end(run)

    def report(self, request_id: int) -> a.ScrubReply:
        """How far the running pass is, or how the last one ended."""
        run = self._run
        if run is None:
            return a.ScrubReply(request_id, False, 0, 0, 0, 0, 0, 0.0)
        running = run.running or bool(run.step)
        seconds = max(0.0, self._clock() - run.started_at) if running else run.seconds
        return a.ScrubReply(
            request_id,
            running,
            len(run.offsets),
            run.done - len(run.step),
            run.checked_slots,
            run.checked_bytes,
            run.mismatches,
            seconds,
        )

    def _end(self, run: _Run) -> None:
        run.seconds = max(0.0, self._clock() - run.started_at)
        logger.info(
            "Scrubbed: %d slots (%s) were compared with their checksums in %s, %d were wrong.",
            run.checked_slots,
            format_size(run.checked_bytes),
            format_duration(run.seconds),
            run.mismatches,
        )
