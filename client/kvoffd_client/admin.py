"""The administrator's client: statistics, health, sessions, namespaces, clearing, the event tail."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvoffd_client.options import ClientOptions
from kvoffd_proto.events import EventBatch
from kvoffd_proto.messages import HealthReply, NamespacesReply, SessionsReply, StatsReply

DEFAULT_OPTIONS = ClientOptions()


class AdminClient:
    """Asks one daemon about itself. Connects at the first call; each call waits for its answer. Thread-safe.

    Args:
        directory: where the daemon's sockets are.
        options: ``request_timeout_s`` bounds every call, the connecting in it included.

    All calls raise:
        DaemonUnavailable: nothing listens there, or it refuses this user; the sentence names the directory.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.
    """

    def __init__(self, directory: str | os.PathLike[str], options: ClientOptions = DEFAULT_OPTIONS) -> None:
        raise NotImplementedError

    def stats(self) -> StatsReply:
        """All counters."""
        raise NotImplementedError

    def health(self) -> HealthReply:
        """Whether the daemon works: a round trip through the loop that serves engines."""
        raise NotImplementedError

    def sessions(self) -> SessionsReply:
        """Open sessions, oldest first."""
        raise NotImplementedError

    def namespaces(self) -> NamespacesReply:
        """Open namespaces, oldest first."""
        raise NotImplementedError

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Drop every block of one namespace, or of all; returns how many."""
        raise NotImplementedError

    def events(self, idle_timeout_s: float | None = None) -> Iterator[tuple[bytes, int, EventBatch]]:
        """Yield (topic, sequence, batch) of all KV events from now on, also past restarts of the daemon.

        Ends when close() was called, or after ``idle_timeout_s`` seconds without an event.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the session. Repeatable."""
        raise NotImplementedError

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
