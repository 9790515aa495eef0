"""The session of a ``BlockClient``: an administrator's, with leases, the pool's descriptor and attached memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from typing import TypeVar, cast

from kvoffd_client.admin_client import AdminSession
from kvoffd_client.client_options import ClientOptions, Identity
from kvoffd_client.client_session import Link, new_lease_id
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused
from kvoffd_client.socket_link import SocketLink
from kvoffd_proto.lifeline import Attach, Attached, AttachRefused, FromDaemon, OpenPool, PoolOpened, PoolRefused
from kvoffd_proto.messages import HeartbeatReply

T = TypeVar("T")

OpenedPool = tuple[FileIO, PoolOpened]
"""The pool's file, and where the pool lies in it. A file that nobody waits for any more is closed by its deletion."""


@dataclass(eq=False)
class Lease:
    """Pins of this session.

    Attributes:
        id: its name on the wire.
        alive: False once the daemon has ended it, or the session has ended.
        open_blocks: blocks that were opened under it and are not closed.
        ends_at: when it ends unless it is renewed. A process that was stopped meanwhile is told later.
    """

    id: int
    alive: bool = True
    open_blocks: int = 0
    ends_at: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether what is under it is pinned still."""
        return self.alive and time.monotonic() < self.ends_at


class BlockSession(AdminSession):
    """Adds to ``AdminSession`` what goes over the lifeline, one exchange at a time, and renews leases.

    Attributes:
        leases: by id, those to renew.
    """

    def __init__(self, link: Link, identity: Identity, options: ClientOptions, rng: random.Random) -> None:
        super().__init__(link, identity, options, rng)
        self._socket_link = cast(SocketLink, link)
        self.leases: dict[int, Lease] = {}
        self._renewed: list[Lease] = []
        """Those of the last heartbeat."""
        self._next_segment = 0
        self._on_answer: Callable[[FromDaemon | KvoffdClientError], None] | None = None

    def new_lease(self) -> Lease:
        """A lease with a new id. Renewed once it is in ``leases``."""
        return Lease(new_lease_id(self._rng))

    def open_pool(self, outcome: list[OpenedPool | KvoffdClientError]) -> None:
        """Have the daemon send its pool's descriptor."""

        def result_of(message: FromDaemon) -> OpenedPool | KvoffdClientError | None:
            if not isinstance(message, PoolOpened):
                return None
            fd = self._socket_link.take_descriptor()
            return DaemonUnavailable("The pool came without its descriptor.") if fd is None else (FileIO(fd), message)

        self._exchange(lambda: self._socket_link.send_over_lifeline(OpenPool()), result_of, outcome)

    def attach(self, fd: int, outcome: list[int | KvoffdClientError]) -> None:
        """Hand memory to the daemon; the outcome is the segment's id."""
        self._next_segment += 1
        segment = self._next_segment

        def result_of(message: FromDaemon) -> int | None:
            return segment if isinstance(message, Attached) and message.segment_id == segment else None

        self._exchange(lambda: self._link.attach(Attach(segment), fd), result_of, outcome)

    def _exchange(
        self,
        send: Callable[[], None],
        result_of: Callable[[FromDaemon], T | KvoffdClientError | None],
        outcome: list[T | KvoffdClientError],
    ) -> None:
        """Send over the lifeline; what ``result_of`` makes of the answer, or why there is none, goes to ``outcome``."""

        def on_answer(message: FromDaemon | KvoffdClientError) -> None:
            if isinstance(message, KvoffdClientError):
                outcome.append(message)
            elif isinstance(message, PoolRefused | AttachRefused):
                outcome.append(RequestRefused(message.code, message.message))
            elif (result := result_of(message)) is not None:
                outcome.append(result)
            else:
                problem = f"The daemon answered with {type(message).__name__} on its lifeline."
                outcome.append(DaemonUnavailable(problem))

        if not self.usable or self._on_answer is not None:
            on_answer(DaemonUnavailable(self.problem or "The lifeline is in use."))
            return
        try:
            send()
        except OSError as error:
            on_answer(DaemonUnavailable(f"The daemon does not read its lifeline ({error.strerror or error})."))
            return
        self._on_answer = on_answer

    def on_lifeline_message(self, message: FromDaemon, now: float) -> None:
        """Take an answer to an exchange; other messages go to ``Session``."""
        if isinstance(message, PoolOpened | PoolRefused | Attached | AttachRefused) and self._on_answer is not None:
            on_answer, self._on_answer = self._on_answer, None
            on_answer(message)
            self.on_change()
            return
        super().on_lifeline_message(message, now)

    def _renewals(self, now: float) -> list[int]:
        self._renewed = list(self.leases.values())
        return list(self.leases)

    def _role_heartbeat(self, reply: HeartbeatReply, sent_at: float, now: float) -> None:
        for lease in self._renewed:
            lease.ends_at = max(lease.ends_at, sent_at + self.lease_ttl_s)
        for lease_id in reply.ended:
            if (ended := self.leases.pop(lease_id, None)) is not None:
                ended.alive = False

    def _role_disconnected(self, dead: bool, now: float) -> None:
        super()._role_disconnected(dead, now)
        for lease in self.leases.values():
            lease.alive = False
        self.leases.clear()
        self._next_segment = 0
        if self._on_answer is not None:
            on_answer, self._on_answer = self._on_answer, None
            on_answer(DaemonUnavailable(self.problem or "The connection was lost."))
