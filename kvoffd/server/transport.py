"""The two ZeroMQ sockets on the event loop, and the daemon's own check that they are served.

Each wake-up reads until empty, then sends what is due.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
from typing import TypeVar

import zmq

from kvoffd.observe.metrics import render_metrics
from kvoffd.server.admission import filter_peers
from kvoffd.server.service import Service
from kvoffd.server.session import Lifeline, Peer
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.events import SEQUENCE_BYTES
from kvoffd_proto.sockets import receive_frames, send_frames

logger = logging.getLogger(__name__)

MESSAGES_AT_ONCE = 256
"""Messages that are read before the loop does other work, so that completions and lifelines are not starved."""
READ_S = 0.02
"""Or for how long they are read, in seconds: a message can be large."""
PROBE_DEADLINE_S = 2.0

AnswerT = TypeVar("AnswerT", bound=m.AnyReply)


class Transport:
    """``jobs.sock`` and ``events.sock`` of one service.

    ZeroMQ's descriptor is edge-triggered: it may stay silent while messages wait, so the socket is asked again whenever
    something was sent or left.
    """

    def __init__(self, service: Service, directory: DaemonDirectory) -> None:
        self._service = service
        self._config = service.context.config
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        _seed_routing_ids()
        self._context = zmq.Context(io_threads=1)
        self._jobs = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PUB)
        self._wake_due = False

    def open(self) -> None:
        """Bind both sockets. Raises zmq.ZMQError."""
        buffer = self._config.event_buffer_steps
        for socket in (self._jobs, self._events):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, max(10_000, buffer + 100))
            filter_peers(socket, self._config)
        # A peer that does not read must not make a reply vanish uncounted.
        self._jobs.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Twice our own limit, so that frames a little too long get a reply and only absurd ones cost the connection.
        self._jobs.setsockopt(zmq.MAXMSGSIZE, 2 * self._config.max_frame_bytes)
        paths = self._directory.sockets
        for socket, path in ((self._jobs, paths.jobs), (self._events, paths.events)):
            socket.bind(f"ipc://{path}")
            self._directory.open_to_group(path)
        self._loop.add_reader(self._jobs.FD, self._read_and_send)

    def close(self, linger_ms: int) -> None:
        """Send what is queued, for ``linger_ms`` at most, and close."""
        self._loop.remove_reader(self._jobs.FD)
        self._jobs.close(linger=linger_ms)
        self._events.close(linger=linger_ms)
        self._context.term()

    def wake(self) -> None:
        """Read and send soon: something outside the socket changed what is to be sent."""
        if not self._wake_due and not self._jobs.closed:
            self._wake_due = True
            self._loop.call_soon(self._read_and_send)

    def _read_and_send(self) -> None:
        self._wake_due = False
        if self._jobs.closed:
            return
        try:
            read = self._read()
            sent = self.flush()
        except Exception:
            # The loop that serves engines must outlive whatever went wrong with one message.
            logger.exception("An iteration of the message loop failed.")
            read = sent = True
        if read or sent:
            self.wake()

    def _read(self) -> bool:
        """Handle up to ``MESSAGES_AT_ONCE`` messages; True when there was any."""
        until = self._loop.time() + READ_S
        for count in range(MESSAGES_AT_ONCE):
            if count and self._loop.time() > until:
                return True
            try:
                frames = receive_frames(self._jobs)
            except zmq.Again:
                return count > 0
            if len(frames) == 2:
                self._service.handle(frames[0], frames[1])
            elif len(frames) == 3 and not frames[1] and len(frames[2]) == SEQUENCE_BYTES:
                self._service.replay_events(frames[0], frames[2])
            else:
                # Not one frame of ours: let the decoder refuse it, so that the sender hears why.
                self._service.handle(frames[0], b"")
            # A reply must not wait until all other messages are read.
            self.flush()
        return True

    def flush(self) -> bool:
        """Send replies and publications; True when there was any."""
        outbox = self._service.flush()
        # Completions first: a reply may tell the client to look for them.
        for publication in outbox.publications:
            send_frames(self._events, publication)
        for sender, frame in outbox.replies:
            self._reply([sender, frame])
        for sender, messages in outbox.event_replays:
            for message in messages:
                if not self._reply([sender, b"", *message]):
                    break
        self._service.after_send()
        return bool(outbox.replies or outbox.publications or outbox.event_replays)

    def _reply(self, frames: list[bytes]) -> bool:
        try:
            send_frames(self._jobs, frames)
        except zmq.ZMQError as error:
            self._service.context.replies_dropped[drop_reason(error)] += 1
            return False
        return True


def drop_reason(error: zmq.ZMQError) -> str:
    """Why a ROUTER could not send a reply: the peer does not read (EAGAIN), or is gone (EHOSTUNREACH)."""
    return "unread" if isinstance(error, zmq.Again) else "gone"


class ProbeFailed(Exception):
    """The message loop did not answer in time."""


class SelfProbe:
    """An admin session of the daemon with itself over ``jobs.sock``."""

    def __init__(self, service: Service, directory: DaemonDirectory) -> None:
        self._service = service
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._waiting: dict[int, asyncio.Future[m.AnyReply]] = {}
        self._ids = itertools.count(1)
        self._token = b""

    def open(self) -> None:
        """Connect and say Hello. Raises zmq.ZMQError."""
        session = self._service.sessions.open(Lifeline(), Peer(0, 0, 0), internal=True)
        self._token = session.token
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{self._directory.sockets.jobs}")
        self._loop.add_reader(self._socket.FD, self._read)
        hello = m.Hello(next(self._ids), self._token, m.PROTOCOL_VERSION, m.Role.ADMIN, "kvoffd's own probe", "")
        self._socket.send(codec.encode(hello), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; whoever still waits for an answer is told that there is none."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=0)
        self._context.term()
        for future in self._waiting.values():
            future.cancel()

    async def health(self) -> m.HealthReply:
        """Ask for health. Raises ProbeFailed when no answer comes within the deadline."""
        return await self._ask(m.Health(next(self._ids), self._token))

    async def works(self) -> bool:
        await self.health()
        return True

    async def metrics(self) -> bytes:
        """Ask for statistics and render them as Prometheus text. Raises ProbeFailed."""
        return render_metrics(await self._ask(m.Stats(next(self._ids), self._token)))

    async def _ask(self, request: m.Request[AnswerT]) -> AnswerT:
        future: asyncio.Future[m.AnyReply] = self._loop.create_future()
        self._waiting[request.request_id] = future
        try:
            self._socket.send(codec.encode(request), zmq.NOBLOCK)
            self._read()  # sending may have eaten the descriptor's edge
            reply = await asyncio.wait_for(future, PROBE_DEADLINE_S)
        except (TimeoutError, zmq.Again) as error:
            raise ProbeFailed(f"The message loop did not answer within {PROBE_DEADLINE_S:.0f} s.") from error
        finally:
            self._waiting.pop(request.request_id, None)
        if not isinstance(reply, m.answer_type(type(request))):
            raise ProbeFailed(f"The daemon answered its own {type(request).__name__} with {reply}.")
        return reply

    def _read(self) -> None:
        while True:
            try:
                reply = codec.decode_reply(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            future = self._waiting.get(reply.request_id)
            if future is not None and not future.done():
                future.set_result(reply)


def _seed_routing_ids() -> None:
    """Have ZeroMQ name its clients by numbers that nobody can foresee.

    A ROUTER counts from a number that it takes from the C library's rand(), which nobody seeds, and it ends the process
    (an assertion of libzmq 4.3.5) when a client has given itself the name that it comes to.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
