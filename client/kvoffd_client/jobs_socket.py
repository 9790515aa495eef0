"""The client's end of ``jobs.sock``: what ZeroMQ's DEALER would send and receive, over a Unix stream of our own.

libzmq hands each message to a thread of its own, so that a request leaves when that thread gets to run, and so for the
reply. Here a request has left when ``send`` returns, for vLLM's scheduler waits for both.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from kvoffd_proto import zmtp

READ_BYTES = 65536
RECONNECT_S = 0.02
"""Pause between attempts. A daemon that starts binds its lifeline first; its other sockets follow at once."""
MAX_MESSAGE_BYTES = 1 << 28
"""Largest message taken from the daemon: a bound against garbage."""
MAX_FRAMES = 4
"""Of a message from the daemon: a replayed event."""


class JobsSocket:
    """One connection to the daemon, made anew when it breaks. No call blocks or raises; the owner's lock guards all.

    Args:
        path: of the socket.
        most_unsent: messages that may wait to be sent.
        reader: epoll of the thread that reads, and sends what had to wait.
        leader: epoll of a thread that waits for a reply. What arrives wakes one that sleeps here, or else the reader.
    """

    def __init__(self, path: Path, most_unsent: int, reader: select.epoll, leader: select.epoll) -> None:
        self._path = str(path)
        self._most_unsent = most_unsent
        self._reader = reader
        self._leader = leader
        self._stream: socket.socket | None = None
        self._tried_at = float("-inf")
        self._input = zmtp.Input({b"ROUTER"}, MAX_MESSAGE_BYTES, MAX_FRAMES)
        self._received: deque[list[bytes]] = deque()
        self._unsent: deque[bytes] = deque()
        self._sent_bytes = 0
        """Of the first message that is not sent."""
        self._waits_for_room = False
        self._connect()

    @property
    def must_connect(self) -> bool:
        """Whether messages wait for a connection: ``look`` again after RECONNECT_S."""
        return self._stream is None and bool(self._unsent)

    @property
    def has_message(self) -> bool:
        return bool(self._received)

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message, or keep it until there is room and a connection; False when too many are kept."""
        if len(self._unsent) >= self._most_unsent:
            self._send_on()
            if len(self._unsent) >= self._most_unsent:
                return False
        self._unsent.append(zmtp.encode(frames))
        self._send_on()
        return True

    def look(self) -> None:
        """Read what has arrived, and send what waits, if there is room now."""
        if self._stream is not None:
            self._read(self._stream)
        if self._unsent:
            self._send_on()

    def take(self, limit: int) -> list[list[bytes]]:
        """Take up to ``limit`` messages, oldest first."""
        if not self._received:
            self.look()
        return [self._received.popleft() for _ in range(min(limit, len(self._received)))]

    def close(self) -> None:
        self._break()
        self._unsent.clear()
        self._received.clear()

    def forget_in_child(self) -> None:
        """Close the stream in a forked child, where it is only a copy."""
        if self._stream is not None:
            self._stream.close()

    def _connect(self) -> None:
        self._tried_at = time.monotonic()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            stream.connect(self._path)
        except OSError:
            stream.close()
            return
        # Exclusive, the leader's first: what arrives wakes one of them and never both.
        for epoll in (self._leader, self._reader):
            epoll.register(stream, select.EPOLLIN | select.EPOLLEXCLUSIVE)
        self._stream = stream
        self._input = zmtp.Input({b"ROUTER"}, MAX_MESSAGE_BYTES, MAX_FRAMES)
        try:
            stream.send(zmtp.opening(b"DEALER"), socket.MSG_NOSIGNAL)  # a new stream has room for it
        except OSError:
            self._break()

    def _read(self, stream: socket.socket) -> None:
        try:
            data = stream.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._break()
            return
        self._input.feed(data)
        try:
            while (taken := self._input.next()) is not None:
                if isinstance(taken, list):
                    self._received.append(taken)
        except zmtp.ZmtpError:
            self._break()

    def _send_on(self) -> None:
        if self._stream is None and time.monotonic() - self._tried_at >= RECONNECT_S:
            self._connect()
        if self._stream is None or not self._input.ready:  # libzmq's ROUTER loses what comes before it is ready
            return
        while self._unsent:
            first = self._unsent[0]
            rest = memoryview(first)[self._sent_bytes :] if self._sent_bytes else first
            try:
                self._sent_bytes += self._stream.send(rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                self._break()
                return
            if self._sent_bytes == len(first):
                self._unsent.popleft()
                self._sent_bytes = 0
        if self._waits_for_room != bool(self._unsent):
            self._waits_for_room = bool(self._unsent)
            # An exclusive registration cannot be modified.
            self._reader.unregister(self._stream)
            events = select.EPOLLOUT if self._waits_for_room else select.EPOLLEXCLUSIVE
            self._reader.register(self._stream, select.EPOLLIN | events)

    def _break(self) -> None:
        """Close the connection. What was not sent goes over the next one."""
        if self._stream is None:
            return
        for epoll in (self._leader, self._reader):
            epoll.unregister(self._stream)  # a forked child may keep the stream open, and so registered
        self._stream.close()
        self._stream = None
        self._waits_for_room = False
        if self._sent_bytes:
            self._unsent.popleft()
            self._sent_bytes = 0
