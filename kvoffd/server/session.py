"""One client's session: the process behind it, its lifeline, and the resources that it has open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kvoffd.cache.namespace import Namespace
from kvoffd.errors import KvoffdError
from kvoffd.server.events import CompletionLog
from kvoffd.transfer.engine import EngineMemory
from kvoffd.transfer.plan import GroupLayout
from kvoffd_proto.admin import LoggedPrompt
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.lifeline import routing_id
from kvoffd_proto.messages import Role

OpenT = TypeVar("OpenT")

MAX_LOGGED_PROMPTS = 1000
"""Prompts kept for each session, some 300 KB."""


@dataclass(frozen=True)
class ClientProcess:
    """The process at the other end of a connection (SO_PEERCRED). pid is 0 if it is in another pid namespace."""

    pid: int
    uid: int
    gid: int

    def __str__(self) -> str:
        return f"uid {self.uid}"


class Lifeline(Protocol):
    """The part of a session's stream that the service uses."""

    def alive(self) -> bool:
        """Ask the kernel whether the client still has its end open, without waiting for an event."""

    def close_descriptor(self, fd: int) -> None:
        """Close a client's descriptor. If the client is gone, that frees its memory, which is slow."""


@dataclass(eq=False)
class Registration:
    """KV tensors that a worker has registered: mapped memory, and the layouts over it."""

    memory: EngineMemory
    namespace: Namespace
    rank: int
    layouts: list[GroupLayout]
    copies: int = field(default=0, init=False)
    """Number of copies that use the memory."""
    closing: bool = field(default=False, init=False)
    """Whether ``close_when_idle`` was called: no further copy may use the memory."""
    _on_closed: Callable[[], None] = field(default=lambda: None, init=False)

    def close_when_idle(self, on_closed: Callable[[], None]) -> None:
        """Unmap the memory after the last copy, then call ``on_closed``. Call this once."""
        assert not self.closing, "a registration is closed once"
        self.closing, self._on_closed = True, on_closed
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Unmap the memory if ``close_when_idle`` was called and no copy uses it."""
        if self.closing and not self.copies:
            self.memory.close(self._on_closed)


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
    process: ClientProcess
    lifeline: Lifeline
    opened_at: float
    completions: CompletionLog
    role: Role | None = None
    name: str = ""
    software: str = ""
    last_request_at: float = field(init=False)
    """``opened_at`` before the first request."""
    ended: bool = False
    waiting: int = 0
    """Number of its requests without a reply yet. ``Service`` maintains this."""
    namespaces: Opened[Namespace] = field(default_factory=lambda: Opened(ErrorCode.UNKNOWN_NAMESPACE))
    """Open namespaces by fingerprint."""
    attached: dict[int, int] = field(default_factory=dict)
    """Descriptors that no registration uses yet, by segment id."""
    registrations: Opened[Registration] = field(default_factory=lambda: Opened(ErrorCode.UNKNOWN_REGISTRATION))
    registering: set[bytes] = field(default_factory=set)
    """Ids of registrations whose memory is being mapped."""
    in_flight: int = 0
    """Number of jobs without a result, or whose copy may still touch the client's memory. ``Jobs`` maintains this and
    the next number."""
    pieces: int = 0
    """Ranges of memory that these jobs copy, at most."""
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

    @property
    def has_asked(self) -> bool:
        """Whether a request came."""
        return self.last_request_at != self.opened_at

    def release_if_idle(self) -> None:
        """Call ``on_released`` if the session and its last copy have ended."""
        if self.on_released is not None and not self.in_flight:
            on_released, self.on_released = self.on_released, None
            on_released()

    def close_memory(self) -> None:
        """Unmap all memory as soon as no copy uses it, and close attached descriptors."""
        for registration in self.registrations.values():
            registration.close_when_idle(lambda: None)
        self.registrations.clear()
        for fd in self.attached.values():
            self.lifeline.close_descriptor(fd)
        self.attached.clear()
