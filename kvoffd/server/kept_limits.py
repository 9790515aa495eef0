"""The limits of namespaces, in a file, from one daemon to the next."""

from __future__ import annotations

import logging

import msgspec

from kvoffd.cache.shares import MAX_LIMITED, Shares
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.kept_file import KeptFile, checked, path_beside_pool
from kvoffd_proto.messages import NamespaceLimits
from kvoffd_proto.wire import ByteCount

logger = logging.getLogger(__name__)

LIMITS_SUFFIX = ".limits"
LIMIT_BYTES = 256


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    fingerprint: str
    """In hex."""
    minimum_bytes: ByteCount
    maximum_bytes: ByteCount | None
    weight: float | None


class KeptLimits:
    """Keeps limits in ``<pool_file>.limits``, or ``kvoffd.limits`` in the daemon's directory.

    It has the CRC-32 of what follows, in hex, then a line of JSON for each namespace. A file of no use, or a limit that
    this pool cannot keep, is left out, and the log says so.
    """

    def __init__(self, shares: Shares, config: Config) -> None:
        self._shares = shares
        self._file = KeptFile(path_beside_pool(config, LIMITS_SUFFIX), (MAX_LIMITED + 1) * LIMIT_BYTES)
        self._written = self._content()

    def go_on(self) -> None:
        """Take over what an earlier daemon left, if it left anything."""
        try:
            lines = [msgspec.json.decode(line, type=_Line) for line in self._file.read_checked().splitlines()]
            found = [(bytes.fromhex(line.fingerprint), line) for line in lines]
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            path = self._file.path
            logger.warning("The limits of namespaces, in %s, are of no use: %s. There are none.", path, error)
            return
        for fingerprint, line in found:
            try:
                limits = NamespaceLimits(line.minimum_bytes, line.maximum_bytes, line.weight)
                self._shares.set(fingerprint, limits)
            except KvoffdError as error:
                logger.warning("The limits of the namespace %s are left out. %s", line.fingerprint, error.message)
        self._written = self._content()

    @property
    def is_being_written(self) -> bool:
        """Whether ``note`` has not ended."""
        return self._file.is_being_written

    @property
    def problem(self) -> str:
        """Why what there is now may not outlive the daemon."""
        if self._file.is_being_written:
            return f"{self._file.path} takes long to write"
        return f"{self._file.path} cannot be written: {self._file.error}" if self._file.error else ""

    def note(self) -> None:
        """Write what there is now, in a thread; where one is writing, when the daemon ends."""
        if not self._file.is_being_written:
            self._written = self._content()
            self._file.write_soon([self._written])

    def close(self) -> None:
        if self._file.join() and ((content := self._content()) != self._written or self._file.error):
            self._file.write_soon([content])
            self._file.join()

    def _content(self) -> bytes:
        lines = (
            _Line(fingerprint.hex(), one.minimum_bytes, one.maximum_bytes, one.weight)
            for fingerprint, one in self._shares
        )
        return checked(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
