"""A client's session with a daemon as a state machine: what a message means and what to send next.

A session knows no socket, no thread and no clock: a ``Link`` carries what it sends, its owner calls it with what
arrived and with the time. ``Connection`` runs it on real sockets; a simulator may run it on anything else. It is not
thread-safe: its owner holds one lock around every call.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from kvoffd_client.client_options import ClientOptions, Identity
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestRefused, why_unreachable
from kvoffd_client.pending_requests import NEVER, OnReply, PendingRequests, ReplyOrError
from kvoffd_proto import messages as m
from kvoffd_proto.codec import encode
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import session_topic
from kvoffd_proto.lifeline import Attach, Attached, AttachRefused, FromDaemon, Greeting, MemoryReleased, Refused

log = logging.getLogger("kvoffd_client")

ENDED_SESSION = (ErrorCode.BAD_TOKEN, ErrorCode.NO_HELLO)
"""Refusals that mean the daemon knows this session no more."""


class Link(Protocol):
    """Carries what a session sends. No call blocks."""

    def open(self) -> None:
        """Connect the lifeline. Raises OSError."""

    def open_sockets(self, topics: Sequence[bytes]) -> None:
        """Connect the jobs socket and the events socket, subscribed to ``topics``."""

    def attach(self, message: Attach, fd: int) -> None:
        """Send a descriptor over the lifeline. Raises OSError."""

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send one message to the jobs socket; False when its queue is full."""

    def close(self) -> None:
        """Close everything: to the daemon this is the client's death."""

    def close_draining(self, generation: int) -> None:
        """Close all but the reading half of the lifeline.

        The owner calls ``on_drained(generation)`` once the daemon touches the session's memory no more.
        """


class Phase(Enum):
    """How far the session has come in connecting."""

    WAITING = auto()
    GREETING = auto()
    HELLO = auto()
    NAMESPACE = auto()
    ATTACHING = auto()
    REGISTERING = auto()
    READY = auto()
    CLOSED = auto()


def new_lease_id(rng: random.Random) -> int:
    """A random id for a lease: who knows it may load."""
    return rng.randrange(2**32, 2**63)


class Session:
    """What all roles share: connecting, requests and replies, heartbeats, the end of a connection, connecting again.

    Attributes:
        generation: counts connections, failed attempts included.
        responsive: False while the daemon owes a reply for longer than ``unresponsive_after_s``.
        problem: a sentence that says why the session is not ready.
        refusal: the daemon's refusal, where that is the reason.
        on_change: called after every change that a thread may wait for.
    """

    def __init__(self, link: Link, identity: Identity, options: ClientOptions, rng: random.Random) -> None:
        self._link = link
        self._rng = rng
        self.identity = identity
        self.options = options
        self.phase = Phase.WAITING
        self.generation = 0
        self.epoch = 0
        self.session_id = 0
        self.token = b""
        self.limits: m.Limits | None = None
        self.capabilities: frozenset[str] = frozenset()
        self.credit_bytes = 0
        self.lease_ttl_s = 0.0
        self.responsive = True
        self.problem: str | None = f"The client has not reached the kvoffd daemon in {identity.directory} yet."
        self.refusal: RequestRefused | None = None
        self.on_change: Callable[[], None] = lambda: None
        self._pending = PendingRequests()
        self._next_request_id = 1
        self._retry_at = 0.0
        self._failed_attempts = 0
        self._absent_attempts = 0
        self._ready_at = 0.0
        self._handshake_deadline = NEVER
        self._heartbeat_interval_s = 1.0
        self._heartbeat_at = NEVER
        self._heartbeat_pending = False
        self._last_warning = ""
        # What roles set: topics besides the session's own, and when to call _role_tick at the latest.
        self._topics: Sequence[bytes] = ()
        self._role_wake_at = NEVER

    @property
    def usable(self) -> bool:
        """The session is open and the daemon answers: requests are worth sending."""
        return self.phase is Phase.READY and self.responsive

    # --- time ------------------------------------------------------------------------------------

    def wake_at(self) -> float:
        """The time at which tick() must be called at the latest."""
        if self.phase is Phase.CLOSED:
            return NEVER
        if self.phase is Phase.WAITING:
            return min(self._retry_at, self._role_wake_at)
        owed = self._pending.owed_since + self.options.unresponsive_after_s if self.responsive else NEVER
        return min(self._pending.next_expiry, self._handshake_deadline, self._heartbeat_at, owed, self._role_wake_at)

    def tick(self, now: float) -> None:
        """Do what is due: connect, expire requests, send a heartbeat."""
        if now < self.wake_at():
            return
        if self.phase is Phase.WAITING and now >= self._retry_at:
            self._connect(now)
        if now >= self._handshake_deadline:
            self.disconnect(self.problem or "The daemon did not finish the handshake.", now)
        silent = self.responsive and now >= self._pending.owed_since + self.options.unresponsive_after_s
        if now >= self._pending.next_expiry:
            self._pending.expire(now)
        if silent and self.responsive and self.phase is not Phase.WAITING:
            self.responsive = False
            self.problem = f"The kvoffd daemon in {self.identity.directory} does not answer; going on without it."
            self._warn(self.problem)
            self.on_change()
        if now >= self._heartbeat_at:
            self._send_heartbeat(now)
        self._role_tick(now)

    def retry_now(self, now: float) -> None:
        """Make the next attempt to connect now: a caller waits for it."""
        if self.phase is Phase.WAITING:
            self._retry_at = now

    # --- requests --------------------------------------------------------------------------------

    def next_request_id(self) -> int:
        self._next_request_id += 1
        return self._next_request_id

    def send(self, message: m.AnyRequest) -> KvoffdClientError | None:
        """Send a message without waiting for its reply; returns the reason when it cannot go out."""
        frame = encode(message)
        if self.limits is not None and len(frame) > self.limits.max_frame_bytes:
            limit = self.limits.max_frame_bytes
            sentence = f"The request has {len(frame)} bytes and the daemon takes {limit}; send less at a time."
            return RequestRefused(ErrorCode.TOO_LARGE, sentence)
        if not self._link.send((frame,)):
            return DaemonUnavailable(f"The daemon in {self.identity.directory} does not read its socket.")
        return None

    def request(self, message: m.AnyRequest, on_reply: OnReply, now: float, timeout_s: float | None = None) -> None:
        """Send a message; ``on_reply`` is called once, possibly before this returns."""
        if len(self._pending) >= self.options.max_pending_requests:
            on_reply(DaemonUnavailable(f"{len(self._pending)} requests wait for the daemon already."), now)
            return
        refused = self.send(message)
        if refused is not None:
            on_reply(refused, now)
            return
        deadline = now + (self.options.request_timeout_s if timeout_s is None else timeout_s)
        self._pending.add(message.request_id, deadline, on_reply, now)

    def on_reply(self, reply: m.AnyReply, now: float) -> None:
        if self.phase in (Phase.WAITING, Phase.GREETING, Phase.CLOSED):
            return
        if reply.epoch != self.epoch:
            self.disconnect("The daemon was restarted.", now)
            return
        if not self.responsive:
            self.responsive = True
            self.problem = None
            self._last_warning = ""
            self.on_change()
        on_reply = self._pending.take(reply.request_id, now)
        if isinstance(reply, m.Error):
            refusal = RequestRefused(reply.code, reply.message)
            if on_reply is not None:
                on_reply(refusal, now)
            else:
                self._on_unexpected_refusal(reply, refusal, now)
            if reply.code in ENDED_SESSION and self.token:
                self.disconnect(str(refusal), now)
        elif on_reply is not None:
            on_reply(reply, now)
        else:
            self._on_unasked_reply(reply, now)

    # --- connecting ------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        self.generation += 1
        try:
            self._link.open()
        except OSError as error:
            self._absent_attempts += 1
            self.disconnect(why_unreachable(error, self.identity.directory), now)
            return
        self.problem = (
            f"The kvoffd daemon in {self.identity.directory} accepts connections but does not answer; see its log, and "
            "whether its process is stopped (ps, systemctl status)."
        )
        self._absent_attempts = 0
        self.phase = Phase.GREETING
        self._handshake_deadline = now + self.options.handshake_timeout_s

    def on_lifeline_message(self, message: FromDaemon, now: float) -> None:
        if isinstance(message, Refused):
            self._end_refused(RequestRefused(message.code, message.message), now)
        elif isinstance(message, Greeting) and self.phase is Phase.GREETING:
            self._on_greeting(message, now)
        elif isinstance(message, Attached | AttachRefused) and self.phase is Phase.ATTACHING:
            self._on_attached(message, now)
        elif not isinstance(message, MemoryReleased):  # the EOF follows
            self.disconnect(f"The daemon sent {type(message).__name__} out of turn.", now)

    def _on_greeting(self, greeting: Greeting, now: float) -> None:
        if greeting.protocol_version != m.PROTOCOL_VERSION:
            sentence = (
                f"The daemon in {self.identity.directory} speaks protocol {greeting.protocol_version} and this client "
                f"{m.PROTOCOL_VERSION}; install the same kvoffd release on both."
            )
            self._end_refused(RequestRefused(ErrorCode.BAD_VERSION, sentence), now)
            return
        self._on_epoch(greeting.epoch)
        self.epoch, self.session_id, self.token = greeting.epoch, greeting.session_id, greeting.token
        self.limits = None  # those of another daemon may be too low for a handshake
        self.phase = Phase.HELLO
        self._link.open_sockets([session_topic(self.epoch, self.session_id), *self._topics])
        identity = self.identity
        name, software = identity.name[:128], identity.software[:128]
        hello = m.Hello(self.next_request_id(), self.token, m.PROTOCOL_VERSION, identity.role, name, software)
        self.request(hello, self._on_welcome, now, self.options.handshake_timeout_s)

    def _on_welcome(self, reply: ReplyOrError, now: float) -> None:
        if not isinstance(reply, m.Welcome):
            self._fail_handshake("Hello", reply, now)
            return
        self.limits = reply.limits
        self.capabilities = frozenset(reply.capabilities)
        self.credit_bytes = reply.credit_bytes
        self.lease_ttl_s = reply.lease_ttl_ms / 1000
        self._heartbeat_interval_s = reply.heartbeat_interval_ms / 1000
        spec = self.identity.namespace
        if spec is None:
            self._become_ready(now)
            return
        self.phase = Phase.NAMESPACE
        message = m.OpenNamespace(self.next_request_id(), self.token, *spec.wire_fields())
        self.request(message, self._on_namespace_opened, now, self.options.handshake_timeout_s)

    def _on_namespace_opened(self, reply: ReplyOrError, now: float) -> None:
        if isinstance(reply, m.NamespaceOpened):
            self._after_namespace_opened(now)
        else:
            self._fail_handshake("OpenNamespace", reply, now)

    def _become_ready(self, now: float) -> None:
        self.phase = Phase.READY
        self._ready_at = now
        self._handshake_deadline = NEVER
        self._heartbeat_at = now
        self.problem = None
        self.refusal = None
        self._last_warning = ""
        log.info("%s is connected to the kvoffd daemon in %s", self.identity.name, self.identity.directory)
        self._role_ready(now)
        self.on_change()

    def _fail_handshake(self, step: str, reply: ReplyOrError, now: float) -> None:
        if self.phase is Phase.WAITING:
            return  # disconnect() has failed this request and set the problem
        if isinstance(reply, RequestRefused):
            self._end_refused(reply, now)
        elif isinstance(reply, KvoffdClientError):
            self.disconnect(f"{step}: {reply}", now)
        else:
            self.disconnect(f"The daemon answered {step} with {type(reply).__name__}.", now)

    def _end_refused(self, refusal: RequestRefused, now: float) -> None:
        self.disconnect(f"The kvoffd daemon in {self.identity.directory} refuses: {refusal}", now, refusal)

    # --- the end of a connection -----------------------------------------------------------------

    def on_lifeline_end(self, now: float, released: bool = True) -> None:
        """EOF: the daemon is dead, or has ended this session. ``released``: it is known to touch no memory any more."""
        if self.phase is not Phase.WAITING:
            dead = released or not self._copies_outlive_lifeline()
            self.disconnect(f"The kvoffd daemon in {self.identity.directory} went away.", now, dead=dead)

    def on_drained(self, generation: int, now: float) -> None:
        """After ``close_draining``: the daemon, or its end, has let go of that session's memory."""

    def disconnect(
        self, sentence: str, now: float, refusal: RequestRefused | None = None, *, dead: bool = False
    ) -> None:
        """End the connection and plan the next attempt. ``dead``: the daemon touches the client's memory no more."""
        if self.phase is Phase.CLOSED:
            return
        if self.phase is Phase.READY and now - self._ready_at > self.options.backoff_max_s:
            self._failed_attempts = 0
        self.phase = Phase.WAITING
        if not dead and self._must_drain():
            self._link.close_draining(self.generation)
        else:
            self._link.close()
        self.problem, self.refusal = sentence, refusal
        self._warn(sentence)
        self._reset_connection(DaemonUnavailable(sentence), now)
        self._role_disconnected(dead, now)
        self._retry_at = now + self._retry_delay_s(refusal is not None) * self._rng.uniform(0.5, 1.0)
        self.on_change()

    def close(self, now: float) -> None:
        if self.phase is Phase.CLOSED:
            return
        self.phase = Phase.CLOSED
        self._link.close()
        self.problem = "The client is closed."
        self._reset_connection(DaemonUnavailable(self.problem), now)
        self._role_disconnected(True, now)
        self.on_change()

    def _reset_connection(self, reason: KvoffdClientError, now: float) -> None:
        self.token = b""
        self.credit_bytes = 0
        self.responsive = True
        self._heartbeat_pending = False
        self._handshake_deadline = self._heartbeat_at = NEVER
        self._pending.fail_all(reason, now)

    def _retry_delay_s(self, refused: bool) -> float:
        """Seconds until the next attempt, after one that is counted here as failed."""
        options = self.options
        if self._absent_attempts:
            most = min(options.backoff_absent_s, options.backoff_max_s)
            return min(most, options.backoff_min_s * 2.0 ** min(self._absent_attempts - 1, 30))
        self._failed_attempts += 1
        if refused:
            return options.backoff_max_s
        return min(options.backoff_max_s, options.backoff_min_s * 2.0 ** min(self._failed_attempts - 1, 30))

    def _warn(self, sentence: str) -> None:
        """Log once per outage and reason."""
        if sentence != self._last_warning:
            self._last_warning = sentence
            # An administrator's call raises the sentence; the log need not repeat it.
            log.log(logging.DEBUG if self.identity.role is m.Role.ADMIN else logging.WARNING, "%s", sentence)

    # --- heartbeat -------------------------------------------------------------------------------

    def _send_heartbeat(self, now: float) -> None:
        self._heartbeat_at = now + self._heartbeat_interval_s
        if self._heartbeat_pending or self.phase is not Phase.READY:
            return
        self._heartbeat_pending = True
        renew = self._renewals(now)
        message = m.Heartbeat(self.next_request_id(), self.token, self._acknowledged(), renew)
        self.request(message, lambda reply, reply_now: self._on_heartbeat_reply(reply, now, reply_now), now)

    def _on_heartbeat_reply(self, reply: ReplyOrError, sent_at: float, now: float) -> None:
        self._heartbeat_pending = False
        if isinstance(reply, m.HeartbeatReply):
            self.credit_bytes = reply.credit_bytes
            self._role_heartbeat(reply, sent_at, now)
        elif not isinstance(reply, KvoffdClientError):
            self.disconnect(f"The daemon answered Heartbeat with {type(reply).__name__}.", now)

    # --- what roles add --------------------------------------------------------------------------

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take a message from the events socket."""

    def on_event_replay(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        """Take a part of a KV event replay from the jobs socket."""

    def _after_namespace_opened(self, now: float) -> None:
        self._become_ready(now)

    def _on_attached(self, message: Attached | AttachRefused, now: float) -> None:
        self.disconnect("The daemon acknowledged a descriptor that was not sent.", now)

    def _on_epoch(self, epoch: int) -> None: ...

    def _role_ready(self, now: float) -> None: ...

    def _role_disconnected(self, dead: bool, now: float) -> None: ...

    def _role_tick(self, now: float) -> None: ...

    def _role_heartbeat(self, reply: m.HeartbeatReply, sent_at: float, now: float) -> None: ...

    def _must_drain(self) -> bool:
        return False

    def _copies_outlive_lifeline(self) -> bool:
        return False

    def _acknowledged(self) -> int:
        return 0

    def _renewals(self, now: float) -> list[int]:
        return []

    def _on_unasked_reply(self, reply: m.AnyReply, now: float) -> None: ...

    def _on_unexpected_refusal(self, reply: m.Error, refusal: RequestRefused, now: float) -> None:
        self._warn(f"The kvoffd daemon refused a message: {refusal}")
