"""File descriptors: as many as the process may have."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
from collections.abc import Callable

from kvoffd.errors import KvoffdError
from kvoffd_proto.cuda import descriptor_limits

logger = logging.getLogger(__name__)

LEAST_DESCRIPTORS = 1024
"""With fewer the daemon does not start: libzmq ends the process where it cannot accept a connection."""
MOST_DESCRIPTORS = 65536


def raise_descriptor_limit() -> None:
    """Each session costs descriptors; take what the hard limit gives. Raises KvoffdError where that is too few."""
    soft, hard = descriptor_limits()
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:  # a seccomp filter
            logger.warning("The limit of open files stays at %d (%s).", soft, error)
    if soft < LEAST_DESCRIPTORS:
        raise KvoffdError(
            f"The daemon may open {soft} files, and needs {LEAST_DESCRIPTORS}: raise the limit (ulimit -n, "
            "LimitNOFILE=)."
        )


def open_descriptors() -> int:
    """Of this process; 0 where there is no /proc."""
    try:
        # Since Linux 6.2 the directory's size is their number; to list it takes 12 us for each.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


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
