"""The session of who opens blocks: an administrator's, with leases, the pool's descriptor and attached memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, cast

from kvoffd_client.admin_client import AdminSession
from kvoffd_client.client_options import ClientOptions, Identity
from kvoffd_client.client_session import Link
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused
from kvoffd_proto.lifeline import Attach, Attached, AttachRefused, FromDaemon, PoolOpened, PoolRefused
from kvoffd_proto.messages import HeartbeatReply


class PoolLink(Link, Protocol):
    """A link over which descriptors come too."""

    def ask_for_pool(self) -> None:
        """Ask over the lifeline for a descriptor of the pool. Raises OSError."""

    def take_descriptor(self) -> int | None:
        """The descriptor that came over the lifeline first, if there is one."""


class Lease:
    """Pins of this session. ``alive`` turns False once the daemon has ended it, or the session has ended."""

    def __init__(self, lease_id: int) -> None:
        self.id = lease_id
        self.alive = True


OpenedPool = tuple[int, PoolOpened]
"""The descriptor, and where the pool lies in its file."""


class BlockSession(AdminSession):
    """Adds to ``AdminSession`` what goes over the lifeline, one exchange at a time, and renews leases.

    Attributes:
        leases: by id, those to renew.
    """

    def __init__(self, link: Link, identity: Identity, options: ClientOptions, dice: random.Random) -> None:
        super().__init__(link, identity, options, dice)
        self._pool_link = cast(PoolLink, link)
        self.leases: dict[int, Lease] = {}
        self._next_lease = 0
        self._next_segment = 0
        self._answered: Callable[[FromDaemon | KvoffdClientError], None] | None = None

    def new_lease(self) -> Lease:
        """A lease with an id that was not used before. Renewed once it is in ``leases``."""
        self._next_lease += 1
        return Lease((self.session_id << 32) + self._next_lease)

    def open_pool(self, outcome: list[OpenedPool | KvoffdClientError]) -> None:
        """Have the daemon send its pool's descriptor."""

        def answered(message: FromDaemon | KvoffdClientError) -> None:
            if isinstance(message, PoolOpened):
                fd = self._pool_link.take_descriptor()
                outcome.append(
                    DaemonUnavailable("The pool came without its descriptor.") if fd is None else (fd, message)
                )
            elif isinstance(message, PoolRefused):
                outcome.append(RequestRefused(message.code, message.message))
            else:
                outcome.append(_no_answer(message))

        self._exchange(self._pool_link.ask_for_pool, answered)

    def attach(self, fd: int, outcome: list[int | KvoffdClientError]) -> None:
        """Hand memory to the daemon; the outcome is the segment's id."""
        self._next_segment += 1
        segment = self._next_segment

        def answered(message: FromDaemon | KvoffdClientError) -> None:
            if isinstance(message, Attached) and message.segment_id == segment:
                outcome.append(segment)
            elif isinstance(message, AttachRefused):
                outcome.append(RequestRefused(message.code, message.message))
            else:
                outcome.append(_no_answer(message))

        self._exchange(lambda: self._link.attach(Attach(segment), fd), answered)

    def _exchange(self, send: Callable[[], None], answered: Callable[[FromDaemon | KvoffdClientError], None]) -> None:
        if not self.usable or self._answered is not None:
            answered(DaemonUnavailable(self.problem or "The lifeline is in use."))
            return
        try:
            send()
        except OSError as error:
            answered(DaemonUnavailable(f"The daemon's lifeline takes nothing ({error.strerror or error})."))
            return
        self._answered = answered

    def lifeline_message(self, message: FromDaemon, now: float) -> None:
        """An answer over the lifeline, or what any session may be told."""
        if isinstance(message, PoolOpened | PoolRefused | Attached | AttachRefused) and self._answered is not None:
            answered, self._answered = self._answered, None
            answered(message)
            self.on_change()
            return
        super().lifeline_message(message, now)

    def _renewals(self, now: float) -> list[int]:
        return list(self.leases)

    def _role_heartbeat(self, reply: HeartbeatReply, sent_at: float, now: float) -> None:
        for lease_id in reply.ended:
            if (lease := self.leases.pop(lease_id, None)) is not None:
                lease.alive = False

    def _role_lost(self, dead: bool, now: float) -> None:
        super()._role_lost(dead, now)
        for lease in self.leases.values():
            lease.alive = False
        self.leases.clear()
        self._next_segment = 0
        if self._answered is not None:
            answered, self._answered = self._answered, None
            answered(DaemonUnavailable(self.problem or "The connection was lost."))


def _no_answer(message: FromDaemon | KvoffdClientError) -> KvoffdClientError:
    if isinstance(message, KvoffdClientError):
        return message
    return DaemonUnavailable(f"The daemon answered with {type(message).__name__} on its lifeline.")
