"""The daemon asks itself: a health check that is a round trip through the loop and socket that serve engines."""

from __future__ import annotations

import asyncio

import zmq

from kvoffd.observe.metrics import render_metrics
from kvoffd.server.service import Service
from kvoffd.server.session import Peer, StandingLifeline
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.messages import PROTOCOL_VERSION

PROBE_DEADLINE_S = 2.0


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
        self._last_id = 0
        self._token = b""

    def open(self) -> None:
        """Connect and say Hello. Raises zmq.ZMQError."""
        session = self._service.open_session(StandingLifeline(), Peer(0, 0, 0), internal=True)
        self._token = session.token
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{self._directory.sockets.jobs}")
        self._loop.add_reader(self._socket.FD, self._read)
        hello = m.Hello(self._next_id(), self._token, PROTOCOL_VERSION, m.Role.ADMIN, "kvoffd's own probe", "")
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
        reply = await self._ask(m.Health(self._next_id(), self._token))
        if not isinstance(reply, m.HealthReply):
            raise ProbeFailed(f"The daemon answered its own health check with {reply}.")
        return reply

    async def works(self) -> bool:
        """Whether the message loop answers at all. Raises ProbeFailed when it does not."""
        await self.health()
        return True

    async def metrics(self) -> bytes:
        """Ask for statistics and render them as Prometheus text. Raises ProbeFailed."""
        reply = await self._ask(m.Stats(self._next_id(), self._token))
        if not isinstance(reply, m.StatsReply):
            raise ProbeFailed(f"The daemon answered its own request for statistics with {reply}.")
        return render_metrics(reply)

    async def _ask(self, request: m.AnyRequest) -> m.AnyReply:
        future: asyncio.Future[m.AnyReply] = self._loop.create_future()
        self._waiting[request.request_id] = future
        try:
            self._socket.send(codec.encode(request), zmq.NOBLOCK)
            self._read()  # sending may have eaten the descriptor's edge
            return await asyncio.wait_for(future, PROBE_DEADLINE_S)
        except (TimeoutError, zmq.Again) as error:
            raise ProbeFailed(f"The message loop did not answer within {PROBE_DEADLINE_S:.0f} s.") from error
        finally:
            self._waiting.pop(request.request_id, None)

    def _read(self) -> None:
        while True:
            try:
                reply = codec.decode_reply(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            future = self._waiting.get(reply.request_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
