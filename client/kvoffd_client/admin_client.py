"""An administrator's client: asks one daemon, and waits for each answer. It needs no thread."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec
import zmq

from kvoffd_client.errors import (
    DaemonUnavailable,
    RequestRefused,
    RequestTimeout,
    UnknownNamespace,
    not_answering,
    why_unreachable,
)
from kvoffd_client.lifeline_stream import NEVER, LifelineStream, refusal_in
from kvoffd_client.session import ENDED_SESSION, Closing
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS, decode_reply, encode
from kvoffd_proto.events import KV_TOPIC_PREFIX, EventBatch, decode_event_batch
from kvoffd_proto.lifeline import FromDaemon, Greeting, LifelineError, routing_id
from kvoffd_proto.paths import SocketPaths
from kvoffd_proto.stats import DaemonStats, Stats
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    from http.client import HTTPResponse

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


def open_url(url: str, timeout_s: float) -> HTTPResponse:
    """GET an address of the operator's network, without the proxy that ``http_proxy`` names. Raises as urlopen does."""
    from urllib.request import ProxyHandler, build_opener  # only a URL needs these: they take long

    answer: HTTPResponse = build_opener(ProxyHandler({})).open(url, timeout=timeout_s)
    return answer


def read_stats(url: str, timeout_s: float = URL_TIMEOUT_S) -> DaemonStats:
    """The statistics of a daemon at its ``http_address``, such as ``http://node:9464``. Raises DaemonUnavailable."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    base = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        if not base.startswith(("http://", "https://")):
            raise ValueError("give http://HOST:PORT")
        with open_url(f"{base}/stats.json", timeout_s) as answer:
            return msgspec.json.decode(answer.read(MAX_REPLY_BYTES), type=DaemonStats)
    except HTTPError as error:
        why = f"it answers {error.code}: {error.read(200).decode(errors='replace').strip()}"
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or str(reason)
    except (ValueError, HTTPException, msgspec.MsgspecError) as error:
        why = str(error)
    raise DaemonUnavailable(f"No statistics of a kvoffd daemon at {base}: {why}.")


class AdminClient(Closing):
    """For administrators, and for one thread. It connects at the first call, and anew at a call after one that failed.

    Each call waits for its answer. All calls raise:
        DaemonUnavailable: nothing listens there, or it refuses this user; the sentence names the place.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.

    Attributes:
        timeout_s: bounds every call, the connecting in it included; may be changed between two calls.
        on_silence: called when an answer takes long.
        session_id: of the last connection.
        pid: of the daemon; 0 where it is in another pid namespace, and before the first connection.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_s: float = TIMEOUT_S) -> None:
        self.directory = os.fspath(directory)
        self.timeout_s = timeout_s
        self.on_silence: Callable[[], None] = lambda: None
        self.session_id = self.pid = 0
        self._paths = SocketPaths(Path(directory))
        self._lifeline: LifelineStream | None = None
        self._jobs: zmq.Socket[bytes] | None = None
        self._next_request_id = itertools.count(1).__next__
        self._deadline = self._silent_at = 0.0
        """Of the call."""

    def ask(
        self, kind: Callable[Concatenate[int, Fields], m.Request[ReplyT]], *fields: Fields.args, **named: Fields.kwargs
    ) -> ReplyT:
        """Send a request; returns its reply, of the type that is declared at the request.

        >>> client.ask(Clear, fingerprint).count                                               # doctest: +SKIP

        Args:
            kind: the request's class, of ``kvoffd_proto.messages``.
            fields: its fields after the id.
        """
        now = time.monotonic()
        self._deadline, self._silent_at = now + self.timeout_s, now + SILENCE_S
        if self._jobs is not None and self._lifeline is not None:
            try:
                self._read_lifeline(self._lifeline)
            except DaemonUnavailable:  # since the last call
                self.close()
        try:
            if self._jobs is None:
                self._connect()
            return self._exchange(kind(self._next_request_id(), *fields, **named))
        except DaemonUnavailable:
            self.close()
            raise
        except RequestRefused as refusal:
            if refusal.code in ENDED_SESSION:
                self.close()
            raise

    def _connect(self) -> None:
        try:
            lifeline = self._lifeline = LifelineStream(self._paths)
        except OSError as error:
            raise DaemonUnavailable(why_unreachable(error, self.directory)) from None
        self.pid = lifeline.pid
        try:
            greeting: Greeting | None = None
            while greeting is None:
                self._wait(lifeline)
                for message in self._read_lifeline(lifeline):
                    if (refusal := refusal_in(message, self.directory)) is not None:
                        raise refusal
                    greeting = message if isinstance(message, Greeting) else greeting
            self.session_id = greeting.session_id
            self._jobs = zmq.Context.instance().socket(zmq.DEALER)
            for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, MAX_REPLY_BYTES)):
                self._jobs.setsockopt(option, value)
            self._jobs.setsockopt(zmq.ROUTING_ID, routing_id(greeting.token))
            self._jobs.connect(f"ipc://{self._paths.jobs}")
            self._exchange(m.Hello(self._next_request_id(), m.PROTOCOL_VERSION, m.Role.ADMIN, "admin", "", False))
        except RequestRefused as refusal:
            raise DaemonUnavailable(f"The kvoffd daemon in {self.directory} refuses: {refusal}") from refusal
        except RequestTimeout:
            raise DaemonUnavailable(not_answering(self.directory)) from None

    def _exchange(self, request: m.Request[ReplyT]) -> ReplyT:
        lifeline, jobs, expected = self._lifeline, self._jobs, m.answer_type(type(request))
        assert lifeline is not None
        assert jobs is not None
        try:
            jobs.send(encode(request), zmq.NOBLOCK)
            while True:
                self._wait(lifeline)
                while jobs.poll(0):
                    reply = decode_reply(jobs.recv(zmq.NOBLOCK))
                    if reply.request_id != request.request_id:
                        continue  # to a call that did not wait so long
                    if isinstance(reply, m.Error):
                        raise RequestRefused(reply.code, reply.message)
                    if isinstance(reply, expected):
                        return reply
                    asked, came = type(request).__name__, type(reply).__name__
                    raise DaemonUnavailable(f"The daemon in {self.directory} did not answer {asked}, but with {came}.")
                self._read_lifeline(lifeline)
        except zmq.Again:
            raise DaemonUnavailable(f"The daemon in {self.directory} does not read its socket.") from None
        except CODEC_ERRORS as error:
            raise DaemonUnavailable(f"The daemon sent what is no reply of this protocol ({error}).") from None

    def _wait(self, lifeline: LifelineStream) -> None:
        """Wait until the daemon says something. Raises RequestTimeout, or DaemonUnavailable where it is stopped."""
        poller = zmq.Poller()
        for source in (lifeline.fileno(), self._jobs):
            if source is not None and source != -1:
                poller.register(source, zmq.POLLIN)
        while not poller.poll(max(0, round((min(self._deadline, self._silent_at) - time.monotonic()) * 1000))):
            if _is_stopped(self.pid):
                raise DaemonUnavailable(
                    f"The kvoffd daemon in {self.directory} does not answer, since its process is stopped; let it "
                    f"go on with `kill -CONT {self.pid}`."
                )
            now = time.monotonic()
            if now >= self._deadline:
                why = f"The kvoffd daemon in {self.directory} did not answer in time; try again later."
                raise RequestTimeout(why)
            if now >= self._silent_at:
                self._silent_at = NEVER
                self.on_silence()

    def _read_lifeline(self, lifeline: LifelineStream) -> list[FromDaemon]:
        try:
            messages = list(lifeline.read())
        except LifelineError as error:
            raise DaemonUnavailable(f"What answers in {self.directory} is no kvoffd daemon: {error}") from None
        if lifeline.ended and not messages:
            raise DaemonUnavailable(f"The kvoffd daemon in {self.directory} went away.")
        return messages

    def close(self) -> None:
        """End the session. Repeatable; a call after it connects again."""
        lifeline, self._lifeline = self._lifeline, None
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.close(linger=0)
        if lifeline is not None:
            lifeline.leave()
            lifeline.close()

    def stats(self) -> DaemonStats:
        """All counters."""
        return self.ask(Stats).stats

    def health(self) -> a.HealthReply:
        """Whether the daemon works: a round trip through the loop that serves engines."""
        return self.ask(a.Health)

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

    def reset_fleet(self, fingerprint: bytes) -> int:
        """Make every block of a namespace void on all nodes that share a store; returns how many stores were told."""
        return self.ask(a.ResetFleet, fingerprint).count

    def trace(self) -> a.TraceReply:
        """What engines asked for since the last call; the first one begins the trace."""
        return self.ask(a.Trace)

    def scrub(self, start: bool = True) -> a.ScrubReply:
        """Have all readable blocks compared with their checksums in the background; False only asks how far that is."""
        return self.ask(a.Scrub, start)

    def events(self, idle_timeout_s: float | None = None) -> Iterator[tuple[bytes, int, EventBatch]]:
        """Yield (topic, sequence, batch) of all KV events from now on, also past restarts of the daemon.

        Ends after ``idle_timeout_s`` seconds without an event. Needs no session.

        Raises:
            DaemonUnavailable: there is no events socket in the directory.
        """
        path = self._paths.events
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
            while True:
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


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False where it is not to be seen from here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
