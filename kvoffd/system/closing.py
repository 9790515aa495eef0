"""Descriptors that clients sent: which of them can be memory, and how the others are closed.

The last close of a descriptor may wait: a TCP socket's for as long as its owner lets it linger, a FUSE file's for the
program behind it. Nor may anything be asked of such a file, not even its size.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from kvoffd.errors import NoMoreThreads, UnsafeSegment
from kvoffd.system.threads import start

CLOSING_THREADS = 8
"""So many closes may hang before descriptors that are no memory stay open."""
WAITING_CLOSES = 16
"""With more, another thread is started: the others may hang."""
MOST_DESCRIPTORS = socket.CMSG_SPACE(253 * 4)
"""Room for all descriptors of a message (SCM_MAX_FD): the kernel closes the others in the thread that reads."""
PATIENCE_S = 1.0
"""A close that takes longer is interrupted."""
STOP_S = 0.5
_STOP = -1
_NO_LINGER = struct.pack("ii", 0, 0)
_STATX_DONT_SYNC, _STATX_TYPE, _EMPTY_PATH = 0x4000, 1, 0x1000  # linux/stat.h, linux/fcntl.h
_MODE = struct.Struct("=28xH226x")
"""Where struct statx has the mode, of its 256 bytes."""
_libc = ctypes.CDLL(None, use_errno=True)


def check_descriptor(fd: int) -> None:
    """Raise UnsafeSegment unless the descriptor is a memfd, or may be a GPU's. Asks the kernel alone, never waits."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if not _of_driver(fd, target):
            kind = target.partition(":")[0] if target[:1] != "/" else "file or device"
            raise UnsafeSegment(
                f"The descriptor is a {kind} and neither a memfd nor what a GPU's driver exports; attach memory."
            ) from None


def _of_driver(fd: int, target: str) -> bool:
    """Whether it is what a GPU's driver exports: a device file of its own (VMM handles), or dma-buf.

    Any file system of a client's own can have files of such names; it is not asked what they are.
    """
    if target.startswith("/dev/nvidia"):
        return stat.S_ISCHR(_known_mode(fd))
    if target.startswith(("/dmabuf:", "anon_inode:[dmabuf]")):
        return "\nexp_name:" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    return False


def _known_mode(fd: int) -> int:
    """The file's type and mode as the kernel has them already, without asking the file system; 0 where it has none."""
    buffer = ctypes.create_string_buffer(_MODE.size)
    flags = _STATX_DONT_SYNC | _EMPTY_PATH
    if _libc.statx(fd, b"", flags, _STATX_TYPE, buffer) != 0:
        return 0
    (mode,) = _MODE.unpack(buffer.raw)
    return int(mode)


class Closer:
    """Threads that close what may make its closer wait: one, and more of them while closes wait for it."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing: dict[int, float] = {}
        """Since when which thread closes something."""
        self._start_thread()

    def close(self, fd: int) -> None:
        """Have the descriptor closed. Returns at once."""
        self._waiting.put(fd)
        if self._waiting.qsize() > WAITING_CLOSES and len(self._threads) < CLOSING_THREADS:
            with suppress(NoMoreThreads):  # then the others close it
                self._start_thread()

    def interrupt(self) -> None:
        """End closes that wait for long: a signal does so to a socket's, even one in the queue of another socket."""
        overdue = time.monotonic() - PATIENCE_S
        for thread, since in list(self._closing.items()):
            if since < overdue:
                signal.pthread_kill(thread, signal.SIGURG)

    def stop(self) -> None:
        """Have the threads end once all is closed, but for those that hang."""
        for _ in self._threads:
            self._waiting.put(_STOP)
        for thread in self._threads:
            thread.join(STOP_S)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="kvoffd-close", daemon=True)
        start(thread)
        self._threads.append(thread)

    def _run(self) -> None:
        own = threading.get_ident()
        while (fd := self._waiting.get()) != _STOP:
            self._closing[own] = time.monotonic()
            try:
                _forbid_lingering(fd)
                os.close(fd)
            except OSError:
                pass  # closed all the same (close(2))
            del self._closing[own]


def _forbid_lingering(fd: int) -> None:
    """A close then does not wait, unless the client sets it again meanwhile."""
    try:
        one = socket.socket(fileno=fd)
    except OSError:
        return  # it is no socket
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    finally:
        one.detach()
