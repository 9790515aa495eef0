"""HTTP for scrapers, probes and people: /metrics, /healthz, /readyz, /stats.json and, at /, a page that shows them.

/healthz is 200 while the loop answers and engines can connect, whatever else is wrong: a restart would fix nothing
else. /readyz is 200 while the daemon accepts sessions. Both list the known problems.

Each connection has a thread and one request. Answers are computed in the loop, which proves that it runs. They are
cached for a second: any process of the machine may ask, and must not slow down lookups.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from kvoffd.config import ALL_INTERFACES, parse_address
from kvoffd.server.sockets import RETRY_S
from kvoffd.system.listening import listen

if TYPE_CHECKING:
    from kvoffd.server.daemon import Daemon

logger = logging.getLogger(__name__)

REQUEST_S = 5.0
"""Time for a request to arrive, and for its answer to be read."""
LOOP_S = 2.0
FRESH_S = 1.0
MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8192
MAX_DISCARDED_BYTES = 1 << 20
PATHS = ("/metrics", "/healthz", "/readyz", "/stats.json")
FOR_BROWSERS = ("/", "/stats.json")
POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the page uses no other source than this daemon."""

ReplyT = TypeVar("ReplyT")


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


class HttpServer:
    """Listens when constructed, answers after ``start``. Raises KvoffdError if the address is unusable."""

    def __init__(self, address: str, daemon: Daemon, loop: asyncio.AbstractEventLoop) -> None:
        self._daemon, self._loop = daemon, loop
        self._dashboard = Path(__file__).with_name("dashboard.html").read_bytes()
        self._locks = {path: threading.Lock() for path in PATHS}
        self._fresh: dict[str, tuple[float, _Answer]] = {}
        self._free = threading.Semaphore(2 * MAX_CONNECTIONS)
        """Connections that may still be accepted; more wait in the kernel's backlog."""
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        """Oldest first; guarded by ``_lock``."""
        self._ended = False
        host, port = parse_address(address)
        self._listeners = listen("" if host == ALL_INTERFACES else host, port)

    def start(self) -> None:
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="kvoffd-http", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._ended = True
        for listener in self._listeners:
            _shut(listener)

    def answer(self, path: str) -> _Answer:
        """Answer a GET. Called in a connection's thread."""
        if path == "/":
            return _Answer(HTTPStatus.OK, self._dashboard, "text/html; charset=utf-8")
        if path not in PATHS:
            return _sentence(HTTPStatus.NOT_FOUND, f"Only / and {', '.join(PATHS)} are served.")
        with self._locks[path]:
            until, answer = self._fresh.get(path) or (0.0, None)
            if answer is None or time.monotonic() >= until:
                answer = self._make(path)
                self._fresh[path] = time.monotonic() + FRESH_S, answer
            return answer

    def _make(self, path: str) -> _Answer:
        try:
            return self._health(path) if path in ("/healthz", "/readyz") else self._stats(path)
        except TimeoutError:
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The loop does not answer.")
        except Exception:
            logger.exception("An HTTP request failed inside the daemon.")
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "The daemon failed to answer; its log has the details.")

    def _health(self, path: str) -> _Answer:
        health, unreachable = self._ask(self._daemon.health), self._daemon.unreachable()
        good = not unreachable and (health.ready or path == "/healthz")
        lines = dict.fromkeys(["ok" if good else "not ok", *filter(None, [unreachable]), *health.problems])
        return _sentence(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(lines))

    def _stats(self, path: str) -> _Answer:
        stats = self._ask(self._daemon.stats)
        if stats is None:
            return _sentence(HTTPStatus.SERVICE_UNAVAILABLE, "\n".join(self._ask(self._daemon.health).problems))
        if path == "/stats.json":
            return _Answer(HTTPStatus.OK, msgspec.json.encode(stats), "application/json")
        from kvoffd.observe.metrics import render_metrics  # a slow import, which would delay the start

        return _Answer(HTTPStatus.OK, render_metrics(stats), "text/plain; version=0.0.4; charset=utf-8")

    def _ask(self, question: Callable[[], ReplyT]) -> ReplyT:
        """Call ``question`` in the loop and return its result. Raises TimeoutError."""
        reply: Future[ReplyT] = Future()

        def ask() -> None:
            if reply.set_running_or_notify_cancel():
                try:
                    reply.set_result(question())
                except Exception as error:
                    reply.set_exception(error)

        self._loop.call_soon_threadsafe(ask)
        try:
            return reply.result(LOOP_S)
        finally:
            reply.cancel()

    # --- connections: each has a thread and one request -------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections until ``close``, in a thread of its own.

        Beyond the limit the oldest connection is closed, so that idle ones never block a probe.
        """
        with listener:
            while self._free.acquire() and not self._ended:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    self._free.release()
                    time.sleep(0 if self._ended else RETRY_S)
                    continue
                with self._lock:
                    self._open.append(connection)
                    if len(self._open) > MAX_CONNECTIONS:
                        _shut(self._open[-MAX_CONNECTIONS - 1])
                try:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                except RuntimeError:  # no thread can be started
                    self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.remove(connection)
            connection.close()
        self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if (answer := self._read_and_answer(connection)) is not None:
                connection.settimeout(REQUEST_S)
                connection.sendall(answer.encode())
                _finish(connection)
        except OSError:
            pass  # the peer is gone, or does not read
        except Exception:
            logger.exception("An HTTP connection failed inside the daemon.")
        finally:
            self._close(connection)

    def _read_and_answer(self, connection: socket.socket) -> _Answer | None:
        """Return the answer to the connection's request; None if the peer closed without one."""
        head, until = b"", time.monotonic() + REQUEST_S
        while b"\r\n\r\n" not in head:
            if len(head) > MAX_REQUEST_BYTES:
                text = f"The request is longer than {MAX_REQUEST_BYTES} bytes."
                return _sentence(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
            try:
                data = _receive(connection, until)
            except TimeoutError:
                return _sentence(HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time.")
            if not data:
                return None
            head += data
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1.") or not words[1].startswith(b"/"):
            return _sentence(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1 request.")
        if words[0] != b"GET":
            return _sentence(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is served.")
        path = words[1].split(b"?", 1)[0].decode(errors="replace")
        if path in FOR_BROWSERS and not _is_here(head):
            return _sentence(HTTPStatus.FORBIDDEN, "Use an IP address, localhost or this machine's name as the host.")
        return self.answer(path)


def _is_here(head: bytes) -> bool:
    """Return whether the Host header is an address, a name without a dot, or this machine's name.

    That protects against DNS rebinding: a foreign page whose name resolves to this machine reads nothing.
    """
    found = [
        line[5:].strip().decode(errors="replace") for line in head.split(b"\r\n")[1:] if line[:5].lower() == b"host:"
    ]
    for name in found:
        host = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        try:
            ip_address(host)
        except ValueError:
            if "." in host.rstrip(".") and host.lower() not in (socket.gethostname().lower(), socket.getfqdn().lower()):
                return False
    return True


def _receive(connection: socket.socket, until: float) -> bytes:
    connection.settimeout(max(0.001, until - time.monotonic()))
    return connection.recv(MAX_REQUEST_BYTES)


def _finish(connection: socket.socket) -> None:
    """Read the rest of the request: closing before would reset the connection, and the answer might be lost."""
    connection.shutdown(socket.SHUT_WR)
    until = time.monotonic() + REQUEST_S
    for _ in range(MAX_DISCARDED_BYTES // MAX_REQUEST_BYTES):
        if not _receive(connection, until):
            break


def _shut(opened: socket.socket) -> None:
    try:
        opened.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer closed first
