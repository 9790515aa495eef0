"""What all clients have in common: timeouts and bounds, an identity, and that they are closed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from kvoffd_proto.messages import Role

if TYPE_CHECKING:  # administrators start faster without numpy
    from kvoffd_client.namespace_spec import NamespaceSpec
    from kvoffd_client.shared_memory import Registration


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Timeouts (seconds) and bounds of one client. All must be positive.

    Raises:
        ValueError: a value is not positive; the message names it.
    """

    connect_timeout_s: float = 10.0
    """How long calls wait that need a daemon at the start (FakeEngine)."""
    handshake_timeout_s: float = 5.0
    """From opening the lifeline to being ready; then the attempt is given up and a new one made."""
    gpu_register_timeout_s: float = 30.0
    """The daemon's answer to a registration of GPU memory, for the first of which it starts the CUDA driver."""
    request_timeout_s: float = 2.0
    """A request without reply by then has failed; for a lookup that is a miss."""
    backoff_min_s: float = 0.05
    """Pause after the first failed attempt to connect; doubles with each further one."""
    backoff_absent_s: float = 0.25
    """Longest pause between attempts while nobody listens: each costs a system call, and a restart takes a second."""
    backoff_max_s: float = 2.0
    """Longest pause after connections that a daemon took and that failed; also the pause after a refusal."""
    job_patience_s: float = 1.0
    """A job older than this makes the client ask whether its completion was lost, and again at this interval."""
    daemon_end_grace_s: float = 5.0
    """A daemon on a GPU that died counts as gone after this, where the kernel does not show when its process is."""
    unresponsive_after_s: float = 5.0
    """Without any reply for this long (while one is due) the client counts as not connected until one comes."""
    close_timeout_s: float = 0.8
    """How long close() waits for the I/O thread."""
    max_pending_requests: int = 1024
    """Requests without reply; beyond it they fail at once."""
    send_queue_frames: int = 256
    """Messages that wait to be sent to the daemon; beyond it requests fail at once."""
    receive_queue_messages: int = 10_000
    """High water mark of the events socket; what is dropped beyond it is replayed."""
    max_buffered_events: int = 100_000
    """KV events kept until take_events(); beyond it the oldest are dropped and counted."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"The client option {field.name} must be positive; it is {getattr(self, field.name)}.")


DEFAULT_OPTIONS = ClientOptions()


@dataclass(frozen=True)
class Identity:
    """The role and names of a session, and what it opens."""

    directory: str
    role: Role
    name: str
    software: str
    namespace: NamespaceSpec | None = None
    registration: Registration | None = None


class Closing:
    """Something that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Give back what it holds. Repeatable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
