"""Listens for connections."""

from __future__ import annotations

import errno
import socket

from kvoffd.errors import KvoffdError

ALL_INTERFACES = "*"
BACKLOG = 1024
"""Connections that may wait to be accepted."""
RETRY_S = 0.25
"""Pause after accept() failed, for example for lack of descriptors: it would fail again at once."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen for HTTP on all addresses of a host; ``*`` is every interface, IPv4 and IPv6.

    Raises KvoffdError.
    """
    try:
        return _listeners(host, port)
    except OSError as error:
        raise KvoffdError(
            f"The HTTP address {host}:{port} cannot be used ({error.strerror or error}); free it, choose "
            "another with --http-address, or give an empty one to start without HTTP."
        ) from error


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Return the sockets. Raises OSError.

    Addresses that the machine lacks are skipped if there is another: ``localhost`` may include ::1 without IPv6.
    """
    if host == ALL_INTERFACES:
        if socket.has_dualstack_ipv6():
            return [socket.create_server(("::", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)]
        return [socket.create_server(("0.0.0.0", port), backlog=BACKLOG)]
    listeners, errors = [], []
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            listeners.append(socket.create_server(place[:2], family=family, backlog=BACKLOG))
        except OSError as error:
            errors.append(error)
    other_errors = [error for error in errors if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)]
    if other_errors or not listeners:
        for listener in listeners:
            listener.close()
        raise (other_errors or errors)[0]
    return listeners
