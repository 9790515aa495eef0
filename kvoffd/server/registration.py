"""A worker's KV memory as the daemon has mapped it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvoffd.cache.namespace import Namespace
from kvoffd.transfer.layout import GroupLayout
from kvoffd.transfer.segments import MappedSegment


@dataclass(eq=False)
class Registration:
    """Mapped segments and the layouts over them. Unmapped only when no job touches them any more."""

    id: bytes
    namespace: Namespace
    rank: int
    segments: list[MappedSegment]
    layouts: list[GroupLayout]
    jobs: int = 0
    """Jobs that hold addresses inside the segments."""
    closing: bool = False
    _on_closed: list[Callable[[], None]] = field(default_factory=list)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of engine memory that the daemon can reach."""
        return sum(segment.size_bytes for segment in self.segments)

    def close_when_idle(self, on_closed: Callable[[], None]) -> None:
        """Unmap once the last job has ended, then call ``on_closed``; at once when there is none."""
        self.closing = True
        self._on_closed.append(on_closed)
        self._close_if_idle()

    def job_started(self) -> None:
        """A job took addresses inside the segments."""
        assert not self.closing, "a closing registration takes no jobs"
        self.jobs += 1

    def job_ended(self) -> None:
        """A job will not touch the segments any more."""
        assert self.jobs > 0
        self.jobs -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.closing or self.jobs:
            return
        for segment in self.segments:
            segment.close()
        self.segments = []
        callbacks, self._on_closed = self._on_closed, []
        for on_closed in callbacks:
            on_closed()
