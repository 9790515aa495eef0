"""The administrator's client on the daemon's own machine, and the event tail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import zmq

from kvoffd_client.admin_session import AdminSession
from kvoffd_client.administration import Administration, R
from kvoffd_client.connection import Connection
from kvoffd_client.errors import DaemonUnavailable, KvoffdClientError, RequestTimeout
from kvoffd_client.identity import Identity
from kvoffd_client.options import ClientOptions
from kvoffd_proto.events import KV_TOPIC_PREFIX, EventBatch, decode_event_batch
from kvoffd_proto.messages import AnyReply, AnyRequest, Role
from kvoffd_proto.sockets import SocketPaths

DEFAULT_OPTIONS = ClientOptions()
TAIL_POLL_MS = 200
"""How soon events() notices close()."""


class AdminClient(Administration):
    """Administration over the daemon's sockets.

    Args:
        directory: where the daemon's sockets are.
        options: ``request_timeout_s`` bounds every call, the connecting in it included.
    """

    _SESSION: ClassVar[type[AdminSession]] = AdminSession

    def __init__(self, directory: str | os.PathLike[str], options: ClientOptions = DEFAULT_OPTIONS) -> None:
        self._directory = os.fspath(directory)
        self._options = options
        self._connection: Connection[AdminSession] | None = None
        self._closed = False
        self._one_call = threading.Lock()

    def events(self, idle_timeout_s: float | None = None) -> Iterator[tuple[bytes, int, EventBatch]]:
        """Yield (topic, sequence, batch) of all KV events from now on, also past restarts of the daemon.

        Ends when close() was called, or after ``idle_timeout_s`` seconds without an event. Needs no session.

        Raises:
            DaemonUnavailable: there is no events socket in the directory.
        """
        path = SocketPaths(Path(self._directory)).events
        if not path.exists():
            raise DaemonUnavailable(
                f"There is no kvoffd daemon in {self._directory} (no {path.name}); start one there."
            )
        with zmq.Context() as context, context.socket(zmq.SUB) as tail:
            tail.setsockopt(zmq.LINGER, 0)
            tail.setsockopt(zmq.RCVHWM, self._options.receive_queue_messages)
            tail.setsockopt(zmq.SUBSCRIBE, KV_TOPIC_PREFIX)
            tail.connect(f"ipc://{path}")
            heard_at = time.monotonic()
            while not self._closed:
                if tail.poll(TAIL_POLL_MS):
                    frames = tail.recv_multipart(zmq.NOBLOCK)
                    heard_at = time.monotonic()
                    try:
                        topic, sequence, payload = frames
                        batch = decode_event_batch(payload)
                    except (ValueError, msgspec.MsgspecError):
                        continue  # not an event of this protocol
                    yield topic, int.from_bytes(sequence, "big"), batch
                elif idle_timeout_s is not None and time.monotonic() - heard_at >= idle_timeout_s:
                    return

    def close(self) -> None:
        """End the session. Repeatable."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()

    def _ask(self, kind: type[R], make: Callable[[int, bytes], AnyRequest]) -> R:
        def start(session: AdminSession, outcome: list[AnyReply | KvoffdClientError], now: float, left: float) -> None:
            session.ask(make(session.next_request_id(), session.token), outcome, now, left)

        reply = self._exchange(start)
        if not isinstance(reply, kind):
            raise DaemonUnavailable(f"The daemon in {self._directory} answered with a {type(reply).__name__}.")
        return reply

    def _exchange(self, start: Callable[[AdminSession, list[Any], float, float], None]) -> Any:
        """Start something on the session and wait for its outcome; a KvoffdClientError is raised.

        ``start`` gets the time and the seconds left, and sees to it that the outcome is appended to its list.
        """
        with self._one_call:
            if self._closed:
                raise DaemonUnavailable("The client is closed; make a new one.")
            deadline = time.monotonic() + self._options.request_timeout_s
            connection = self._connected(deadline)
            session = connection.session
            outcome: list[Any] = []
            with connection.lock:
                start(session, outcome, time.monotonic(), max(0.001, deadline - time.monotonic()))
                connection.flush()
            connection.wait(lambda: bool(outcome), self._options.request_timeout_s)
        if not outcome or isinstance(outcome[0], RequestTimeout):
            raise RequestTimeout(f"The kvoffd daemon in {self._directory} did not answer in time; try again later.")
        if isinstance(outcome[0], KvoffdClientError):
            raise outcome[0]
        return outcome[0]

    def _connected(self, deadline: float) -> Connection[AdminSession]:
        """The connection, ready. Where nothing listens the first failed attempt tells: nobody should wait for that."""
        if self._connection is None:
            identity = Identity(self._directory, Role.ADMIN, "admin", "")
            self._connection = Connection(identity, self._options, self._SESSION)
            before = 0
        else:
            before = self._connection.session.attempts_failed
        connection, session = self._connection, self._connection.session
        connection.check_process()
        with connection.lock:
            session.retry_now(time.monotonic())
            connection.flush()
        connection.wait(lambda: session.usable or session.attempts_failed > before, deadline - time.monotonic())
        if session.usable:
            return connection
        problem = session.problem or f"The kvoffd daemon in {self._directory} did not answer in time."
        raise DaemonUnavailable(problem) from session.refusal
