"""The client's end of jobs.sock, against libzmq's ROUTER and against peers that misbehave."""

from __future__ import annotations

import select
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from kvoffd_client import ClientOptions
from kvoffd_client.jobs_socket import JobsSocket
from kvoffd_client.socket_link import SocketLink
from kvoffd_proto import zmtp
from kvoffd_proto.sockets import SocketPaths
from tests.kit.waiting import wait_until

MOST_UNSENT = 8


@dataclass
class End:
    """A jobs socket and the epolls of its threads."""

    path: Path
    reader: select.epoll
    leader: select.epoll
    jobs: JobsSocket

    def look_until(self, happened: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.jobs.look()
            return happened()

        wait_until(looked)

    def shake_hands(self) -> None:
        assert self.reader.poll(5.0)
        assert self.jobs.take(1) == []

    def take(self, count: int) -> list[list[bytes]]:
        """Messages, as the reader's thread takes them."""
        found: list[list[bytes]] = []
        while len(found) < count:
            assert self.reader.poll(5.0)
            found += self.jobs.take(count)
        return found


@contextmanager
def opened(path: Path) -> Iterator[End]:
    with select.epoll() as reader, select.epoll() as leader:
        jobs = JobsSocket(path, MOST_UNSENT, reader, leader)
        try:
            yield End(path, reader, leader, jobs)
        finally:
            jobs.close()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made) / "jobs.sock"


class Peer:
    """A listener that takes one connection at a time."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(5.0)
        self._listener.bind(str(path))
        self._listener.listen()
        self._input = zmtp.Input({b"DEALER"}, 1 << 24, 4)
        self.stream: socket.socket | None = None

    def accept(self, data: bytes = zmtp.opening(b"ROUTER")) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream, _ = self._listener.accept()
        self.stream.settimeout(5.0)
        self.stream.sendall(data)
        self._input = zmtp.Input({b"DEALER"}, 1 << 24, 4)

    def receive(self, end: End) -> list[bytes]:
        assert self.stream is not None
        while not isinstance(message := self._input.next(), list):
            for _, events in end.reader.poll(0):
                if events & select.EPOLLOUT:
                    end.jobs.look()
            self._input.feed(self.stream.recv(65536))
        return message

    def close(self) -> None:
        self._listener.close()
        if self.stream is not None:
            self.stream.close()


@pytest.fixture
def peer(path: Path) -> Iterator[Peer]:
    made = Peer(path)
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, 5, 255, 256, 1 << 20])
def test_messages_go_to_libzmqs_router_and_back(path: Path, size: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, opened(path) as end:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVTIMEO, 5000)
        assert end.jobs.send((b"", bytes(size)))  # before anybody listens
        assert end.jobs.must_connect
        router.bind(f"ipc://{path}")
        end.look_until(lambda: router.poll(0) > 0)
        name, *frames = router.recv_multipart()
        assert frames == [b"", bytes(size)]
        for text in (b"first", b"second"):
            router.send_multipart([name, text, bytes(size)])
        assert end.take(2) == [[b"first", bytes(size)], [b"second", bytes(size)]]


def test_what_finds_no_room_waits_within_a_bound_and_goes_out_whole_and_in_order(path: Path, peer: Peer) -> None:
    with opened(path) as end:
        peer.accept()
        end.shake_hands()
        sent = 0
        while end.jobs.send((bytes([sent]) * 100_000,)):
            sent += 1
            assert sent < 100
        assert sent > MOST_UNSENT
        assert [peer.receive(end) for _ in range(sent)] == [[bytes([number]) * 100_000] for number in range(sent)]
        assert end.jobs.send((b"more",))
        assert peer.receive(end) == [b"more"]
        assert not [events for _, events in end.reader.poll(0) if events & select.EPOLLOUT], "nothing waits for room"


def test_after_a_connection_broke_the_next_one_begins_with_a_whole_message(path: Path, peer: Peer) -> None:
    with opened(path) as end:
        peer.accept()
        end.shake_hands()
        while end.jobs.send((b"x" * 100_000,)):
            pass
        peer.stream.close()
        end.look_until(lambda: end.jobs.must_connect)
        end.look_until(lambda: not end.jobs.must_connect)
        peer.accept()
        end.shake_hands()
        assert peer.receive(end) == [b"x" * 100_000]


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", zmtp.opening(b"PUB"), b""])
def test_a_peer_that_is_no_router_is_left(path: Path, peer: Peer, data: bytes) -> None:
    with opened(path) as end:
        peer.accept(data)
        peer.stream.shutdown(socket.SHUT_WR)
        end.shake_hands()
        assert end.jobs.take(1) == []
        assert not end.reader.poll(0), "a connection that has ended must not end each sleep"
        assert end.jobs.send((b"hello",))
        end.look_until(lambda: not end.jobs.must_connect)
        peer.accept()
        end.shake_hands()
        assert peer.receive(end) == [b"hello"]


def test_a_message_ends_one_sleep_and_the_leaders_first(path: Path, peer: Peer) -> None:
    with opened(path) as end:
        peer.accept()
        assert peer.stream is not None
        end.shake_hands()
        peer.stream.sendall(zmtp.encode([b"reply"]))
        assert end.leader.poll(5.0)
        assert end.jobs.take(1) == [[b"reply"]]
        assert not end.leader.poll(0)
        assert not end.reader.poll(0)


def test_a_message_that_waits_for_a_connection_ends_a_sleep_so_that_one_is_tried_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SocketLink(SocketPaths(path.parent), ClientOptions())
    try:
        link.open_sockets([])
        woken: list[bool] = []
        monkeypatch.setattr(link, "wake", lambda: woken.append(True))
        assert link.send((b"request",))
        assert woken
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            wait_until(lambda: not link.sleep(0.01) and not link.readable() and bool(router.poll(10)))
            assert router.recv_multipart()[1:] == [b"request"]
            woken.clear()
            assert link.send((b"another",))
            assert not woken
    finally:
        link.shut()
