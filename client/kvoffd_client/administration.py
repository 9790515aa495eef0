"""What an administrator asks of a daemon, however it is reached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, TypeVar

from kvoffd_proto.messages import (
    AnyReply,
    AnyRequest,
    AttachDisk,
    Clear,
    DetachDisk,
    Done,
    DrainDisk,
    Health,
    HealthReply,
    Namespaces,
    NamespacesReply,
    Scrub,
    ScrubReply,
    Sessions,
    SessionsReply,
    Stats,
    StatsReply,
)

R = TypeVar("R", bound=AnyReply)


class Administration(ABC):
    """Asks one daemon about itself. Connects at the first call; each call waits for its answer. Thread-safe.

    All calls raise:
        DaemonUnavailable: nothing listens there, or it refuses this user or key; the sentence names the place.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.
    """

    def stats(self) -> StatsReply:
        """All counters."""
        return self._ask(StatsReply, lambda request_id, token: Stats(request_id, token))

    def health(self) -> HealthReply:
        """Whether the daemon works: a round trip through the loop that serves engines."""
        return self._ask(HealthReply, lambda request_id, token: Health(request_id, token))

    def sessions(self) -> SessionsReply:
        """Open sessions, oldest first."""
        return self._ask(SessionsReply, lambda request_id, token: Sessions(request_id, token))

    def namespaces(self) -> NamespacesReply:
        """Open namespaces, oldest first."""
        return self._ask(NamespacesReply, lambda request_id, token: Namespaces(request_id, token))

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Drop every block of one namespace, or of all; returns how many."""
        return self._ask(Done, lambda request_id, token: Clear(request_id, token, fingerprint)).count

    def scrub(self, start: bool = True) -> ScrubReply:
        """Have every readable block compared with its checksum, in the daemon's background; returns how far that is.

        Args:
            start: begin, unless it is being done already. False only asks.
        """
        return self._ask(ScrubReply, lambda request_id, token: Scrub(request_id, token, start))

    def attach_disk(self, directory: str, size_bytes: int) -> None:
        """Begin to use a directory as a disk tier; ``stats().disks`` tells how that goes."""
        self._ask(Done, lambda request_id, token: AttachDisk(request_id, token, directory, size_bytes))

    def drain_disk(self, directory: str) -> None:
        """Have nothing more written to a directory."""
        self._ask(Done, lambda request_id, token: DrainDisk(request_id, token, directory))

    def detach_disk(self, directory: str) -> None:
        """Give a directory up: it is gone from ``stats().disks`` once its file is closed."""
        self._ask(Done, lambda request_id, token: DetachDisk(request_id, token, directory))

    @abstractmethod
    def close(self) -> None:
        """Go away. Repeatable."""

    @abstractmethod
    def _ask(self, kind: type[R], make: Callable[[int, bytes], AnyRequest]) -> R:
        """Send what ``make`` makes of a request id and a token; the reply, which is of ``kind``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
