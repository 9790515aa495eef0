"""The client's end of the lifeline: a stream that does not block, and the process at its other end."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from kvoffd_proto.lifeline import (
    FrameBuffer,
    FromClient,
    FromDaemon,
    Leaving,
    MemoryReleased,
    decode_from_daemon,
    encode_frame,
)
from kvoffd_proto.paths import SocketPaths, peer_credentials, peer_pidfd

NEVER = float("inf")
READ_BYTES = 65536
DAEMON_END_GRACE_S = 5.0
"""A daemon on a GPU that died counts as gone after this, where the kernel does not show when its process is."""


class LifelineStream:
    """A connected lifeline.

    The EOF alone does not say that a GPU copies no more: the kernel closes a killed process's descriptors one after the
    other, the driver's may be among the last, and copies run until then. The process is gone when all of them are.

    Attributes:
        pid: of the daemon; 0 where it is in another pid namespace.

    Raises:
        OSError: nobody listens there, or no socket can be there.
    """

    def __init__(self, paths: SocketPaths) -> None:
        if problem := paths.problem():
            raise OSError(problem)
        os.stat(paths.jobs)  # ZeroMQ would wait for ever where it was removed
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._frames = FrameBuffer()
        self._last: FromDaemon | None = None
        self._ended_at = NEVER
        try:
            self._stream.connect(str(paths.lifeline))
            self.pid, _, _ = peer_credentials(self._stream)
            self._pidfd = self._pidfd_of_peer()
        except BaseException:
            self._stream.close()
            raise

    def _pidfd_of_peer(self) -> int:
        """A descriptor of the daemon's process; -1 where the kernel gives none."""
        if (pidfd := peer_pidfd(self._stream)) >= 0:
            return pidfd
        try:
            pidfd = os.pidfd_open(self.pid)  # 0 where it is in a pid namespace that this process does not see
        except OSError:
            return -1
        poller = select.poll()
        poller.register(self._stream, select.POLLRDHUP)
        if poller.poll(0):  # it has ended, so that the number may be another's by now
            os.close(pidfd)
            return -1
        return pidfd

    def fileno(self) -> int:
        """Of what becomes readable when there is something to do: the stream, and after its end the process."""
        return self._pidfd if self.ended else self._stream.fileno()

    def send(self, message: FromClient, fds: list[int]) -> None:
        """Send a frame and descriptors. Raises OSError."""
        frame = encode_frame(message)
        if socket.send_fds(self._stream, [frame], fds, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the daemon does not read its lifeline")

    def read(self) -> Iterator[FromDaemon]:
        """Yield the messages that have arrived; ``ended`` tells whether more can come. Raises LifelineError."""
        while not self.ended:
            try:
                data = self._stream.recv(READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._ended_at = time.monotonic()
                self._stream.close()
            for body in self._frames.feed(data):
                self._last = decode_from_daemon(body)
                yield self._last

    @property
    def ended(self) -> bool:
        """Whether the stream has been read to its end."""
        return self._ended_at != NEVER

    def leave(self) -> None:
        """Say that the end of the stream that follows is meant."""
        with suppress(OSError):  # the daemon has closed it already, or does not read: then it counts what it sees
            self._stream.send(encode_frame(Leaving()), socket.MSG_NOSIGNAL)

    def stop_sending(self) -> None:
        """Have the daemon see the client's end; its own can still be read."""
        self.leave()
        with suppress(OSError):  # the daemon has closed it already; the EOF is there to be read
            self._stream.shutdown(socket.SHUT_WR)

    def released(self, now: float) -> bool:
        """Whether the daemon touches the client's memory no more: it said so before the EOF, or its process is gone."""
        if not self.ended or isinstance(self._last, MemoryReleased):
            return self.ended
        return bool(poller_of(self._pidfd).poll(0)) if self._pidfd >= 0 else now >= self.wake_at()

    def wake_at(self) -> float:
        """When to ask ``released`` again although nothing has become readable."""
        return self._ended_at + DAEMON_END_GRACE_S if self.ended and self._pidfd < 0 else NEVER

    def close(self) -> None:
        """Close all descriptors. Repeatable."""
        self._stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def poller_of(*fds: int) -> select.poll:
    """Polls for reading; negative numbers are none."""
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return poller
