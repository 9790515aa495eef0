"""The link of a session over real sockets: lifeline, jobs socket, events socket and a wake-up, all non-blocking."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence
from typing import cast

import zmq

from kvoffd_client.client_options import ClientOptions
from kvoffd_client.jobs_socket import MAX_MESSAGE_BYTES, RECONNECT_S, JobsSocket
from kvoffd_client.lifeline_stream import LifelineStream
from kvoffd_client.pending_requests import NEVER
from kvoffd_proto.lifeline import Attach, encode_frame
from kvoffd_proto.sockets import SocketPaths

# pyzmq's own calls for messages of several frames combine members of enums for each frame. Measured with processes that
# have slept, whose caches are cold: a lookup of 1,000 keys took 10 µs longer with them, of 170.
_NOW, _RCVMORE, _EVENTS, _READABLE = (int(one) for one in (zmq.NOBLOCK, zmq.RCVMORE, zmq.EVENTS, zmq.POLLIN))


class SocketLink:
    """A ``Link`` that also collects what arrived. Its owner's lock guards every call but ``sleep``.

    Sleeping is done by epoll on the raw descriptors and not by zmq's poller, which would use the events socket: so
    other threads may read while the I/O thread sleeps. ZeroMQ's descriptor is edge-triggered: a message that comes
    after the socket was seen empty ends a sleep, but not a message that a later use of the socket has noticed:
    ``must_read()`` says whether there is one.
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
        self._lifeline: LifelineStream | None = None
        self._jobs: JobsSocket | None = None
        self._events: zmq.Socket[bytes] | None = None
        self._used = False
        """Whether the events socket was used since it was seen empty."""
        self._draining: dict[int, LifelineStream] = {}
        # Numbers stay here after closing: a stale one costs a read that finds nothing.
        self._stream_fds: set[int] = set()
        _links.add(self)

    # --- Link ------------------------------------------------------------------------------------

    def open(self) -> None:
        self.close()
        if problem := self._paths.problem():
            raise OSError(problem)
        lifeline = LifelineStream(str(self._paths.lifeline), self._options.daemon_end_grace_s)
        self._watch(lifeline)
        self._lifeline = lifeline

    def _watch(self, lifeline: LifelineStream) -> None:
        self._epoll.register(lifeline.fileno(), select.EPOLLIN)
        self._stream_fds.add(lifeline.fileno())

    def open_sockets(self, topics: Sequence[bytes]) -> None:
        self._jobs = JobsSocket(self._paths.jobs, self._options.send_queue_frames, self._epoll, self._messages_epoll)
        events: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        events.setsockopt(zmq.LINGER, 0)
        events.setsockopt(zmq.RECONNECT_IVL, round(RECONNECT_S * 1000))
        events.setsockopt(zmq.RCVHWM, self._options.receive_queue_messages)
        events.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        events.connect(f"ipc://{self._paths.events}")
        for topic in topics:
            events.setsockopt(zmq.SUBSCRIBE, topic)
        # As the jobs socket: exclusive, the leader's first.
        for epoll in (self._messages_epoll, self._epoll):
            epoll.register(events.FD, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._events = events
        self._used = True

    def attach(self, message: Attach, fd: int) -> None:
        """Send a message with its descriptor to the daemon. Raises OSError."""
        if self._lifeline is None:
            raise OSError("the lifeline is closed")
        self._lifeline.send(encode_frame(message), [fd])

    def send(self, frames: Sequence[bytes]) -> bool:
        sent = self._jobs is not None and self._jobs.send(frames)
        if self._jobs is not None and self._jobs.must_connect:
            self.wake()  # a sleep that began while nothing waited would not end for it
        return sent

    def close(self) -> None:
        if self._lifeline is not None:
            self._lifeline.leave()
            self._lifeline.close()  # epoll forgets a closed descriptor by itself
            self._lifeline = None
        self._close_sockets()

    def close_draining(self, generation: int) -> None:
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            if lifeline.ended:
                self._watch_process(lifeline)
            else:
                lifeline.stop_sending()
            self._draining[generation] = lifeline
        self._close_sockets()

    def _watch_process(self, lifeline: LifelineStream) -> None:
        if lifeline.fileno() >= 0:
            self._watch(lifeline)

    def _close_sockets(self) -> None:
        if self._jobs is not None:
            self._jobs.close()
        if self._events is not None:
            self._epoll.unregister(self._events.FD)
            self._messages_epoll.unregister(self._events.FD)
            self._events.close(linger=0)
        self._jobs = self._events = None

    def must_read(self) -> bool:
        """Whether a message waits that will not end a sleep."""
        return (self._jobs is not None and self._jobs.has_message) or (self._used and self.readable())

    def readable(self) -> bool:
        """Whether a message waits. Queued messages have been sent where there is room."""
        if self._jobs is not None and not self._jobs.has_message:
            self._jobs.look()
        if _has_message(self._events):
            return True
        self._used = False
        return self._jobs is not None and self._jobs.has_message

    def receive(self, limit: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
        """Take up to ``limit`` messages each from the events socket and from the jobs socket."""
        published: list[list[bytes]] = []
        while self._events is not None and len(published) < limit and _has_message(self._events):
            published.append(_receive_frames(self._events))
        self._used = len(published) >= limit
        return published, [] if self._jobs is None else self._jobs.take(limit)

    def read_lifeline(self) -> bytes | None:
        """Take bytes from the lifeline; None when there are none now, b"" at its end."""
        if self._lifeline is None:
            return None
        if (came := self._lifeline.read()) is None:
            return None
        data, fds = came
        for fd in fds:  # nobody asked for them
            os.close(fd)
        return data

    def memory_released(self, now: float) -> bool:
        """Whether the daemon is known to touch no memory of the session, the lifeline of which has ended."""
        return self._lifeline is None or self._lifeline.released(now)

    def drained(self, now: float) -> list[int]:
        """Generations (see ``close_draining``) whose memory the daemon touches no more; each is returned once."""
        for lifeline in self._draining.values():
            while not lifeline.ended and (came := lifeline.read()) is not None:
                for fd in came[1]:
                    os.close(fd)
                if lifeline.ended:
                    self._watch_process(lifeline)
        released = [generation for generation, lifeline in self._draining.items() if lifeline.released(now)]
        for generation in released:
            self._draining.pop(generation).close()
        return released

    def wake_at(self) -> float:
        """When to call ``drained`` again although nothing has ended the sleep."""
        return min((lifeline.wake_at() for lifeline in self._draining.values()), default=NEVER)

    # --- sleeping --------------------------------------------------------------------------------

    def wake(self) -> None:
        """End a sleep, from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def sleep(self, timeout_s: float) -> bool:
        """Sleep until something may have arrived, at most ``timeout_s`` seconds. Called without the lock.

        True when a lifeline has something to read.
        """
        lifelines = False
        jobs = self._jobs
        if jobs is not None and jobs.must_connect:
            timeout_s = min(timeout_s, RECONNECT_S)
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
        for lifeline in self._draining.values():
            lifeline.close()
        self._draining.clear()
        self._context.term()
        self._epoll.close()
        self._messages_epoll.close()
        os.close(self._wake_fd)
        os.close(self._wake_leader_fd)

    def forget_in_child(self) -> None:
        """Close the lifelines in a forked child: their EOF must mean the parent's death."""
        for lifeline in (self._lifeline, *self._draining.values()):
            if lifeline is not None:
                lifeline.close()
        if self._jobs is not None:
            self._jobs.forget_in_child()


def _has_message(connected: zmq.Socket[bytes] | None) -> bool:
    """Whether a message waits. The call makes ZeroMQ notice what has changed."""
    return connected is not None and bool(cast(int, connected.get(_EVENTS)) & _READABLE)


def _receive_frames(connected: zmq.Socket[bytes]) -> list[bytes]:
    """Receive one message. Raises zmq.Again when there is none."""
    frames = [connected.recv(_NOW)]
    while connected.get(_RCVMORE):
        frames.append(connected.recv(_NOW))
    return frames


_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def _forget_in_child() -> None:
    for link in list(_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
