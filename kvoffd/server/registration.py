"""What a worker has registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffd.cache.namespace import Namespace
from kvoffd.server.engine_memory import EngineMemory
from kvoffd.transfer.plan import GroupLayout


@dataclass(eq=False)
class Registration:
    """Mapped memory and the layouts over it. Unmapped only when no job touches it any more."""

    id: bytes
    namespace: Namespace
    rank: int
    memory: EngineMemory
    layouts: list[GroupLayout]
    jobs: int = 0
    """Jobs that hold addresses inside the memory."""
    closing: bool = False
    _on_closed: Callable[[], None] | None = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of engine memory that the daemon can reach."""
        return sum(size for _, size in self.memory.spans)

    def close_when_idle(self, on_closed: Callable[[], None]) -> None:
        """Unmap once the last job has ended, then have ``on_closed`` called. Once."""
        assert not self.closing, "a registration is closed once"
        self.closing = True
        self._on_closed = on_closed
        self._close_if_idle()

    def job_started(self) -> None:
        """A job took addresses inside the memory."""
        assert not self.closing, "a closing registration takes no jobs"
        self.jobs += 1

    def job_ended(self) -> None:
        """A job will not touch the memory any more."""
        assert self.jobs > 0
        self.jobs -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.closing or self.jobs:
            return
        assert self._on_closed is not None
        self.memory.close(self._on_closed)
