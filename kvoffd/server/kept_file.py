"""A file from one daemon to the next.

A file that is damaged, or another user's, is no obstacle: whoever reads it begins anew and says so.
"""

from __future__ import annotations

import os
import stat
import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvoffd.config import Config
from kvoffd.errors import NoMoreThreads
from kvoffd.system.mappings import is_hugetlbfs
from kvoffd.system.threads import start

WRITER_CLOSE_S = 2.0


def path_beside_pool(config: Config, suffix: str) -> str:
    """Where something is kept as long as the pool: beside ``pool_file``, without one in the daemon's directory.

    There too where that file is on hugetlbfs, whose files can be mapped and not written.
    """
    if config.pool_file and not is_hugetlbfs(Path(config.pool_file).parent):
        return config.pool_file + suffix
    return str(config.directory / "kvoffd") + suffix


class OfNoUse(ValueError):
    """A file is of no use. The message says why, and begins with ``it``."""


def checked(body: bytes) -> bytes:
    """The body behind its CRC-32 in hex, for ``KeptFile.read_checked``."""
    return b"%08x\n" % zlib.crc32(body) + body


def _open_own(path: str, flags: int) -> int:
    """Follows no link, and does not block: somebody may have put a FIFO there."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


class KeptFile:
    """Reads a file of at most so many bytes, and writes it anew: whole, or not at all."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._writer: threading.Thread | None = None
        self.error: OSError | None = None
        """Why it could not be written the last time."""

    @property
    def is_being_written(self) -> bool:
        """Whether ``write_soon`` has not ended."""
        return self._writer is not None and self._writer.is_alive()

    def read(self) -> bytes:
        """All of it. Raises OSError, OfNoUse."""
        with open(self.path, "rb", opener=_open_own) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OfNoUse("it is not a file of this user's")
            if found.st_size > self._most_bytes:
                raise OfNoUse(f"it has {found.st_size} bytes, more than {self._most_bytes}")
            return file.read(self._most_bytes)

    def read_checked(self) -> bytes:
        """The body of what ``checked`` made. Raises OSError, OfNoUse."""
        checksum, _, body = self.read().partition(b"\n")
        if checksum != b"%08x" % zlib.crc32(body):
            raise OfNoUse("its checksum is wrong")
        return body

    def write_soon(self, content: Iterable[bytes]) -> None:
        """Write it in a thread, piece by piece as it comes; only while none is being written."""
        assert not self.is_being_written
        writer = threading.Thread(target=self.write, args=(content,), name="kvoffd-kept-file", daemon=True)
        try:
            start(writer)
            self._writer = writer
        except NoMoreThreads as error:
            self.error = OSError(error.message)

    def write(self, content: Iterable[bytes]) -> None:
        """Write it now; ``error`` says how that went, also where ``content`` raises OSError."""
        beside = f"{self.path}.new"
        try:
            Path(beside).unlink(missing_ok=True)
            made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(made, "wb") as file:
                file.writelines(content)
            os.replace(beside, self.path)
            self.error = None
        except OSError as error:
            self.error = error
            with suppress(OSError):  # what there is of it would take the room that is lacking, as of a small tmpfs
                os.unlink(beside)

    def take_error(self) -> OSError | None:
        """Why it could not be written the last time, once."""
        error, self.error = self.error, None
        return error

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait a moment for ``write_soon``; False where it does not end."""
        if self._writer is not None:
            self._writer.join(WRITER_CLOSE_S if timeout_s is None else timeout_s)
        return not self.is_being_written
