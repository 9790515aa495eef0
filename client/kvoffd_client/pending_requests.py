"""Requests that wait for their replies. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvoffd_client.errors import KvoffdClientError, RequestTimeout
from kvoffd_proto.messages import AnyReply

NEVER = float("inf")

Then = Callable[[AnyReply | KvoffdClientError, float], None]
"""Called once with the reply (never Error, which comes as RequestRefused) or the reason why there is none, and now."""


@dataclass(slots=True)
class Pending:
    """One of them."""

    deadline: float
    then: Then


class PendingRequests:
    """All of them, by request id.

    Attributes:
        next_expiry: no deadline is earlier than this.
        owed_since: since when the daemon has owed a reply without sending any; NEVER when it owes none.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Pending] = {}
        self.next_expiry = NEVER
        self.owed_since = NEVER

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: int, deadline: float, then: Then, now: float) -> None:
        """A request was sent."""
        self._entries[request_id] = Pending(deadline, then)
        self.next_expiry = min(self.next_expiry, deadline)
        self.owed_since = min(self.owed_since, now)

    def answered(self, request_id: int, now: float) -> Then | None:
        """A reply came: who waits for it."""
        entry = self._entries.pop(request_id, None)
        self.owed_since = now if self._entries else NEVER
        return None if entry is None else entry.then

    def expire(self, now: float) -> None:
        """Fail what is late."""
        late = [request_id for request_id, entry in self._entries.items() if entry.deadline <= now]
        for request_id in late:
            entry = self._entries.pop(request_id, None)
            if entry is not None:  # a callback may have ended the session, and all its requests with it
                entry.then(RequestTimeout("The kvoffd daemon did not answer in time; try again later."), now)
        self.next_expiry = min((entry.deadline for entry in self._entries.values()), default=NEVER)

    def fail_all(self, reason: KvoffdClientError, now: float) -> None:
        """Fail everything."""
        entries, self._entries = self._entries, {}
        self.next_expiry = self.owed_since = NEVER
        for entry in entries.values():
            entry.then(reason, now)
