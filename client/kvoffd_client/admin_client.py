"""An administrator's client: asks one daemon, and waits for each answer. It has no thread and no heartbeat."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Concatenate, ParamSpec, Self, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import msgspec
import zmq

from kvoffd_client.errors import (
    DaemonUnavailable,
    RequestRefused,
    RequestTimeout,
    UnknownNamespace,
    why_unreachable,
)
from kvoffd_client.health_request import HEALTH_S, ask_health
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import KV_TOPIC_PREFIX, EventBatch, decode_event_batch
from kvoffd_proto.lifeline import (
    FrameBuffer,
    Greeting,
    Leaving,
    LifelineError,
    Refused,
    decode_from_daemon,
    encode_frame,
    routing_id,
)
from kvoffd_proto.paths import SocketPaths, peer_credentials
from kvoffd_proto.stats import DaemonStats, Stats
from kvoffd_proto.units import printable

TIMEOUT_S = 2.0
URL_TIMEOUT_S = 1.4
"""A command says within two seconds that nobody answers, of which it takes half a one to start."""
SILENCE_S = 0.5
"""After so long without an answer it is looked whether the daemon's process is stopped."""
MAX_REPLY_BYTES = 1 << 28
EVENTS_QUEUE = 10_000
"""Messages that wait for events() to be asked for the next; beyond it they are dropped."""
EVENTS_POLL_MS = 200
MIN_PREFIX_DIGITS = 4
"""Fewer hex digits of a fingerprint could name a namespace by a slip of the hand."""

Fields = ParamSpec("Fields")
ReplyT = TypeVar("ReplyT", bound=m.AnyReply)


def one_namespace(namespaces: Iterable[a.NamespaceInfo], name: str) -> a.NamespaceInfo:
    """The one whose label is ``name``, or whose fingerprint begins with it. Raises UnknownNamespace."""
    digits = name.lower() if len(name) >= MIN_PREFIX_DIGITS else "no digits"
    found = [one for one in namespaces if one.label == name or one.namespace.hex().startswith(digits)]
    if len(found) == 1:
        return found[0]
    shown = printable(name)
    if found:
        names = ", ".join(f"{one.namespace.hex()[:12]} ({printable(one.label)})" for one in found)
        raise UnknownNamespace(f"{shown!r} could be any of {names}; give more digits of the fingerprint.")
    raise UnknownNamespace(
        f"No open namespace has the label {shown!r} or a fingerprint that begins with it (at least {MIN_PREFIX_DIGITS} "
        "digits); `kvoffd-cli namespaces` lists them."
    )


def read_stats(url: str, timeout_s: float = URL_TIMEOUT_S) -> DaemonStats:
    """The statistics of a daemon at its ``http_address``, such as ``http://node:9464``. Raises DaemonUnavailable."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        if not base.startswith(("http://", "https://")):
            raise ValueError("give http://HOST:PORT")
        with urlopen(f"{base}/stats.json", timeout=timeout_s) as answer:
            return msgspec.json.decode(answer.read(MAX_REPLY_BYTES), type=DaemonStats)
    except HTTPError as error:
        why = f"it answers {error.code}: {error.read(200).decode(errors='replace').strip()}"
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or str(reason)
    except (ValueError, HTTPException, msgspec.MsgspecError) as error:
        why = str(error)
    raise DaemonUnavailable(f"No statistics of a kvoffd daemon at {base}: {why}.")


class AdminClient:
    """An administrator's client. Connects at the first call, and anew after a call that failed.

    Each call waits for its answer; any thread may call, one at a time. All calls raise:
        DaemonUnavailable: nothing listens there, or it refuses this user; the sentence names the place.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.

    Attributes:
        directory: where the daemon's sockets are.
        timeout_s: bounds every call, the connecting in it included; may be changed between two calls.
        on_silence: called when an answer takes long.
        session_id: of its own session.
        pid: of the daemon; 0 where it is in another pid namespace.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_s: float = TIMEOUT_S) -> None:
        self.directory = os.fspath(directory)
        self.timeout_s = timeout_s
        self.on_silence: Callable[[], None] = lambda: None
        self.session_id = self.pid = 0
        self._lifeline: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._jobs: zmq.Socket[bytes] | None = None
        self._closed = False
        self._one_call = threading.Lock()

    def ask(
        self, kind: Callable[Concatenate[int, Fields], m.Request[ReplyT]], *fields: Fields.args, **named: Fields.kwargs
    ) -> ReplyT:
        """Send a request; returns its reply, of the type that is declared at the request.

        >>> client.ask(Clear, fingerprint).count                                               # doctest: +SKIP

        Args:
            kind: the request's class, of ``kvoffd_proto.messages``.
            fields: its fields after the id.
        """
        with self._one_call:
            if self._closed:
                raise DaemonUnavailable("The client is closed; make a new one.")
            deadline = time.monotonic() + self.timeout_s
            try:
                if self._lifeline is not None and self._lifeline_is_readable():
                    self._disconnect()  # the daemon is gone, or has ended the session
                if self._lifeline is None:
                    self._connect(deadline)
                return self._round_trip(kind(1, *fields, **named), deadline)
            except RequestRefused as refusal:
                if not self.session_id or refusal.code in (ErrorCode.BAD_TOKEN, ErrorCode.NO_HELLO):
                    self._disconnect()
                raise
            except BaseException:
                self._disconnect()  # a reply that comes later is not for the next request
                raise

    def stats(self) -> DaemonStats:
        """All counters."""
        return self.ask(Stats).stats

    def health(self) -> a.HealthReply:
        """Whether the daemon works: a round trip through the loop that serves engines.

        Needs no session, so it is answered when all are taken. Where nothing answers, the attempt to open one says why.
        """
        found = ask_health(Path(self.directory), min(HEALTH_S, self.timeout_s))
        if found is None:
            return self.ask(a.Health)
        return a.HealthReply(0, a.HealthLevel(found.level), [a.HealthProblem(*cause) for cause in found.causes])

    def sessions(self) -> a.SessionsReply:
        """Open sessions, oldest first."""
        return self.ask(a.Sessions)

    def namespaces(self) -> a.NamespacesReply:
        """Open namespaces, oldest first."""
        return self.ask(a.Namespaces)

    def namespace(self, name: str) -> a.NamespaceInfo:
        """The open namespace of a label, or of the first digits of a fingerprint. Raises UnknownNamespace."""
        return one_namespace(self.namespaces().namespaces, name)

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Drop every block of one namespace, or of all; returns how many."""
        return self.ask(a.Clear, fingerprint).count

    def set_quota(self, fingerprint: bytes, quota_bytes: int | None) -> None:
        """Set the most bytes that a namespace may have of the pool; None takes the quota away."""
        self.ask(a.SetQuota, fingerprint, quota_bytes)

    def reset_fleet(self, fingerprint: bytes) -> int:
        """Make every block of a namespace void on all nodes that share a store; returns how many stores were told."""
        return self.ask(a.ResetFleet, fingerprint).count

    def describe_key(self, fingerprint: bytes, group: int, key: bytes) -> a.KeyWorth | None:
        """What the eviction policy knows of a key; None where that is nothing."""
        return self.ask(a.DescribeKey, fingerprint, group, key).key

    def trace(self) -> a.TraceReply:
        """What engines asked for since the last call; the first one begins the trace."""
        return self.ask(a.Trace)

    def scrub(self, start: bool = True) -> a.ScrubReply:
        """Have all readable blocks compared with their checksums in the background; False only asks how far that is."""
        return self.ask(a.Scrub, start)

    def events(self, idle_timeout_s: float | None = None) -> Iterator[tuple[bytes, int, EventBatch]]:
        """Yield (topic, sequence, batch) of all KV events from now on, also past restarts of the daemon.

        Ends when close() was called, or after ``idle_timeout_s`` seconds without an event. Needs no session.

        Raises:
            DaemonUnavailable: there is no events socket in the directory.
        """
        path = SocketPaths(Path(self.directory)).events
        if not path.exists():
            raise DaemonUnavailable(f"There is no kvoffd daemon in {self.directory}; start one there.")
        # Not a context of its own: to end that would wait for ever for a socket that Ctrl-C caught half made.
        subscription: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        with subscription:
            subscription.setsockopt(zmq.LINGER, 0)
            subscription.setsockopt(zmq.RCVHWM, EVENTS_QUEUE)
            subscription.setsockopt(zmq.SUBSCRIBE, KV_TOPIC_PREFIX)
            subscription.connect(f"ipc://{path}")
            last_event_at = time.monotonic()
            while not self._closed:
                if subscription.poll(EVENTS_POLL_MS):
                    last_event_at = time.monotonic()
                    try:
                        topic, sequence, payload = subscription.recv_multipart(zmq.NOBLOCK)
                        batch = decode_event_batch(payload)
                    except (ValueError, msgspec.MsgspecError):
                        continue  # not an event of this protocol
                    yield topic, int.from_bytes(sequence, "big"), batch
                elif idle_timeout_s is not None and time.monotonic() - last_event_at >= idle_timeout_s:
                    return

    def close(self) -> None:
        """End the session. Repeatable."""
        self._closed = True
        with self._one_call:
            self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one session -------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        paths = SocketPaths(Path(self.directory))
        if problem := paths.problem():
            raise DaemonUnavailable(problem)
        self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._lifeline.connect(str(paths.lifeline))
            os.stat(paths.jobs)  # ZeroMQ would wait for ever where it was removed
            self.pid, _, _ = peer_credentials(self._lifeline)
        except OSError as error:
            raise DaemonUnavailable(why_unreachable(error, self.directory)) from error
        greeting = self._greeting(self._lifeline, deadline)
        self._context = zmq.Context()
        self._jobs = self._context.socket(zmq.DEALER)
        self._jobs.setsockopt(zmq.ROUTING_ID, routing_id(greeting.token))
        self._jobs.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        self._jobs.connect(f"ipc://{paths.jobs}")
        self._round_trip(m.Hello(1, m.PROTOCOL_VERSION, m.Role.ADMIN, "admin", ""), deadline)
        self.session_id = greeting.session_id

    def _greeting(self, lifeline: socket.socket, deadline: float) -> Greeting:
        buffer, bodies = FrameBuffer(), list[bytes]()
        while not bodies:
            self._wait(deadline, for_reply=False)
            try:
                if not (data := lifeline.recv(4096)):
                    raise DaemonUnavailable(f"The kvoffd daemon in {self.directory} went away.")
                bodies = buffer.feed(data)
                message = decode_from_daemon(bodies[0]) if bodies else None
            except (OSError, LifelineError) as error:
                raise DaemonUnavailable(f"What answers in {self.directory} is no kvoffd daemon: {error}") from error
        if isinstance(message, Refused):
            why = f"The kvoffd daemon in {self.directory} refuses: {message.message}"
            raise DaemonUnavailable(why) from RequestRefused(message.code, message.message)
        if not isinstance(message, Greeting) or message.protocol_version != m.PROTOCOL_VERSION:
            spoken = message.protocol_version if isinstance(message, Greeting) else "none"
            raise DaemonUnavailable(
                f"The daemon in {self.directory} speaks protocol {spoken} and this client {m.PROTOCOL_VERSION}; "
                "install the same kvoffd release on both."
            )
        return message

    def _round_trip(self, request: m.Request[ReplyT], deadline: float) -> ReplyT:
        assert self._jobs is not None
        self._jobs.send(msgspec.msgpack.encode(request))
        self._wait(deadline)
        kind = m.answer_type(type(request))
        try:  # not kvoffd_proto.codec, whose decoders of all messages take longer to make than a probe has
            reply = msgspec.msgpack.decode(self._jobs.recv_multipart(zmq.NOBLOCK)[0], type=kind | m.Error)
        except msgspec.MsgspecError as error:
            asked = type(request).__name__
            why = f"The daemon in {self.directory} did not answer {asked} with {kind.__name__}: {error}."
            raise DaemonUnavailable(why) from error
        if isinstance(reply, m.Error):
            raise RequestRefused(reply.code, reply.message)
        return cast(ReplyT, reply)

    def _wait(self, deadline: float, *, for_reply: bool = True) -> None:
        """Wait for a reply, before which the lifeline must not end; or else for something on the lifeline."""
        poller, silent = zmq.Poller(), False
        poller.register(self._lifeline, zmq.POLLIN)
        if for_reply:
            poller.register(self._jobs, zmq.POLLIN)
        while True:
            left_s = deadline - time.monotonic()
            came = [one for one, _ in poller.poll(max(0, round(1000 * (left_s if silent else min(left_s, SILENCE_S)))))]
            if self._jobs in came or (came and not for_reply):
                return
            if came:
                raise DaemonUnavailable(f"The kvoffd daemon in {self.directory} went away.")
            if _is_stopped(self.pid):
                raise DaemonUnavailable(
                    f"The kvoffd daemon in {self.directory} does not answer, since its process is stopped; let it "
                    f"go on with `kill -CONT {self.pid}`."
                )
            if silent or left_s <= SILENCE_S:
                break
            silent = True
            self.on_silence()
        if for_reply:
            raise RequestTimeout(f"The kvoffd daemon in {self.directory} did not answer in time; try again later.")
        raise DaemonUnavailable(
            f"The kvoffd daemon in {self.directory} accepts connections but does not answer; see its log, and what its "
            "process does (ps, systemctl status)."
        )

    def _lifeline_is_readable(self) -> bool:
        """Nothing comes there after the greeting but the end, and what is sent before it."""
        poller = zmq.Poller()
        poller.register(self._lifeline, zmq.POLLIN)
        return bool(poller.poll(0))

    def _disconnect(self) -> None:
        if self._lifeline is not None:
            try:
                self._lifeline.send(encode_frame(Leaving()), socket.MSG_NOSIGNAL)
            except OSError:
                pass  # the daemon is gone, or was never there
            self._lifeline.close()
        if self._jobs is not None:
            self._jobs.close(linger=0)
        if self._context is not None:
            self._context.term()
        self._lifeline = self._jobs = self._context = None
        self.session_id = 0


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False where it is not to be seen from here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
