"""The link of a session over real sockets: lifeline, jobs socket, events socket and a wake-up, all non-blocking."""

from __future__ import annotations

import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Sequence

import zmq

from kvoffd_client.client_options import ClientOptions
from kvoffd_proto.lifeline import Attach, OpenPool, encode_frame
from kvoffd_proto.sockets import READABLE, WRITABLE, SocketPaths, events_of, receive_frames, send_frames

READ_BYTES = 65536
MAX_DESCRIPTORS = 4
"""Taken from one read of the lifeline."""
RECONNECT_MS = 20
"""A daemon that starts binds its lifeline first; its other sockets follow at once."""
MAX_MESSAGE_BYTES = 1 << 28
"""Largest message taken from the daemon: a bound against garbage."""


class SocketLink:
    """A ``Link`` that also collects what arrived. Its owner's lock guards every call but ``sleep``.

    Sleeping is done by epoll on the raw descriptors and not by zmq's poller, which would use the sockets: so other
    threads may send while the I/O thread sleeps. ZeroMQ's descriptors are edge-triggered: a message that comes after a
    socket was seen empty ends a sleep, but not a message that a later use of the socket has noticed: ``must_read()``
    says whether there is one.
    """

    def __init__(self, paths: SocketPaths, options: ClientOptions) -> None:
        self._paths = paths
        self._options = options
        self._epoll = select.epoll()
        self._messages_epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wake_leader_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._messages_epoll.register(self._wake_leader_fd, select.EPOLLIN)
        self._context = zmq.Context(io_threads=1)
        self._lifeline: socket.socket | None = None
        self._jobs: zmq.Socket[bytes] | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._used = False
        """Whether a socket was used since both were seen empty."""
        self._unsent: deque[Sequence[bytes]] = deque()
        self._received: list[int] = []
        self._draining: dict[int, socket.socket] = {}
        # Numbers stay here after closing: a stale one costs a read that finds nothing.
        self._stream_fds: set[int] = set()
        _links.add(self)

    # --- Link ------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        if problem := self._paths.problem():
            raise OSError(problem)
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            stream.connect(str(self._paths.lifeline))
            self._epoll.register(stream.fileno(), select.EPOLLIN)
        except BaseException:
            stream.close()
            raise
        self._stream_fds.add(stream.fileno())
        self._lifeline = stream

    def open_sockets(self, topics: Sequence[bytes]) -> None:
        self._jobs = self._connect(zmq.DEALER, str(self._paths.jobs))
        self._events = self._connect(zmq.SUB, str(self._paths.events))
        for topic in topics:
            self._events.setsockopt(zmq.SUBSCRIBE, topic)

    def _connect(self, kind: int, path: str) -> zmq.Socket[bytes]:
        connected: zmq.Socket[bytes] = self._context.socket(kind)
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        connected.setsockopt(zmq.RCVHWM, self._options.receive_queue_messages)
        connected.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if kind == zmq.DEALER:
            connected.setsockopt(zmq.SNDHWM, self._options.send_queue_frames)
            connected.setsockopt(zmq.IMMEDIATE, 1)
        connected.connect(f"ipc://{path}")
        # Exclusive, the leader's first: what arrives wakes a leader that sleeps or else the I/O thread, never both.
        for epoll in (self._messages_epoll, self._epoll):
            epoll.register(connected.FD, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        return connected

    def attach(self, message: Attach, fd: int) -> None:
        self.send_over_lifeline(message, [fd])

    def send_over_lifeline(self, message: Attach | OpenPool, fds: Sequence[int] = ()) -> None:
        """Send a message and descriptors to the daemon. Raises OSError."""
        if self._lifeline is None:
            raise OSError("the lifeline is closed")
        frame = encode_frame(message)
        if socket.send_fds(self._lifeline, [frame], fds, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the daemon does not read its lifeline")

    def take_descriptor(self) -> int | None:
        """The descriptor that came over the lifeline first, if there is one; it is the caller's from here on."""
        return self._received.pop(0) if self._received else None

    def send(self, frames: Sequence[bytes]) -> bool:
        jobs = self._jobs
        if jobs is None:
            return False
        self._used = True
        if self._unsent:
            self._send_queued(jobs)
        if not self._unsent and _try_send(jobs, frames):
            return True
        # Not connected yet (IMMEDIATE), or its queue is full: it goes out as soon as there is room.
        if len(self._unsent) >= self._options.send_queue_frames:
            return False
        self._unsent.append(frames)
        return True

    def _send_queued(self, jobs: zmq.Socket[bytes]) -> None:
        while self._unsent and _try_send(jobs, self._unsent[0]):
            self._unsent.popleft()

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()  # epoll forgets a closed descriptor by itself
            self._lifeline = None
        while self._received:
            os.close(self._received.pop())
        self._close_sockets()

    def close_draining(self, generation: int) -> None:
        stream, self._lifeline = self._lifeline, None
        if stream is not None:
            try:
                stream.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the daemon has closed it already; the EOF is there to be read
            self._draining[generation] = stream
        self._close_sockets()

    def _close_sockets(self) -> None:
        for connected in (self._jobs, self._events):
            if connected is not None:
                self._epoll.unregister(connected.FD)
                self._messages_epoll.unregister(connected.FD)
                connected.close(linger=0)
        self._jobs = self._events = None
        self._unsent.clear()

    # --- reading ---------------------------------------------------------------------------------

    def must_read(self) -> bool:
        """Whether a message waits that will not end a sleep. Queued messages have been sent where there is room."""
        return (self._used or bool(self._unsent)) and self.readable()

    def readable(self) -> bool:
        """Whether a message waits. If none does, queued messages have been sent where there is room."""
        if _has_message(self._events):
            return True
        jobs = self._jobs
        while jobs is not None:
            # It is this look that makes ZeroMQ notice a connection that is up or room that is there, and it notices
            # each once: so a look that finds room must be followed by sending, and sending by another look.
            events = events_of(jobs)
            if events & READABLE:
                return True
            if not (self._unsent and events & WRITABLE):
                break
            self._send_queued(jobs)
        self._used = False
        return False

    def receive(self, limit: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
        """Take up to ``limit`` messages each from the events socket and from the jobs socket."""
        published, replied = self._receive(self._events, limit), self._receive(self._jobs, limit)
        self._used = bool(self._unsent) or max(len(published), len(replied)) >= limit
        return published, replied

    @staticmethod
    def _receive(connected: zmq.Socket[bytes] | None, limit: int) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        while connected is not None and len(found) < limit and _has_message(connected):
            found.append(receive_frames(connected))
        return found

    def read_lifeline(self) -> bytes | None:
        """Take bytes from the lifeline; None when there are none now, b"" at its end."""
        if self._lifeline is None:
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self._lifeline, READ_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        self._received += fds
        return data

    def ended_lifelines(self) -> list[int]:
        """Generations whose half-open lifelines (see ``close_draining``) have ended; each is returned once."""
        ended = [generation for generation, stream in self._draining.items() if _read(stream) == b""]
        for generation in ended:
            self._draining.pop(generation).close()
        return ended

    # --- sleeping --------------------------------------------------------------------------------

    def wake(self) -> None:
        """End a sleep, from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def sleep(self, timeout_s: float) -> bool:
        """Sleep until something may have arrived, at most ``timeout_s`` seconds. Called without the lock.

        True when a lifeline has something to read.
        """
        lifelines = False
        for fd, _ in self._epoll.poll(timeout_s):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            elif fd in self._stream_fds:
                lifelines = True
        return lifelines

    def sleep_for_messages(self, timeout_s: float) -> None:
        """As sleep(), but only messages end it, and while it lasts they do not end the I/O thread's sleep()."""
        for fd, _ in self._messages_epoll.poll(timeout_s):
            if fd == self._wake_leader_fd:
                os.eventfd_read(fd)

    def wake_leader(self) -> None:
        """End a sleep_for_messages(), from any thread."""
        os.eventfd_write(self._wake_leader_fd, 1)

    def shut(self) -> None:
        """Close all descriptors for good. No other thread may be in any call."""
        self.close()
        for stream in self._draining.values():
            stream.close()
        self._draining.clear()
        self._context.term()
        self._epoll.close()
        self._messages_epoll.close()
        os.close(self._wake_fd)
        os.close(self._wake_leader_fd)

    def forget_in_child(self) -> None:
        """Close the lifelines in a forked child: their EOF must mean the parent's death."""
        for stream in (self._lifeline, *self._draining.values()):
            if stream is not None:
                stream.close()


def _try_send(jobs: zmq.Socket[bytes], frames: Sequence[bytes]) -> bool:
    try:
        send_frames(jobs, frames)
    except zmq.Again:
        return False
    return True


def _has_message(connected: zmq.Socket[bytes] | None) -> bool:
    return connected is not None and bool(events_of(connected) & READABLE)


def _read(stream: socket.socket) -> bytes | None:
    try:
        return stream.recv(READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def _forget_in_child() -> None:
    for link in list(_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
