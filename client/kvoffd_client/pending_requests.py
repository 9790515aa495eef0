"""Requests that wait for their replies. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable

from kvoffd_client.errors import KvoffdClientError, RequestTimeout
from kvoffd_proto.messages import AnyReply

NEVER = float("inf")

ReplyOrError = AnyReply | KvoffdClientError
"""A reply, which is never Error (that comes as RequestRefused), or the reason why there is none."""
OnReply = Callable[[ReplyOrError, float], None]
"""Called once, with the time of it."""


class PendingRequests:
    """The requests of one session, by their ids.

    Attributes:
        next_expiry: no deadline is earlier than this.
        owed_since: since when the daemon has owed a reply without sending any; NEVER when it owes none.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, OnReply]] = {}
        """By request: when it expires, and what to call then or with its reply."""
        self.next_expiry = NEVER
        self.owed_since = NEVER

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: int, deadline: float, on_reply: OnReply, now: float) -> None:
        self._entries[request_id] = deadline, on_reply
        self.next_expiry = min(self.next_expiry, deadline)
        self.owed_since = min(self.owed_since, now)

    def take(self, request_id: int, now: float) -> OnReply | None:
        """Remove a request whose reply came; returns its callback, or None where it has expired or had none."""
        entry = self._entries.pop(request_id, None)
        self.owed_since = now if self._entries else NEVER
        return None if entry is None else entry[1]

    def expire(self, now: float) -> None:
        late = [request_id for request_id, (deadline, _) in self._entries.items() if deadline <= now]
        for request_id in late:
            entry = self._entries.pop(request_id, None)
            if entry is not None:  # a callback may have ended the session, and all its requests with it
                entry[1](RequestTimeout("The kvoffd daemon did not answer in time; try again later."), now)
        self.next_expiry = min((deadline for deadline, _ in self._entries.values()), default=NEVER)

    def fail_all(self, reason: KvoffdClientError, now: float) -> None:
        entries, self._entries = self._entries, {}
        self.next_expiry = self.owed_since = NEVER
        for _, on_reply in entries.values():
            on_reply(reason, now)
