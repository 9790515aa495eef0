"""What a policy knows, in a file beside the pool's, from one daemon to the next.

A file that is damaged, another user's or another policy's is no obstacle: the policy learns anew, and the log says so.
"""

from __future__ import annotations

import logging
import os
import stat

from kvoffd.cache.policies import EvictionPolicy
from kvoffd.config import Config

logger = logging.getLogger(__name__)

POLICY_SUFFIX = ".policy"
LARGEST_PART, LARGEST_BYTES = 25, 16 << 20
"""A larger file than a part in so many of the pool, and so much more, is not a policy's."""


class _NoPolicy(ValueError):
    """A file is of no use. The message says why, and begins with ``it``."""


def keep_policy(policy: EvictionPolicy, config: Config) -> None:
    """Leave what the policy knows to the next daemon. Where that fails, it begins anew."""
    if not config.pool_file or not (record := policy.record()):
        return
    path = config.pool_file + POLICY_SUFFIX
    beside = f"{path}.new"
    try:
        _remove(beside)
        made = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(made, "wb") as file:
            file.write(config.eviction_policy.encode() + b"\n" + record)
        os.replace(beside, path)
    except OSError as error:
        logger.warning("What the policy knows cannot be written to %s (%s); the next daemon learns anew.", path, error)


def go_on(policy: EvictionPolicy, config: Config) -> None:
    """Have a new policy go on with what an earlier daemon left, if it left anything."""
    if not config.pool_file:
        return
    path = config.pool_file + POLICY_SUFFIX
    try:
        written = _read(path, config.pool_bytes // LARGEST_PART + LARGEST_BYTES)
        name, _, record = written.partition(b"\n")
        if name != config.eviction_policy.encode():
            raise _NoPolicy(f"it is not of the policy {config.eviction_policy}")
        policy.go_on(record)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        logger.warning("What a policy knew, in %s, is of no use: %s. The policy learns anew.", path, error)


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


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
