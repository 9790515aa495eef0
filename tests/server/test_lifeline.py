"""The lifeline's own promises, without a daemon around it."""

from __future__ import annotations

import socket

from kvoffd.server.lifeline import Connection


def test_lifeline_of_a_peer_that_closed_is_dead_whatever_it_wrote_before() -> None:
    for unread in (b"", b"\x01", b"x" * 5000):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours, theirs:
            connection = Connection(ours, None)  # type: ignore[arg-type]
            theirs.sendall(unread)
            assert connection.alive()
            theirs.close()
            assert not connection.alive()


def test_lifeline_that_was_shut_down_or_closed_here_is_dead() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        connection = Connection(ours, None)  # type: ignore[arg-type]
        theirs.shutdown(socket.SHUT_WR)
        assert not connection.alive()
        ours.close()
        assert not connection.alive()
