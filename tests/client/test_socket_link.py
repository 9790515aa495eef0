"""The real link: what waits for a connection goes out when it is up, however the looks at it fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from kvoffd_client import ClientOptions
from kvoffd_client.socket_link import SocketLink
from kvoffd_proto.sockets import SocketPaths


class Dealer:
    """A jobs socket whose connection is up from a certain use on; ZeroMQ tells that to one look only."""

    def __init__(self, up_after: int) -> None:
        self.uses = 0
        self.up_after = up_after
        self.sent: list[bytes] = []
        self.saw_room = False

    def _use(self) -> bool:
        self.uses += 1
        return self.uses > self.up_after

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        self.saw_room = self._use()
        return zmq.POLLOUT if self.saw_room else 0

    def send(self, frame: bytes, flags: int) -> None:
        if not self._use():
            raise zmq.Again
        self.sent.append(frame)


@pytest.mark.parametrize("up_after", range(6))
def test_a_look_that_finds_the_connection_up_sends_what_waits(up_after: int, tmp_path: Path) -> None:
    link = SocketLink(SocketPaths(tmp_path), ClientOptions())
    dealer: Any = Dealer(up_after)
    link._jobs = dealer
    try:
        assert link.send((b"hello",))
        assert not link.readable()
        assert dealer.sent or not dealer.saw_room, "nothing would wake anybody to send it"
        assert not link.readable()
        assert dealer.sent or dealer.uses <= up_after
    finally:
        link._jobs = None
        link.shut()
