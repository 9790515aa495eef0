"""The daemon's sockets: where they are, and who is at the other end."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SYSTEM_DIRECTORY = Path("/run/kvoffd")
_SO_PEERPIDFD = 77  # asm-generic/socket.h
_UCRED = struct.Struct("iII")
MAX_SOCKET_PATH_BYTES = 107
"""sun_path holds 108 bytes with its terminating zero (unix(7))."""


@dataclass(frozen=True)
class SocketPaths:
    """The socket files of one daemon, and the one that stands for them while it starts."""

    directory: Path

    @property
    def jobs(self) -> Path:
        """ZeroMQ ROUTER: requests and replies."""
        return self.directory / "jobs.sock"

    @property
    def events(self) -> Path:
        """ZeroMQ PUB: completions and KV events."""
        return self.directory / "events.sock"

    @property
    def lifeline(self) -> Path:
        """Unix stream: descriptors and credentials; its EOF ends the session."""
        return self.directory / "lifeline.sock"

    @property
    def starting(self) -> Path:
        """File with how far the start is, until the sockets are open."""
        return self.directory / "kvoffd.starting"

    def problem(self) -> str | None:
        """Return why ZeroMQ cannot use the paths: too long for a unix socket, or not UTF-8. None if it can."""
        if not is_utf8(self.directory):
            return f"The directory {os.fsencode(self.directory)!r} is not UTF-8; choose another --directory."
        longest = max((self.jobs, self.events, self.lifeline), key=lambda path: len(os.fsencode(path)))
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            return (
                f"The socket path {longest} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter --directory."
            )
        return None


def is_utf8(name: object) -> bool:
    """Return whether a file name is valid UTF-8, as messages require."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        return False
    return True


def default_directory() -> Path:
    """Return ``$KVOFFD_DIRECTORY``, else /run/kvoffd for root or if it exists, else the user's runtime directory.

    The daemon reads the variable the same way: without spaces around it, and with ``~`` as the home directory.
    """
    if named := os.environ.get("KVOFFD_DIRECTORY", "").strip():
        return Path(os.path.expanduser(named))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0 or SYSTEM_DIRECTORY.is_dir() or not runtime:
        return SYSTEM_DIRECTORY
    return Path(runtime) / "kvoffd"


def peer_credentials(stream: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process that connected or listened (unix(7)). Raises OSError."""
    pid, uid, gid = _UCRED.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def peer_pidfd(stream: socket.socket) -> int:
    """Return a new pidfd of the process that connected or listened; it becomes readable when the process has ended.

    Return -1 before Linux 6.5, and if the process has already ended.
    """
    try:
        return stream.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
