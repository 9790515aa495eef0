"""The scheduler's client: lookups, leases, KV events."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvoffd_client.namespace import NamespaceSpec
from kvoffd_client.options import ClientOptions
from kvoffd_client.tickets import LookupTicket
from kvoffd_proto.events import KvEvent
from kvoffd_proto.messages import GroupKeys

DEFAULT_OPTIONS = ClientOptions()


class SchedulerClient:
    """Asks one daemon which blocks of one namespace are ready. No call blocks unless it says wait. Thread-safe.

    It connects in the background, and again whenever the daemon goes; until then every lookup is a miss.

    Args:
        directory: where the daemon's sockets are.
        namespace: opened (or joined) at every connection.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        subscribe_events: collect the namespace's KV events for take_events().
        options: timeouts and bounds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        namespace: NamespaceSpec,
        *,
        name: str = "scheduler",
        software: str = "",
        subscribe_events: bool = False,
        options: ClientOptions = DEFAULT_OPTIONS,
    ) -> None:
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """The namespace is open and the daemon answers."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The daemon's life this client is (or was last) connected to; 0 before the first."""
        raise NotImplementedError

    @property
    def credit_bytes(self) -> int:
        """Bytes of stores the daemon lets a session have outstanding; 0 when not connected."""
        raise NotImplementedError

    @property
    def problem(self) -> str | None:
        """A sentence that says why the client is not connected; None while it is."""
        raise NotImplementedError

    @property
    def events_lost(self) -> int:
        """KV event messages that could not be had any more, and events dropped since nobody took them."""
        raise NotImplementedError

    def lookup(self, groups: Sequence[GroupKeys]) -> LookupTicket:
        """Ask which keys are ready and pin those under a new lease. When not connected the ticket has failed already.

        Raises:
            ValueError: the keys of a group are not a whole number of the namespace's key_bytes.
        """
        raise NotImplementedError

    def release(self, lease_id: int) -> None:
        """End a lease. Harmless when it has ended, or its lookup is not answered yet."""
        raise NotImplementedError

    def invalidate(self, groups: Sequence[GroupKeys]) -> None:
        """Have the daemon forget blocks that proved unusable. Dropped when not connected."""
        raise NotImplementedError

    def reset(self, timeout_s: float = 2.0) -> bool:
        """Drop every block of the namespace and wait until that is done; False when the daemon did not confirm it."""
        raise NotImplementedError

    def take_events(self) -> list[KvEvent]:
        """KV events of the namespace since the last call, in order, from the start of the daemon's life.

        When the daemon was restarted, ``AllBlocksCleared`` comes first, since the new one's index began empty.
        """
        raise NotImplementedError

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until connected; False when it is not after ``timeout_s`` seconds."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unanswered tickets fail. Repeatable."""
        raise NotImplementedError

    def __enter__(self) -> SchedulerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
