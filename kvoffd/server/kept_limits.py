"""The quotas of namespaces, in a file, from one daemon to the next."""

from __future__ import annotations

import logging

import msgspec

from kvoffd.cache.quota import MAX_QUOTAS, Quotas
from kvoffd.config import Config
from kvoffd.errors import KvoffdError
from kvoffd.server.kept_file import KeptFile, checked, path_beside_pool
from kvoffd_proto.wire import ByteCount

logger = logging.getLogger(__name__)

LIMITS_SUFFIX = ".limits"
LIMIT_BYTES = 256


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    fingerprint: str
    """In hex."""
    quota_bytes: ByteCount


class KeptLimits:
    """Keeps quotas in ``<pool_file>.limits``, or ``kvoffd.limits`` in the daemon's directory.

    It has the CRC-32 of what follows, in hex, then a line of JSON for each namespace. A file of no use, or a quota too
    many, is left out, and the log says so.
    """

    def __init__(self, quotas: Quotas, config: Config) -> None:
        self._quotas = quotas
        self._file = KeptFile(path_beside_pool(config, LIMITS_SUFFIX), (MAX_QUOTAS + 1) * LIMIT_BYTES)
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
            logger.warning("The quotas of namespaces, in %s, are of no use: %s. There are none.", path, error)
            return
        for fingerprint, line in found:
            try:
                self._quotas.set(fingerprint, line.quota_bytes)
            except KvoffdError as error:
                logger.warning("The quota of the namespace %s is left out. %s", line.fingerprint, error.message)
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
        lines = (_Line(fingerprint.hex(), quota_bytes) for fingerprint, quota_bytes in self._quotas)
        return checked(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
