"""The daemon's own check that its clients are answered: requests over ``jobs.sock``, as a client sends them."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TypeVar

from kvoffd.observe.metrics import render_metrics
from kvoffd.server.service import Service
from kvoffd.server.session import Lifeline, Peer
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import codec, zmtp
from kvoffd_proto import messages as m

PROBE_DEADLINE_S = 2.0
PAGE_SHARE, PAGE_S = 20, 2.0
"""A page of metrics is for all who ask until it is so many times as old as it took to make, or so many seconds: every
process of the machine may ask for it."""
_READ_BYTES = 64 * 1024
_MOST_BYTES = 1 << 30

AnswerT = TypeVar("AnswerT", bound=m.AnyReply)


class ProbeFailed(Exception):
    """The message loop did not answer in time."""


class SelfProbe:
    """The daemon's own requests over ``jobs.sock``, which prove that its clients are answered."""

    def __init__(self, service: Service, directory: DaemonDirectory) -> None:
        self._service = service
        self._path = str(directory.sockets.jobs)
        self._ids = itertools.count(1)
        self._token = b""
        self._page: asyncio.Task[bytes] | None = None
        self._page_until = 0.0

    def open(self) -> None:
        session = self._service.sessions.open(Lifeline(), Peer(0, 0, 0), internal=True)
        session.role, self._token = m.Role.ADMIN, session.token

    async def health(self) -> m.HealthReply:
        """Ask for health. Raises ProbeFailed when no answer comes within the deadline."""
        return await self._ask(m.Health(next(self._ids), self._token))

    async def works(self) -> bool:
        await self.health()
        return True

    async def metrics(self) -> bytes:
        """Statistics as Prometheus text, of a moment ago at most. Raises ProbeFailed."""
        if self._page is None or (self._page.done() and time.monotonic() >= self._page_until):
            self._page = asyncio.create_task(self._make_page())
            self._page.add_done_callback(lambda page: page.cancelled() or page.exception())  # maybe nobody waits
        return await asyncio.shield(self._page)

    async def _make_page(self) -> bytes:
        began = time.monotonic()
        try:
            stats = await self._ask(m.Stats(next(self._ids), self._token))
            try:
                return await asyncio.to_thread(render_metrics, stats)
            except RuntimeError:  # there is no thread for it
                return render_metrics(stats)
        finally:
            now = time.monotonic()
            self._page_until = now + min(PAGE_S, PAGE_SHARE * (now - began))

    async def _ask(self, request: m.Request[AnswerT]) -> AnswerT:
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                reply = codec.decode_reply(await self._exchange(codec.encode(request)))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            why = f"{self._path} is not this daemon's socket any more ({error.strerror})"
            raise ProbeFailed(f"No engine can connect: {why}. Leave its directory alone, and restart it.") from error
        except (OSError, TimeoutError, EOFError) as error:
            raise ProbeFailed(f"The message loop did not answer within {PROBE_DEADLINE_S:.0f} s ({error}).") from error
        if not isinstance(reply, m.answer_type(type(request))):
            raise ProbeFailed(f"The daemon answered its own {type(request).__name__} with {reply}.")
        return reply

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            writer.write(zmtp.opening(b"DEALER") + zmtp.encode([request]))
            received = zmtp.Input({b"ROUTER"}, _MOST_BYTES, 1)
            while not isinstance(message := received.next(), list):
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise EOFError("the connection was closed")
                received.feed(data)
            return message[0]
        finally:
            writer.transport.abort()
