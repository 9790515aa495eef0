"""What a stretch of work costs the daemon."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from kvoffd_client.admin import AdminClient
from kvoffd_client.bench.report import Cost


class CpuMeter:
    """CPU time of the daemon in ``directory``, from its own counters. Raises DaemonUnavailable."""

    def __init__(self, directory: Path) -> None:
        self._admin = AdminClient(directory)
        self._began = 0.0
        self._used = 0.0

    def start(self) -> None:
        """A stretch begins."""
        self._began = self._admin.stats().cpu_seconds

    def stop(self) -> None:
        """The stretch has ended; it adds to those before."""
        self._used += self._admin.stats().cpu_seconds - self._began

    def cost(self, count: float, per: str) -> Cost:
        """The stretches since the last call, divided by ``count``."""
        used, self._used = self._used, 0.0
        return Cost(used / count, per)

    def __enter__(self) -> CpuMeter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._admin.close()
