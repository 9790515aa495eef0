"""File descriptors: as many as the process may have, and how many of them are for which connections."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 64
"""Of the daemon itself: sockets, files of the pool and disks, HTTP."""
MORE_CONNECTIONS = 32
"""Clients of the ZeroMQ sockets that have no session."""


def half_of_descriptors() -> int:
    """For what sessions attach. The others are for lifelines, ZeroMQ's sockets, and those on their way to a session."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def most_connections(max_sessions: int) -> int:
    """How many clients may connect to each of the two ZeroMQ sockets: two a session, and some that only subscribe."""
    left = half_of_descriptors() - max_sessions - OTHER_DESCRIPTORS
    wanted = 2 * max_sessions + MORE_CONNECTIONS
    most = max(MORE_CONNECTIONS, min(wanted, left // 2))
    if most < wanted:
        logger.warning(
            "Only %d clients can connect, since the limit of open files is low; %d are enough for max_sessions.",
            most,
            2 * (max_sessions + OTHER_DESCRIPTORS + 2 * wanted),
        )
    return most


def raise_descriptor_limit() -> None:
    """Each session costs descriptors; take what the hard limit gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
