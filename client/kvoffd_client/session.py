"""A client's session with a daemon: what a message means and what to send next.

A session knows no socket, no thread and no clock. A ``Transport`` carries what it sends, holds its lock, and calls its
``on_`` methods and ``tick`` with the lock held: ``SocketTransport`` over real sockets, the simulator's over none. The
scheduler's, the worker's and the administrator's client are sessions, with public methods for any thread.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused, RequestTimeout, why_unreachable
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.lifeline import (
    Attach,
    Attached,
    AttachRefused,
    FromDaemon,
    Greeting,
    MemoryReleased,
    Refused,
    routing_id,
)

if TYPE_CHECKING:  # administrators start faster without numpy
    from kvoffd_client.namespace import NamespaceSpec

log = logging.getLogger("kvoffd_client")

T = TypeVar("T")

NEVER = float("inf")
BACKOFF_MIN_S = 0.05
"""Pause after the first failed attempt to connect; doubles with each further one."""
BACKOFF_ABSENT_S = 0.25
"""Longest pause between attempts while nobody listens: each costs a system call, and a restart takes a second."""
DEAF_AFTER = 3
"""After so many times ``unresponsive_after_s`` without a reply the client opens another session: another client may
have taken the routing id of this one, whose replies it gets."""
MAX_PENDING_REQUESTS = 1024
"""Requests without reply; beyond it they fail at once."""
ENDED_SESSION = (ErrorCode.BAD_TOKEN, ErrorCode.NO_HELLO)
"""Refusals that mean the daemon does not know this session any more."""

ReplyOrError = m.AnyReply | KvoffdClientError
"""A reply, which is never Error (that comes as RequestRefused), or the reason why there is none."""
OnReply = Callable[[ReplyOrError, float], None]
"""Called once, with the time of it."""


class Closing:
    """Something that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release what it holds. Repeatable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Timeouts of one client in seconds, which must be positive, and what it is.

    Raises:
        ValueError: a value is not positive; the message names it.
    """

    handshake_timeout_s: float = 5.0
    """From opening the lifeline to being ready; then the attempt ends and a new one is made."""
    gpu_register_timeout_s: float = 30.0
    """The daemon's answer to a registration of GPU memory, for the first of which it starts the CUDA driver."""
    request_timeout_s: float = 2.0
    """A request without reply by then has failed; for a lookup that is a miss."""
    unresponsive_after_s: float = 5.0
    """Without any reply for this long (while one is due) the client counts as not connected until one comes."""
    backoff_max_s: float = 2.0
    """Longest pause after connections that a daemon took and that failed; also the pause after a refusal."""
    close_timeout_s: float = 0.8
    """How long close() waits for the I/O thread."""
    operator: bool = False
    """A program of operators: counted nowhere, and the policy neither learns of it nor refuses its stores."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "operator" and getattr(self, field.name) <= 0:
                raise ValueError(f"The client option {field.name} must be positive; it is {getattr(self, field.name)}.")


DEFAULT_OPTIONS = ClientOptions()


class Transport(Protocol):
    """Carries what one session sends, and holds its lock. No call but ``wait`` and ``stop`` blocks."""

    def start(self, session: Session) -> None:
        """Begin to drive a session, whose methods are called with the lock held."""

    lock: AbstractContextManager[object]
    """Held for a ``with`` block. Raises ForkedProcess in a forked child."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()``, called with the lock held, or the session is closed; returns what it says then.

        Without a timeout it reads what has arrived, in the caller's thread.
        """

    def stop(self) -> None:
        """Close the session and end the thread. Repeatable; does nothing in a forked child."""

    # With the lock held:

    def open(self) -> None:
        """Connect the lifeline. Raises OSError."""

    def connect(self, route: bytes, topics: Sequence[bytes]) -> None:
        """Connect the jobs socket under the routing id that names the session.

        Where there are ``topics`` to subscribe to, connect the events socket too.
        """

    def attach(self, message: Attach, fd: int) -> None:
        """Send a descriptor over the lifeline. Raises OSError."""

    def send(self, frame: bytes) -> bool:
        """Send a message to the jobs socket; False when its queue is full. ``tick`` may be due earlier by now."""

    def disconnect(self, *, drain: bool) -> None:
        """Close all sockets: to the daemon this is the client's death.

        With ``drain`` the lifeline can still be read, and ``on_released`` is called once the daemon touches the
        session's memory no more.
        """

    def notify(self) -> None:
        """Something changed that a thread may wait for, or ``tick`` is due earlier."""


class Phase(Enum):
    """How far the session has come in connecting."""

    IDLE = auto()
    GREETING = auto()
    HELLO = auto()
    ATTACHING = auto()
    REGISTERING = auto()
    READY = auto()
    DRAINING = auto()
    """The connection has ended, and the daemon may still touch memory of it."""
    CLOSED = auto()


CONNECTED = (Phase.GREETING, Phase.HELLO, Phase.ATTACHING, Phase.REGISTERING, Phase.READY)


class Session(Closing):
    """What all roles share: connecting, requests and replies, the end of a connection, connecting again.

    No public method blocks unless it says wait. They are thread-safe; all that begins with ``on_``, ``_`` or ``tick``
    needs the lock.

    Args:
        directory: where the daemon's sockets are.
        role: of the session.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        namespace: opened, or joined, at every connection.
        options: timeouts.
        transport: real sockets unless one is given.
        rng: for lease ids and pauses.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        role: m.Role,
        name: str,
        software: str,
        namespace: NamespaceSpec | None,
        options: ClientOptions,
        transport: Transport | None,
        rng: random.Random | None,
    ) -> None:
        self.directory = os.fspath(directory)
        self.role = role
        self.name = name[:128]
        self._software = software[:128]
        self._spec = namespace
        self._options = options
        self._rng = rng or random.Random()
        self._phase = Phase.IDLE
        self.epoch = 0
        """The daemon's life this client is, or was last, connected to; 0 before the first. All here is read only."""
        self.session_id = 0
        """Of its session there."""
        self._limits: m.Limits | None = None
        self._credit_bytes = 0
        self.ready = False
        """The session is open, with all that the client opens in it, and the daemon answers."""
        self.problem: str | None = f"The client has not reached the kvoffd daemon in {self.directory} yet."
        """A sentence that says why the client is not ready; None while it is."""
        self.refusal: RequestRefused | None = None
        """The daemon's refusal, where that is why the client is not ready."""
        self._wanted = True
        """False once what the client is for was given up: it is not ready any more."""
        self._responsive = True
        """False while the daemon owes a reply for longer than ``unresponsive_after_s``."""
        self._pending: dict[int, tuple[float, OnReply]] = {}
        """By request: when it expires, and what to call then or with its reply."""
        self._next_expiry = NEVER
        """No request expires earlier."""
        self._owed_since = NEVER
        """Since when the daemon has owed a reply without sending any."""
        self._next_request_id = itertools.count(1).__next__
        self._retry_at = 0.0
        self._failed_attempts = 0
        self._absent_attempts = 0
        self._ready_at = 0.0
        self._handshake_deadline = NEVER
        self._last_warning = ""
        self._role_wake_at = NEVER
        """When to call _role_tick at the latest."""
        if transport is None:
            from kvoffd_client.transport import SocketTransport

            transport = SocketTransport(self.directory, options)
        self._transport = transport

    # --- for any thread --------------------------------------------------------------------------

    @property
    def credit_bytes(self) -> int:
        """Bytes of stores the daemon lets a session have outstanding, running ones included; 0 when not ready."""
        return self._credit_bytes if self.ready else 0

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ready; False when it is not after ``timeout_s`` seconds."""
        return self._transport.wait(lambda: self.ready, timeout_s)

    def wait_settled(self, timeout_s: float) -> bool:
        """As wait_ready(), but return at once when the daemon refuses this client; see ``refusal``."""
        self._transport.wait(lambda: self.ready or self.refusal is not None, timeout_s)
        return self.ready

    def close(self) -> None:
        """End the session and the thread, in less than a second; what has no answer fails. Repeatable."""
        self._transport.stop()

    def _outcome_of(self, start: Callable[[list[T], float, float], None], timeout_s: float) -> list[T]:
        """Call ``start`` with a list, the time and the timeout, under the lock; wait until it appends to the list."""
        outcome: list[T] = []
        with self._transport.lock:
            start(outcome, self._transport.now(), timeout_s)
        self._transport.wait(lambda: bool(outcome), timeout_s)
        return outcome

    def poll(self) -> None:
        """Read answers that have arrived, in this thread; otherwise they are read when the client's thread gets to it.

        For callers that are about to read lookups and busy otherwise: a thread that computes keeps the GIL from the
        client's own thread for up to ``sys.getswitchinterval()``.
        """
        self._transport.wait(bool, 0.0)

    # --- time ------------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """The time at which tick() must be called at the latest."""
        if self._phase is Phase.CLOSED:
            return NEVER
        if self._phase is Phase.IDLE:
            return min(self._retry_at, self._role_wake_at)
        # When the client will not wait for a reply any longer.
        silent_at = self._owed_since + self._options.unresponsive_after_s * (1 if self._responsive else DEAF_AFTER)
        return min(self._next_expiry, self._handshake_deadline, silent_at, self._role_wake_at)

    def tick(self, now: float) -> None:
        """Do what is due: connect, expire requests."""
        if now < self.wake_at():
            return
        if self._phase is Phase.IDLE and now >= self._retry_at:
            self._connect(now)
        if now >= self._handshake_deadline:
            self.disconnect(self.problem or "The daemon did not finish the handshake.", now)
        owed_since, patience_s = self._owed_since, self._options.unresponsive_after_s
        if now >= self._next_expiry:
            self._expire(now)
        if now >= owed_since + patience_s and self._phase in CONNECTED:
            problem = f"The kvoffd daemon in {self.directory} does not answer; going on without it."
            if now >= owed_since + patience_s * DEAF_AFTER:
                self.disconnect(problem, now)
            elif self._responsive:
                self._responsive = self.ready = False
                self.problem = problem
                self._warn(problem)
                self._transport.notify()
        self._role_tick(now)

    # --- requests --------------------------------------------------------------------------------

    def _send(
        self,
        message: m.AnyRequest,
        now: float = 0.0,
        on_reply: OnReply | None = None,
        timeout_s: float | None = None,
    ) -> KvoffdClientError | None:
        """Send a message; returns the reason when it cannot go out.

        ``on_reply`` is called once, possibly before this returns: with the reply, or with the reason why there is none.
        """
        frame, limits, owed_since = encode(message), self._limits, self._owed_since
        refused: KvoffdClientError | None = None
        if limits is not None and len(frame) > limits.max_frame_bytes:
            sentence = f"The request has {len(frame)} bytes and the daemon takes {limits.max_frame_bytes}; send less."
            refused = RequestRefused(ErrorCode.TOO_LARGE, sentence)
        elif on_reply is not None and len(self._pending) >= MAX_PENDING_REQUESTS:
            refused = DaemonUnavailable(f"{len(self._pending)} requests wait for the daemon already.")
        else:
            if on_reply is not None:  # before the transport looks when tick is due
                deadline = now + (self._options.request_timeout_s if timeout_s is None else timeout_s)
                self._pending[message.request_id] = deadline, on_reply
                self._next_expiry = min(self._next_expiry, deadline)
                self._owed_since = min(owed_since, now)
            if not self._transport.send(frame):
                self._pending.pop(message.request_id, None)
                self._owed_since = owed_since
                refused = DaemonUnavailable(f"The daemon in {self.directory} does not read its socket.")
        if on_reply is not None and refused is not None:
            on_reply(refused, now)
        return refused

    def on_reply(self, reply: m.AnyReply, now: float) -> None:
        """Take a reply from the jobs socket."""
        if self._phase is not Phase.READY and (self._phase not in CONNECTED or self._phase is Phase.GREETING):
            return
        if not self._responsive:
            self._responsive, self.problem = True, None
            self.ready = self._phase is Phase.READY and self._wanted
            self._last_warning = ""
            self._transport.notify()
        entry = self._pending.pop(reply.request_id, None)
        self._owed_since = now if self._pending else NEVER
        if isinstance(reply, m.Error):
            refusal = RequestRefused(reply.code, reply.message)
            if entry is not None:
                entry[1](refusal, now)
            else:
                self._on_unexpected_refusal(reply, refusal, now)
            if reply.code in ENDED_SESSION and self._phase in CONNECTED:
                self.disconnect(str(refusal), now)
        elif entry is not None:
            entry[1](reply, now)

    def _expire(self, now: float) -> None:
        late = [request_id for request_id, (deadline, _) in self._pending.items() if deadline <= now]
        for request_id in late:
            entry = self._pending.pop(request_id, None)
            if entry is not None:  # a callback may have ended the session, and all its requests with it
                entry[1](RequestTimeout("The kvoffd daemon did not answer in time; try again later."), now)
        self._next_expiry = min((deadline for deadline, _ in self._pending.values()), default=NEVER)
        owed = self._owed_since < NEVER and not self._pending
        if (late or owed) and self._phase is Phase.READY:  # whether it was that reply alone, or the daemon is silent
            self._send(self._hello(), now, lambda *_: None)
            if not self._pending:  # its socket's queue is full; without another try nothing would ever come
                self._next_expiry = now + self._options.request_timeout_s

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        try:
            self._transport.open()
        except OSError as error:
            self._absent_attempts += 1
            self.disconnect(why_unreachable(error, self.directory), now)
            return
        self.problem = (
            f"The kvoffd daemon in {self.directory} accepts connections but does not answer; see its log, and "
            "whether its process is stopped (ps, systemctl status)."
        )
        self._absent_attempts = 0
        self._phase = Phase.GREETING
        self._handshake_deadline = now + self._options.handshake_timeout_s

    def on_lifeline_message(self, message: FromDaemon, now: float) -> None:
        """Take a frame of the lifeline."""
        if self._phase not in CONNECTED:
            return
        if isinstance(message, Refused):
            self._end_refused(RequestRefused(message.code, message.message), now)
        elif isinstance(message, Greeting) and self._phase is Phase.GREETING:
            self._on_greeting(message, now)
        elif isinstance(message, Attached | AttachRefused) and self._phase is Phase.ATTACHING:
            self._on_attached(message, now)
        elif not isinstance(message, MemoryReleased):  # the EOF follows
            self.disconnect(f"The daemon sent {type(message).__name__} out of turn.", now)

    def _on_greeting(self, greeting: Greeting, now: float) -> None:
        if greeting.protocol_version != m.PROTOCOL_VERSION:
            sentence = (
                f"The daemon in {self.directory} speaks protocol {greeting.protocol_version} and this client "
                f"{m.PROTOCOL_VERSION}; install the same kvoffd release on both."
            )
            self._end_refused(RequestRefused(ErrorCode.BAD_VERSION, sentence), now)
            return
        self.epoch, self.session_id = greeting.epoch, greeting.session_id
        self._limits = None  # those of another daemon may be too low for a handshake
        self._phase = Phase.HELLO
        self._transport.connect(routing_id(greeting.token), self._topics())
        self._send(self._hello(), now, self._on_welcome, self._options.handshake_timeout_s)

    def _hello(self) -> m.Hello:
        who = self.role, self.name, self._software, self._options.operator
        return m.Hello(self._next_request_id(), m.PROTOCOL_VERSION, *who)

    def _on_welcome(self, reply: ReplyOrError, now: float) -> None:
        if not isinstance(reply, m.Welcome):
            self._fail_handshake("Hello", reply, now)
            return
        self._limits = reply.limits
        self._credit_bytes = reply.credit_bytes
        if self._spec is None:
            self._become_ready(now)
            return
        message = m.OpenNamespace(self._next_request_id(), *self._spec.wire_fields())
        self._send(message, now, self._on_namespace_opened, self._options.handshake_timeout_s)

    def _on_namespace_opened(self, reply: ReplyOrError, now: float) -> None:
        if isinstance(reply, m.NamespaceOpened):
            self._after_namespace_opened(now)
        else:
            self._fail_handshake("OpenNamespace", reply, now)

    def _become_ready(self, now: float) -> None:
        self._phase, self._ready_at = Phase.READY, now
        self.ready = self._responsive and self._wanted
        self._handshake_deadline = NEVER
        self.problem = self.refusal = None
        self._last_warning = ""
        log.info("%s is connected to the kvoffd daemon in %s", self.name, self.directory)
        self._role_ready(now)
        self._transport.notify()

    def _fail_handshake(self, step: str, reply: ReplyOrError, now: float) -> None:
        if self._phase not in CONNECTED:
            return  # disconnect() has failed this request and set the problem
        if isinstance(reply, RequestRefused):
            self._end_refused(reply, now)
        elif isinstance(reply, KvoffdClientError):
            self.disconnect(f"{step}: {reply}", now)
        else:
            self.disconnect(f"The daemon answered {step} with {type(reply).__name__}.", now)

    def _end_refused(self, refusal: RequestRefused, now: float) -> None:
        self.disconnect(f"The kvoffd daemon in {self.directory} refuses: {refusal}", now, refusal)

    # --- the end of a connection -----------------------------------------------------------------

    def on_lifeline_end(self, now: float, released: bool = True) -> None:
        """EOF: the daemon is dead, or has ended this session. ``released``: it is known to touch no memory any more."""
        dead = released or not self._copies_outlive_lifeline()
        if self._phase is Phase.DRAINING and dead:
            self._transport.disconnect(drain=False)
            self.on_released(now)
        elif self._phase in CONNECTED:
            self.disconnect(f"The kvoffd daemon in {self.directory} went away.", now, dead=dead)

    def on_released(self, now: float) -> None:
        """After a disconnect that drains: the daemon has released the session's memory, or its process is gone."""
        if self._phase is Phase.DRAINING:
            self._phase = Phase.IDLE
            self._role_released(now)
            self._transport.notify()

    def disconnect(
        self, sentence: str, now: float, refusal: RequestRefused | None = None, *, dead: bool = False
    ) -> None:
        """End the connection and plan the next attempt. ``dead``: the daemon touches the client's memory no more."""
        if self._phase in (Phase.CLOSED, Phase.DRAINING):
            return
        if self._phase is Phase.READY and now - self._ready_at > self._options.backoff_max_s:
            self._failed_attempts = 0
        drain = not dead and self._must_drain()
        self._phase = Phase.DRAINING if drain else Phase.IDLE
        self._transport.disconnect(drain=drain)
        self.problem, self.refusal = sentence, refusal
        self._warn(sentence)
        self._reset_connection(DaemonUnavailable(sentence), now)
        self._role_disconnected(now)
        self._retry_at = now + self._retry_delay_s(refusal is not None) * self._rng.uniform(0.5, 1.0)
        self._transport.notify()

    def on_close(self, now: float) -> None:
        """End for good: ``close()`` was called."""
        if self._phase is Phase.CLOSED:
            return
        self._phase = Phase.CLOSED
        self._transport.disconnect(drain=False)
        self.problem = "The client is closed."
        self._reset_connection(DaemonUnavailable(self.problem), now)
        self._role_disconnected(now)
        self._transport.notify()

    def _reset_connection(self, reason: KvoffdClientError, now: float) -> None:
        self._credit_bytes = 0
        self.ready, self._responsive = False, True
        self._handshake_deadline = self._next_expiry = self._owed_since = NEVER
        pending, self._pending = self._pending, {}
        for _, on_reply in pending.values():
            on_reply(reason, now)

    def _retry_delay_s(self, refused: bool) -> float:
        """Seconds until the next attempt, after one that is counted here as failed."""
        longest = self._options.backoff_max_s
        if self._absent_attempts:
            return min(BACKOFF_ABSENT_S, longest, BACKOFF_MIN_S * 2.0 ** min(self._absent_attempts - 1, 30))
        self._failed_attempts += 1
        return longest if refused else min(longest, BACKOFF_MIN_S * 2.0 ** min(self._failed_attempts - 1, 30))

    def _warn(self, sentence: str) -> None:
        """Log once per outage and reason."""
        if sentence != self._last_warning:
            self._last_warning = sentence
            # An administrator's call raises the sentence; the log need not repeat it.
            log.log(logging.DEBUG if self.role is m.Role.ADMIN else logging.WARNING, "%s", sentence)

    # --- what roles add --------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take a message from the events socket."""

    def _after_namespace_opened(self, now: float) -> None:
        self._become_ready(now)

    def _on_attached(self, message: Attached | AttachRefused, now: float) -> None:
        self.disconnect("The daemon acknowledged a descriptor that was not sent.", now)

    def _topics(self) -> Sequence[bytes]:
        return ()

    def _role_ready(self, now: float) -> None: ...

    def _role_disconnected(self, now: float) -> None: ...

    def _role_released(self, now: float) -> None: ...

    def _role_tick(self, now: float) -> None: ...

    def _must_drain(self) -> bool:
        return False

    def _copies_outlive_lifeline(self) -> bool:
        return False

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        self._warn(f"The kvoffd daemon refused a message: {refusal}")
