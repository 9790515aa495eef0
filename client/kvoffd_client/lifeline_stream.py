"""The client's end of a lifeline, and when the daemon has let go of the memory that was registered over it."""

from __future__ import annotations

import os
import select
import socket
import time

from kvoffd_client.pending_requests import NEVER
from kvoffd_proto.lifeline import Leaving, MemoryReleased, encode_frame
from kvoffd_proto.sockets import peer_credentials, peer_pidfd

READ_BYTES = 65536
MAX_DESCRIPTORS = 4
"""Taken from one read of the lifeline."""
_RELEASED = encode_frame(MemoryReleased())
_LEAVING = encode_frame(Leaving())


class LifelineStream:
    """A connected stream, not blocking, and the process that listens at its other end.

    The EOF alone does not say that a GPU copies no more: the kernel closes a killed process's descriptors one after the
    other, the driver's may be among the last, and copies run until then. The process is gone when all of them are.

    Args:
        path: the lifeline's socket.
        grace_s: how long after the EOF a daemon counts as gone whose process the kernel does not show.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, path: str, grace_s: float) -> None:
        self._stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._grace_s = grace_s
        self._tail = b""
        self._ended_at = NEVER
        try:
            self._stream.connect(path)
            self._pidfd = _pidfd_of(self._stream)
        except BaseException:
            self._stream.close()
            raise

    def fileno(self) -> int:
        """Of what becomes readable when there is something to do: the stream, and after its end the process."""
        return self._stream.fileno() if self._ended_at == NEVER else self._pidfd

    def send(self, frame: bytes, fds: list[int]) -> None:
        if socket.send_fds(self._stream, [frame], fds, socket.MSG_NOSIGNAL) != len(frame):
            raise OSError("the daemon does not read its lifeline")

    def read(self) -> tuple[bytes, list[int]] | None:
        """Take bytes and the descriptors with them; None when there are none now, no bytes at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._stream, READ_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError:
            data, fds = b"", []
        self._tail = (self._tail + data)[-len(_RELEASED) :]
        if not data:
            self._ended_at = time.monotonic()
            self._stream.close()
        return data, fds

    @property
    def ended(self) -> bool:
        return self._ended_at != NEVER

    def leave(self) -> None:
        """Say that the end of the stream that follows is meant."""
        try:
            self._stream.send(_LEAVING, socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the daemon has closed it already, or does not read: then it counts what it sees

    def stop_sending(self) -> None:
        """Have the daemon see the client's end; its own can still be read."""
        self.leave()
        try:
            self._stream.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the daemon has closed it already; the EOF is there to be read

    def released(self, now: float) -> bool:
        """Whether the daemon touches the client's memory no more: it said so before the EOF, or its process is gone."""
        if not self.ended or self._tail == _RELEASED:
            return self.ended
        return _has_ended(self._pidfd) if self._pidfd >= 0 else now >= self.wake_at()

    def wake_at(self) -> float:
        """When to ask ``released`` again although nothing has become readable."""
        return self._ended_at + self._grace_s if self.ended and self._pidfd < 0 else NEVER

    def close(self) -> None:
        self._stream.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _pidfd_of(stream: socket.socket) -> int:
    """A descriptor of the daemon's process; -1 where the kernel gives none."""
    if (pidfd := peer_pidfd(stream)) >= 0:
        return pidfd
    pid, _, _ = peer_credentials(stream)
    try:
        pidfd = os.pidfd_open(pid)  # pid is 0 where the daemon is in a pid namespace that this process does not see
    except OSError:
        return -1
    poller = select.poll()
    poller.register(stream, select.POLLRDHUP)
    if poller.poll(0):  # it has ended, so that the number may be another's by now
        os.close(pidfd)
        return -1
    return pidfd


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
