"""What a stretch of work costs the daemon."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from kvoffd_client.admin_client import AdminClient
from kvoffd_client.bench.report import Cost


class CpuMeter:
    """CPU time of the daemon in ``directory``, from its own counters. Raises DaemonUnavailable."""

    def __init__(self, directory: Path) -> None:
        self._admin = AdminClient(directory)
        self._began = (0.0, 0.0)
        self._used = 0.0
        self._checksums = 0.0

    def start(self) -> None:
        """A stretch begins."""
        self._began = self._read()

    def stop(self) -> None:
        """The stretch has ended; it adds to those before."""
        used, checksums = self._read()
        self._used += used - self._began[0]
        self._checksums += checksums - self._began[1]

    def cost(self, count: float, per: str, *, checksums: bool = False) -> Cost:
        """The stretches since the last call, divided by ``count``; with what checksums took of it if asked for."""
        cost = Cost(self._used / count, per, self._checksums / count if checksums else None)
        self._used = self._checksums = 0.0
        return cost

    def _read(self) -> tuple[float, float]:
        """CPU seconds of all that the daemon did, and of its checksums."""
        stats = self._admin.stats()
        return stats.cpu_seconds, stats.store.checksum_seconds + stats.load.checksum_seconds

    def __enter__(self) -> CpuMeter:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._admin.close()
