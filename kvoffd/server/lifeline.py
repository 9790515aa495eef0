"""``lifeline.sock``: admits clients by their credentials, takes their descriptors, and ends a session with its stream.

A stream ends when the client closes it or dies, or violates the protocol. ``MemoryReleased`` is the last frame: no copy
touches the client's memory any more.
"""

from __future__ import annotations

import array
import asyncio
import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from kvoffd.errors import KvoffdError
from kvoffd.server.service import Service
from kvoffd.server.session import ClientProcess, Session
from kvoffd.server.sessions import Ending, may_connect
from kvoffd.server.sockets import FEW_DESCRIPTORS, Sockets
from kvoffd.system.directory import DaemonDirectory
from kvoffd.system.limits import few_descriptors_left
from kvoffd.system.listening import BACKLOG, RETRY_S
from kvoffd.system.mappings import PageFaulter, check_descriptor
from kvoffd.system.rare_warnings import RareWarnings
from kvoffd_proto import lifeline
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import PROTOCOL_VERSION
from kvoffd_proto.paths import peer_credentials

logger = logging.getLogger(__name__)

HELLO_DEADLINE_S = 10.0
ACCEPTED_AT_ONCE = 16
MAX_UNNAMED = 16
"""Limit of received descriptors without an Attach frame."""
_READ_BYTES = 1024
"""Bytes read from a lifeline at a time, some forty frames."""
_ANCILLARY_BYTES = socket.CMSG_SPACE(253 * 4)
"""Buffer for all descriptors of a message (SCM_MAX_FD): the kernel would close others in the loop's thread."""


class Connection:
    """One accepted stream, its session's Lifeline.

    Attributes:
        leaving: the client has sent Leaving.
        session: set when the client is admitted, before the first read.
    """

    def __init__(self, stream: socket.socket, close_descriptor: Callable[[int], None]) -> None:
        self.stream = stream
        self.leaving = False
        self.session: Session
        self.close_descriptor = close_descriptor
        self._buffer = lifeline.FrameBuffer()
        self._unnamed: list[int | KvoffdError] = []
        """Descriptors without a frame yet. One that is not memory is closed at once and replaced by the error: if it
        were the client's own end of the lifeline, an open copy would hide the client's death."""

    def alive(self) -> bool:
        if self.stream.fileno() < 0:
            return False
        # Not by MSG_PEEK: unread bytes would hide that the client died.
        poller = select.poll()
        poller.register(self.stream, select.POLLRDHUP)
        return not poller.poll(0)

    def close(self) -> None:
        if self.stream.fileno() >= 0:
            with suppress(OSError):  # the client is gone
                self.stream.shutdown(socket.SHUT_RDWR)
            self.close_descriptor(self.stream.detach())  # together with unread descriptors
        for fd in self._unnamed:
            if isinstance(fd, int):
                self.close_descriptor(fd)
        self._unnamed.clear()

    def close_with(self, last: lifeline.FromDaemon) -> None:
        """Send a last frame, if possible, and close."""
        with suppress(OSError):
            self.send(last)
        self.close()

    def send(self, message: lifeline.FromDaemon) -> None:
        """Send one small frame. Raises OSError if the client does not read its lifeline, and so counts as dead."""
        frame = lifeline.encode_frame(message)
        if self.stream.send(frame, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the client does not read its lifeline")

    def receive(self) -> list[lifeline.FromClient]:
        """Return the frames that have arrived. Raises EOFError, or LifelineError or OSError if the stream must end."""
        try:
            data, ancillary, flags, _ = self.stream.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._unnamed += map(self._checked, fds)
        if flags & socket.MSG_CTRUNC:
            raise lifeline.LifelineError("A message has too many descriptors.")
        if not data:
            raise EOFError
        frames = [lifeline.decode_from_client(body) for body in self._buffer.feed(data)]
        if len(self._unnamed) > MAX_UNNAMED + sum(isinstance(frame, lifeline.Attach) for frame in frames):
            raise lifeline.LifelineError("Descriptors came without Attach frames.")
        return frames

    def take_descriptor(self) -> int:
        """Return the next Attach's descriptor. Raises KvoffdError if it is refused, LifelineError if there is none."""
        if not self._unnamed:
            raise lifeline.LifelineError("An Attach frame came without its descriptor.")
        fd = self._unnamed.pop(0)
        if isinstance(fd, KvoffdError):
            raise fd
        return fd

    def _checked(self, fd: int) -> int | KvoffdError:
        """Return the descriptor, or close it and return the error if it is refused."""
        try:
            check_descriptor(fd)
        except KvoffdError as error:
            self.close_descriptor(fd)
            return error
        return fd


class LifelineServer:
    """Listens on ``lifeline.sock``, opens a session for each connection, and ends it with the connection."""

    def __init__(
        self, service: Service, directory: DaemonDirectory, sockets: Sockets, page_faulter: PageFaulter
    ) -> None:
        self._service = service
        self._directory = directory
        self._sockets = sockets
        self._page_faulter = page_faulter
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._connections: dict[int, Connection] = {}
        """Connections that the loop watches, by descriptor."""
        self._refused, self._ended = RareWarnings(logger), RareWarnings(logger)

    def open(self) -> None:
        """Listen. Raises OSError."""
        path = self._directory.sockets.lifeline
        self._listener.bind(str(path))
        self._directory.open_to_group(path)
        self._listener.listen(BACKLOG)
        self._listen_on()

    def close(self) -> None:
        """End all sessions."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for connection in list(self._connections.values()):
            self._end(connection, Ending.STOPPING)

    def tick(self) -> None:
        """End connections of dead processes, and those without a Hello, which would take a session forever.

        If a process dies with unread data, libuv reports EPOLLERR only once, perhaps before its last frames were read.
        """
        poller = select.poll()
        for fd in self._connections:
            poller.register(fd, 0)
        for fd, events in poller.poll(0):
            if events & select.POLLERR:
                self._end(self._connections[fd], Ending.GONE)
        overdue = self._service.clock() - HELLO_DEADLINE_S
        for connection in list(self._connections.values()):
            session = connection.session
            if session.role is None and session.opened_at < overdue:
                self._ended.warn("Session %d sent no Hello within %.0f s and was ended.", session.id, HELLO_DEADLINE_S)
                self._end(connection, Ending.NO_HELLO)

    def _listen_on(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._refused.warn("Connections cannot be accepted: %s.", error.strerror)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(RETRY_S, self._listen_on)
                return
            stream.setblocking(False)
            connection = Connection(stream, self._page_faulter.close_descriptor)
            try:
                with self._service.loop_watch:
                    self._admit(connection)
            except Exception:
                logger.exception("A connection failed inside the daemon.")
                connection.close()

    def _admit(self, connection: Connection) -> None:
        """Open a session, or refuse the connection with an error."""
        service = self._service
        try:
            process = ClientProcess(*peer_credentials(connection.stream))
            if not may_connect(process, service.config):
                raise KvoffdError(
                    f"User {process.uid} (group {process.gid}) may not use this kvoffd; add the uid to allowed_uids "
                    "or the gid to allowed_gids.",
                    ErrorCode.FORBIDDEN,
                )
            if few_descriptors_left():
                raise KvoffdError(FEW_DESCRIPTORS, ErrorCode.TOO_MANY)
            session = connection.session = service.sessions.open(connection, process)
        except KvoffdError as error:
            service.request_counts.count_error(error.code)
            self._refused.warn("A connection was refused: %s", error.message)
            connection.close_with(lifeline.Refused(error.code, error.message))
            return
        self._connections[connection.stream.fileno()] = connection
        self._loop.add_reader(connection.stream.fileno(), self._readable, connection)
        try:
            connection.send(lifeline.Greeting(PROTOCOL_VERSION, service.sessions.epoch, session.id, session.token))
        except OSError:
            self._end(connection, Ending.GONE)

    def _readable(self, connection: Connection) -> None:
        with self._service.loop_watch:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            for frame in connection.receive():
                if isinstance(frame, lifeline.Leaving):
                    connection.leaving = True
                else:
                    self._attach(connection, frame.segment_id)
        except lifeline.LifelineError as error:
            self._service.request_counts.count_error(ErrorCode.MALFORMED)
            self._ended.warn("The lifeline of session %d was closed: %s", connection.session.id, error)
            self._end(connection, Ending.MALFORMED)
        except (EOFError, ConnectionError):
            self._end(connection, Ending.CLOSED if connection.leaving else Ending.GONE)
        except OSError:
            self._end(connection, Ending.FAILED)
        except Exception:
            logger.exception("A lifeline failed inside the daemon.")
            self._end(connection, Ending.FAILED)

    def _attach(self, connection: Connection, segment_id: int) -> None:
        """Keep a descriptor for a later Register, or refuse it. Raises OSError; LifelineError without a descriptor."""
        answer: lifeline.Attached | lifeline.AttachRefused = lifeline.Attached(segment_id)
        fd = -1
        try:
            fd = connection.take_descriptor()
            self._service.sessions.attach(connection.session, segment_id, fd)
        except KvoffdError as error:
            if fd >= 0:
                connection.close_descriptor(fd)
            self._service.request_counts.count_error(error.code)
            answer = lifeline.AttachRefused(segment_id, error.code, error.message)
        connection.send(answer)

    def _end(self, connection: Connection, why: Ending) -> None:
        """End the session. After its last copy, release the memory and close the stream."""
        fd = connection.stream.fileno()
        if self._connections.pop(fd, None) is not None:
            self._loop.remove_reader(fd)
        session = connection.session
        if why is Ending.CLOSED and not session.has_asked:
            self._ended.warn(
                "A client (pid %d, %s) disconnected before its first request. If it is of another kvoffd release, "
                "install the same on both ends: this daemon speaks protocol %d.",
                session.process.pid,
                session.process,
                PROTOCOL_VERSION,
            )
        self._service.sessions.end(session, lambda: connection.close_with(lifeline.MemoryReleased()), why)
        self._sockets.wake()
