"""``jobs.sock`` and ``events.sock``: a ROUTER and a PUB socket of libzmq on the event loop.

libzmq moves the bytes in a thread of its own, without the GIL. The loop reads whole messages, of one client after the
other. What a client does not read is bounded by count: beyond ``QUEUED_MESSAGES`` its replies and publications are
dropped. Its session keeps its results until it acknowledges them, and it asks for what it lacks.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

import zmq

from kvoffd.config import Config
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.sessions import Peer, may_connect
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto.errors import ErrorCode

if TYPE_CHECKING:
    from kvoffd.server.service import Service

logger = logging.getLogger(__name__)

QUEUED_MESSAGES = 1000
"""Messages to or from one client that wait. Never 0: to libzmq that is no bound at all."""
MAX_SUBSCRIPTION_BYTES = 4096
BACKLOG = 1024
RETRY_S = 0.25
"""After accept() failed, as it does without descriptors: it would fail again at once."""
DRAIN_S, DRAINED_AT_ONCE = 0.002, 64
"""How long, and how many messages, before the loop looks at lifelines and timers."""
REST_S = 0.002
"""What follows a reply is put off by so much."""
NOBODY = 2**32 - 1
"""No user and no group has this id."""
# pyzmq makes an enum's member of each of these where it is given one; plain numbers are faster.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Sockets:
    """Both sockets of one daemon, and ``post``, by which other threads reach its loop. All else is for the loop's own.

    libzmq's descriptor is edge-triggered: it stays silent while messages wait that were there before, and every call
    may consume the edge. So the socket is asked for its events after the last use of it, and at each tick.
    """

    def __init__(self, config: Config, directory: DaemonDirectory) -> None:
        self._config = config
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._post_woke = self._woken = self._rest_due = False
        self._service: Service | None = None
        """While the sockets are open. What is posted before waits until then; afterwards the pool may be unmapped."""
        self._warnings = RareWarnings(logger)
        _seed_routing_ids()
        self._zmq = zmq.Context(io_threads=1)
        self._admission = self._zmq.socket(zmq.REP)
        self._jobs = self._zmq.socket(zmq.ROUTER)
        self._events = self._zmq.socket(zmq.PUB)

    def open(self, service: Service) -> None:
        """Bind both sockets. Raises OSError."""
        self._service = service
        paths = self._directory.sockets
        try:
            self._admission.bind("inproc://zeromq.zap.01")
            # Without it libzmq finds the newcomer with the name of a client that it still holds for connected, and
            # ignores it.
            self._jobs.setsockopt(zmq.ROUTER_HANDOVER, 1)
            # Without it replies vanish uncounted.
            self._jobs.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A frame that is a little too long is answered; one beyond this ends the connection without a word.
            self._bind(self._jobs, paths.jobs, 2 * self._config.limits.max_frame_bytes)
            self._bind(self._events, paths.events, MAX_SUBSCRIPTION_BYTES)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        self._loop.add_reader(self._admission.FD, self._admit)
        self._loop.add_reader(self._jobs.FD, self._drain)
        self.wake()

    def _bind(self, socket: zmq.Socket[bytes], path: Path, max_message_bytes: int) -> None:
        socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvoffd")
        socket.bind(f"ipc://{path}")
        self._directory.open_to_group(path)

    def close(self, linger_ms: int) -> None:
        """Send what is queued, for ``linger_ms`` at most, and close."""
        for socket in (self._admission, self._jobs):
            if self._service is not None:
                self._loop.remove_reader(socket.FD)
        self._service = None
        for socket in (self._jobs, self._events, self._admission):
            socket.close(linger=linger_ms)
        self._zmq.term()

    # --- the loop ---------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have ``call`` made in the loop's thread, and what it leaves to send sent. For any thread."""
        self._posted.append(call)
        if not self._post_woke:  # asked after the append: _make_calls finds the call, or has taken this back before
            self._post_woke = True
            with suppress(RuntimeError):  # the loop has ended; so have all sessions
                self._loop.call_soon_threadsafe(self._drain, True)

    def wake(self) -> None:
        """Read and send soon: something other than a message changed what is to be sent."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._on_wake)

    def work_off(self) -> None:
        """Make all calls that other threads have posted, and send what they leave."""
        self._make_calls(inf)
        self.flush()

    def serve(self) -> bool:
        """As after a message, and what a lost edge has left. At each tick, and a while after a reply.

        False where it failed inside the daemon.
        """
        self._admit()
        self._rest_due = False
        return self._drain(due=True)

    def _on_wake(self) -> None:
        # Only here: were it taken back by every drain, each would let one more be queued, and the loop do nothing else.
        self._woken = False
        self._drain(due=True)

    def _drain(self, due: bool = False) -> bool:
        """Make the calls of other threads, and answer requests, until none waits or others must have the loop.

        ``due``: something other than a message may have changed what is to be sent.
        """
        if (service := self._service) is None:
            return True
        with service.loop_watch:
            until, more, jobs = time.monotonic() + DRAIN_S, False, self._jobs
            try:
                if due or self._posted:
                    more = self._make_calls(until)
                    self.flush()
                for _ in range(DRAINED_AT_ONCE):
                    if not cast(int, jobs.get(_EVENTS)) & _POLLIN:
                        break
                    route, frame = jobs.recv(_NOBLOCK), jobs.recv(_NOBLOCK, copy=False)
                    whole = not frame.more
                    while frame.more:
                        frame = jobs.recv(_NOBLOCK, copy=False)
                    # Several frames are no request: the decoder refuses that, and the sender hears why.
                    service.handle(route, frame.bytes if whole else b"")
                    self.flush()  # a reply does not wait for the requests behind it
                    if time.monotonic() > until:
                        more = True
                        break
                else:
                    more = True
                more = service.background() or more
                if service.pending:
                    more = self.flush() or more  # what was sent may have consumed the edge
            except Exception:  # the loop that serves engines must outlive it; the tick goes on
                logger.exception("An iteration of the message loop failed.")
                return False
            if more:
                self.wake()
            return True

    def _make_calls(self, until: float) -> bool:
        """Make the calls that have arrived; True when some are left."""
        self._post_woke = False
        for _ in range(len(self._posted)):
            call = self._posted.popleft()
            try:
                call()
            except Exception:
                logger.exception("The end of a copy, or of a mapping, failed inside the daemon.")
            if time.monotonic() > until:
                break
        return bool(self._posted)

    def flush(self) -> bool:
        """Send replies and publications; True when there were replies."""
        if (service := self._service) is None:
            return False
        publications, replies = service.outgoing()
        if publications:
            self._events.get(_EVENTS)  # takes subscriptions that have arrived; sending does so once in a millisecond
            for topic, number, payload in publications:
                self._events.send(topic, _SNDMORE)
                self._events.send(number, _SNDMORE)
                self._events.send(payload)  # never waits: PUB drops what a subscriber has no room for
        for route, frame in replies:  # after the completions: a reply may tell the client to look for them
            try:
                self._jobs.send(route, _NOBLOCK | _SNDMORE)
                self._jobs.send(frame, _NOBLOCK)
            except zmq.ZMQError as error:
                service.replies_dropped["unread" if isinstance(error, zmq.Again) else "gone"] += 1
        if service.urgent or not replies:
            service.after_send()
        elif not self._rest_due:  # on few cores it would keep libzmq's thread from sending
            self._rest_due = True
            self._loop.call_later(REST_S, self.serve)
        return bool(replies)

    # --- who may connect --------------------------------------------------------------------------

    def _admit(self) -> None:
        """Answer libzmq, which asks for each connection (ZeroMQ RFC 27) and tells the peer's credentials."""
        while self._service is not None and cast(int, self._admission.get(_EVENTS)) & _POLLIN:
            _, request_id, _, address, *_ = self._admission.recv_multipart(_NOBLOCK)
            peer = _peer_at(address)
            allowed = peer.pid == os.getpid() or may_connect(peer, self._config)
            if not allowed:
                self._service.count_error(ErrorCode.FORBIDDEN)
                self._warnings.warn(
                    "A connection was refused: user %d (group %d) may not use this kvoffd.", peer.uid, peer.gid
                )
            status = b"200" if allowed else b"400"
            self._admission.send_multipart([b"1.0", request_id, status, b"", b"", b""], _NOBLOCK)


def _peer_at(address: bytes) -> Peer:
    """The peer that libzmq names ``localhost:UID:GID:PID``; nobody where it names none."""
    try:
        _, uid, gid, pid = address.split(b":")
        return Peer(int(pid), int(uid), int(gid))
    except ValueError:
        return Peer(0, NOBODY, NOBODY)


def _seed_routing_ids() -> None:
    """Have libzmq name its clients by numbers that nobody chooses by accident.

    A ROUTER counts from a number of the C library's rand(). It ends the process (an assertion of libzmq 4.3.5) when a
    client has given itself the name that it comes to.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
