"""The errors of clients. Every message says what to do next."""

from __future__ import annotations

import os

from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.units import printable


class KvoffdClientError(Exception):
    """Base of all errors of the client."""


class DaemonUnavailable(KvoffdClientError):
    """The daemon is not there, does not answer, or went away before the answer came."""


class RequestRefused(KvoffdClientError):
    """The daemon answered with an error; nothing changed there. ``code`` says why, the message what to do."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(printable(message) or code.sentence)
        self.code = code


class RequestTimeout(KvoffdClientError):
    """The daemon did not answer in time. It may still have done what was asked."""


class UnknownNamespace(KvoffdClientError):
    """None, or several, of the open namespaces have the name."""


class BlockUnavailable(KvoffdClientError):
    """A block is not in the pool, or there is no space for it."""


class BlockDamaged(KvoffdClientError):
    """A block's bytes are not those that were stored, or do not fit their description."""


class ForkedProcess(KvoffdClientError):
    """A client was used in a process that was forked after the client was made."""


def _lock_holder(directory: str) -> int | None:
    """The process that has the daemon's lock in ``directory``, as Linux says it: its file is not for every user."""
    try:
        lock = os.stat(os.path.join(directory, "kvoffd.lock"))
        with open("/proc/locks", encoding="ascii") as locks:
            held = [line.split() for line in locks]
    except (OSError, ValueError):
        return None
    device = os.major(lock.st_dev), os.minor(lock.st_dev)
    for words in held:  # 1: FLOCK  ADVISORY  WRITE 6997 fe:00:2187672 0 EOF
        if len(words) == 8 and words[1] == "FLOCK":
            major, minor, inode = words[5].split(":")
            if (int(major, 16), int(minor, 16)) == device and int(inode) == lock.st_ino:
                return int(words[4])
    return None


def why_unreachable(error: OSError, directory: str) -> str:
    if isinstance(error, FileNotFoundError):
        if pid := _lock_holder(directory):
            return (
                f"The kvoffd daemon (pid {pid}) in {directory} has no sockets there: it is starting, or they were "
                "removed. Its log says which; restart it if it serves."
            )
        return f"There is no kvoffd daemon in {directory}; start one there, or name its directory in KVOFFD_DIRECTORY."
    if isinstance(error, ConnectionRefusedError):
        return f"The kvoffd daemon in {directory} has ended; start it again."
    if isinstance(error, PermissionError):
        return (
            f"The sockets of the kvoffd daemon in {directory} are not for this user (uid {os.geteuid()}); use root, "
            "the daemon's user, or one that its allowed_uids or allowed_gids name and that may enter the directory."
        )
    if isinstance(error, BlockingIOError):
        return f"The kvoffd daemon in {directory} runs but accepts no connections; see its log."
    return f"The kvoffd daemon in {directory} cannot be reached: {error.strerror or error}."
