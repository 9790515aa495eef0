"""``jobs.sock`` and ``events.sock``: a ROUTER and a PUB socket of libzmq on the event loop.

libzmq moves the bytes in a thread of its own, without the GIL. The loop reads whole messages, one client at a time.
Beyond ``QUEUED_MESSAGES`` unread replies, or ``QUEUED_PUBLICATIONS``, a client's further ones are dropped. Its session
keeps results until it acknowledges them, and it requests those that it lacks.
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
from typing import cast

import zmq

from kvoffd.config import Config
from kvoffd.server.service import Service
from kvoffd.server.session import ClientProcess
from kvoffd.server.sessions import may_connect
from kvoffd.system.directory import DaemonDirectory
from kvoffd.system.limits import few_descriptors_left
from kvoffd.system.listening import BACKLOG
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd_proto.errors import ErrorCode

logger = logging.getLogger(__name__)

QUEUED_MESSAGES = 1000
"""Limit of queued messages to or from one client. Not 0, which libzmq takes for no limit."""
QUEUED_PUBLICATIONS = 256
"""The same of publications to one subscriber, which has a queue too: one has the tokens of up to a thousand blocks."""
MAX_SUBSCRIPTION_BYTES = 4096
"""Limit of one subscription. Of their number libzmq has none: it keeps each until its client leaves, in some fifty
bytes for each of its bytes."""
TURN_S, HANDLED_AT_ONCE = 0.002, 64
"""Time and requests after which a turn ends, so that the loop handles lifelines and timers."""
ADMITTED_AT_ONCE = 64
"""Connections admitted or refused before the loop handles anything else."""
FRAMES_AT_ONCE = 2048
"""Frames dropped at once of a message that has too many: it may have millions, of two bytes each on the wire."""
FRAMES_TIMED = 8
"""Frames dropped between two looks at the clock, since they may be large."""
AFTER_REPLY_S = 0.002
"""Delay of the work that follows a reply."""
FEW_DESCRIPTORS = (
    "Connections are refused, as the daemon has few descriptors left. A client keeps many connections open: `ss -xp` "
    "shows which. End it, or raise the limit (LimitNOFILE= in the systemd unit, ulimit -n)."
)
NOBODY = 2**32 - 1
"""Id of no user and no group."""
# Plain numbers: pyzmq is slower with members of its enums.
_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_EVENTS, _POLLIN, _RCVMORE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.RCVMORE)


class Sockets:
    """Both sockets of one daemon. Only ``post`` may be called in other threads than the loop's.

    libzmq's descriptor is edge-triggered: it does not signal messages that were there before, and every call may
    consume the edge. So the loop polls the socket after its last use, and at each tick.

    All of these end in ``_turn``, which has all that the loop does for messages, in its order:

    | what happened | what is called |
    |---|---|
    | a message came, and libzmq signals it | ``_turn``, by the loop |
    | another thread ended a copy, an I/O or a mapping | ``post``, which schedules it once for all posted calls |
    | the loop queued messages: a session ended, a scrub's step | ``wake``, which schedules it once |
    | it stopped with more to do | ``wake``, by itself |
    | a reply was sent, AFTER_REPLY_S ago; a tick | ``serve``, for the edge may be lost |

    A request is one frame. A message of more frames is answered with an error, and the others are dropped, some in each
    turn. Until then no other request is read, since libzmq delivers one message after another; all other work
    continues. libzmq delivers no frame before it has the whole message, at 64 bytes a frame and without a limit.
    """

    def __init__(self, config: Config, directory: DaemonDirectory) -> None:
        self._config = config
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._posted: deque[Callable[[], None]] = deque()
        self._post_scheduled = self._wake_scheduled = self._serve_scheduled = False
        self._service: Service | None = None
        """The service while the sockets are open. Earlier posts wait; later ones are dropped: the pool may be gone."""
        self._admits_more = False
        """Whether connections may be left that wait for their admission."""
        self._drops_frames = False
        """Whether the message that was read last has frames that are not dropped yet."""
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
            # Otherwise libzmq ignores a client that reconnects while its old connection still counts as open.
            self._jobs.setsockopt(zmq.ROUTER_HANDOVER, 1)
            # Otherwise replies to clients that are gone are dropped without an error, and not counted.
            self._jobs.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A frame beyond twice the limit ends the connection without an error reply.
            self._bind(self._jobs, paths.jobs, 2 * self._config.limits.max_frame_bytes, QUEUED_MESSAGES)
            self._bind(self._events, paths.events, MAX_SUBSCRIPTION_BYTES, QUEUED_PUBLICATIONS)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        self._loop.add_reader(self._admission.FD, self._admit)
        self._loop.add_reader(self._jobs.FD, self._turn)
        self.wake()

    def _bind(self, socket: zmq.Socket[bytes], path: Path, max_message_bytes: int, queued: int) -> None:
        socket.setsockopt(zmq.SNDHWM, queued)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvoffd")
        socket.bind(f"ipc://{path}")
        self._directory.open_to_group(path)

    def close(self, linger_ms: int) -> None:
        """Send queued messages for at most ``linger_ms``, and close."""
        if self._service is not None:
            self._loop.remove_reader(self._admission.FD)
            self._loop.remove_reader(self._jobs.FD)
            self._service = None
        for socket in (self._jobs, self._events, self._admission):
            socket.close(linger=linger_ms)
        self._zmq.term()

    # --- the loop ---------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Schedule a call in the loop's thread, and the messages that it sends. For any thread."""
        self._posted.append(call)
        if not self._post_scheduled:  # checked after the append: if it is set, _make_calls will find the call
            self._post_scheduled = True
            with suppress(RuntimeError):  # the loop has ended, and with it all sessions
                self._loop.call_soon_threadsafe(self._turn, True)

    def wake(self) -> None:
        """Schedule a turn, after something other than a message may have queued messages to send."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._on_wake)

    def finish_posted(self) -> None:
        """Make all posted calls, and send their messages: the last turn."""
        self._make_calls(inf)
        self.flush()

    def serve(self) -> bool:
        """Take a turn at each tick, and a while after a reply, since an edge may be lost. False after a bug."""
        self._admit()
        self._serve_scheduled = False
        return self._turn(due=True)

    def _on_wake(self) -> None:
        # Reset only here: if each turn did, each could schedule another one, and the loop would do nothing else.
        self._wake_scheduled = False
        if self._admits_more:
            self._admit()
        self._turn(due=True)

    def _turn(self, due: bool = False) -> bool:
        """Take one turn: ends of copies and I/O, requests, a step of background work. What these leave is sent at once.

        ``due``: something other than a message may have queued messages to send. Return False after a bug.
        """
        if (service := self._service) is None:
            return True
        with service.loop_watch:
            until, more = time.monotonic() + TURN_S, False
            try:
                if due or self._posted:
                    more = self._make_calls(until)
                    self._follow_up(self.flush())
                for _ in range(HANDLED_AT_ONCE):
                    if (request := self._receive()) is None:
                        more = more or self._drops_frames
                        break
                    service.handle(*request)
                    self._follow_up(self.flush())  # a reply does not wait for later requests
                    if time.monotonic() > until:
                        more = True
                        break
                else:
                    more = True
                more = service.background() or more
                if service.waiting or service.events.pending:
                    self._follow_up(replied := self.flush())
                    # Sending may have consumed the edge of a request that came since ``_receive`` last looked: the next
                    # turn looks again.
                    more = more or replied
            except Exception:  # the loop must survive it; the next tick takes another turn
                logger.exception("A turn of the message loop failed.")
                return False
            if more:
                self.wake()
            return True

    def _receive(self) -> tuple[bytes, bytes] | None:
        """Return the next request and its route; None if none waits, or frames of the last message are still to be
        dropped."""
        if self._drops_frames and not self._drop_frames():
            return None
        jobs = self._jobs
        if not cast(int, jobs.get(_EVENTS)) & _POLLIN:
            return None
        route, frame = jobs.recv(_NOBLOCK), jobs.recv(_NOBLOCK, copy=False)
        self._drops_frames = frame.more
        return route, b"" if frame.more else frame.bytes  # the decoder refuses an empty frame with an error

    def _drop_frames(self) -> bool:
        """Drop FRAMES_AT_ONCE frames of the message that was read last, or fewer if they are large; return whether none
        is left."""
        until = time.monotonic() + TURN_S
        for count in range(FRAMES_AT_ONCE):
            if not self._jobs.get(_RCVMORE):
                self._drops_frames = False
                break
            self._jobs.recv(_NOBLOCK)
            if not count % FRAMES_TIMED and time.monotonic() > until:
                break
        return not self._drops_frames

    def _make_calls(self, until: float) -> bool:
        """Make the posted calls until ``until``; return whether some are left."""
        self._post_scheduled = False
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
        """Send publications and replies; return whether there were replies."""
        if (service := self._service) is None:
            return False
        publications, replies = service.outgoing()
        if publications:
            self._events.get(_EVENTS)  # processes new subscriptions; sending does so only once a millisecond
            for topic, number, payload in publications:
                self._events.send(topic, _SNDMORE)
                self._events.send(number, _SNDMORE)
                self._events.send(payload)  # never blocks: PUB drops messages to a subscriber whose queue is full
        for route, frame in replies:  # after the completions, to which a reply may refer
            try:
                self._jobs.send(route, _NOBLOCK | _SNDMORE)
                self._jobs.send(frame, _NOBLOCK)
            except zmq.ZMQError as error:
                service.request_counts.replies_dropped["unread" if isinstance(error, zmq.Again) else "gone"] += 1
        return bool(replies)

    def _follow_up(self, replied: bool) -> None:
        """Have the service do the work that may wait until replies are sent. ``replied``: some were sent just now.

        It does it now if it is urgent, or nothing was sent; else in a turn AFTER_REPLY_S later, which may be scheduled
        already.
        """
        service = self._service
        assert service is not None, "a turn needs one"
        if service.urgent or not replied:
            service.after_send()
        elif not self._serve_scheduled:
            # On few cores it would delay libzmq's thread, which sends. ``serve`` comes back here, by ``_turn``, mostly
            # with nothing to send, and does it then.
            self._serve_scheduled = True
            self._loop.call_later(AFTER_REPLY_S, self.serve)

    # --- access control ---------------------------------------------------------------------------

    def _admit(self) -> None:
        """Answer libzmq's requests to admit connections (ZeroMQ RFC 27, ZAP), which have the processes' credentials."""
        if (service := self._service) is None:
            return
        with service.loop_watch:
            self._admits_more = False
            for _ in range(ADMITTED_AT_ONCE):
                if not cast(int, self._admission.get(_EVENTS)) & _POLLIN:
                    return
                self._admit_one(service)
            self._admits_more = True
            self.wake()

    def _admit_one(self, service: Service) -> None:
        _, request_id, _, address, *_ = self._admission.recv_multipart(_NOBLOCK)
        process = _process_at(address)
        allowed = may_connect(process, self._config)
        if allowed and few_descriptors_left():
            allowed = False
            service.request_counts.count_error(ErrorCode.TOO_MANY)
            self._warnings.warn("%s", FEW_DESCRIPTORS)
        elif not allowed:
            service.request_counts.count_error(ErrorCode.FORBIDDEN)
            self._warnings.warn(
                "A connection was refused: user %d (group %d) may not use this kvoffd.", process.uid, process.gid
            )
        status = b"200" if allowed else b"400"
        self._admission.send_multipart([b"1.0", request_id, status, b"", b"", b""], _NOBLOCK)


def _process_at(address: bytes) -> ClientProcess:
    """Return the process at an address ``localhost:UID:GID:PID``; one of NOBODY for another address."""
    try:
        _, uid, gid, pid = address.split(b":")
        return ClientProcess(int(pid), int(uid), int(gid))
    except ValueError:
        return ClientProcess(0, NOBODY, NOBODY)


def _seed_routing_ids() -> None:
    """Make libzmq's routing ids random.

    A ROUTER generates them from the C library's rand(), counting up. It aborts the process (an assertion in libzmq
    4.3.5) if a client has chosen the same id for itself.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
