"""Sessions of clients: access control, and the resources of each."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvoffd.cache.cache import Cache
from kvoffd.cache.namespace import Namespace
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.events import CompletionLog
from kvoffd.server.memory import Host
from kvoffd.transfer.engine import EngineMemory
from kvoffd.transfer.plan import GroupLayout
from kvoffd_proto.admin import LoggedPrompt
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.lifeline import routing_id
from kvoffd_proto.messages import TOKEN_BYTES, Role

if TYPE_CHECKING:
    from kvoffd.server.jobs import Job, Jobs

logger = logging.getLogger(__name__)
OpenT = TypeVar("OpenT")

MAX_DEFAULT_CREDIT_BYTES = 2**30
OPERATORS_SESSIONS = 8
"""Sessions beyond max_sessions, for operators when engines use all of those."""
MAX_DEPARTED = 1024
"""Limit of remembered routes of clients that left: their last messages may arrive after the end of their lifelines."""
MAX_LOGGED_PROMPTS = 1000
"""Prompts kept for each session, some 300 KB."""


@dataclass(frozen=True)
class Peer:
    """Credentials of a connection's peer (SO_PEERCRED). pid is 0 if it is in another pid namespace."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"uid {self.uid}"


class Ending(StrEnum):
    """Reason why a session ended."""

    CLOSED = "closed"
    """The client sent Leaving."""
    GONE = "gone"
    """The lifeline ended without Leaving: the process was killed, as vLLM by default kills its engine at SIGTERM."""
    NO_HELLO = "no_hello"
    MALFORMED = "malformed"
    """The client sent an invalid frame over the lifeline."""
    FAILED = "failed"
    """An internal error of the daemon ended it, or the client did not read its lifeline."""
    STOPPING = "stopping"
    """The daemon stopped."""


class Lifeline(Protocol):
    """The part of a session's stream that the service uses."""

    def alive(self) -> bool:
        """Ask the kernel whether the peer still has its end open, without waiting for an event."""

    def close_descriptor(self, fd: int) -> None:
        """Close a client's descriptor. If the client is gone, that frees its memory, which is slow."""


@dataclass(eq=False)
class Registration:
    """KV tensors that a worker has registered: mapped memory, and the layouts over it."""

    memory: EngineMemory
    namespace: Namespace
    rank: int
    layouts: list[GroupLayout]
    jobs: int = field(default=0, init=False)
    """Number of jobs that use the memory."""
    on_closed: Callable[[], None] | None = field(default=None, init=False)
    """Callback of ``close_when_idle``, once that was called."""

    def close_when_idle(self, on_closed: Callable[[], None]) -> None:
        """Unmap the memory after the last job, then call ``on_closed``. Call this once."""
        assert self.on_closed is None, "a registration is closed once"
        self.on_closed = on_closed
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Unmap the memory if ``close_when_idle`` was called and no job uses it."""
        if self.on_closed is not None and not self.jobs:
            self.memory.close(self.on_closed)


class Opened(dict[bytes, OpenT]):
    """Things that a session has opened, by id. Another id raises KvoffdError with ``code``."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, name: bytes) -> OpenT:
        raise KvoffdError.of(self._code)


@dataclass(eq=False)
class Session:
    """State of one client. It lives until its last copy has ended; ``ended`` is set when the lifeline ends."""

    id: int
    token: bytes
    """Secret of the client, sent over the lifeline."""
    peer: Peer
    lifeline: Lifeline
    opened_at: float
    completions: CompletionLog
    role: Role | None = None
    name: str = ""
    software: str = ""
    last_request_at: float = field(init=False)
    ended: bool = False
    namespaces: Opened[Namespace] = field(default_factory=lambda: Opened(ErrorCode.UNKNOWN_NAMESPACE))
    """Open namespaces by fingerprint."""
    segments: dict[int, int] = field(default_factory=dict)
    """Attached descriptors without a registration, by segment id."""
    registrations: Opened[Registration] = field(default_factory=lambda: Opened(ErrorCode.UNKNOWN_REGISTRATION))
    registering: set[bytes] = field(default_factory=set)
    """Ids of registrations whose memory is being mapped."""
    jobs: dict[int, Job] = field(default_factory=dict)
    """Jobs without a result by id; several ids may share a copy. ``Jobs`` maintains these and the numbers below."""
    in_flight: int = 0
    """Number of jobs without a result, or whose copy may still touch the client's memory."""
    pieces: int = 0
    """Sum of the pieces of these jobs."""
    stored_bytes: int = 0
    loaded_bytes: int = 0
    prompts: deque[LoggedPrompt] = field(default_factory=lambda: deque(maxlen=MAX_LOGGED_PROMPTS))
    """Reports of its engine's latest prompts."""
    problem: str = ""
    """Reason why its engine stores and loads nothing, as the engine reported it."""
    on_released: Callable[[], None] | None = None
    """Callback after its last copy, once it has ended."""

    def __post_init__(self) -> None:
        self.last_request_at = self.opened_at
        self.route = routing_id(self.token)
        """ZeroMQ routing id of the client's requests."""

    def release_if_idle(self) -> None:
        """Call ``on_released`` if the session and its last copy have ended."""
        if self.on_released is not None and not self.in_flight:
            on_released, self.on_released = self.on_released, None
            on_released()

    def close_memory(self) -> None:
        """Unmap all memory as soon as no job uses it, and close attached descriptors."""
        for memory in self.registrations.values():
            memory.close_when_idle(lambda: None)
        self.registrations.clear()
        for fd in self.segments.values():
            self.lifeline.close_descriptor(fd)
        self.segments.clear()


def may_connect(peer: Peer, config: Config) -> bool:
    """Return whether the peer may connect: root, the daemon's own user, users in allowed_uids, and processes whose gid
    is in allowed_gids, by default the daemon's own gid."""
    uids = 0, os.geteuid(), *config.allowed_uids
    return peer.uid in uids or peer.gid in (config.allowed_gids or (os.getegid(),))


def credit_bytes(config: Config, cache: Cache) -> int:
    """Return the bytes of stores that all sessions together may have outstanding."""
    return config.limits.credit_bytes or min(cache.slots.pool_bytes // 8, MAX_DEFAULT_CREDIT_BYTES)


class Sessions:
    """The open sessions: admits clients, and frees their resources when they leave.

    Args:
        max_attached: limit of attached descriptors without a registration, of all sessions together.
    """

    def __init__(self, config: Config, cache: Cache, jobs: Jobs, host: Host, max_attached: int) -> None:
        self._config = config
        self._cache = cache
        self._jobs = jobs
        self._host = host
        self._max_attached = max_attached
        self.by_route: dict[bytes, Session] = {}
        """Open sessions by the routing id of their requests."""
        self.departed: OrderedDict[bytes, None] = OrderedDict()
        """Routes of clients that left recently, oldest first."""
        self._last_id = 0
        self.epoch = int.from_bytes(host.random(8), "big") >> 1
        """Random number of this daemon process, so that its clients do not take a successor's results for theirs."""
        self.credit_bytes = credit_bytes(config, cache)
        """Bytes of stores that each session may have outstanding: its part of the credit of all."""
        self.ended: Counter[str] = Counter()
        """Ended sessions by ``Ending``: engines', and those that the daemon ended before their Hello."""
        self.stopping = False

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(self.by_route.values())

    def __len__(self) -> int:
        return len(self.by_route)

    def open(self, lifeline: Lifeline, peer: Peer) -> Session:
        """Open a session for a client of the lifeline. Raises KvoffdError if the client is not admitted."""
        if self.stopping:
            raise KvoffdError.of(ErrorCode.SHUTTING_DOWN)
        if len(self.by_route) >= self._config.max_sessions + OPERATORS_SESSIONS:
            raise self._full()
        self._last_id += 1
        token = self._host.random(TOKEN_BYTES)
        log = CompletionLog(self.epoch, self._last_id)
        session = Session(self._last_id, token, peer, lifeline, self._host.now(), log)
        self.by_route[session.route] = session
        return session

    @property
    def of_engines(self) -> int:
        """Number of sessions of schedulers and workers."""
        return sum(session.role in (Role.SCHEDULER, Role.WORKER) for session in self)

    def set_role(self, session: Session, role: Role, name: str, software: str) -> None:
        """Set a session's role and names. Raises KvoffdError if the client may not have the role."""
        if session.role is not None and session.role != role:
            raise KvoffdError(
                f"The session sent Hello as {session.role}, which cannot change; open another session.",
                ErrorCode.WRONG_ROLE,
            )
        admins = self._config.admin_uids  # if empty, all users; root and the daemon's own user always may
        if role is Role.ADMIN and admins and session.peer.uid not in (0, os.geteuid(), *admins):
            raise KvoffdError(
                f"User {session.peer.uid} may not administer this kvoffd; add the uid to admin_uids.",
                ErrorCode.FORBIDDEN,
            )
        if role is not Role.ADMIN and session.role is None and self.of_engines >= self._config.max_sessions:
            raise self._full()
        if session.role is None:
            process = f"pid {session.peer.pid}" if session.peer.pid else "in another pid namespace"
            level = logging.DEBUG if role is Role.ADMIN else logging.INFO  # every kvoffd-cli command opens one
            who = f"{name} ({software})" if software else name
            logger.log(level, "Session %d: %s %s, %s.", session.id, role, who, process)
        session.role, session.name, session.software = role, name, software

    def _full(self) -> KvoffdError:
        return KvoffdError(
            f"All {self._config.max_sessions} sessions are taken; raise max_sessions.", ErrorCode.TOO_MANY
        )

    def attach(self, session: Session, segment_id: int, fd: int) -> None:
        """Keep a descriptor for a later Register. Takes ownership of ``fd`` unless it raises KvoffdError."""
        if session.ended:
            raise KvoffdError.of(ErrorCode.SESSION_ENDED)
        if segment_id in session.segments:
            raise KvoffdError(f"Segment {segment_id} is attached already; use a new id.", ErrorCode.MALFORMED)
        if len(session.segments) >= self._config.limits.max_segments:
            raise KvoffdError(
                f"The session holds {len(session.segments)} segments, its limit; register some.", ErrorCode.TOO_MANY
            )
        if sum([len(other.segments) for other in self]) >= self._max_attached:
            raise KvoffdError(
                f"All sessions together have {self._max_attached} descriptors attached, the limit. Register some, or "
                "raise the daemon's limit of open files.",
                ErrorCode.TOO_MANY,
            )
        session.segments[segment_id] = fd

    def share_credit(self) -> None:
        """Divide the credit among the sessions with registered memory, after their number changed."""
        writers = sum(bool(session.registrations) for session in self)
        self.credit_bytes = credit_bytes(self._config, self._cache) // max(1, writers)

    def end(self, session: Session, on_released: Callable[[], None], why: Ending = Ending.GONE) -> None:
        """End a session after its lifeline: end its leases, stop its copies, unmap its memory.

        ``on_released`` is called after the last of its copies.
        """
        if session.ended:
            return
        del self.by_route[session.route]
        if why in (Ending.CLOSED, Ending.GONE):
            self.departed[session.route] = None
            if len(self.departed) > MAX_DEPARTED:
                self.departed.popitem(last=False)
        self._cache.end_session(session.id)
        session.ended, session.on_released = True, on_released
        session.release_if_idle()
        self._jobs.abandon(list(session.jobs.values()))
        session.close_memory()
        self.share_credit()
        if session.role is not None:
            level = logging.DEBUG if session.role is Role.ADMIN else logging.INFO
            logger.log(level, "Session %d (%s %s) ended: %s.", session.id, session.role, session.name, why)
        of_engine = session.role is not None and session.role is not Role.ADMIN
        if of_engine or (session.role is None and why not in (Ending.CLOSED, Ending.GONE, Ending.STOPPING)):
            self.ended[why.value] += 1
