"""The lifeline's own promises, without a daemon around it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvoffd.server.lifeline import Connection


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("unread", [b"", b"\x01", b"x" * 5000])
def test_a_closed_peer_is_dead_whatever_it_wrote_before(ends: tuple[socket.socket, socket.socket], unread: bytes):
    ours, theirs = ends
    connection = Connection(ours, None)  # type: ignore[arg-type]
    theirs.sendall(unread)
    assert connection.alive()
    theirs.close()
    assert not connection.alive()


def test_a_peer_that_has_shut_its_side_down_is_dead(ends: tuple[socket.socket, socket.socket]):
    ours, theirs = ends
    connection = Connection(ours, None)  # type: ignore[arg-type]
    theirs.shutdown(socket.SHUT_WR)
    assert not connection.alive()


def test_a_closed_connection_is_dead(ends: tuple[socket.socket, socket.socket]):
    ours, _ = ends
    ours.close()
    assert not Connection(ours, None).alive()  # type: ignore[arg-type]
