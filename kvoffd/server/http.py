"""HTTP for scrapers, probes and people: /metrics, /healthz, /readyz, /stats.json, and a page at /, of /page.json.

/healthz is 200 while the loop answers and engines can connect, whatever else is wrong: a restart would fix nothing
else. /readyz is 200 while the daemon accepts sessions. Both list the known problems.

asyncio's streams serve in a thread and loop of their own, one request per connection. Beyond ``MAX_CONNECTIONS`` each
new one closes another: see ``HttpServer._close_one``. Answers are computed in the
daemon's loop, which proves that it runs. They are cached for a second: any process of the machine may ask, and must
not slow down lookups.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from kvoffd.config import parse_address
from kvoffd.errors import NoMoreThreads
from kvoffd.server.page import PageFacts, page_of
from kvoffd.system.listening import RETRY_S, listen
from kvoffd.system.threads import start
from kvoffd_proto.admin import HealthReply
from kvoffd_proto.stats import DaemonStats

logger = logging.getLogger(__name__)

REQUEST_S = 5.0
"""Time for a request to arrive, and for its answer to be read."""
LOOP_S = 2.0
"""Time for the daemon's loop to answer."""
NAMES_S = 2.0
"""Time to find this machine's names."""
FRESH_S = 1.0
"""Time for which an answer is given again."""
MAX_CONNECTIONS = 32
"""Limit of connections that are open at once."""
ACCEPTED_AT_ONCE = 64
MAX_REQUEST_BYTES = 8192
MAX_DISCARDED_BYTES = 1 << 20
PROBES = "/healthz", "/readyz"
PATHS = ("/metrics", *PROBES, "/stats.json", "/page.json")
PROBES_BEGIN = tuple(f"GET {path}".encode() for path in PROBES)
PRIVATE = (".svc", ".local", ".internal", ".localhost")
"""Ends of names that the public DNS does not have: Services of Kubernetes, and networks of their own."""
POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the page uses no other source than this daemon."""

ReplyT = TypeVar("ReplyT")


class Asked(Protocol):
    """The daemon, as HTTP asks it."""

    def health(self) -> HealthReply:
        """Called in the daemon's loop."""

    def stats(self) -> DaemonStats | None:
        """Return None while the daemon starts or stops. Called in the daemon's loop."""

    def page_facts(self) -> PageFacts | None:
        """Return None while the daemon starts or stops. Called in the daemon's loop."""

    def unreachable(self) -> str:
        """Return a sentence why no engine can connect; empty if they can. Called in any thread."""


class _Answer(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    def encode(self) -> bytes:
        allow = "Allow: GET\r\n" if self.status is HTTPStatus.METHOD_NOT_ALLOWED else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
            f"Content-Security-Policy: {POLICY}\r\n{allow}Connection: close\r\n\r\n"
        )
        return head.encode() + self.body


def _sentence(status: HTTPStatus, text: str) -> _Answer:
    return _Answer(status, f"{text}\n".encode())


@dataclass(eq=False)
class _Connection:
    stream: socket.socket
    address: str
    """Address of its client, without the port."""
    is_probe: bool = False
    """Whether a probe's request has arrived, as far as was looked."""
    is_read: bool = False
    """Whether its request was read: then ``is_probe`` is certain."""
    has_begun: bool = False
    """Whether its task has begun, and closes the stream."""


class HttpServer:
    """Listens when constructed, answers after ``start``. Raises KvoffdError if the address is unusable."""

    def __init__(self, address: str, hosts: Collection[str], daemon: Asked, loop: asyncio.AbstractEventLoop) -> None:
        self._hosts, self._daemon, self._loop = hosts, daemon, loop
        self._own_names = set[str]()
        self._finding = Future[set[str]]()
        """The latest question for this machine's names. It has ended while none is asked, so from the start."""
        self._finding.set_result(self._own_names)
        self._dashboard = Path(__file__).with_name("dashboard.html").read_bytes()
        self._answers: dict[str, tuple[float, asyncio.Task[_Answer]]] = {}
        """The latest answer by path, perhaps still being made, with the time until which it is given."""
        self._open: dict[_Connection, asyncio.Task[None]] = {}
        """The tasks that serve connections, oldest first."""
        self._ended: Future[None] = Future()
        self._listeners = listen(*parse_address(address))

    def start(self) -> None:
        """Raises NoMoreThreads."""
        start(threading.Thread(target=lambda: asyncio.run(self._listen()), name="kvoffd-http", daemon=True))

    def close(self) -> None:
        """Stop listening."""
        self._ended.set_result(None)

    async def _listen(self) -> None:
        for listener in self._listeners:
            listener.setblocking(False)
            self._listen_on(listener)
        await asyncio.wrap_future(self._ended)
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _listen_on(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                stream, peer = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                loop.remove_reader(listener)
                loop.call_later(RETRY_S, self._listen_on, listener)
                return
            stream.setblocking(False)
            connection = _Connection(stream, peer[0])
            self._open[connection] = loop.create_task(self._serve(connection))
            if len(self._open) > MAX_CONNECTIONS:
                self._close_one()

    def _close_one(self) -> None:
        """Close a connection of the address that has the most: its oldest one without a probe's request, if it has one.

        Never the newest: its request may be a probe's, and not have arrived yet. So neither idle connections nor a
        client that asks too often keep a probe from its answer: an orchestrator would restart the daemon. Most of a
        flood are closed before their tasks have begun, which costs little.
        """
        for one in self._open:
            if not (one.is_probe or one.is_read):
                one.is_probe = _begins_as_probe(one.stream)
        counts = Counter(one.address for one in self._open)
        *others, _ = self._open
        closed = max(others, key=lambda one: (counts[one.address], not one.is_probe))  # the oldest of several
        self._open.pop(closed).cancel()
        if not closed.has_begun:
            closed.stream.close()

    async def _serve(self, connection: _Connection) -> None:
        """Answer one request, and close the connection."""
        connection.has_begun = True
        try:
            reader, writer = await asyncio.open_connection(limit=MAX_REQUEST_BYTES, sock=connection.stream)
            try:
                if (answer := await self._read_and_answer(reader, connection)) is not None:
                    async with asyncio.timeout(REQUEST_S):
                        await _send(answer, reader, writer)
            finally:
                writer.transport.abort()
        except OSError:
            pass  # the peer is gone, or does not read
        except Exception:
            logger.exception("An HTTP connection failed inside the daemon.")
        finally:
            self._open.pop(connection, None)

    async def _read_and_answer(self, reader: asyncio.StreamReader, connection: _Connection) -> _Answer | None:
        """Return the answer to the connection's request; None if the peer closed without one."""
        try:
            async with asyncio.timeout(REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            text = f"The request is longer than {MAX_REQUEST_BYTES} bytes."
            return _sentence(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        except TimeoutError:
            return _sentence(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time.")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not words[1].startswith(b"/"):
            return _sentence(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1 request.")
        if words[0] != b"GET":
            return _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is served.")
        path = words[1].split(b"?", 1)[0].decode(errors="replace")
        connection.is_probe, connection.is_read = path in PROBES, True
        for host in _hosts_of(head):
            if not (self._is_served(host) or host in await self._find_own_names()):
                text = "Use an IP address, localhost or this machine's name as the host, or add this one to http_hosts."
                return _sentence(HTTPStatus.FORBIDDEN, text)
        return await self._answer(path)

    def _is_served(self, host: str) -> bool:
        """Return whether a host is served by any daemon, by this one's setting, or is known to be this machine's name.

        Others are refused against DNS rebinding: a name of the public DNS may be a foreign page's, and resolve to here.
        """
        if "." not in host or host.endswith(PRIVATE) or host in self._own_names:
            return True
        with suppress(ValueError):
            return bool(ip_address(host))
        return host in self._hosts or "*" in self._hosts

    async def _find_own_names(self) -> set[str]:
        """Return this machine's names now; the earlier ones if that takes too long, since it may ask a server, or if
        there are no more threads."""
        if self._finding.done():
            asked = Future[set[str]]()

            def find() -> None:
                names = self._own_names
                with suppress(OSError, UnicodeError):  # the second: the machine's name is none of the DNS
                    names = {socket.gethostname().lower(), socket.getfqdn().lower()}
                asked.set_result(names)

            # No executor's thread, for which the process would wait at its end.
            try:
                start(threading.Thread(target=find, name="kvoffd-http-names", daemon=True))
            except NoMoreThreads:
                return self._own_names
            self._finding = asked
        with suppress(TimeoutError):
            async with asyncio.timeout(NAMES_S):
                self._own_names = await asyncio.shield(asyncio.wrap_future(self._finding))
        return self._own_names

    async def _answer(self, path: str) -> _Answer:
        if path == "/":
            return _Answer(HTTPStatus.OK, self._dashboard, "text/html; charset=utf-8")
        if path not in PATHS:
            return _sentence(HTTPStatus.NOT_FOUND, f"Only / and {', '.join(PATHS)} are served.")
        until, making = self._answers.get(path, (0.0, None))
        if making is None or (making.done() and time.monotonic() >= until):
            making = asyncio.create_task(self._make(path))
            self._answers[path] = time.monotonic() + FRESH_S, making
        return await asyncio.shield(making)  # all who ask now wait for it, also when this connection is closed

    async def _make(self, path: str) -> _Answer:
        try:
            if path in PROBES:
                return await self._health(path)
            return await (self._page() if path == "/page.json" else self._stats(path))
        except TimeoutError:
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The loop does not answer.")
        except Exception:
            logger.exception("An HTTP request failed inside the daemon.")
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The daemon failed to answer; its log has the details.")

    async def _health(self, path: str) -> _Answer:
        health, unreachable = await self._ask(self._daemon.health), self._daemon.unreachable()
        good = not unreachable and (health.ready or path == "/healthz")
        problems = [unreachable, *health.problems] if unreachable else health.problems
        lines = dict.fromkeys(["ok" if good else "not ok", *problems])  # each once: health may know of the first too
        return _sentence(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(lines))

    async def _stats(self, path: str) -> _Answer:
        stats = await self._ask(self._daemon.stats)
        if stats is None:
            return await self._not_serving()
        if path == "/stats.json":
            return _Answer(HTTPStatus.OK, msgspec.json.encode(stats), "application/json")
        from kvoffd.observe.metrics import render_metrics  # a slow import, which would delay the start

        return _Answer(HTTPStatus.OK, render_metrics(stats), "text/plain; version=0.0.4; charset=utf-8")

    async def _page(self) -> _Answer:
        facts = await self._ask(self._daemon.page_facts)
        if facts is None:
            return await self._not_serving()
        return _Answer(HTTPStatus.OK, msgspec.json.encode(page_of(facts)), "application/json")

    async def _not_serving(self) -> _Answer:
        """Answer with the reason why the daemon has no statistics."""
        return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "\n".join((await self._ask(self._daemon.health)).problems))

    async def _ask(self, question: Callable[[], ReplyT]) -> ReplyT:
        """Call ``question`` in the daemon's loop and return its result. Raises TimeoutError."""
        reply: Future[ReplyT] = Future()

        def ask() -> None:
            if reply.set_running_or_notify_cancel():
                try:
                    reply.set_result(question())
                except Exception as error:
                    reply.set_exception(error)

        self._loop.call_soon_threadsafe(ask)
        return await asyncio.wait_for(asyncio.wrap_future(reply), LOOP_S)


def _begins_as_probe(stream: socket.socket) -> bool:
    """Return whether a probe's request has arrived. It stays unread."""
    with suppress(OSError):  # nothing has arrived, or the peer is gone
        return stream.recv(max(map(len, PROBES_BEGIN)), socket.MSG_PEEK).startswith(PROBES_BEGIN)
    return False


async def _send(answer: _Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(0)
    writer.write(answer.encode())
    await writer.drain()
    writer.write_eof()
    # Closing before the rest of the request is read would reset the connection, and the answer might be lost.
    for _ in range(MAX_DISCARDED_BYTES // MAX_REQUEST_BYTES):
        if not await reader.read(MAX_REQUEST_BYTES):
            break


def _hosts_of(head: bytes) -> list[str]:
    """Return the hosts that a request names, without ports."""
    found = [
        line[5:].strip().decode(errors="replace") for line in head.split(b"\r\n")[1:] if line[:5].lower() == b"host:"
    ]
    hosts = [name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0] for name in found]
    return [host.lower().rstrip(".") for host in hosts]
