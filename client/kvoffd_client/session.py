"""A client's session with a daemon: the protocol's state machine.

A session has no socket, thread or clock. A ``Transport`` sends its messages, has its lock, and calls its ``on_``
methods and ``tick`` with the lock held: ``SocketTransport`` has sockets, the simulator's has none. The clients of
scheduler, worker and administrator are sessions.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Protocol, Self, TypeVar

from kvoffd_client.errors import (
    SET_DIRECTORY,
    DaemonUnavailable,
    KvoffdClientError,
    RequestRefused,
    RequestTimeout,
    why_unreachable,
)
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.namespace import NamespaceSpec, is_positive
from kvoffd_proto import lifeline
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS, decode_request, encode
from kvoffd_proto.errors import ErrorCode

log = logging.getLogger("kvoffd_client")

ReplyT = TypeVar("ReplyT", bound=m.AnyReply)

BACKOFF_MIN_S = 0.05
"""Pause after the first failed connection attempt; it doubles with each further one."""
BACKOFF_ABSENT_S = 0.25
"""Longest pause between attempts while nobody listens: an attempt is cheap, and a restart takes a second."""
BACKOFF_REFUSED_S = 60.0
"""Longest pause after repeated refusals."""
GPU_REGISTER_S = 30.0
"""Time limit of a registration of GPU memory. At the first one the daemon starts the CUDA driver."""
DEAF_AFTER = 3
"""The client opens another session after this many ``unresponsive_after_s`` without a reply: another client may have
taken its routing id and get its replies."""
REFUSALS_LOGGED_S = 60.0
"""Least time between two log lines about refused messages."""
ENDED_SESSION = (ErrorCode.BAD_TOKEN, ErrorCode.NO_HELLO)
"""Refusals which mean that the daemon no longer knows this session."""

ReplyOrError = m.AnyReply | KvoffdClientError
"""A reply, or the reason why there is none. An Error becomes RequestRefused."""
OnReply = Callable[[ReplyOrError, float], None]
"""Callback of one request, called once with the answer and its time."""


class Closing:
    """Base of objects that a ``with`` block closes."""

    def close(self) -> None:
        """Release all resources. Repeatable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """Timeouts of one client, positive, in seconds.

    Raises:
        ValueError: a value is not a positive number; the message names it.
    """

    handshake_timeout_s: float = 5.0
    """Time from opening the lifeline to being ready; then the attempt fails."""
    request_timeout_s: float = 2.0
    """Time after which a request without a reply fails; a lookup is then a miss."""
    unresponsive_after_s: float = 5.0
    """Time for which a due reply may be missing; then the client counts as not connected, until a reply comes."""
    backoff_max_s: float = 2.0
    """Longest pause after failed connections to a daemon; also the pause after the first refusal."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not is_positive(value := getattr(self, field.name)):
                raise ValueError(f"The client option {field.name} must be a positive number; it is {value!r}.")


DEFAULT_OPTIONS = ClientOptions()


class Backoff:
    """Pause before the next attempt, which doubles with each failure.

    Args:
        first_s, longest_s: the first pause, and the longest one.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    def take(self) -> float:
        """Return the pause in seconds, and double the next one."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return min(pause_s, self._longest_s)

    def restart(self) -> None:
        """Begin with the first pause again."""
        self._next_s = self._first_s


class Transport(Protocol):
    """Sends and receives for one session, and has its lock. Only ``wait`` and ``stop`` block."""

    lock: AbstractContextManager[object]
    """The session's lock, for ``with``. Raises ForkedProcess in a forked child."""

    def start(self, session: Session) -> None:
        """Start to drive a session, calling its methods with the lock held."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``ready()``, called with the lock held, or the session is closed; return the value of ``ready()``.

        With a timeout of 0 it only reads messages that have arrived, in the caller's thread.
        """

    def stop(self) -> None:
        """Close the session and end the thread. Repeatable; does nothing in a forked child."""

    # With the lock held:

    def open(self) -> None:
        """Connect the lifeline. Raises OSError."""

    def connect(self, route: bytes, topics: Sequence[bytes]) -> None:
        """Connect the jobs socket under a routing id, and the events socket if there are topics to subscribe to.

        Raises OSError.
        """

    def attach(self, message: lifeline.Attach, fd: int) -> None:
        """Send a descriptor over the lifeline. Raises OSError."""

    def send(self, frame: bytes) -> bool:
        """Send a message to the jobs socket; False if its queue is full. ``tick`` may now be due earlier."""

    def disconnect(self, *, drain: bool) -> None:
        """Close all sockets, which ends the session for the daemon.

        With ``drain`` the lifeline is still read, and ``on_released`` is called once the daemon no longer accesses the
        session's memory.
        """

    def notify(self) -> None:
        """Wake waiting threads after a change of state, or because ``tick`` is due earlier."""


class Phase(Enum):
    """State of the connection."""

    IDLE = auto()
    GREETING = auto()
    """The lifeline is open, and the daemon has not sent Greeting."""
    HANDSHAKE = auto()
    """The session, its namespace and its registration are being opened."""
    OPEN = auto()
    """All of these are open. While the daemon does not answer the client is not ``ready``, but still sends what must
    not be lost, such as releases."""
    DRAINING = auto()
    """The connection has ended, but the daemon may still access the client's memory."""
    CLOSED = auto()


CONNECTED = (Phase.GREETING, Phase.HANDSHAKE, Phase.OPEN)


class Session(Closing):
    """Base of the clients: connecting, requests and replies, disconnecting, reconnecting.

    Public methods are thread-safe, and block only if their names or docstrings say wait; ``close()`` waits for the
    thread. ``on_`` and ``_`` methods, ``wake_at``, ``tick`` and ``disconnect`` need the lock.

    Args, besides those of SchedulerClient:
        namespace: opened or joined in the handshake; None for none.
        transport: real sockets by default.
        rng: for lease ids and pauses.

    Attributes:
        epoch: random number of the last connection's daemon run; 0 before the first connection.
        session_id: id of the session there.
        refusal: the daemon's refusal, if that is why the client is not ready.
        reported_prefill_rate: prefill rate, in tokens per second, that an engine of the namespace last reported to the
            daemon; 0.0 if none has.
        memory_on_gpu: whether access to the memory may last until the daemon's process is gone.
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
        self.directory_hint = SET_DIRECTORY
        self.role = role
        self.name = name[:128]
        self._software = software[:128]
        self._namespace_to_open = namespace
        self._options = options
        self._rng = rng or random.Random()
        self.epoch = self.session_id = 0
        self.refusal: RequestRefused | None = None
        self.reported_prefill_rate = 0.0
        self._phase = Phase.IDLE
        self._wanted = True
        """False after ``unregister``: the client will not become ready again."""
        self._responsive = True
        """False while a reply is overdue by more than ``unresponsive_after_s``."""
        self._problem = f"The client has not reached the kvoffd daemon in {self.directory} yet."
        self._outage = ""
        """Sentence that says why the daemon cannot be used; empty before the first attempt, and while it answers."""
        self._refusal_logged_at = -REFUSALS_LOGGED_S
        self._limits: m.Limits | None = None
        """The daemon's limits; None before Welcome."""
        self._credit_bytes = 0
        self._next_request_id = itertools.count(1).__next__
        self._pending: dict[int, tuple[float, OnReply]] = {}
        """Deadline and callback of each unanswered request, by id."""
        self._next_expiry = NEVER
        """Lower bound of the deadlines."""
        self._owed_since = NEVER
        """Time since which the daemon owes a reply: that of the last reply, or of the first request after it if none
        was unanswered then; NEVER if it owes none. A request that times out is still owed one."""
        self._handshake_deadline = NEVER
        self._role_due = NEVER
        """Latest time for the next _role_tick."""
        self._retry_at = 0.0
        """Time of the next attempt to connect."""
        self._open_since = 0.0
        """Time when the last session became open."""
        longest_s = options.backoff_max_s
        self._backoff = Backoff(BACKOFF_MIN_S, longest_s)
        """Pauses after connections that ended or failed in the handshake."""
        self._absent_backoff = Backoff(BACKOFF_MIN_S, min(BACKOFF_ABSENT_S, longest_s))
        """Pauses while nobody listens."""
        self._refused_backoff = Backoff(longest_s, max(BACKOFF_REFUSED_S, longest_s))
        """Pauses after refusals."""
        if transport is None:
            from kvoffd_client.transport import SocketTransport

            transport = SocketTransport(self.directory)
        self._transport = transport

    # --- for any thread --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the session, its namespace and its registration are open, and the daemon answers."""
        return self._phase is Phase.OPEN and self._responsive and self._wanted

    @property
    def problem(self) -> str | None:
        """Sentence that says why the client is not ready; None while it is."""
        return None if self.ready else self._problem

    @property
    def unreachable(self) -> bool:
        """Whether the last attempt to connect failed, the connection ended, or the daemon does not answer."""
        return bool(self._outage)

    @property
    def credit_bytes(self) -> int:
        """Bytes of stores that may be outstanding, including running ones; 0 when not ready."""
        return self._credit_bytes if self.ready else 0

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until ready; False if it is not after ``timeout_s`` seconds."""
        return self._transport.wait(lambda: self.ready, timeout_s)

    def wait_settled(self, timeout_s: float) -> bool:
        """As wait_ready(), but return as soon as the daemon refuses this client; see ``refusal``."""
        self._transport.wait(lambda: self.ready or self.refusal is not None, timeout_s)
        return self.ready

    def poll(self) -> None:
        """Read answers that have arrived, in the caller's thread.

        Call it before reading lookups in a thread that computes: such a thread can keep the GIL from the client's own
        thread for up to ``sys.getswitchinterval()``.
        """
        self._transport.wait(lambda: False, 0.0)

    def close(self) -> None:
        """End the session and the thread, in less than a second. Unanswered requests fail. Repeatable."""
        self._transport.stop()

    # --- time ------------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """Return the latest time for the next tick()."""
        phase = self._phase
        if phase is Phase.OPEN:
            return min(self._next_expiry, self._silence_due(), self._role_due)
        if phase is Phase.CLOSED:
            return NEVER
        return min(self._retry_at if phase is Phase.IDLE else self._handshake_deadline, self._role_due)

    def _silence_due(self) -> float:
        """Return when the daemon's silence has its next consequence in an open session: first the client counts as not
        connected, then it opens another session."""
        return self._owed_since + self._options.unresponsive_after_s * (1 if self._responsive else DEAF_AFTER)

    def tick(self, now: float) -> None:
        """Do what is due: connect, expire requests."""
        if now < self.wake_at():
            return
        if self._phase is Phase.IDLE and now >= self._retry_at:
            self._connect(now)
        if now >= self._handshake_deadline:
            self.disconnect(self._problem, now)  # the sentence of _connect
        if now >= self._next_expiry:
            self._expire(now)
        if self._phase is Phase.OPEN and now >= self._silence_due():
            sentence = f"The kvoffd daemon in {self.directory} does not answer; continuing without it."
            if self._responsive:
                self._responsive, self._problem = False, sentence
                self._note_outage(sentence)
                self._transport.notify()
            else:
                self.disconnect(sentence, now)
        self._role_tick(now)

    # --- requests --------------------------------------------------------------------------------

    def _send(
        self,
        message: m.AnyRequest,
        now: float = 0.0,
        callback: OnReply | None = None,
        timeout_s: float | None = None,
    ) -> KvoffdClientError | None:
        """Send a message; return the error if it cannot be sent.

        ``callback`` is called once, perhaps before this returns, with the reply or the reason why there is none. Only
        with one: ``now`` is the time of the request, and ``timeout_s`` its limit, ``request_timeout_s`` by default.
        """
        frame, limits, owed_before = encode(message), self._limits, self._owed_since
        refused: KvoffdClientError | None = None
        if limits is not None and len(frame) > limits.max_frame_bytes:
            sentence = f"The request has {len(frame)} bytes; the daemon's limit is {limits.max_frame_bytes}. Send less."
            refused = RequestRefused(ErrorCode.TOO_LARGE, sentence)
        else:
            if callback is not None:  # before send(), which reads wake_at()
                deadline = now + (self._options.request_timeout_s if timeout_s is None else timeout_s)
                self._pending[message.request_id] = deadline, callback
                self._next_expiry = min(self._next_expiry, deadline)
                self._owed_since = min(owed_before, now)
            if not self._transport.send(frame):
                self._pending.pop(message.request_id, None)
                self._owed_since = owed_before
                refused = DaemonUnavailable(f"The daemon in {self.directory} does not read its socket.")
        if callback is not None and refused is not None:
            callback(refused, now)
        return refused

    def on_reply(self, reply: m.AnyReply, now: float) -> None:
        """Handle a reply from the jobs socket."""
        if self._phase is not Phase.OPEN and self._phase is not Phase.HANDSHAKE:
            return
        if not self._responsive:
            self._responsive, self._outage = True, ""
        _, callback = self._pending.pop(reply.request_id, (0.0, None))
        self._owed_since = now if self._pending else NEVER
        if isinstance(reply, m.Error):
            refusal = RequestRefused(reply.code, reply.message)
            if callback is not None:
                callback(refusal, now)
            else:
                self._on_other_refusal(reply, refusal, now)
            if reply.code in ENDED_SESSION and self._phase in CONNECTED:  # the callback may have disconnected
                self.disconnect(str(refusal), now)
        elif callback is not None:
            callback(reply, now)
        else:
            self._on_late_reply(reply)
        self._transport.notify()

    def _expire(self, now: float) -> None:
        """Fail late requests, and send another Hello, which any daemon that lives answers: a reply that was lost must
        not make it seem silent."""
        late = [request_id for request_id, (deadline, _) in self._pending.items() if deadline <= now]
        for request_id in late:
            _, callback = self._pending.pop(request_id, (0.0, None))
            if callback is not None:  # else an earlier callback has ended the session and its requests
                callback(RequestTimeout("The kvoffd daemon did not answer in time; try again later."), now)
                self._transport.notify()
        self._next_expiry = min((deadline for deadline, _ in self._pending.values()), default=NEVER)
        # If nothing is late, the Hello of an earlier call could not be sent (see below), and this is another attempt.
        must_ask = bool(late) or (self._owed_since < NEVER and not self._pending)
        if must_ask and self._phase is Phase.OPEN:
            self._send(self._hello(), now, lambda *_: None)
            if not self._pending:  # the socket's queue is full
                self._next_expiry = now + self._options.request_timeout_s

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        """Open the lifeline. The daemon's Greeting on it begins the handshake."""
        try:
            self._transport.open()
        except OSError as error:
            self.disconnect(why_unreachable(error, self.directory, self.directory_hint), now)
            return
        self._problem = (
            f"The server in {self.directory} accepts connections but does not answer; if it is kvoffd, check "
            "its log, and whether its process is stopped (ps, systemctl status)."
        )
        self._absent_backoff.restart()
        self._phase = Phase.GREETING
        self._handshake_deadline = now + self._options.handshake_timeout_s

    def on_lifeline_message(self, message: lifeline.FromDaemon, now: float) -> None:
        """Handle a frame of the lifeline."""
        if self._phase not in CONNECTED:
            return
        if isinstance(message, lifeline.Refused | lifeline.AttachRefused):
            self._end_refused(RequestRefused(message.code, message.message), now)
        elif isinstance(message, lifeline.Greeting) and message.protocol_version != m.PROTOCOL_VERSION:
            sentence = (
                f"The daemon in {self.directory} has protocol {message.protocol_version} and this client "
                f"{m.PROTOCOL_VERSION}; install the same kvoffd release on both."
            )
            self._end_refused(RequestRefused(ErrorCode.BAD_VERSION, sentence), now)
        elif isinstance(message, lifeline.Greeting) and self._phase is Phase.GREETING:
            self.epoch, self.session_id = message.epoch, message.session_id
            self._limits = None  # another daemon's limits may be too low for the handshake
            self._phase = Phase.HANDSHAKE
            try:
                self._transport.connect(lifeline.routing_id(message.token), self._topics())
            except OSError as error:
                self.disconnect(why_unreachable(error, self.directory, self.directory_hint), now)
                return
            self._send_handshake(self._hello(), self._on_welcome, now)
        elif isinstance(message, lifeline.Attached) and self._phase is Phase.HANDSHAKE:
            self._on_attached(message, now)
        elif not isinstance(message, lifeline.MemoryReleased):  # its EOF follows
            self.disconnect(f"The daemon sent {type(message).__name__} out of turn.", now)

    def _hello(self) -> m.Hello:
        return m.Hello(self._next_request_id(), m.PROTOCOL_VERSION, self.role, self.name, self._software)

    def _send_handshake(self, message: m.Request[ReplyT], then: Callable[[ReplyT, float], None], now: float) -> None:
        """Send a request of the handshake; ``then`` handles its reply. The handshake's deadline applies."""
        kind = type(message)

        def on_answer(reply: ReplyOrError, now: float) -> None:
            if isinstance(reply, m.answer_type(kind)):
                then(reply, now)
            elif isinstance(reply, RequestRefused):
                self._end_refused(reply, now)
            elif self._phase in CONNECTED:  # else disconnect() has already failed this request
                what = str(reply) if isinstance(reply, KvoffdClientError) else type(reply).__name__
                self.disconnect(f"The daemon's answer to {kind.__name__}: {what}", now)

        self._send(message, now, on_answer, NEVER)

    def _on_welcome(self, reply: m.Welcome, now: float) -> None:
        self._limits, self._credit_bytes = reply.limits, reply.credit_bytes
        if (one := self._namespace_to_open) is None:
            self._become_open(now)
            return
        geometry = one.fingerprint, one.label, one.world_size, one.key_bytes, list(one.groups)
        message = m.OpenNamespace(self._next_request_id(), *geometry, one.description)
        self._send_handshake(message, self._on_namespace_opened, now)

    def _on_namespace_opened(self, reply: m.NamespaceOpened, now: float) -> None:
        """Handle the last answer of the handshake, except a worker's."""
        self.reported_prefill_rate = reply.prefill_tokens_per_second
        self._become_open(now)

    def _become_open(self, now: float) -> None:
        self._phase, self._open_since = Phase.OPEN, now
        self._handshake_deadline = NEVER
        self.refusal, self._outage = None, ""
        self._refused_backoff.restart()
        log.info("%s is connected to the kvoffd daemon in %s", self.name, self.directory)
        self._transport.notify()

    def _end_refused(self, refusal: RequestRefused, now: float) -> None:
        self.disconnect(f"The kvoffd daemon in {self.directory} refuses: {refusal}", now, refusal)

    # --- the end of a connection -----------------------------------------------------------------

    def on_lifeline_end(self, now: float, released: bool = True) -> None:
        """Handle EOF: the daemon died or ended this session. ``released``: it no longer accesses the memory."""
        if self._phase in CONNECTED:
            self.disconnect(f"The kvoffd daemon in {self.directory} has ended the connection.", now, released=released)

    def on_released(self, now: float) -> None:
        """End draining: the daemon has released the session's memory, or its process is gone."""
        if self._phase is Phase.DRAINING:
            self._phase = Phase.IDLE
            self._role_disconnected(now)
            self._transport.notify()

    def disconnect(
        self, sentence: str, now: float, refusal: RequestRefused | None = None, *, released: bool = False
    ) -> None:
        """End the connection and schedule the next attempt. ``released``: the daemon no longer accesses the memory."""
        if self._phase in (Phase.CLOSED, Phase.DRAINING):
            return
        if refusal is not None:
            backoff = self._refused_backoff
        elif self._phase is Phase.IDLE:  # the lifeline could not be opened
            backoff = self._absent_backoff
            self._refused_backoff.restart()  # the next daemon may accept this client
        else:
            backoff = self._backoff
            if self._phase is Phase.OPEN and now - self._open_since > self._options.backoff_max_s:
                backoff.restart()  # it was stable
        self._retry_at = now + backoff.take() * self._rng.uniform(0.5, 1.0)
        self.refusal = refusal
        self._note_outage(sentence)
        drain = not released and self._phase in CONNECTED and self._must_drain()
        self._end(Phase.DRAINING if drain else Phase.IDLE, sentence, now)

    def on_close(self, now: float) -> None:
        """End the session for good, after ``close()``."""
        if self._phase is not Phase.CLOSED:
            self._end(Phase.CLOSED, "The client is closed.", now)

    def _end(self, phase: Phase, sentence: str, now: float) -> None:
        self._phase, self._problem = phase, sentence
        self._transport.disconnect(drain=phase is Phase.DRAINING)
        self._responsive = True
        self._handshake_deadline = self._next_expiry = self._owed_since = NEVER
        pending, self._pending = self._pending, {}
        for _, callback in pending.values():
            callback(DaemonUnavailable(sentence), now)
        self._role_disconnected(now)
        self._transport.notify()

    def _note_outage(self, sentence: str) -> None:
        if sentence != self._outage:
            self._outage = sentence
            self._warn(sentence)

    # --- hooks for the roles ---------------------------------------------------------------------

    def _warn(self, sentence: str) -> None:
        """Log why the daemon cannot be used. Called once for each cause in an outage."""
        log.warning("%s", sentence)

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Handle a message from the events socket."""

    def _topics(self) -> Sequence[bytes]:
        return ()

    def _on_attached(self, message: lifeline.Attached, now: float) -> None:
        self.disconnect("The daemon acknowledged a descriptor that was not sent.", now)

    def _on_other_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        """Handle the refusal of a message that has no callback, or whose request has timed out."""
        if now - self._refusal_logged_at >= REFUSALS_LOGGED_S:
            self._refusal_logged_at = now
            log.warning("The kvoffd daemon refused a message: %s", refusal)

    def _on_late_reply(self, reply: m.AnyReply) -> None:
        """Handle a reply after its request has timed out."""

    def _role_disconnected(self, now: float) -> None:
        """Handle the end of the connection, and again the end of draining."""

    def _role_tick(self, now: float) -> None:
        """Do what is due at ``_role_due``, and set that. Also called earlier, and in every phase."""

    def _must_drain(self) -> bool:
        """Return whether a connection that ends must wait until the daemon no longer accesses the memory."""
        return False


def check(message: m.AnyRequest) -> None:
    """Raise ValueError if the daemon would not take the message for one of the protocol."""
    try:
        decode_request(encode(message))
    except (*CODEC_ERRORS, TypeError, OverflowError) as error:
        what, path = str(error), re.search(r" - at `\$\[(\d+)\](.*)`$", str(error))
        where = ""
        if path is not None:
            # Element 0 is the tag.
            where = f".{message.__struct_fields__[int(path[1]) - 1]}{path[2]}"
            what = what[: path.start()]
        raise ValueError(f"{type(message).__name__}{where}: {what}.") from None
