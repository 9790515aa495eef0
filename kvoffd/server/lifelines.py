"""The lifeline socket: admits peers by their credentials, receives descriptors, notices death by EOF."""

from __future__ import annotations

import array
import asyncio
import logging
import select
import socket
from collections.abc import Callable

from kvoffd.errors import KvoffdError
from kvoffd.observe.logging import RareWarnings
from kvoffd.server.acceptor import Acceptor, failed_streams, peer_of
from kvoffd.server.context import Context
from kvoffd.server.sessions import Ending, Session, may_connect
from kvoffd.system.closing import MOST_DESCRIPTORS, Closer, check_descriptor
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import lifeline
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_MAX_FDS = 16
_READ_BYTES = 1024
"""Some forty frames: what one wake-up of the loop handles of a lifeline."""
HELLO_DEADLINE_S = 10.0


class _Connection:
    """One accepted stream. Is the session's Lifeline."""

    def __init__(self, stream: socket.socket, server: LifelineServer) -> None:
        self._stream = stream
        self._server = server
        self._buffer = lifeline.FrameBuffer()
        self._fds: list[int | KvoffdError] = []
        """What came and has no frame yet. Of what is no memory, why it is refused: held open, the peer's own end of the
        lifeline would hide that the peer is gone."""
        self.leaving = False
        self.session: Session
        """Set once the peer is admitted, before anything is read from it."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def alive(self) -> bool:
        if self._stream.fileno() < 0:
            return False
        # Not by peeking: what a peer wrote before it died would hide that it died.
        poller = select.poll()
        poller.register(self._stream, select.POLLRDHUP)
        return not poller.poll(0)

    def close(self) -> None:
        """Close the stream and what came over it and was not taken."""
        self._server.forget(self)
        if self._stream.fileno() >= 0:
            try:
                self._stream.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the peer is gone
            # What was sent over it and not read is closed with it.
            self._server.closer.close(self._stream.detach())
        for fd in self._fds:
            if isinstance(fd, int):
                self._server.closer.close(fd)
        self._fds.clear()

    def close_descriptor(self, fd: int) -> None:
        self._server.closer.close(fd)

    def release(self) -> None:
        """Tell the peer that no copy touches its memory any more, and close."""
        try:
            self.send(lifeline.MemoryReleased())
        except OSError:
            pass  # the peer is gone
        self.close()

    def send(self, message: lifeline.FromDaemon, *fds: int) -> None:
        """Send one small frame and descriptors. A peer that does not read its lifeline is taken for dead."""
        frame = lifeline.encode_frame(message)
        if socket.send_fds(self._stream, [frame], fds, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the peer does not read its lifeline")

    def read(self) -> None:
        """Take what has arrived. Raises LifelineError or OSError when the stream must end, EOFError at its end."""
        try:
            data, ancillary, flags, _ = self._stream.recvmsg(_READ_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return  # only of this call: an answer that finds no room ends the stream
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                first = len(self._fds)
                self._fds += fds
                for at, fd in enumerate(fds, first):
                    self._fds[at] = self._checked(fd)
        if flags & socket.MSG_CTRUNC:
            raise lifeline.LifelineError("More descriptors came with one message than are accepted.")
        if not data:
            raise EOFError
        for body in self._buffer.feed(data):
            frame = lifeline.decode_from_client(body)
            if isinstance(frame, lifeline.Leaving):
                self.leaving = True
            else:
                self._attach(frame)
        if len(self._fds) > _MAX_FDS:
            raise lifeline.LifelineError("Descriptors came without Attach frames.")

    def _checked(self, fd: int) -> int | KvoffdError:
        """The descriptor; or why it is refused, and then it is closed."""
        try:
            check_descriptor(fd)
        except KvoffdError as error:
            self._server.closer.close(fd)
            return error
        return fd

    def _attach(self, frame: lifeline.Attach) -> None:
        if not self._fds:
            raise lifeline.LifelineError("An Attach frame came without its descriptor.")
        fd = self._fds.pop(0)
        try:
            if isinstance(fd, KvoffdError):
                raise fd
            self._server.context.sessions.attach(self.session, frame.segment_id, fd)
        except KvoffdError as error:
            if isinstance(fd, int):
                self._server.closer.close(fd)
            self._server.context.count_error(error.code)
            self.send(lifeline.AttachRefused(frame.segment_id, error.code, error.message))
        else:
            self.send(lifeline.Attached(frame.segment_id))


class LifelineServer:
    """Listens on ``lifeline.sock`` and turns connections into sessions and their EOF into the sessions' end."""

    def __init__(
        self,
        context: Context,
        directory: DaemonDirectory,
        on_change: Callable[[], None],
    ) -> None:
        self.context = context
        self._directory = directory
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener = listener
        self._acceptor = Acceptor(listener, self._admit)
        self._connections: set[_Connection] = set()
        self.closer = Closer()
        self._warnings = RareWarnings(logger)

    def open(self) -> None:
        path = self._directory.sockets.lifeline
        self._listener.bind(str(path))
        self._directory.open_to_group(path)
        self._acceptor.start()

    def close(self) -> None:
        self._acceptor.close()
        for connection in list(self._connections):
            self._end(connection, Ending.STOPPING)
        self.closer.stop()

    def tick(self) -> None:
        """End connections of processes that died, and those that never said Hello: they would hold a session for ever.

        The loop tells of a process that died with something unread once only, when what it had sent is still there.
        """
        self.closer.interrupt()
        by_fd = {connection.fileno(): connection for connection in self._connections}
        for fd in failed_streams(by_fd):
            self._end(by_fd[fd])
        overdue = self.context.clock() - HELLO_DEADLINE_S
        for connection in list(self._connections):
            session = connection.session
            if session.role is None and session.opened_at < overdue:
                logger.warning("Session %d sent no Hello within %.0f s and was ended.", session.id, HELLO_DEADLINE_S)
                self._end(connection, Ending.NO_HELLO)

    def forget(self, connection: _Connection) -> None:
        """Stop watching a connection that is about to be closed."""
        if connection in self._connections:
            self._connections.remove(connection)
            self._loop.remove_reader(connection.fileno())

    def _admit(self, stream: socket.socket) -> None:
        connection = _Connection(stream, self)
        context = self.context
        try:
            peer = peer_of(stream)
            if not may_connect(peer, context.config):
                raise KvoffdError(
                    f"User {peer.uid} (group {peer.gid}) may not use this kvoffd; add the uid to allowed_uids "
                    "or the gid to allowed_gids.",
                    ErrorCode.FORBIDDEN,
                )
            connection.session = context.sessions.open(connection, peer)
        except KvoffdError as error:
            context.count_error(error.code)
            self._warnings.warn("A connection was refused: %s", error.message)
            try:
                connection.send(lifeline.Refused(error.code, error.message))
            except OSError:
                pass  # it is gone already
            connection.close()
            return
        self._connections.add(connection)
        self._loop.add_reader(connection.fileno(), self._readable, connection)
        session = connection.session
        try:
            connection.send(lifeline.Greeting(PROTOCOL_VERSION, context.epoch, session.id, session.token))
        except OSError:
            self._end(connection)

    def _readable(self, connection: _Connection) -> None:
        try:
            connection.read()
        except lifeline.LifelineError as error:
            why = Ending.MALFORMED
            self.context.count_error(ErrorCode.MALFORMED)
            logger.warning("A lifeline was closed: %s", error)
        except (EOFError, ConnectionError):
            why = Ending.CLOSED if connection.leaving else Ending.GONE
        except OSError:
            why = Ending.FAILED
        except Exception:
            why = Ending.FAILED
            logger.exception("A lifeline failed inside the daemon.")
        else:
            return
        self._end(connection, why)

    def _end(self, connection: _Connection, why: Ending = Ending.GONE) -> None:
        """End the session; release the peer's memory and close the stream when its last copy has ended."""
        self.forget(connection)
        self.context.sessions.end(connection.session, connection.release, why)
        self._on_change()
