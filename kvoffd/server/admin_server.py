"""Administration over TCP: encrypted, for known keys only, and for nothing else.

CURVE (ZeroMQ RFC 26) proves on every connection that the client has the secret of a key in ``admin_clients_file``, and
to the client that this daemon has the one whose public half it was given. The key says who asks: a key has one session
with the role of an administrator for as long as the daemon lives, so no request of an engine is answered here, whatever
token it carries, and a connection leaves nothing behind.

libzmq does CURVE and judges keys, on a socket that nobody else reaches. What it does not bound, the connections and
what one of them may send unanswered, is bounded before it: the daemon accepts on TCP and carries the bytes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.acceptor import Acceptor
from kvoffd.server.listening import listen_everywhere
from kvoffd.server.service import Service
from kvoffd.server.session import Lifeline, Peer, Session
from kvoffd.settings import ALL_INTERFACES, parse_address
from kvoffd_proto.curve_keys import CurveKeyError, read_public_keys, read_secret_key
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import Role

logger = logging.getLogger(__name__)

ZAP_DOMAIN = "kvoffd-admin"
NOBODY = 2**32 - 1
"""No user and no group has this id: a key passes none of the checks that go by ids."""
MAX_MESSAGE_BYTES = 64 * 1024
"""No request of an administrator is near that."""
HANDSHAKE_MS = 5_000
QUEUED_REPLIES = 64
MAX_CONNECTIONS = 64
"""One more takes the place of the oldest whose key was not judged yet."""
HANDSHAKE_BYTES = 64 + 170
"""What the daemon has sent when it has not judged the client's key: its greeting and CURVE's WELCOME."""
MAX_UNANSWERED_BYTES = 1024**2
CARRIED_BYTES = 16 * 1024
MESSAGES_AT_ONCE = 8
REST_S = 0.005
"""Pause between two batches of messages: engines' messages come first."""


class AdminServerError(KvoffdError):
    """Administration over TCP cannot be offered. The message says why."""


class AdminKeys(NamedTuple):
    """Whose secret the daemon has, and who may come in."""

    secret: bytes
    public: bytes
    clients: frozenset[str]

    @classmethod
    def read(cls, config: Config) -> AdminKeys:
        """From the files that ``config`` names. Raises AdminServerError."""
        try:
            secret = read_secret_key(Path(config.admin_key_file)).encode()
            clients = frozenset(read_public_keys(Path(config.admin_clients_file)))
            return cls(secret, zmq.curve_public(secret), clients)
        except CurveKeyError as error:
            raise AdminServerError(f"admin_address cannot be served: {error}") from error
        except zmq.ZMQError as error:  # this ZeroMQ has no CURVE, or the 40 characters are no number
            raise AdminServerError(f"admin_address cannot be served: ZeroMQ refuses the key ({error}).") from error


class AdminServer:
    """The TCP socket of one service. Has its own ZeroMQ context: its traffic does not hold up the engines' sockets."""

    def __init__(self, service: Service, directory: Path, address: str, keys: AdminKeys) -> None:
        self._service = service
        self._address = parse_address(address)
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._authenticator = ThreadAuthenticator(self._context)
        self._inner = directory / "admin"
        self._acceptor: Acceptor | None = None
        self._port = 0
        self._connections: dict[asyncio.Task[None], int] = {}
        """Bytes that the daemon sent, by connection, oldest first."""
        self._sessions: dict[str, Session] = {}
        self._read_due = False
        self._warnings = RareWarnings(logger)

    @property
    def endpoint(self) -> str:
        """Where it listens, the port included that the kernel chose for 0."""
        host, _ = self._address
        return f"tcp://[{host}]:{self._port}" if ":" in host else f"tcp://{host}:{self._port}"

    def open(self) -> None:
        """Listen. Raises AdminServerError."""
        for key in self._keys.clients:
            session = self._service.sessions.open(Lifeline(), Peer(0, NOBODY, NOBODY, key), internal=True)
            session.role = Role.ADMIN
            self._sessions[key] = session
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, credentials_provider=self)
        settings: dict[int, int | bytes] = {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: self._keys.secret,
            zmq.ZAP_DOMAIN: ZAP_DOMAIN.encode(),
            # Without it ZeroMQ lets everybody in whose handshake ends while nobody answers for keys.
            zmq.ZAP_ENFORCE_DOMAIN: 1,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.SNDHWM: QUEUED_REPLIES,
            zmq.RCVHWM: QUEUED_REPLIES,
            zmq.ROUTER_MANDATORY: 1,
            zmq.LINGER: 0,
        }
        for option, value in settings.items():
            self._socket.setsockopt(option, value)
        host, port = self._address
        try:
            self._inner.mkdir(mode=0o700, exist_ok=True)
            self._socket.bind(f"ipc://{self._inner}/socket")
            if host == ALL_INTERFACES:
                listener = listen_everywhere(port)
            else:
                listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise AdminServerError(f"admin_address {host}:{port} cannot be listened on: {error.strerror}.") from error
        self._port = int(listener.getsockname()[1])
        self._acceptor = Acceptor(listener, self._accepted)
        self._acceptor.start()
        self._loop.add_reader(self._socket.FD, self._read_messages)
        logger.info(
            "Administration over %s, known keys: %d; the daemon's own public key is %s",
            self.endpoint,
            len(self._keys.clients),
            self._keys.public.decode(),
        )

    def close(self, linger_ms: int) -> None:
        """Send what is queued, for ``linger_ms`` at most, and close."""
        if self._acceptor is not None:
            self._acceptor.close()
        for task in list(self._connections):
            task.cancel()
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close(linger=linger_ms)
        self._authenticator.stop()
        self._context.term()

    def _accepted(self, stream: socket.socket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            unjudged = (task for task, sent in self._connections.items() if sent <= HANDSHAKE_BYTES)
            oldest = next(unjudged, None)
            if oldest is None:
                stream.close()
                return
            oldest.cancel()
            del self._connections[oldest]
        task = self._loop.create_task(self._carry(stream))
        self._connections[task] = 0
        task.add_done_callback(lambda ended: self._connections.pop(ended, None))

    async def _carry(self, stream: socket.socket) -> None:
        """Carry a connection's bytes to ZeroMQ and back until one of them closes."""
        task = asyncio.current_task()
        assert task is not None
        writers: list[asyncio.StreamWriter] = []
        unanswered = asyncio.Semaphore(MAX_UNANSWERED_BYTES // CARRIED_BYTES)
        taken = 0

        async def carry_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            while data := await reader.read(CARRIED_BYTES):
                await unanswered.acquire()
                taken += 1
                writer.write(data)
                await writer.drain()

        async def carry_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal taken
            while data := await reader.read(CARRIED_BYTES):
                for _ in range(taken):
                    unanswered.release()
                taken = 0
                if task in self._connections:
                    self._connections[task] += len(data)
                writer.write(data)
                await writer.drain()

        try:
            from_client, to_client = await asyncio.open_connection(sock=stream)
            writers.append(to_client)
            from_daemon, to_daemon = await asyncio.open_unix_connection(f"{self._inner}/socket")
            writers.append(to_daemon)
            ways = [
                self._loop.create_task(carry_in(from_client, to_daemon)),
                self._loop.create_task(carry_out(from_daemon, to_client)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # one of them went away; or its place was taken, or close() cancels, as nobody else does
        finally:
            stream.close()
            for writer in writers:
                writer.transport.abort()

    def _read_messages(self) -> None:
        self._read_due = False
        if self._socket.closed:
            return
        try:
            more = self._read()
        except Exception:
            logger.exception("Reading messages of administration over TCP failed.")
            more = True
        if more and not self._read_due:
            self._read_due = True
            self._loop.call_later(REST_S, self._read_messages)

    def _read(self) -> bool:
        """Answer up to ``MESSAGES_AT_ONCE`` messages; True when there may be more."""
        for _ in range(MESSAGES_AT_ONCE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            session = self._sessions.get(_key_of(frames[-1]))
            if session is None:  # the authenticator has let nobody in without a known key
                logger.error("A message over TCP came without a known key and was dropped.")
                continue
            frame = frames[1].bytes if len(frames) == 2 else b""
            rest = self._service.handle(partial(self._send, frames[0].bytes), frame, session)
            if rest is not None:
                self._go_on(rest)
        return True

    def _go_on(self, rest: Iterator[None]) -> None:
        """Do what is left of a request, a part at each turn of the loop."""
        if next(rest, rest) is None:
            self._loop.call_soon(self._go_on, rest)

    def _send(self, peer: bytes, reply: bytes) -> None:
        try:
            self._socket.send_multipart([peer, reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the peer does not read (EAGAIN), or is gone (EHOSTUNREACH)
            self._service.context.replies_dropped["unread" if isinstance(error, zmq.Again) else "gone"] += 1
            logger.debug("A reply to an administrator could not be sent: %s.", error)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key, in Z85, may come in. Called in the authenticator's thread."""
        name = key.decode()
        if name in self._keys.clients:
            return True
        self._loop.call_soon_threadsafe(self._refused, name)
        return False

    def _refused(self, key: str) -> None:
        self._service.context.count_error(ErrorCode.FORBIDDEN)
        self._warnings.warn("Administration over TCP was refused to the key %s, which admin_clients_file lacks.", key)


def _key_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
