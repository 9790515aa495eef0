"""Errors of clients. Every message says what to do next."""

from __future__ import annotations

import os
from pathlib import Path

from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.paths import SocketPaths
from kvoffd_proto.units import printable


class KvoffdClientError(Exception):
    """Base of all errors of the client."""


class DaemonUnavailable(KvoffdClientError):
    """The daemon is not running, does not answer, or ended before it answered."""


class RequestRefused(KvoffdClientError):
    """The daemon refused the request, which changed nothing. ``code`` is the reason; the message says what to do."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(printable(message) or code.sentence)
        self.code = code


class RequestTimeout(KvoffdClientError):
    """The daemon did not answer in time. It may have executed the request all the same."""


class HttpError(KvoffdClientError):
    """A server gave no usable answer. The message says what it did, see ``open_url``; its ``status``, or 0."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ForkedProcess(KvoffdClientError):
    """A client was used in a process forked after the client was created."""


def _lock_holder(directory: str) -> int | None:
    """Return the pid that holds the daemon's lock, from /proc/locks: not every user may open the file."""
    try:
        lock = os.stat(os.path.join(directory, "kvoffd.lock"))
        with open("/proc/locks", encoding="ascii") as locks:
            rows = [line.split() for line in locks]
    except (OSError, ValueError):
        return None
    device = os.major(lock.st_dev), os.minor(lock.st_dev)
    for words in rows:  # 1: FLOCK  ADVISORY  WRITE 6997 fe:00:2187672 0 EOF
        if len(words) == 8 and words[1] == "FLOCK":
            major, minor, inode = words[5].split(":")
            if (int(major, 16), int(minor, 16)) == device and int(inode) == lock.st_ino:
                return int(words[4])
    return None


def _start_progress(directory: str) -> str:
    """Return how far a daemon's start is; empty if it does not start."""
    paths = SocketPaths(Path(directory))
    try:
        return printable(paths.starting.read_text(errors="replace").strip()) or "starting"
    except OSError:
        return "starting" if paths.jobs.exists() else ""  # it has just opened its sockets


def is_starting(directory: Path) -> bool:
    """Whether a daemon that has no sockets yet starts there, as while it touches a large pool."""
    return _lock_holder(str(directory)) is not None and SocketPaths(directory).starting.exists()


SET_DIRECTORY = "set KVOFFD_DIRECTORY to its directory"
"""End of the sentence about a directory without a daemon; clients that do not read the variable have another end."""


def why_unreachable(error: OSError, directory: str, hint: str = SET_DIRECTORY) -> str:
    """Return the sentence about a lifeline that cannot be opened. ``hint``: what to do if it is the wrong directory."""
    shown = directory or "''"
    if isinstance(error, FileNotFoundError):
        if pid := _lock_holder(directory):
            which = f"The kvoffd daemon (pid {pid}) in {shown}"
            if text := _start_progress(directory):
                return f"{which} is {text}."
            return f"{which} has no sockets there: they were removed, or it is stopping. If it is not, restart it."
        return f"There is no kvoffd daemon in {shown}; start one, or {hint}."
    if isinstance(error, ConnectionRefusedError):
        return f"The kvoffd daemon in {shown} has ended; start it again."
    if isinstance(error, PermissionError):
        return (
            f"This user (uid {os.geteuid()}) may not use the kvoffd daemon's sockets in {shown}; use root, the "
            "daemon's user, or one in its allowed_uids or allowed_gids that may enter the directory."
        )
    if isinstance(error, BlockingIOError):
        return f"The kvoffd daemon in {shown} runs but accepts no connections; see its log."
    return f"The kvoffd daemon in {shown} cannot be reached: {error.strerror or error}."
