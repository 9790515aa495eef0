"""An administrator's client over the daemon's sockets."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

import msgspec
import zmq

from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestTimeout
from kvoffd_client.health_request import ask_health
from kvoffd_client.session import DEFAULT_OPTIONS, ClientOptions, Closing, Phase, ReplyOrError, Session, Transport
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto import stats as s
from kvoffd_proto.events import KV_TOPIC_PREFIX, EventBatch, decode_event_batch
from kvoffd_proto.messages import Request, answer_type
from kvoffd_proto.paths import SocketPaths

OPERATOR_WAIT_S = 10.0
"""The machine may be busy, and an operator would rather wait than ask again."""
OPERATOR_OPTIONS = ClientOptions(request_timeout_s=OPERATOR_WAIT_S, handshake_timeout_s=OPERATOR_WAIT_S)
EVENTS_QUEUE = 10_000
"""Messages that wait for events() to be asked for the next; beyond it they are dropped."""
EVENTS_POLL_MS = 200
"""How soon events() notices close()."""

MIN_PREFIX_DIGITS = 4
"""Fewer hex digits of a fingerprint could name a namespace by a slip of the hand."""

Fields = ParamSpec("Fields")
ReplyT = TypeVar("ReplyT", bound=m.AnyReply)
T = TypeVar("T")
MakeRequest = Callable[[int], m.AnyRequest]
"""Makes a request of its id."""


def matching_namespaces(namespaces: Iterable[a.NamespaceInfo], name: str) -> list[a.NamespaceInfo]:
    """Return the namespaces whose label is ``name``, or whose fingerprint begins with it."""
    digits = name.lower() if len(name) >= MIN_PREFIX_DIGITS else None
    return [
        namespace
        for namespace in namespaces
        if namespace.label == name or (digits is not None and namespace.namespace.hex().startswith(digits))
    ]


class AdminSession(Session):
    """The administrator's session: requests whose outcome is waited for.

    Attributes:
        attempts_failed: attempts to connect, and connections, that ended.
    """

    def __init__(
        self,
        directory: str,
        options: ClientOptions,
        transport: Transport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(directory, m.Role.ADMIN, "admin", "", None, options, transport, rng)
        self.attempts_failed = 0
        self._transport.start(self)

    def connect_now(self, deadline: float) -> bool:
        """Connect without a pause, and wait; False at the deadline, or when an attempt has failed."""
        with self._transport.locked() as now:
            before = self.attempts_failed
            if self._phase is Phase.IDLE:
                self._retry_at = now
        self._transport.wait(lambda: self.ready or self.attempts_failed > before, deadline - time.monotonic())
        return self.ready

    def ask(self, make: MakeRequest, timeout_s: float) -> ReplyOrError:
        """Send a request and wait for its reply, or for the reason why there is none."""
        outcome = self._outcome_of(partial(self.begin, make), timeout_s)
        return outcome[0] if outcome else RequestTimeout()

    def begin(self, make: MakeRequest, outcome: list[ReplyOrError], now: float, timeout_s: float) -> None:
        """Send a request; its reply, or why there is none, is appended to ``outcome``. With the lock held."""
        if not self.ready:
            outcome.append(DaemonUnavailable(self._problem or "The client is not connected."))
            return

        def on_reply(reply: ReplyOrError, _: float) -> None:
            outcome.append(reply)
            self._transport.notify()

        self._request(make(self._next_request_id()), on_reply, now, timeout_s)

    def _role_disconnected(self, now: float) -> None:
        self.attempts_failed += 1


class AdminClient(Closing):
    """An administrator's client. Connects at the first call. Thread-safe.

    Each call waits for its answer. All calls raise:
        DaemonUnavailable: nothing listens there, or it refuses this user; the sentence names the place.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.

    Attributes:
        timeout_s: bounds every call; may be changed between two calls.
        deadline: of ``time.monotonic``: bounds all calls together, the connecting in them included.

    Args:
        directory: where the daemon's sockets are.
        options: ``request_timeout_s`` bounds every call, the connecting in it included.
    """

    def __init__(self, directory: str | os.PathLike[str], options: ClientOptions = DEFAULT_OPTIONS) -> None:
        self._directory = os.fspath(directory)
        self._options = options
        self.timeout_s = options.request_timeout_s
        self.deadline = inf
        self._admin: AdminSession | None = None
        self._closed = False
        self._one_call = threading.Lock()

    def ask(
        self,
        kind: Callable[Concatenate[int, Fields], Request[ReplyT]],
        *fields: Fields.args,
        **named: Fields.kwargs,
    ) -> ReplyT:
        """Send a request; returns its reply, of the type that is declared at the request.

        >>> client.ask(Clear, fingerprint).count                                               # doctest: +SKIP

        Args:
            kind: the request's class, of ``kvoffd_proto.messages``.
            fields: its fields after the id.
        """
        reply = self._round_trip(lambda request_id: kind(request_id, *fields, **named))
        if not isinstance(reply, answer_type(cast("type[Request[ReplyT]]", kind))):
            raise DaemonUnavailable(f"The daemon in {self._directory} answered with a {type(reply).__name__}.")
        return reply

    def stats(self) -> s.StatsReply:
        return self.ask(s.Stats)

    def health(self) -> a.HealthReply:
        """Whether the daemon works: a round trip through the loop that serves engines.

        Needs no session, so it is answered when all are taken. Where nothing answers, the attempt to open one says why.
        """
        return ask_health(Path(self._directory), self._call_deadline()) or self.ask(a.Health)

    def sessions(self) -> a.SessionsReply:
        """Open sessions, oldest first."""
        return self.ask(a.Sessions)

    def namespaces(self) -> a.NamespacesReply:
        """Open namespaces, oldest first."""
        return self.ask(a.Namespaces)

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Drop every block of one namespace, or of all; returns how many."""
        return self.ask(a.Clear, fingerprint).count

    def set_quota(self, fingerprint: bytes, quota_bytes: int | None) -> None:
        """Set the most bytes that a namespace may have of the pool; None takes the quota away."""
        self.ask(a.SetQuota, fingerprint, quota_bytes)

    def reset_fleet(self, fingerprint: bytes) -> int:
        """Make every block of a namespace void on all nodes that share a store; returns how many stores were told."""
        return self.ask(a.ResetFleet, fingerprint).count

    def describe_policy(self, fingerprint: bytes | None = None, group: int = 0, key: bytes = b"") -> a.PolicyDescribed:
        """What the eviction policy has learned, and what it knows of one key of a namespace."""
        return self.ask(a.DescribePolicy, fingerprint, group, key)

    def record(self, recording: int = 0, *, end: bool = False) -> a.Recorded:
        """Begin to record what engines ask for, or fetch what came since; the reply has the recording's number."""
        return self.ask(a.Record, recording, end)

    def scrub(self, start: bool = True) -> a.ScrubReply:
        """Have every readable block compared with its checksum, in the daemon's background; returns how far that is.

        Args:
            start: begin, unless it is being done already. False only asks.
        """
        return self.ask(a.Scrub, start)

    def events(self, idle_timeout_s: float | None = None) -> Iterator[tuple[bytes, int, EventBatch]]:
        """Yield (topic, sequence, batch) of all KV events from now on, also past restarts of the daemon.

        Ends when close() was called, or after ``idle_timeout_s`` seconds without an event. Needs no session.

        Raises:
            DaemonUnavailable: there is no events socket in the directory.
        """
        path = SocketPaths(Path(self._directory)).events
        if not path.exists():
            raise DaemonUnavailable(f"There is no kvoffd daemon in {self._directory}; start one there.")
        with zmq.Context() as context, context.socket(zmq.SUB) as subscription:
            subscription.setsockopt(zmq.LINGER, 0)
            subscription.setsockopt(zmq.RCVHWM, EVENTS_QUEUE)
            subscription.setsockopt(zmq.SUBSCRIBE, KV_TOPIC_PREFIX)
            subscription.connect(f"ipc://{path}")
            last_event_at = time.monotonic()
            while not self._closed:
                if subscription.poll(EVENTS_POLL_MS):
                    frames = subscription.recv_multipart(zmq.NOBLOCK)
                    last_event_at = time.monotonic()
                    try:
                        topic, sequence, payload = frames
                        batch = decode_event_batch(payload)
                    except (ValueError, msgspec.MsgspecError):
                        continue  # not an event of this protocol
                    yield topic, int.from_bytes(sequence, "big"), batch
                elif idle_timeout_s is not None and time.monotonic() - last_event_at >= idle_timeout_s:
                    return

    def close(self) -> None:
        self._closed = True
        if self._admin is not None:
            self._admin.close()

    def _call_deadline(self) -> float:
        return min(self.deadline, time.monotonic() + self.timeout_s)

    def _round_trip(self, make: MakeRequest) -> m.AnyReply:
        """Send a request and wait for its reply, which is never Error."""
        with self._one_call:
            if self._closed:
                raise DaemonUnavailable("The client is closed; make a new one.")
            deadline = self._call_deadline()
            session = self._connected(deadline)
            found = session.ask(make, max(0.001, deadline - time.monotonic()))
        if isinstance(found, RequestTimeout):
            raise RequestTimeout(f"The kvoffd daemon in {self._directory} did not answer in time; try again later.")
        if isinstance(found, KvoffdClientError):
            raise found
        return found

    def _connected(self, deadline: float) -> AdminSession:
        """The session, ready. Where nothing listens the first failed attempt raises, before the deadline."""
        if self._admin is None:
            self._admin = AdminSession(self._directory, self._options)
        session = self._admin
        if session.connect_now(deadline):
            return session
        problem = session.problem or f"The kvoffd daemon in {self._directory} did not answer in time."
        raise DaemonUnavailable(problem) from session.refusal
