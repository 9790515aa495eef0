"""Where a TCP address is listened at."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from kvoffd.server.listening import listeners_of
from kvoffd.settings import ALL_INTERFACES, Address

V4, V6 = (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0))


def reached(listener: socket.socket, host: str) -> bool:
    with listener, socket.create_connection((host, listener.getsockname()[1]), 5.0):
        return True


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_star_is_ipv4_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    (listener,) = asyncio.run(listeners_of(Address(ALL_INTERFACES, 0), 5))
    assert listener.family == socket.AF_INET
    assert reached(listener, "127.0.0.2")


async def listen(*places: Any, without: int = 0, error: int = errno.EADDRNOTAVAIL) -> list[socket.AddressFamily]:
    """The families that are listened at where a name is at ``places``, and one family cannot be had."""

    async def resolved(*_: object, **__: object) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 6, "", place) for family, place in places]

    def create(place: Any, family: int, **_: object) -> socket.socket:
        if family == without:
            raise OSError(error, "no")
        return socket.socket(family)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
        patched.setattr(socket, "create_server", create)
        listeners = await listeners_of(Address("name", 0), 5)
    for listener in listeners:
        listener.close()
    return [listener.family for listener in listeners]


def test_a_name_is_listened_at_wherever_it_is_and_ipv6_may_be_lacking() -> None:
    if has_ipv6():
        assert asyncio.run(listen(V6, V4)) == [socket.AF_INET6, socket.AF_INET]
    for places in ((V6, V4), (V4, V6)):
        assert asyncio.run(listen(*places, without=socket.AF_INET6)) == [socket.AF_INET]
    for places, without, error in (
        ((V6,), socket.AF_INET6, errno.EADDRNOTAVAIL),
        ((V4, V6), socket.AF_INET6, errno.EADDRINUSE),
        ((V4,), socket.AF_INET, errno.EADDRNOTAVAIL),
    ):
        with pytest.raises(OSError, match="no"):
            asyncio.run(listen(*places, without=without, error=error))
