"""The ZeroMQ sockets ``jobs.sock`` and ``events.sock`` on the event loop.

Client processes take turns: a message of the process that was served least is next, by the time that its messages took.
What a connection may make the daemon keep is bounded: the input that waits for its turn, the frame that is arriving,
its subscriptions, and the output that it does not read. A connection whose replies wait is not read meanwhile.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import logging
import os
import socket
import time
from collections import Counter
from functools import partial

from kvoffd.observe.logging import RareWarnings
from kvoffd.server.acceptor import Acceptor, failed_streams, peer_of
from kvoffd.server.connections import (
    MAX_TOPIC_BYTES,
    RECEIVE_BYTES,
    RECEIVE_EVENTS_BYTES,
    ClientProcess,
    Connection,
    ListeningSocket,
    LongFrames,
    ProcessQueue,
    Subscriptions,
)
from kvoffd.server.service import Service
from kvoffd.server.sessions import may_connect
from kvoffd.system.closing import MOST_DESCRIPTORS, Closer
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import zmtp
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.events import SEQUENCE_BYTES

logger = logging.getLogger(__name__)

SERVE_S = 0.0002
"""How long messages are answered before the loop looks at lifelines and completions."""
MAX_UNSENT_BYTES = 8 * 1024**2
"""Output that a process has not read: with more, no request of it is answered and no publication kept for it."""
MAX_ALL_UNSENT_BYTES = 64 * 1024**2
"""Output that all processes together have not read: with more, the same is so for each of these."""
PIECE_BYTES = 256
"""What a message that waits to be sent costs besides its own bytes."""
SENT_AT_ONCE, REPLAYED_AT_ONCE = 256, 64
"""Messages that wait, and KV events of a replay, that are sent before the loop does other work."""
_SO_PASSRIGHTS = 83  # asm-generic/socket.h, Linux 6.16


class Transport:
    """``jobs.sock`` and ``events.sock`` of one service.

    Args:
        max_connections: to each of the two. When as many are there, a newcomer takes the place of the oldest one of the
            process that has the most, among those of the user who has the most; it is refused where that is its own.
    """

    def __init__(self, service: Service, directory: DaemonDirectory, max_connections: int) -> None:
        self._service = service
        self._context = service.context
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        paths = directory.sockets
        frame_bytes = service.context.config.limits.max_frame_bytes
        dealers, subscribers = frozenset({b"DEALER", b"REQ"}), frozenset({b"SUB", b"XSUB"})
        self._jobs = ListeningSocket(paths.jobs, b"ROUTER", dealers, max_connections, RECEIVE_BYTES, frame_bytes)
        self._events = ListeningSocket(
            paths.events, b"PUB", subscribers, max_connections, RECEIVE_EVENTS_BYTES, MAX_TOPIC_BYTES + 1
        )
        self._acceptors: list[Acceptor] = []
        self._closer: Closer | None = None
        """Closes descriptors that clients send, where the kernel lets them."""
        self._numbers = itertools.count(1)
        self._processes: dict[tuple[int, ...], ClientProcess] = {}
        self._queue = ProcessQueue()
        self._due = self._closed = False
        self._subscriptions = Subscriptions()
        self._unsent_bytes = 0
        self._held: set[ClientProcess] = set()
        """Those with connections that get no turn until output is read."""
        self._long_frames = LongFrames(self._loop.time, self._read_on)
        self._scratch = memoryview(bytearray(4 * RECEIVE_BYTES))
        self._warnings = RareWarnings(logger)

    def open(self) -> None:
        """Bind both sockets. Raises OSError."""
        for endpoint in (self._jobs, self._events):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                # Descriptors are for the lifeline. Here the kernel refuses them to who sends them.
                listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
            except OSError:
                self._closer = Closer()  # before Linux 6.16: they come
            acceptor = Acceptor(listener, partial(self._admit, endpoint))
            self._acceptors.append(acceptor)
            listener.bind(str(endpoint.path))
            self._directory.open_to_group(endpoint.path)
            acceptor.start()

    async def close(self, linger_s: float) -> None:
        """Stop accepting, send what is queued for ``linger_s`` at most, and close."""
        for acceptor in self._acceptors:
            acceptor.close()
        deadline = self._loop.time() + linger_s
        while self._unsent_bytes and self._loop.time() < deadline:  # noqa: ASYNC110 - clients read when they like
            await asyncio.sleep(0.01)
        self._closed = True
        for connection in self._connections():
            self._close(connection)
        if self._closer is not None:
            self._closer.stop()

    def wake(self) -> None:
        """Serve and send soon: something other than a message changed what is to be sent."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self.serve)

    def tick(self) -> None:
        """Close connections whose frame takes too long to arrive, and those of processes that died.

        The loop tells only once of a peer that closed its end with something unread (EPOLLERR; libuv then stops to
        look), and the input that it had sent hides the end of it.
        """
        connections = {one.stream.fileno(): one for one in self._connections()}
        if self._closer is not None:
            self._closer.interrupt()
        for fd in failed_streams(connections):
            self._close(connections[fd])
        for connection in self._long_frames.overdue():
            self._drop(connection, f"a frame did not arrive within {self._long_frames.patience_s:.0f} s")
        for process in list(self._held):
            self._release(process)

    # --- connections ------------------------------------------------------------------------------

    def _connections(self) -> list[Connection]:
        return [*self._jobs.connections.values(), *self._events.connections.values()]

    def _admit(self, endpoint: ListeningSocket, stream: socket.socket) -> None:
        peer = peer_of(stream)
        if peer.pid != os.getpid() and not may_connect(peer, self._context.config):
            self._refuse(stream, ErrorCode.FORBIDDEN, f"user {peer.uid} (group {peer.gid}) may not use this kvoffd")
            return
        name = next(self._numbers).to_bytes(8, "big")
        # A process that the kernel does not tell apart from others stands for itself with each connection.
        key = (peer.uid, peer.process) if peer.process else (peer.uid, 0, int.from_bytes(name, "big"))
        process = self._processes.get(key) or ClientProcess(key)
        full = len(endpoint.connections) >= endpoint.max_connections
        if full and peer.pid != os.getpid() and not self._make_place(endpoint, process):
            self._refuse(
                stream, ErrorCode.TOO_MANY, f"{endpoint.max_connections} connections to {endpoint.path.name} are open"
            )
            return
        self._processes[key] = process
        process.connections[endpoint] += 1
        connection = Connection(name, stream, endpoint, process)
        endpoint.connections[name] = connection
        self._read_on(connection)
        self._send(connection, zmtp.opening(endpoint.type))

    def _make_place(self, endpoint: ListeningSocket, newcomer: ClientProcess) -> bool:
        """Close a connection of who has the most, unless that is the newcomer, or nobody has more than it would."""
        users: Counter[int] = Counter()
        for process in self._processes.values():
            users[process.key[0]] += process.connections[endpoint]
        user, most = users.most_common(1)[0]
        if users[newcomer.key[0]] + 1 >= most:
            user = newcomer.key[0]
        largest = max(
            (process for process in self._processes.values() if process.key[0] == user),
            key=lambda process: process.connections[endpoint],
            default=None,
        )
        if largest is None or (
            user == newcomer.key[0] and largest.connections[endpoint] <= newcomer.connections[endpoint] + 1
        ):
            return False
        oldest = next(one for one in endpoint.connections.values() if one.process is largest)
        self._drop(oldest, "its process has the most connections, and another needs one")
        return True

    def _refuse(self, stream: socket.socket, code: ErrorCode, why: str) -> None:
        self._context.count_error(code)
        stream.close()
        self._warnings.warn("A connection was refused: %s.", why)

    def _drop(self, connection: Connection, why: str) -> None:
        user, name = connection.process.key[0], connection.endpoint.path.name
        self._warnings.warn("A connection of user %d to %s was closed: %s.", user, name, why)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        endpoint, process = connection.endpoint, connection.process
        self._pause(connection)
        self._loop.remove_writer(connection.stream.fileno())
        if self._closer is None:
            connection.stream.close()
        else:  # with the descriptors that were not received
            self._closer.close(connection.stream.detach())
        del endpoint.connections[connection.name]
        self._count_unsent(connection, -connection.unsent_bytes)
        process.held.discard(connection)
        self._release(process)
        for topic in list(connection.subscriptions):
            self._subscriptions.remove(connection, topic)
        self._long_frames.arrived(connection)
        process.connections[endpoint] -= 1
        if not any(process.connections.values()):
            self._processes.pop(process.key, None)

    # --- reading ----------------------------------------------------------------------------------

    def _read_on(self, connection: Connection) -> None:
        if not connection.reading and not connection.closed:
            connection.reading = True
            self._loop.add_reader(connection.stream.fileno(), self._readable, connection)

    def _pause(self, connection: Connection) -> None:
        if connection.reading:
            connection.reading = False
            self._loop.remove_reader(connection.stream.fileno())

    def _readable(self, connection: Connection) -> None:
        incoming = connection.incoming_since is not None
        room = self._scratch if incoming else self._scratch[: connection.endpoint.receive_bytes]
        try:
            count = connection.stream.recv_into(room) if self._closer is None else self._receive(connection, room)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            return self._close(connection)
        connection.input.feed(self._scratch[:count])
        if not connection.input.missing_bytes:
            self._wait_for_turn(connection)
        if not incoming and connection.input.waiting_bytes >= connection.endpoint.receive_bytes:
            self._pause(connection)

    def _receive(self, connection: Connection, room: memoryview) -> int:
        """Receive, and have descriptors that came with it closed: closing one may wait."""
        assert self._closer is not None
        count, ancillary, _, _ = connection.stream.recvmsg_into([room], MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        for _, _, payload in ancillary:
            for fd in array.array("i", payload[: len(payload) // 4 * 4]):
                self._closer.close(fd)
        return count

    def _wait_for_turn(self, connection: Connection) -> None:
        if not connection.waits and not connection.closed:
            connection.waits = True
            self._queue.add(connection)
            self.wake()

    def serve(self) -> bool:
        """Answer what has arrived, for a moment; False where that failed inside the daemon."""
        self._due = more = False
        works = True
        if self._closed:  # the pool may be unmapped
            return works
        try:
            self._queue.serve(self._serve_one, time.monotonic() + SERVE_S)
            more = self._service.background()
            self.flush()
        except Exception:  # the loop that serves engines must outlive it
            logger.exception("An iteration of the message loop failed.")
            works = False
        if more or self._queue:
            self.wake()
        return works

    def _serve_one(self, connection: Connection) -> bool:
        """Answer one message of a connection; False when it has no further one that may be answered now."""
        if connection.closed:
            return False
        try:
            more = self._take_one(connection)
        except zmtp.ZmtpError as error:
            self._context.count_error(ErrorCode.MALFORMED)
            self._drop(connection, f"it sent {error}")
            return False
        except Exception:
            logger.exception("A message failed inside the daemon.")
            more = True
        connection.waits = more
        return more

    def _take_one(self, connection: Connection) -> bool:
        if connection.replay is not None or self._behind(connection.process):
            connection.process.held.add(connection)
            self._held.add(connection.process)
            return False  # goes on when that is read
        taken = connection.input.next()
        if taken is None:
            self._wait_for_rest(connection)
            return False
        self._long_frames.arrived(connection)
        if isinstance(taken, zmtp.Command):
            self._obey(connection, taken)
        elif connection.endpoint is self._events:
            self._subscribe_by_message(connection, taken)
        elif isinstance(taken, zmtp.TooLong):
            self._service.refuse_frame(connection.name, taken.frame_bytes)
        elif len(taken) == 1:
            self._service.handle(connection.name, taken[0])
        elif len(taken) == 2 and not taken[0] and len(taken[1]) == SEQUENCE_BYTES:
            self._service.replay_events(connection.name, taken[1])
        else:
            self._service.handle(connection.name, b"")  # no request: the decoder refuses it, and the sender hears why
        self.flush()  # a reply must not wait until other messages are served
        if connection.input.waiting_bytes < connection.endpoint.receive_bytes:
            self._read_on(connection)
        return True

    def _wait_for_rest(self, connection: Connection) -> None:
        """Read on: what has arrived is no whole message. A long frame waits until it is its turn to be kept."""
        if connection.input.missing_bytes + connection.input.waiting_bytes <= connection.endpoint.receive_bytes:
            self._read_on(connection)
        elif connection.incoming_since is None:
            self._pause(connection)
            self._long_frames.add(connection)

    # --- subscriptions ----------------------------------------------------------------------------

    def _obey(self, connection: Connection, command: zmtp.Command) -> None:
        if command.name == b"PING":
            self._send(connection, zmtp.encode_pong(command))
        elif command.name == b"SUBSCRIBE":
            self._subscriptions.add(connection, command.data)
        elif command.name == b"CANCEL":
            self._subscriptions.remove(connection, command.data)

    def _subscribe_by_message(self, connection: Connection, taken: list[bytes] | zmtp.TooLong) -> None:
        """As peers of ZMTP 3.0 do."""
        wanted, prefix = zmtp.decode_subscription([] if isinstance(taken, zmtp.TooLong) else taken)
        change = self._subscriptions.add if wanted else self._subscriptions.remove
        change(connection, prefix)

    # --- sending ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send replies and publications."""
        outbox = self._service.flush()
        # Completions first: a reply may tell the client to look for them.
        for publication in outbox.publications:
            if subscribers := self._subscriptions.to(publication[0]):
                data = zmtp.encode(publication)
                for subscriber in subscribers:
                    self._publish(subscriber, data)
        for sender, frame in outbox.replies:
            self._reply(sender, [frame])
        for sender, messages in outbox.event_replays:
            if (connection := self._jobs.connections.get(sender)) is not None:
                connection.replay = messages
                self._go_on_replaying(connection)
        self._service.after_send()

    def _publish(self, subscriber: Connection, data: bytes) -> None:
        if self._behind(subscriber.process):
            self._context.publications_dropped += 1
        else:
            self._send(subscriber, data)

    def _reply(self, sender: bytes, frames: list[bytes]) -> None:
        if (connection := self._jobs.connections.get(sender)) is None:
            self._context.replies_dropped["gone"] += 1
        else:
            self._send(connection, zmtp.encode(frames))

    def _go_on_replaying(self, connection: Connection) -> None:
        for _ in range(REPLAYED_AT_ONCE):
            if connection.replay is None or connection.unsent or connection.closed:
                return self._release(connection.process)
            if (message := next(connection.replay, None)) is None:
                connection.replay = None
            else:
                self._send(connection, zmtp.encode((b"", *message)))
        self._loop.call_soon(self._go_on_replaying, connection)

    def _send(self, connection: Connection, data: bytes) -> None:
        if connection.closed:
            return
        sent = 0
        if not connection.unsent:
            try:
                sent = connection.stream.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError:
                return self._close(connection)
            if sent == len(data):
                return
            self._loop.add_writer(connection.stream.fileno(), self._writable, connection)
        connection.unsent.append(memoryview(data)[sent:])
        self._count_unsent(connection, len(data) - sent + PIECE_BYTES)

        while self._unsent_bytes > MAX_ALL_UNSENT_BYTES + MAX_UNSENT_BYTES:
            # Who is not behind is still answered, however much that is.
            most = max(self._connections(), key=lambda one: one.unsent_bytes)
            self._drop(most, f"{most.unsent_bytes} bytes of its output are not read, and others need the memory")

    def _count_unsent(self, connection: Connection, more_bytes: int) -> None:
        connection.unsent_bytes += more_bytes
        connection.process.unsent_bytes += more_bytes
        self._unsent_bytes += more_bytes

    def _writable(self, connection: Connection) -> None:
        unsent = connection.unsent
        try:
            sent = connection.stream.sendmsg(list(itertools.islice(unsent, SENT_AT_ONCE)), [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None
        except OSError:
            return self._close(connection)
        while sent:
            first = unsent.popleft()
            self._count_unsent(connection, -len(first) - PIECE_BYTES)
            if sent < len(first):
                unsent.appendleft(first[sent:])
                self._count_unsent(connection, len(first) - sent + PIECE_BYTES)
                break
            sent -= len(first)
        if not unsent:
            self._loop.remove_writer(connection.stream.fileno())
            self._go_on_replaying(connection)
        self._release(connection.process)

    def _behind(self, process: ClientProcess) -> bool:
        """Whether nothing more is to be sent to the process until output is read."""
        unsent = process.unsent_bytes
        return unsent >= MAX_UNSENT_BYTES or (unsent > 0 and self._unsent_bytes >= MAX_ALL_UNSENT_BYTES)

    def _release(self, process: ClientProcess) -> None:
        """Give turns again to connections that had none while output was not read."""
        while process.held and not self._behind(process):
            self._wait_for_turn(process.held.pop())
        if not process.held:
            self._held.discard(process)
