"""File descriptors: as many as the process may have, and how many of them are for which connections."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
from collections.abc import Callable

from kvoffd.errors import KvoffdError
from kvoffd_proto.descriptors import descriptor_limits

logger = logging.getLogger(__name__)

OTHER_DESCRIPTORS = 64
"""Of the daemon itself: sockets, files of the pool and disks, HTTP."""
MORE_CONNECTIONS = 32
"""Clients of the ZeroMQ sockets that have no session."""


def half_of_descriptors() -> int:
    """For what sessions attach. The others are for lifelines, ZeroMQ's sockets, and those on their way to a session."""
    return descriptor_limits()[0] // 2


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
    """Each session costs descriptors; take what the hard limit gives. Raises KvoffdError where that is too few."""
    soft, hard = descriptor_limits()
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # a seccomp filter
            logger.warning("The limit of open files stays at %d (%s).", soft, error)
    if soft < OTHER_DESCRIPTORS:
        raise KvoffdError(
            f"The daemon may open {soft} files, and itself needs {OTHER_DESCRIPTORS}: raise the limit (ulimit -n, "
            "LimitNOFILE=)."
        )


def check_loop_calls() -> None:
    """Raise KvoffdError where there can be no event loop: libuv ends the process, or leaves half of one behind."""
    calls: dict[str, Callable[[], object]] = {
        "epoll_create1": lambda: select.epoll().close(),
        "eventfd2": lambda: os.close(os.eventfd(0, os.EFD_CLOEXEC)),
        "pipe2": lambda: list(map(os.close, os.pipe())),
        "socketpair": lambda: list(map(socket.socket.close, socket.socketpair())),
    }
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            raise KvoffdError(
                f"The daemon can have no event loop: {name} is refused ({error.strerror}). See the limit of open "
                "files (ulimit -n) and the seccomp filter that it is started with."
            ) from error
