"""The administrator's client: sends requests to one daemon and waits for each answer."""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec

from kvoffd_client.errors import DaemonUnavailable, HttpError, KvoffdClientError, RequestTimeout
from kvoffd_client.lifeline_stream import NEVER
from kvoffd_client.session import ClientOptions, Phase, ReplyOrError, Session
from kvoffd_client.transport import SocketTransport
from kvoffd_proto import admin as a
from kvoffd_proto import messages as m
from kvoffd_proto.codec import CODEC_ERRORS
from kvoffd_proto.events import KV_TOPIC_PREFIX, EventBatch, decode_event_batch
from kvoffd_proto.stats import DaemonStats, Stats
from kvoffd_proto.units import printable

if TYPE_CHECKING:
    from http.client import HTTPResponse

TIMEOUT_S = 10.0
"""Default time limit of a call: on a busy machine operators prefer to wait."""
HANDSHAKE_TIMEOUT_S = 2.0
STATS_TIMEOUT_S = 1.4
"""Commands report a missing daemon within two seconds, and take half a second to start."""
OPTIONS = ClientOptions(unresponsive_after_s=3600.0, handshake_timeout_s=HANDSHAKE_TIMEOUT_S)
"""Each call has its own timeout, which may be long for a busy daemon; the handshake's is short."""
SILENCE_S = 0.5
"""Time without an answer after which the client checks whether the daemon's process is stopped."""
MAX_EVENT_MESSAGES = 10_000
"""Limit of KV event messages that wait for ``events``. Beyond it the oldest are dropped, which their sequence shows."""
MAX_STATS_BYTES = 1 << 28
MAX_ERROR_BYTES = 4096
MIN_PREFIX_DIGITS = 4
"""Fewer hex digits of a fingerprint could name a namespace by mistake."""
WHOLE_FINGERPRINT = re.compile(rf"[0-9a-fA-F]{{{2 * m.FINGERPRINT_BYTES}}}")
"""All digits of a fingerprint. They name no label: a client may have chosen another namespace's fingerprint as one."""

Fields = ParamSpec("Fields")
ReplyT = TypeVar("ReplyT", bound=m.AnyReply)


def matching_namespaces(namespaces: Iterable[a.NamespaceInfo], name: str) -> list[a.NamespaceInfo]:
    """Return those whose label is ``name`` or whose fingerprint begins with it; none for an empty name."""
    is_prefix, is_label = len(name) >= MIN_PREFIX_DIGITS, bool(name) and not WHOLE_FINGERPRINT.fullmatch(name)
    return [
        one
        for one in namespaces
        if (is_label and one.label == name) or (is_prefix and one.namespace.hex().startswith(name.lower()))
    ]


def find_namespace_info(namespaces: Iterable[a.NamespaceInfo], name: str) -> a.NamespaceInfo:
    """Return the one whose label is ``name`` or whose fingerprint begins with it. Raises KvoffdClientError."""
    found = matching_namespaces(namespaces, name)
    if len(found) == 1:
        return found[0]
    shown = printable(name)
    if found:
        names = ", ".join(f"{one.namespace.hex()[:12]} ({printable(one.label)})" for one in found)
        raise KvoffdClientError(f"{shown!r} is ambiguous: {names}; give more digits of the fingerprint.")
    raise KvoffdClientError(
        f"No open namespace has the label {shown!r} or a fingerprint that begins with it (at least {MIN_PREFIX_DIGITS} "
        "digits); `kvoffd-cli namespaces` lists them."
    )


def base_url(given: str) -> str:
    """Return the URL of a server given as ``node:9464`` or ``http://node:9464``. Raises KvoffdClientError."""
    url = (given if "://" in given else f"http://{given}").rstrip("/")
    if not re.match(r"https?://[^/\s]+", url):
        raise KvoffdClientError(f"{printable(given)!r} is not an address like http://HOST:PORT.")
    return url


@contextmanager
def open_url(
    url: str, timeout_s: float, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Iterator[HTTPResponse]:
    """Yield the answer of a server. Raises HttpError, also if the block finds that the answer cannot be read.

    Its message says what the server does, without naming it: ``answers 404 Not Found: ...``.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener  # slow to import

    try:
        request = Request(url, body, dict(headers or {}))
        with build_opener(ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            yield answer
    except HTTPError as error:
        body = b""
        with error, suppress(OSError, HTTPException):  # the status says enough
            body = error.read(MAX_ERROR_BYTES)
        raise HttpError(f"answers {error.code} {printable(str(error.reason))}: {error_in(body)}", error.code) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise HttpError(f"does not answer within {timeout_s:g} s; check whether its process runs") from None
        why = printable(str(getattr(reason, "strerror", None) or reason or type(reason).__name__)).rstrip(".")
        raise HttpError(f"does not answer: {why}") from None
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # RecursionError: JSON that is too deep
        raise HttpError(f"does not answer as it should: {printable(str(error)).rstrip('.')}") from None


def error_in(body: bytes) -> str:
    """Return the message of an error's JSON, or the beginning of what came instead."""
    text = body.decode(errors="replace")
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = json.loads(body)["error"]
        text = text["message"]  # unless the error is a text itself
    return printable(str(text)[:400].strip()).rstrip(".") or "nothing more"


def read_stats(url: str, timeout_s: float = STATS_TIMEOUT_S) -> DaemonStats:
    """Return a daemon's statistics from its ``http_address``, as ``http://node:9464``. Raises KvoffdClientError."""
    base = base_url(url)
    try:
        with open_url(f"{base}/stats.json", timeout_s) as answer:
            return msgspec.json.decode(answer.read(MAX_STATS_BYTES), type=DaemonStats)
    except HttpError as error:
        raise DaemonUnavailable(f"No statistics of a kvoffd daemon at {base}: it {error}.") from None


class AdminClient(Session):
    """An administrator's client, for one thread: it has none of its own.

    The first call connects, and so does a call after a failed one. Each call waits for its answer. All raise:
        DaemonUnavailable: nothing listens in the directory, or it refuses this user.
        RequestRefused: the daemon answered with an error.
        RequestTimeout: no answer in time.

    Attributes:
        timeout_s: time limit of every call, including connecting; may be changed between calls.
        on_silence: called when an answer takes long.
    """

    def __init__(
        self, directory: str | os.PathLike[str], timeout_s: float = TIMEOUT_S, *, subscribe_events: bool = False
    ) -> None:
        self.timeout_s = timeout_s
        self.on_silence: Callable[[], None] = lambda: None
        self._subscribe_events = subscribe_events
        self._events = deque[tuple[bytes, int, EventBatch]](maxlen=MAX_EVENT_MESSAGES)
        self._was_ready = True
        """Readiness that events() reported last."""
        self._ended_connections = 0
        self._sockets = SocketTransport(os.fspath(directory), threaded=False)
        super().__init__(directory, m.Role.ADMIN, None, "admin", "", OPTIONS, self._sockets, None)
        self._transport.start(self)

    @property
    def pid(self) -> int:
        """The daemon's; 0 if it is in another pid namespace, and before the first connection."""
        return self._sockets.daemon_pid

    def ask(
        self, kind: Callable[Concatenate[int, Fields], m.Request[ReplyT]], *fields: Fields.args, **named: Fields.kwargs
    ) -> ReplyT:
        """Send a request and return its reply, of the type declared by the request.

        >>> client.ask(Clear, fingerprint).count                                               # doctest: +SKIP

        Args:
            kind: the request's class, of ``kvoffd_proto.messages``.
            fields: its fields after the id.
        """
        deadline = time.monotonic() + self.timeout_s
        self.poll()  # notices if the daemon has ended since the last call
        self._retry_at = 0.0  # an operator's call does not wait for the pause after a failure
        ended = self._ended_connections
        self._wait(lambda: self.ready or self._ended_connections > ended, deadline)
        if not self.ready:
            raise DaemonUnavailable(self.problem) from self.refusal
        request, answers, now = kind(self._next_request_id(), *fields, **named), list[ReplyOrError](), time.monotonic()
        self._send(request, now, lambda reply, _: answers.append(reply), deadline - now)
        self._wait(lambda: bool(answers), deadline)
        answer = answers[0] if answers else RequestTimeout()
        if isinstance(answer, RequestTimeout):
            why = f"The kvoffd daemon in {self.directory} did not answer in time; try again later."
            raise RequestTimeout(why)
        if isinstance(answer, KvoffdClientError):
            raise answer
        expected = m.answer_type(type(request))
        if not isinstance(answer, expected):
            asked, came = type(request).__name__, type(answer).__name__
            raise DaemonUnavailable(f"The daemon in {self.directory} answered {asked} with {came}.")
        return answer

    def _wait(self, ready: Callable[[], bool], deadline: float) -> None:
        """Wait until ``ready()`` or the deadline. Raises DaemonUnavailable if the daemon's process is stopped."""
        if self._transport.wait(ready, min(SILENCE_S, deadline - time.monotonic())):
            return
        if _is_stopped(self.pid):
            raise DaemonUnavailable(
                f"The kvoffd daemon in {self.directory} does not answer because its process is stopped; continue it "
                f"with `kill -CONT {self.pid}`."
            )
        if time.monotonic() < deadline:
            self.on_silence()
            self._transport.wait(ready, deadline - time.monotonic())

    def _role_disconnected(self, now: float) -> None:
        self._ended_connections += 1

    def _warn(self, sentence: str) -> None:
        """Log nothing: the call raises the sentence."""

    def stats(self) -> DaemonStats:
        """Return all statistics."""
        return self.ask(Stats).stats

    def health(self) -> a.HealthReply:
        """Return the daemon's health, by a round trip through the loop that serves engines."""
        return self.ask(a.Health)

    def sessions(self) -> a.SessionsReply:
        """Return the open sessions, oldest first."""
        return self.ask(a.Sessions)

    def namespaces(self) -> a.NamespacesReply:
        """Return the open namespaces, oldest first."""
        return self.ask(a.Namespaces)

    def namespace(self, name: str) -> a.NamespaceInfo:
        """Return the open namespace by label or first digits of its fingerprint. Raises KvoffdClientError."""
        return find_namespace_info(self.namespaces().namespaces, name)

    def clear(self, fingerprint: bytes | None = None) -> int:
        """Drop every block of one namespace, or of all; return their number."""
        return self.ask(a.Clear, fingerprint).count

    def reset_fleet(self, fingerprint: bytes) -> int:
        """Drop a namespace's blocks on all nodes that share a store or are peers; return the number of this one's."""
        return self.ask(a.ResetFleet, fingerprint).count

    def scrub(self, start: bool = True) -> a.ScrubReply:
        """Start comparing all readable blocks with their checksums in the background; False only asks for progress."""
        return self.ask(a.Scrub, start)

    def events(self) -> Iterator[tuple[bytes, int, EventBatch] | None]:
        """Yield (topic, sequence, batch) of all KV events from now on; None when the daemon has ended or is back.

        For a client with ``subscribe_events`` that has made a call.
        """
        while self._phase is not Phase.CLOSED:
            self._transport.wait(lambda: bool(self._events) or self.ready is not self._was_ready, NEVER)
            while self._events:
                yield self._events.popleft()
            if self.ready is not self._was_ready:
                self._was_ready = self.ready
                yield None

    def on_publication(self, topic: bytes, sequence: bytes, payload: bytes, now: float) -> None:
        with suppress(*CODEC_ERRORS):  # not an event of this protocol
            self._events.append((topic, int.from_bytes(sequence, "big"), decode_event_batch(payload)))

    def _topics(self) -> Sequence[bytes]:
        return [KV_TOPIC_PREFIX] if self._subscribe_events else []


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or debugger; False if it is not visible."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
