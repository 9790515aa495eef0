"""The sockets of a TCP address."""

from __future__ import annotations

import asyncio
import errno
import socket

from kvoffd.settings import ALL_INTERFACES, Address


async def listeners_of(address: Address, backlog: int) -> list[socket.socket]:
    """Sockets that listen wherever the address's host is. Raises OSError where one of the places cannot be had.

    ``localhost`` may be an IPv6 address that the machine, without IPv6, does not have: it is passed over.
    """
    if address.host == ALL_INTERFACES:
        return [listen_everywhere(address.port, backlog)]
    found = await asyncio.get_running_loop().getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    places = list(dict.fromkeys((family, place) for family, _, _, _, place in found))
    listeners: list[socket.socket] = []
    for family, place in places:
        try:
            listeners.append(socket.create_server(place[:2], family=family, backlog=backlog))
        except OSError as error:
            lacking = family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
            if lacking and (listeners or (family, place) != places[-1]):
                continue
            for listener in listeners:
                listener.close()
            raise
    return listeners


def listen_everywhere(port: int, backlog: int | None = None) -> socket.socket:
    """A socket that listens on all interfaces, by IPv4 and, where there is one, IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("0.0.0.0", port), backlog=backlog)
