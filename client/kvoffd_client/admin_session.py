"""The administrator's session: one request at a time, each waited for. Pure, like ``Session``."""

from __future__ import annotations

from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError
from kvoffd_client.session import Session
from kvoffd_proto.messages import AnyReply, AnyRequest


class AdminSession(Session):
    """Adds to ``Session`` requests whose outcome is waited for.

    Attributes:
        attempts_failed: attempts to connect, and connections, that ended.
    """

    attempts_failed = 0

    def ask(
        self, message: AnyRequest, outcome: list[AnyReply | KvoffdClientError], now: float, timeout_s: float
    ) -> None:
        """Send a request; its reply, or why there is none, is appended to ``outcome``."""
        if not self.usable:
            outcome.append(DaemonUnavailable(self.problem or "The client is not connected."))
            return

        def then(reply: AnyReply | KvoffdClientError, _: float) -> None:
            outcome.append(reply)
            self.on_change()

        self.request(message, then, now, timeout_s)

    def _role_lost(self, dead: bool, now: float) -> None:
        self.attempts_failed += 1
