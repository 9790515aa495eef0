"""What a policy knows, in a file beside the pool's, from one daemon to the next.

A file that is damaged, another user's or another policy's is no obstacle: the policy learns anew, and the log says so.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from pathlib import Path

from kvoffd.cache.policies import EvictionPolicy
from kvoffd.config import Config

logger = logging.getLogger(__name__)

POLICY_SUFFIX = ".policy"
KEPT_EVERY_S = 300.0
WRITER_CLOSE_S = 2.0
LARGEST_PART, LARGEST_BYTES = 25, 16 << 20
"""A larger file than a part in so many of the pool, and so much more, is not a policy's."""


class _NoPolicy(ValueError):
    """A file is of no use. The message says why, and begins with ``it``."""


class KeptPolicy:
    """Keeps what a policy knows in ``<pool_file>.policy``: now and then, and when the daemon ends."""

    def __init__(self, policy: EvictionPolicy, config: Config) -> None:
        self._policy = policy
        self._config = config
        self._path = config.pool_file + POLICY_SUFFIX if config.pool_file else ""
        self._due = time.monotonic() + KEPT_EVERY_S
        self._writer: threading.Thread | None = None

    def go_on(self) -> None:
        """Have the policy, which is new, go on with what an earlier daemon left, if it left anything."""
        if not self._path:
            return
        try:
            written = _read(self._path, self._config.pool_bytes // LARGEST_PART + LARGEST_BYTES)
            name, _, record = written.partition(b"\n")
            if name != self._config.eviction_policy.encode():
                raise _NoPolicy(f"it is not of the policy {self._config.eviction_policy}")
            self._policy.go_on(record)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("What a policy knew, in %s, is of no use: %s. The policy learns anew.", self._path, error)

    def tick(self) -> None:
        """Write the file where that is due, in a thread: a daemon that is killed leaves what it knew then."""
        if time.monotonic() >= self._due and (self._writer is None or not self._writer.is_alive()):
            self._due = time.monotonic() + KEPT_EVERY_S
            if self._path and (record := self._policy.record()):
                self._writer = threading.Thread(target=self._write, args=(record,), name="kvoffd-policy", daemon=True)
                self._writer.start()

    def close(self) -> None:
        """Leave what the policy knows now to the next daemon. Where that fails, it begins anew."""
        if self._writer is not None:
            self._writer.join(WRITER_CLOSE_S)
            if self._writer.is_alive():
                return
        if self._path and (record := self._policy.record()):
            self._write(record)

    def _write(self, record: bytes) -> None:
        beside = f"{self._path}.new"
        try:
            Path(beside).unlink(missing_ok=True)
            made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(made, "wb") as file:
                file.write(self._config.eviction_policy.encode() + b"\n" + record)
            os.replace(beside, self._path)
        except OSError as error:
            logger.warning(
                "What the policy knows cannot be written to %s (%s); the next daemon learns anew.", self._path, error
            )


def _read(path: str, most_bytes: int) -> bytes:
    """All of a file of this user's. Raises OSError, _NoPolicy."""
    # Not blocking: somebody may have put a FIFO there.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise _NoPolicy("it is not a file of this user's")
        if found.st_size > most_bytes:
            raise _NoPolicy(f"it has {found.st_size} bytes, more than {most_bytes}")
        return file.read(most_bytes)
