"""What a policy knows, in a file beside the pool's, from one daemon to the next.

A file that is damaged, another user's or another policy's is no obstacle: the policy learns anew, and the log says so.
"""

from __future__ import annotations

import logging
import time

from kvoffd.cache.policies import EvictionPolicy
from kvoffd.config import Config
from kvoffd.server.kept_file import KeptFile, OfNoUse

logger = logging.getLogger(__name__)

POLICY_SUFFIX = ".policy"
KEPT_EVERY_S = 300.0
LARGEST_PART, LARGEST_BYTES = 25, 16 << 20
"""A larger file than a part in so many of the pool, and so much more, is not a policy's."""


class KeptPolicy:
    """Keeps what a policy knows in ``<pool_file>.policy``: now and then, and when the daemon ends."""

    def __init__(self, policy: EvictionPolicy, config: Config) -> None:
        self._policy = policy
        self._name = config.eviction_policy.encode()
        most_bytes = config.pool_bytes // LARGEST_PART + LARGEST_BYTES
        self._file = KeptFile(config.pool_file + POLICY_SUFFIX, most_bytes) if config.pool_file else None
        self._due = time.monotonic() + KEPT_EVERY_S

    def go_on(self) -> None:
        """Have the policy, which is new, go on with what an earlier daemon left, if it left anything."""
        if self._file is None:
            return
        try:
            name, _, record = self._file.read().partition(b"\n")
            if name != self._name:
                raise OfNoUse(f"it is not of the policy {self._name.decode()}")
            self._policy.go_on(record)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            path = self._file.path
            logger.warning("What a policy knew, in %s, is of no use: %s. The policy learns anew.", path, error)

    def tick(self) -> None:
        """Write the file where that is due, in a thread: a daemon that is killed leaves what it knew then."""
        if self._file is None or time.monotonic() < self._due or self._file.is_being_written:
            return
        self._due = time.monotonic() + KEPT_EVERY_S
        self._complain()
        if record := self._policy.record():
            self._file.write_soon(self._name, b"\n", record)

    def close(self) -> None:
        """Leave what the policy knows now to the next daemon. Where that fails, it begins anew."""
        if self._file is not None and self._file.join() and (record := self._policy.record()):
            self._file.write(self._name, b"\n", record)
            self._complain()

    def _complain(self) -> None:
        if self._file is not None and (error := self._file.error) is not None:
            logger.warning(
                "What the policy knows cannot be written to %s (%s); the next daemon learns anew.",
                self._file.path,
                error,
            )
