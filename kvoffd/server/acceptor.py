"""Accepts connections a few at a time, so that a peer which connects without end does not keep the loop busy."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from collections.abc import Callable, Iterable

from kvoffd.observe.logging import RareWarnings
from kvoffd.server.sessions import Peer
from kvoffd.system.mappings import filesystem_magic
from kvoffd_proto.paths import peer_credentials, peer_pidfd

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
REST_S = 0.005
"""Between two batches: at most 3,200 connections in a second, each of which costs some 20 µs where it is refused."""
RETRY_S = 0.25
"""After accept() failed, as it does without descriptors: it would fail again at once."""
BACKLOG = 1024
_PIDFS_MAGIC = 0x50494446  # linux/magic.h


class Acceptor:
    """One listening socket on the event loop. Owns it from ``start`` on; ``on_stream`` owns each connection."""

    def __init__(self, listener: socket.socket, on_stream: Callable[[socket.socket], None]) -> None:
        self._listener = listener
        self._on_stream = on_stream
        self._loop = asyncio.get_running_loop()
        self._warnings = RareWarnings(logger)
        listener.setblocking(False)

    def start(self) -> None:
        self._listener.listen(BACKLOG)
        self._resume()

    @property
    def port(self) -> int:
        """Of a TCP socket."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        rest_s = REST_S
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._warnings.warn("Connections cannot be accepted: %s.", error.strerror)
                rest_s = RETRY_S
                break
            stream.setblocking(False)
            try:
                self._on_stream(stream)
            except Exception:
                logger.exception("A connection failed inside the daemon.")
                stream.close()
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(rest_s, self._resume)


def peer_of(stream: socket.socket) -> Peer:
    """Who connected, as the kernel says. Raises OSError."""
    pid, uid, gid = peer_credentials(stream)
    return Peer(pid, uid, gid, process=_process_of(stream) or pid)


def failed_streams(fds: Iterable[int]) -> list[int]:
    """Those whose peer has closed its end and left something unread."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, 0)
    return [fd for fd, events in poller.poll(0) if events & select.POLLERR]


def _process_of(stream: socket.socket) -> int:
    """A number that no other process has, in whatever pid namespace; 0 where the kernel gives none."""
    pidfd = peer_pidfd(stream)
    if pidfd < 0:
        return 0
    try:
        # Before Linux 6.9 all of them are one inode of another file system.
        return os.fstat(pidfd).st_ino if filesystem_magic(pidfd) == _PIDFS_MAGIC else 0
    finally:
        os.close(pidfd)
