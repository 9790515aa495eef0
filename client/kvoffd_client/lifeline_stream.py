"""The client's end of the lifeline: a non-blocking stream, and the process at its other end."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from kvoffd_proto import lifeline
from kvoffd_proto.paths import SocketPaths, peer_credentials, peer_pidfd

NEVER = float("inf")
READ_BYTES = 65536
DAEMON_END_GRACE_S = 5.0
"""A dead daemon that used a GPU counts as gone after this, if the kernel does not show the end of its process."""


class LifelineStream:
    """A connected lifeline.

    EOF alone does not mean that a GPU has stopped copying: the kernel closes a killed process's descriptors one after
    the other, the driver's perhaps last, and copies run until then. They have stopped when the process is gone.

    Attributes:
        pid: the daemon's; 0 if it is in a pid namespace that this process does not see.

    Raises:
        OSError: nobody listens there, or the path cannot be a socket's.
    """

    def __init__(self, paths: SocketPaths) -> None:
        if problem := paths.problem():
            raise OSError(problem)
        os.stat(paths.jobs)  # ZeroMQ would wait for ever if it is missing
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._frames = lifeline.FrameBuffer()
        self._last: lifeline.FromDaemon | None = None
        self._ended_at = NEVER
        try:
            self._stream.connect(str(paths.lifeline))
            self.pid, _, _ = peer_credentials(self._stream)
            self._pidfd = self._pidfd_of_peer()
        except BaseException:
            self._stream.close()
            raise

    def _pidfd_of_peer(self) -> int:
        """Return a pidfd of the daemon; -1 if the kernel gives none."""
        if (pidfd := peer_pidfd(self._stream)) >= 0:
            return pidfd
        try:
            pidfd = os.pidfd_open(self.pid)  # raises for 0
        except OSError:
            return -1
        poller = select.poll()
        poller.register(self._stream, select.POLLRDHUP)
        if poller.poll(0):  # the daemon has ended, and its pid may have been reused
            os.close(pidfd)
            return -1
        return pidfd

    def fileno(self) -> int:
        """Return the descriptor to poll: the stream's, and after EOF the process's."""
        return self._pidfd if self.ended else self._stream.fileno()

    def send(self, message: lifeline.FromClient, fds: list[int]) -> None:
        """Send a frame and descriptors. Raises OSError."""
        frame = lifeline.encode_frame(message)
        if socket.send_fds(self._stream, [frame], fds, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the daemon does not read its lifeline")

    def read(self) -> Iterator[lifeline.FromDaemon]:
        """Yield the messages that have arrived. ``ended`` is true once no more can come. Raises LifelineError."""
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
                self._last = lifeline.decode_from_daemon(body)
                yield self._last

    @property
    def ended(self) -> bool:
        """Whether the stream has been read to its end."""
        return self._ended_at != NEVER

    def leave(self) -> None:
        """Announce that the client is about to end the session on purpose."""
        with suppress(OSError):  # the daemon has closed it or does not read it, or it is closed or shut down here
            self._stream.send(lifeline.encode_frame(lifeline.Leaving()), socket.MSG_NOSIGNAL)

    def stop_sending(self) -> None:
        """End the session and shut down writing; the daemon's end can still be read."""
        self.leave()
        with suppress(OSError):  # one of the two has closed it already
            self._stream.shutdown(socket.SHUT_WR)

    def released(self, now: float) -> bool:
        """Return whether the daemon no longer accesses the client's memory: it said so, or its process is gone."""
        if not self.ended:
            return False
        if isinstance(self._last, lifeline.MemoryReleased):
            return True
        return bool(poller_of(self._pidfd).poll(0)) if self._pidfd >= 0 else now >= self.wake_at()

    def wake_at(self) -> float:
        """Return when to call ``released`` again even if nothing has become readable."""
        return self._ended_at + DAEMON_END_GRACE_S if self.ended and self._pidfd < 0 else NEVER

    def close(self) -> None:
        """Close all descriptors. Repeatable."""
        self._stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def poller_of(*fds: int) -> select.poll:
    """Return a poll for reading of these descriptors, without negative ones."""
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return poller
