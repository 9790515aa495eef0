"""The two ZeroMQ sockets on the event loop: each wake-up reads until empty, then sends what is due."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os

import zmq

from kvoffd.server.admission import guard
from kvoffd.server.service import Service
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto.events import SEQUENCE_BYTES
from kvoffd_proto.sockets import receive_frames, send_frames

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 256
"""After this many messages the loop gets its turn, so that completions and lifelines are not starved."""
TURN_S = 0.02
"""Or after so long: a message can be large."""


class Transport:
    """``jobs.sock`` and ``events.sock`` of one service.

    ZeroMQ's descriptor is edge-triggered: it may stay silent while messages wait, so every turn that sent or left
    something asks the socket again.
    """

    def __init__(self, service: Service, directory: DaemonDirectory) -> None:
        self._service = service
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        _seed_routing_ids()
        self._context = zmq.Context(io_threads=1)
        self._jobs = self._context.socket(zmq.ROUTER)
        self._events = self._context.socket(zmq.PUB)
        self._turn_due = False

    def open(self) -> None:
        """Bind both sockets. Raises zmq.ZMQError."""
        buffer = self._service.config.event_buffer_steps
        for socket in (self._jobs, self._events):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, max(10_000, buffer + 100))
            guard(socket, self._service.config)
        # A peer that does not read must not make a reply vanish uncounted.
        self._jobs.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Twice our own limit, so that frames a little too long get a reply and only absurd ones cost the connection.
        self._jobs.setsockopt(zmq.MAXMSGSIZE, 2 * self._service.config.max_frame_bytes)
        paths = self._directory.sockets
        self._jobs.bind(f"ipc://{paths.jobs}")
        self._directory.open_to_group(paths.jobs)
        self._events.bind(f"ipc://{paths.events}")
        self._directory.open_to_group(paths.events)
        self._loop.add_reader(self._jobs.FD, self._turn)

    def close(self, linger_ms: int) -> None:
        """Send what is queued, for ``linger_ms`` at most, and close."""
        self._loop.remove_reader(self._jobs.FD)
        self._jobs.close(linger=linger_ms)
        self._events.close(linger=linger_ms)
        self._context.term()

    def schedule_turn(self) -> None:
        """Have a turn soon: something outside the socket changed what is to be sent."""
        if not self._turn_due and not self._jobs.closed:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._jobs.closed:
            return
        try:
            read = self._read()
            sent = self.flush()
        except Exception:
            # The loop that serves engines must outlive whatever went wrong in one turn.
            logger.exception("A turn of the message loop failed.")
            read = sent = True
        if read or sent:
            self.schedule_turn()

    def _read(self) -> bool:
        """Handle up to a turn's worth of messages; True when there was any."""
        until = self._loop.time() + TURN_S
        for count in range(MESSAGES_PER_TURN):
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
        except zmq.ZMQError:  # the peer is gone (EHOSTUNREACH) or does not read (EAGAIN)
            self._service.replies_dropped += 1
            return False
        return True


def _seed_routing_ids() -> None:
    """Have ZeroMQ name its clients by numbers that nobody can foresee.

    A ROUTER counts from a number that it takes from the C library's rand(), which nobody seeds, and it ends the process
    (an assertion of libzmq 4.3.5) when a client has given itself the name that it comes to.
    """
    ctypes.CDLL(None).srand(ctypes.c_uint(int.from_bytes(os.urandom(4), "little")))
