"""What a session needs of the outside world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvoffd_proto.lifeline import Attach


class Link(Protocol):
    """What a session does to the outside. No call blocks."""

    def open(self) -> None:
        """Connect the lifeline. Raises OSError."""

    def open_sockets(self, topics: Sequence[bytes]) -> None:
        """Connect the jobs socket and the events socket, subscribed to ``topics``."""

    def attach(self, message: Attach, fd: int) -> None:
        """Send a descriptor over the lifeline. Raises OSError."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message to the jobs socket; False when its queue is full."""

    def close(self) -> None:
        """Close everything: to the daemon this is the client's death."""

    def close_draining(self, generation: int) -> None:
        """Close everything but our reading half of the lifeline; its EOF is told by ``drained(generation)``."""
