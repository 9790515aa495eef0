"""Sockets that listen on all addresses of a host."""

from __future__ import annotations

import socket

import pytest

from kvoffd.errors import KvoffdError
from kvoffd.system.listening import listen

LACKED = "192.0.2.1"
"""An address of documentation, which no machine has (RFC 5737)."""


def test_a_port_that_is_in_use_is_said_whatever_addresses_the_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["127.0.0.1", LACKED]
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _, port, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in hosts],
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(2):
            with pytest.raises(KvoffdError, match="already in use"):
                listen("localhost", taken.getsockname()[1])
            hosts.reverse()
    (listener,) = listen("localhost", 0)
    listener.close()
