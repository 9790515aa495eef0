"""A client's session with a daemon: what a message means and what to send next.

A session knows no socket, no thread and no clock. A ``Transport`` carries what it sends, holds its lock, and calls its
``on_`` methods and ``tick`` with the lock held: ``SocketTransport`` over real sockets, the simulator's over none. The
scheduler's, the worker's and the administrator's client are sessions.
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
from typing import Protocol, Self, TypeVar

from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused, RequestTimeout, why_unreachable
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.namespace import NamespaceSpec
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

log = logging.getLogger("kvoffd_client")

ReplyT = TypeVar("ReplyT", bound=m.AnyReply)

BACKOFF_MIN_S = 0.05
"""Pause after the first failed attempt to connect; doubles with each further one."""
BACKOFF_ABSENT_S = 0.25
"""Longest pause between attempts while nobody listens: each costs a system call, and a restart takes a second."""
BACKOFF_REFUSED_S = 60.0
"""Longest pause after refusals that follow each other."""
GPU_REGISTER_S = 30.0
"""The daemon's answer to a registration of GPU memory, for the first of which it starts the CUDA driver."""
DEAF_AFTER = 3
"""After so many times ``unresponsive_after_s`` without a reply the client opens another session: another client may
have taken the routing id of this one, whose replies it gets."""
REFUSALS_LOGGED_S = 60.0
"""Between two lines of the log about messages that the daemon refused."""
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
    request_timeout_s: float = 2.0
    """A request without reply by then has failed; for a lookup that is a miss."""
    unresponsive_after_s: float = 5.0
    """Without any reply for this long (while one is due) the client counts as not connected until one comes."""
    backoff_max_s: float = 2.0
    """Longest pause after connections that a daemon took and that failed; also the pause after the first refusal."""
    operator: bool = False
    """A program of operators: counted nowhere, and the policy neither learns of it nor refuses its stores."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "operator" and getattr(self, field.name) <= 0:
                raise ValueError(f"The client option {field.name} must be positive; it is {getattr(self, field.name)}.")


DEFAULT_OPTIONS = ClientOptions()


class Transport(Protocol):
    """Carries what one session sends, and holds its lock. No call but ``wait`` and ``stop`` blocks."""

    lock: AbstractContextManager[object]
    """Held for a ``with`` block. Raises ForkedProcess in a forked child."""

    def start(self, session: Session) -> None:
        """Begin to drive a session, whose methods are called with the lock held."""

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
        """Connect the jobs socket under a routing id, and the events socket where there are topics to subscribe to."""

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
    """The lifeline is open, and the daemon has not spoken."""
    HANDSHAKE = auto()
    """The session is being opened, with all that the client opens in it."""
    READY = auto()
    DRAINING = auto()
    """The connection has ended, and the daemon may still touch memory of it."""
    CLOSED = auto()


CONNECTED = (Phase.GREETING, Phase.HANDSHAKE, Phase.READY)


class Session(Closing):
    """What all roles share: connecting, requests and replies, the end of a connection, connecting again.

    No public method blocks unless it says wait. They are thread-safe; all that begins with ``on_``, ``_`` or ``tick``
    needs the lock.

    Args:
        directory: where the daemon's sockets are.
        role: of the session.
        namespace: opened, or joined, at every connection.
        name: shown to operators.
        software: client and engine versions, shown to operators.
        options: timeouts.
        transport: real sockets unless one is given.
        rng: for lease ids and pauses.

    Attributes:
        epoch: the daemon's life this client is, or was last, connected to; 0 before the first.
        session_id: of its session there.
        refusal: the daemon's refusal, where that is why the client is not ready.
        reported_prefill_rate: prompt tokens a second that an engine of the namespace computes, as one reported last to
            the daemon, perhaps before its restart; 0.0 where none has.
        memory_on_gpu: the daemon may touch the client's memory until its process is gone.
    """

    memory_on_gpu = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        role: m.Role,
        namespace: NamespaceSpec | None,
        name: str,
        software: str,
        options: ClientOptions,
        transport: Transport | None,
        rng: random.Random | None,
    ) -> None:
        self.directory = os.fspath(directory)
        self.role = role
        self.name = name[:128]
        self._software = software[:128]
        self._to_open = namespace
        self._options = options
        self._rng = rng or random.Random()
        self.epoch = self.session_id = 0
        self.refusal: RequestRefused | None = None
        self.reported_prefill_rate = 0.0
        self._phase = Phase.IDLE
        self._wanted = True
        """False once what the client is for was given up: it is not ready any more."""
        self._responsive = True
        """False while the daemon owes a reply for longer than ``unresponsive_after_s``."""
        self._problem = f"The client has not reached the kvoffd daemon in {self.directory} yet."
        self._last_warning = ""
        self._refusal_logged_at = -REFUSALS_LOGGED_S
        self._limits: m.Limits | None = None
        """The daemon's; None before it said them."""
        self._credit_bytes = 0
        self._next_request_id = itertools.count(1).__next__
        self._pending: dict[int, tuple[float, OnReply]] = {}
        """By request: when it expires, and what to call then or with its reply."""
        self._next_expiry = NEVER
        """No request expires earlier."""
        self._owed_since = NEVER
        """Since when the daemon has owed a reply without sending any."""
        self._handshake_deadline = NEVER
        self._role_due = NEVER
        """When to call _role_tick at the latest."""
        # When to connect again.
        self._retry_at = self._ready_at = 0.0
        self._pause_s = self._absent_pause_s = BACKOFF_MIN_S
        self._refused_pause_s = options.backoff_max_s
        """After the next refusal."""
        if transport is None:
            from kvoffd_client.transport import SocketTransport

            transport = SocketTransport(self.directory)
        self._transport = transport

    # --- for any thread --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the session is open, with all that the client opens in it, and the daemon answers."""
        return self._phase is Phase.READY and self._responsive and self._wanted

    @property
    def problem(self) -> str | None:
        """A sentence that says why the client is not ready; None while it is."""
        return None if self.ready else self._problem

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

    def poll(self) -> None:
        """Read answers that have arrived, in this thread; otherwise they are read when the client's thread gets to it.

        For callers that are about to read lookups and busy otherwise: a thread that computes keeps the GIL from the
        client's own thread for up to ``sys.getswitchinterval()``.
        """
        self._transport.wait(bool, 0.0)

    def close(self) -> None:
        """End the session and the thread, in less than a second; what has no answer fails. Repeatable."""
        self._transport.stop()

    # --- time ------------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """The time at which tick() must be called at the latest."""
        phase = self._phase
        if phase is Phase.READY:
            return min(self._next_expiry, self._silent_at(), self._role_due)
        if phase is Phase.CLOSED:
            return NEVER
        return min(self._retry_at if phase is Phase.IDLE else self._handshake_deadline, self._role_due)

    def _silent_at(self) -> float:
        """When the client will not wait for a reply any longer. In a handshake its deadline says that."""
        return self._owed_since + self._options.unresponsive_after_s * (1 if self._responsive else DEAF_AFTER)

    def tick(self, now: float) -> None:
        """Do what is due: connect, expire requests."""
        if now < self.wake_at():
            return
        if self._phase is Phase.IDLE and now >= self._retry_at:
            self._connect(now)
        if now >= self._handshake_deadline:
            self.disconnect(self._problem, now)
        if now >= self._next_expiry:
            self._expire(now)
        if self._phase is Phase.READY and now >= self._silent_at():
            sentence = f"The kvoffd daemon in {self.directory} does not answer; going on without it."
            if self._responsive:
                self._responsive, self._problem = False, sentence
                self._warn(sentence)
                self._transport.notify()
            else:
                self.disconnect(sentence, now)
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
        if self._phase is not Phase.READY and self._phase is not Phase.HANDSHAKE:
            return
        if not self._responsive:
            self._responsive, self._last_warning = True, ""
        _, on_reply = self._pending.pop(reply.request_id, (0.0, None))
        self._owed_since = now if self._pending else NEVER
        if isinstance(reply, m.Error):
            refusal = RequestRefused(reply.code, reply.message)
            if on_reply is not None:
                on_reply(refusal, now)
            else:
                self._on_unexpected_refusal(reply, refusal, now)
            if reply.code in ENDED_SESSION and self._phase in CONNECTED:
                self.disconnect(str(refusal), now)
        elif on_reply is not None:
            on_reply(reply, now)
        else:
            self._on_late_reply(reply)
        self._transport.notify()

    def _expire(self, now: float) -> None:
        late = [request_id for request_id, (deadline, _) in self._pending.items() if deadline <= now]
        for request_id in late:
            entry = self._pending.pop(request_id, None)
            if entry is not None:  # a callback may have ended the session, and all its requests with it
                entry[1](RequestTimeout("The kvoffd daemon did not answer in time; try again later."), now)
                self._transport.notify()
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
            self.disconnect(why_unreachable(error, self.directory), now)
            return
        self._problem = (
            f"What listens in {self.directory} accepts connections but does not answer; if it is the kvoffd daemon, "
            "see its log, and whether its process is stopped (ps, systemctl status)."
        )
        self._absent_pause_s = BACKOFF_MIN_S
        self._phase = Phase.GREETING
        self._handshake_deadline = now + self._options.handshake_timeout_s

    def on_lifeline_message(self, message: FromDaemon, now: float) -> None:
        """Take a frame of the lifeline."""
        if self._phase not in CONNECTED:
            return
        if isinstance(message, Refused | AttachRefused):
            self._end_refused(RequestRefused(message.code, message.message), now)
        elif isinstance(message, Greeting) and message.protocol_version != m.PROTOCOL_VERSION:
            sentence = (
                f"The daemon in {self.directory} speaks protocol {message.protocol_version} and this client "
                f"{m.PROTOCOL_VERSION}; install the same kvoffd release on both."
            )
            self._end_refused(RequestRefused(ErrorCode.BAD_VERSION, sentence), now)
        elif isinstance(message, Greeting) and self._phase is Phase.GREETING:
            self.epoch, self.session_id = message.epoch, message.session_id
            self._limits = None  # those of another daemon may be too low for a handshake
            self._phase = Phase.HANDSHAKE
            self._transport.connect(routing_id(message.token), self._topics())
            self._shake(self._hello(), self._on_welcome, now)
        elif isinstance(message, Attached) and self._phase is Phase.HANDSHAKE:
            self._on_attached(message, now)
        elif not isinstance(message, MemoryReleased):  # the EOF follows
            self.disconnect(f"The daemon sent {type(message).__name__} out of turn.", now)

    def _hello(self) -> m.Hello:
        who = self.role, self.name, self._software, self._options.operator
        return m.Hello(self._next_request_id(), m.PROTOCOL_VERSION, *who)

    def _shake(self, message: m.Request[ReplyT], then: Callable[[ReplyT, float], None], now: float) -> None:
        """Send a request of the handshake; ``then`` takes its reply. The handshake's deadline is the request's too."""
        kind = type(message)

        def on_reply(reply: ReplyOrError, now: float) -> None:
            if isinstance(reply, m.answer_type(kind)):
                then(reply, now)
            elif isinstance(reply, RequestRefused):
                self._end_refused(reply, now)
            elif self._phase in CONNECTED:  # else disconnect() has failed this request
                what = str(reply) if isinstance(reply, KvoffdClientError) else type(reply).__name__
                self.disconnect(f"The daemon's answer to {kind.__name__}: {what}", now)

        self._send(message, now, on_reply, NEVER)

    def _on_welcome(self, reply: m.Welcome, now: float) -> None:
        self._limits, self._credit_bytes = reply.limits, reply.credit_bytes
        if (one := self._to_open) is None:
            self._become_ready(now)
            return
        geometry = one.fingerprint, one.label, one.world_size, one.key_bytes, list(one.groups)
        message = m.OpenNamespace(self._next_request_id(), *geometry, one.description)
        self._shake(message, self._on_opened, now)

    def _on_opened(self, reply: m.NamespaceOpened, now: float) -> None:
        self.reported_prefill_rate = reply.prefill_tokens_per_second
        self._on_namespace_opened(now)

    def _become_ready(self, now: float) -> None:
        self._phase, self._ready_at = Phase.READY, now
        self._handshake_deadline = NEVER
        self.refusal, self._last_warning = None, ""
        self._refused_pause_s = self._options.backoff_max_s
        log.info("%s is connected to the kvoffd daemon in %s", self.name, self.directory)
        self._transport.notify()

    def _end_refused(self, refusal: RequestRefused, now: float) -> None:
        self.disconnect(f"The kvoffd daemon in {self.directory} refuses: {refusal}", now, refusal)

    # --- the end of a connection -----------------------------------------------------------------

    def on_lifeline_end(self, now: float, released: bool = True) -> None:
        """EOF: the daemon is dead, or has ended this session. ``released``: it is known to touch no memory any more."""
        if self._phase in CONNECTED:
            self.disconnect(f"The kvoffd daemon in {self.directory} went away.", now, released=released)

    def on_released(self, now: float) -> None:
        """After a disconnect that drains: the daemon has released the session's memory, or its process is gone."""
        if self._phase is Phase.DRAINING:
            self._phase = Phase.IDLE
            self._role_disconnected(now)
            self._transport.notify()

    def disconnect(
        self, sentence: str, now: float, refusal: RequestRefused | None = None, *, released: bool = False
    ) -> None:
        """End the connection and plan the next attempt. ``released``: the daemon touches the memory no more."""
        if self._phase in (Phase.CLOSED, Phase.DRAINING):
            return
        if self._phase is Phase.READY and now - self._ready_at > self._options.backoff_max_s:
            self._pause_s = BACKOFF_MIN_S
        pause_s, longest_s = self._pause_s, self._options.backoff_max_s
        if self._phase is Phase.IDLE:  # nobody listens
            pause_s, self._absent_pause_s = self._absent_pause_s, min(2 * self._absent_pause_s, BACKOFF_ABSENT_S)
            self._refused_pause_s = self._options.backoff_max_s  # the next daemon may take this client
        else:
            self._pause_s = min(2 * self._pause_s, longest_s)
        if refusal is not None:
            pause_s, longest_s = self._refused_pause_s, max(longest_s, BACKOFF_REFUSED_S)
            self._refused_pause_s = min(2 * pause_s, longest_s)
        self._retry_at = now + min(pause_s, longest_s) * self._rng.uniform(0.5, 1.0)
        self.refusal = refusal
        self._warn(sentence)
        drain = not released and self._must_drain()
        self._end(Phase.DRAINING if drain else Phase.IDLE, sentence, now)

    def on_close(self, now: float) -> None:
        """End for good: ``close()`` was called."""
        if self._phase is not Phase.CLOSED:
            self._end(Phase.CLOSED, "The client is closed.", now)

    def _end(self, phase: Phase, sentence: str, now: float) -> None:
        self._phase, self._problem = phase, sentence
        self._transport.disconnect(drain=phase is Phase.DRAINING)
        self._responsive = True
        self._handshake_deadline = self._next_expiry = self._owed_since = NEVER
        pending, self._pending = self._pending, {}
        for _, on_reply in pending.values():
            on_reply(DaemonUnavailable(sentence), now)
        self._role_disconnected(now)
        self._transport.notify()

    def _warn(self, sentence: str) -> None:
        """Log once per outage and reason."""
        if sentence != self._last_warning:
            self._last_warning = sentence
            log.warning("%s", sentence)

    # --- what roles add --------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take a message from the events socket."""

    def _topics(self) -> Sequence[bytes]:
        return ()

    def _on_namespace_opened(self, now: float) -> None:
        self._become_ready(now)

    def _on_attached(self, message: Attached, now: float) -> None:
        self.disconnect("The daemon acknowledged a descriptor that was not sent.", now)

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        if now - self._refusal_logged_at >= REFUSALS_LOGGED_S:
            self._refusal_logged_at = now
            log.warning("The kvoffd daemon refused a message: %s", refusal)

    def _on_late_reply(self, reply: m.AnyReply) -> None:
        """Nobody waits for it any more: the daemon stood still."""

    def _role_disconnected(self, now: float) -> None:
        """The connection has ended; once more when the session has drained."""

    def _role_tick(self, now: float) -> None: ...

    def _must_drain(self) -> bool:
        return False


def split_keys(counts: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Cut groups of so many keys into parts of at most ``most`` keys: of each part the groups' places, begins and ends.

    A group without keys is in one part too.
    """
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = most
    for place, count in enumerate(counts):
        begin = 0
        while begin < count or not begin:
            if not room:
                parts.append([])
                room = most
            end = min(count, begin + room)
            parts[-1].append((place, begin, end))
            room -= end - begin
            begin = max(end, 1)
    return parts
