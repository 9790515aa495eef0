"""ZeroMQ's numbers, which the proto package writes down so that it needs no pyzmq."""

from __future__ import annotations

import zmq

from kvoffd_proto import sockets


def test_the_numbers_are_those_of_zmq() -> None:
    assert (sockets.READABLE, sockets._NOW) == (zmq.POLLIN, zmq.NOBLOCK)
    assert (sockets._RCVMORE, sockets._EVENTS) == (zmq.RCVMORE, zmq.EVENTS)
