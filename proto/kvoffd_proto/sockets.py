"""The daemon's sockets: where they are, who may use the one on TCP, and how messages come out of ZeroMQ's."""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import zmq

# --- where the sockets are -----------------------------------------------------------------------

SYSTEM_DIRECTORY = Path("/run/kvoffd")
_SO_PEERPIDFD = 77  # asm-generic/socket.h
_UCRED = struct.Struct("iII")
MAX_SOCKET_PATH_BYTES = 107
"""sun_path holds 108 bytes with its terminating zero (unix(7))."""


@dataclass(frozen=True)
class SocketPaths:
    """The socket files of one daemon."""

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

    def problem(self) -> str | None:
        """A sentence when the paths are too long for a unix socket, else None."""
        longest = max((self.jobs, self.events, self.lifeline), key=lambda path: len(os.fsencode(path)))
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            return (
                f"The socket path {longest} is longer than {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter --directory."
            )
        return None


def default_directory() -> Path:
    """``$KVOFFD_DIRECTORY``, else /run/kvoffd for root and where it exists, else the user's runtime directory."""
    if named := os.environ.get("KVOFFD_DIRECTORY"):
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0 or SYSTEM_DIRECTORY.is_dir() or not runtime:
        return SYSTEM_DIRECTORY
    return Path(runtime) / "kvoffd"


def peer_credentials(stream: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the process that connected or listened (unix(7)). Raises OSError."""
    return _UCRED.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))


def peer_pidfd(stream: socket.socket) -> int:
    """Return a new descriptor of the process that connected or listened, readable once it has ended.

    -1 before Linux 6.5, and for a process that is gone already.
    """
    try:
        return stream.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1


# --- keys of administration over TCP -------------------------------------------------------------

# TCP is encrypted and authenticated by CURVE (ZeroMQ RFC 26). A key is 32 bytes, written as 40 characters of Z85
# (ZeroMQ RFC 32). A secret file holds one key; a file of public keys holds one on a line, and behind it a name where
# there is one. Lines that begin with "#" are comments, in both.

KEY_CHARACTERS = 40
NO_TOKEN = bytes(16)
"""The token of requests over TCP, where the connection's key identifies the client."""

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_FILE_BYTES = 1 << 20


class CurveKeyError(Exception):
    """A key or a file of keys cannot be used. The text is a sentence that says what to do."""


def is_key(text: str) -> bool:
    """Whether ``text`` is a key as Z85 writes it."""
    return _KEY.fullmatch(text) is not None


def read_secret_key(path: Path) -> str:
    """Return the secret key in ``path``. Raises CurveKeyError, also for a file that everybody may read."""
    lines = _lines(path, secret=True)
    if len(lines) != 1 or not is_key(lines[0]):
        raise CurveKeyError(f"{path} holds no secret key; make a pair of files with `kvoffd-cli keygen FILE`.")
    return lines[0]


def read_public_keys(path: Path) -> dict[str, str]:
    """Return the administrators' names by public key. Raises CurveKeyError."""
    found: dict[str, str] = {}
    for line in _lines(path, secret=False):
        key, _, name = line.partition(" ")
        if not is_key(key):
            raise CurveKeyError(
                f"{path}: a line begins with {key[:50]!r}, which is no public key; one has {KEY_CHARACTERS} "
                "characters, as `kvoffd-cli keygen` writes them."
            )
        found[key] = name.strip()
    return found


def _lines(path: Path, *, secret: bool) -> list[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                raise CurveKeyError(f"{path} is no file of keys.")
            if secret and status.st_mode & stat.S_IROTH:
                raise CurveKeyError(f"{path} holds a secret and everybody may read it; `chmod 600 {path}`.")
            text = file.read().decode()
    except OSError as error:
        raise CurveKeyError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CurveKeyError(f"{path} is no file of keys.") from error
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


# --- messages from ZeroMQ's sockets ---------------------------------------------------------------

# pyzmq's own calls for messages of several frames combine members of enums for each frame. Measured with processes that
# have slept, whose caches are cold: a lookup of 1,000 keys took 10 µs longer with them, of 170.
# The numbers are those of zmq.h, so that this package does not import pyzmq.
_NOW = 1  # ZMQ_DONTWAIT
_RCVMORE, _EVENTS = 13, 15
READABLE = 1  # ZMQ_POLLIN


def receive_frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive one message. Raises zmq.Again when there is none."""
    frames = [socket.recv(_NOW)]
    while socket.get(_RCVMORE):
        frames.append(socket.recv(_NOW))
    return frames


def events_of(socket: zmq.Socket[bytes]) -> int:
    """Return flags, READABLE among them where a message waits. The call makes ZeroMQ notice what has changed."""
    return cast(int, socket.get(_EVENTS))
