"""Plain HTTP for scrapers and probes: GET /metrics, /healthz, /readyz, and nothing else.

/healthz is 200 while the loop that serves engines answers, whatever it has to say: a restart mends nothing else.
/readyz is 200 while the daemon takes sessions. Both name the problems that the daemon knows of.

No web framework: three fixed answers do not earn a dependency, and this server must run in the daemon's own loop, so
that an answer proves that the loop turns.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from kvoffd.errors import KvoffdError
from kvoffd.server.acceptor import Acceptor
from kvoffd.server.listening import listeners_of
from kvoffd.settings import parse_address
from kvoffd_proto.messages import HealthReply

logger = logging.getLogger(__name__)

ANSWER_DEADLINE_S = 5.0
MAX_REQUEST_BYTES = 8192
MAX_DISCARDED_BYTES = 1024 * 1024
MAX_CONNECTIONS = 64
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT


def _sentence(status: HTTPStatus, text: str) -> _Answer:
    return _Answer(status, f"{text}\n".encode())


class NotServing(Exception):
    """The daemon has nothing to tell yet, or any more. The message is a sentence for whoever asked."""


class HttpServer:
    """Serves one request per connection, at most ``MAX_CONNECTIONS`` at a time.

    When there are as many, a new one takes the place of the oldest whose request has not arrived or whose answer is not
    read: a probe, which sends at once and reads at once, is answered however many others do not.

    Args:
        address: ``host:port``; port 0 takes a free one.
        metrics: Gives the Prometheus page; NotServing becomes 503.
        health: Gives the daemon's health by a round trip through its message loop; NotServing says that it is alive
            and not ready, any other exception that it does not answer.
        deadline_s: A connection that has not been answered by then is answered 408 or 503, or closed.
    """

    def __init__(
        self,
        address: str,
        metrics: Callable[[], Awaitable[bytes]],
        health: Callable[[], Awaitable[HealthReply]],
        deadline_s: float = ANSWER_DEADLINE_S,
    ) -> None:
        self._wanted = parse_address(address)
        self._metrics = metrics
        self._health = health
        self._deadline_s = deadline_s
        self._acceptors: list[Acceptor] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: dict[asyncio.Task[None], None] = {}
        """Those of them that wait for their peer, oldest first."""

    @property
    def port(self) -> int:
        """The port that is listened on; 0 before ``start``."""
        return self._acceptors[0].port if self._acceptors else 0

    async def start(self) -> None:
        """Listen. Raises KvoffdError when the address cannot be had."""
        host, port = self._wanted
        try:
            listeners = await listeners_of(self._wanted, MAX_CONNECTIONS)
        except OSError as error:
            raise KvoffdError(
                f"The HTTP address {host}:{port} cannot be listened on ({error.strerror or error}); "
                "free it, choose another with --http-address, or give an empty one to serve no HTTP."
            ) from error
        for listener in listeners:
            self._acceptors.append(Acceptor(listener, self._accepted))
            self._acceptors[-1].start()

    async def close(self) -> None:
        """Stop listening and drop the connections that are open."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors.clear()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accepted(self, stream: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS and self._idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.cancel()
        if len(self._connections) >= 2 * MAX_CONNECTIONS:
            stream.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._connections.add(task)
        self._idle[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        self._idle.pop(task, None)

    async def _serve(self, stream: socket.socket) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=stream, limit=MAX_REQUEST_BYTES)
        except (OSError, asyncio.CancelledError):
            stream.close()
            return
        try:
            answer = await self._read_and_answer(reader)
            if answer is not None:
                writer.write(_encode(answer))
                await self._finish(reader, writer)
        except (OSError, asyncio.CancelledError):
            # The peer went away or does not read (TimeoutError): there is nobody to tell. Or its place is taken, or
            # close() cancels; ending normally keeps asyncio from reporting the task as failed.
            writer.transport.abort()
        finally:
            writer.close()

    async def _finish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Get the answer to the peer: closing with parts of the request unread would reset the connection first."""
        async with asyncio.timeout(self._deadline_s):
            await writer.drain()
            writer.write_eof()
            for _ in range(MAX_DISCARDED_BYTES // MAX_REQUEST_BYTES):
                if not await reader.read(MAX_REQUEST_BYTES):
                    break

    async def _read_and_answer(self, reader: asyncio.StreamReader) -> _Answer | None:
        """The answer to the connection's request; None when the peer closed without one."""
        try:
            async with asyncio.timeout(self._deadline_s):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return _sentence(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time.")
        except asyncio.LimitOverrunError:
            return _sentence(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"The request is longer than {MAX_REQUEST_BYTES} bytes."
            )
        except asyncio.IncompleteReadError:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._idle.pop(task, None)
        try:
            return await self._respond(head)
        finally:
            self._idle[task] = None

    async def _respond(self, head: bytes) -> _Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not words[1].startswith(b"/"):
            return _sentence(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1 request.")
        if words[0] != b"GET":
            return _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is served.")
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._answer(words[1].split(b"?", 1)[0])
        except TimeoutError:
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The daemon did not answer in time.")
        except Exception:
            logger.exception("An HTTP request failed.")
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The daemon failed to answer; its log has the details.")

    async def _answer(self, path: bytes) -> _Answer:
        if path not in (b"/metrics", b"/healthz", b"/readyz"):
            return _sentence(HTTPStatus.NOT_FOUND, "Only /metrics, /healthz and /readyz are served.")
        try:
            if path == b"/metrics":
                return _Answer(HTTPStatus.OK, await self._metrics(), METRICS_CONTENT_TYPE)
            health = await self._health()
            ready, problems = health.ready, health.problems
        except NotServing as reason:
            ready, problems = False, [str(reason)]
        good = ready or path == b"/healthz"
        lines = ("ok" if good else "not ok", *problems)
        return _sentence(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(lines))


def _encode(answer: _Answer) -> bytes:
    head = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET"] if answer.status == HTTPStatus.METHOD_NOT_ALLOWED else []),
    ]
    return "\r\n".join((*head, "", "")).encode() + answer.body
