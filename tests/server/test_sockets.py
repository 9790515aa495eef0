"""The sockets of requests and events on a loop of their own, over a service that only answers."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
import zmq

from kvoffd.config import Config
from kvoffd.observe.loop_watch import LoopWatch
from kvoffd.server.service import Service
from kvoffd.server.sockets import FRAMES_AT_ONCE, Sockets
from kvoffd.system.directory import DaemonDirectory
from tests.kit.waiting import wait_until

WAIT_MS = 10_000


class Echo:
    """A service that sends each request back, and what else a test wants."""

    def __init__(self) -> None:
        self.waiting = 0
        self.events = SimpleNamespace(pending={})
        self.replies: list[tuple[bytes, bytes]] = []
        self.publications: list[tuple[bytes, bytes, bytes]] = []
        self.during: Callable[[bytes], None] = lambda frame: None
        self.steps = 0
        """Of background work that are left."""
        self.urgent = False
        self.loop_watch: Any = nullcontext()
        self.turns = list[str]()
        """What was sent, and when ``after_send`` was called."""

    def handle(self, route: bytes, frame: bytes) -> None:
        self.during(frame)
        self.replies.append((route, frame))

    def outgoing(self) -> tuple[list[tuple[bytes, bytes, bytes]], list[tuple[bytes, bytes]]]:
        replies, self.replies = self.replies, []
        publications, self.publications = self.publications, []
        self.events.pending.clear()
        self.turns.append(f"{len(replies)} replies")
        return publications, replies

    def after_send(self) -> None:
        self.turns.append("after")

    def background(self) -> bool:
        self.steps = max(0, self.steps - 1)
        return self.steps > 0


class Room:
    """Open sockets in a loop that nothing wakes but they themselves, and clients in other threads."""

    def __init__(self, service: Echo, sockets: Sockets, directory: Path) -> None:
        self.service = service
        self.sockets = sockets
        self.directory = directory
        self._zmq = zmq.Context()
        self._clients: list[zmq.Socket[bytes]] = []

    def close(self) -> None:
        for client in self._clients:
            client.close(linger=0)
        self._zmq.term()

    def client(self, kind: int = zmq.DEALER, routing_id: bytes = b"") -> zmq.Socket[bytes]:
        """A connected client."""
        client = self._zmq.socket(kind)
        self._clients.append(client)
        if routing_id:
            client.setsockopt(zmq.ROUTING_ID, routing_id)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        client.connect(f"ipc://{self.directory}/{'events' if kind == zmq.SUB else 'jobs'}.sock")
        return client


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvoffd-", dir="/tmp") as made:
        yield Path(made)


def with_clients(directory: Path, run: Callable[[Room], None], service: Echo | None = None) -> Echo:
    """Run clients in a thread while the loop serves them. There is no tick: an edge that is lost hangs a client."""
    service = service or Echo()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        owned = DaemonDirectory(directory)
        owned.acquire()
        sockets = Sockets(Config(), owned)
        sockets.open(cast(Service, service))
        room = Room(service, sockets, directory)
        try:
            await loop.run_in_executor(None, run, room)
        finally:
            room.close()
            sockets.close(0)
            owned.release()

    uvloop.run(serve())
    return service


def test_a_message_that_comes_while_another_is_answered_is_not_lost(directory: Path) -> None:
    """Sending consumes libzmq's edge. Who only sleeps until the next one would leave the message where it is."""
    service, other_sent = Echo(), threading.Event()

    def during(frame: bytes) -> None:
        if frame == b"slow":
            assert other_sent.wait(10)
            time.sleep(0.02)  # now libzmq has it

    service.during = during

    def run(room: Room) -> None:
        slow, fast = room.client(), room.client()
        fast.send(b"first")  # connected now
        assert fast.recv() == b"first"
        for _ in range(20):
            other_sent.clear()
            slow.send(b"slow")
            time.sleep(0.005)
            fast.send(b"fast")
            other_sent.set()
            assert slow.recv() == b"slow"
            assert fast.recv() == b"fast"

    with_clients(directory, run, service)


def test_calls_of_other_threads_are_made_and_what_they_leave_is_sent(directory: Path) -> None:
    service = Echo()

    def run(room: Room) -> None:
        subscriber, client = room.client(zmq.SUB), room.client()
        subscriber.setsockopt(zmq.SUBSCRIBE, b"topic")
        client.send(b"")
        assert client.recv() == b""
        made: list[int] = []

        def publish(number: int) -> None:
            made.append(number)
            if number == 100:
                raise RuntimeError("planted")
            service.publications.append((b"topic", b"%d" % number, b"payload"))

        deadline = time.monotonic() + 10
        while not subscriber.poll(10):  # until the subscription has arrived
            assert time.monotonic() < deadline
            room.sockets.post(lambda: service.publications.append((b"topic", b"early", b"")))
        for number in range(200):
            room.sockets.post(lambda number=number: publish(number))  # type: ignore[misc]
        numbers = []
        while not numbers or numbers[-1] != 199:
            _, number, _ = subscriber.recv_multipart()
            numbers += [int(number)] if number != b"early" else []
        assert numbers == [number for number in range(200) if number != 100]
        assert made == list(range(200))

    with_clients(directory, run, service)


def test_a_request_that_takes_long_between_two_beats_counts_as_a_block_of_the_loop(directory: Path) -> None:
    service = Echo()
    watch = service.loop_watch = LoopWatch()
    service.during = lambda frame: time.sleep(0.06)

    def run(room: Room) -> None:
        client, started = room.client(), threading.Event()
        room.sockets.post(lambda: (watch.start(asyncio.get_running_loop()), started.set()))
        assert started.wait(10)
        client.send(b"")
        assert client.recv() == b""
        wait_until(lambda: watch.loop_blocked_max_seconds >= 0.04)

    with_clients(directory, run, service)
    watch.stop()


def test_events_of_the_last_step_of_background_work_are_published_in_its_turn(directory: Path) -> None:
    """They waited for the next message or tick."""

    class Dropping(Echo):
        left = 0

        def background(self) -> bool:
            if self.left:
                self.left -= 1
                self.publications.append((b"topic", b"%d" % self.left, b"payload"))
                self.events.pending["namespace"] = ["event"]
            return self.left > 0

    service = Dropping()

    def run(room: Room) -> None:
        subscriber, client = room.client(zmq.SUB), room.client()
        subscriber.setsockopt(zmq.SUBSCRIBE, b"topic")
        client.send(b"")
        assert client.recv() == b""
        deadline = time.monotonic() + 10
        while not subscriber.poll(10):  # until the subscription has arrived
            assert time.monotonic() < deadline
            room.sockets.post(lambda: service.publications.append((b"topic", b"early", b"")))
        room.sockets.post(lambda: setattr(service, "left", 3))
        numbers = list[bytes]()
        while not numbers or numbers[-1] != b"0":
            numbers.append(subscriber.recv_multipart()[1])
        assert [one for one in numbers if one != b"early"] == [b"2", b"1", b"0"]

    with_clients(directory, run, service)


class Noting:
    """A socket that notes its name before each frame that it sends."""

    def __init__(self, name: str, socket: object, sent: list[str]) -> None:
        self._name, self._socket, self._sent = name, socket, sent

    def __getattr__(self, name: str) -> object:
        if name == "send":
            self._sent.append(self._name)
        return getattr(self._socket, name)


def test_results_go_out_before_the_reply_that_tells_of_them(directory: Path) -> None:
    service, sent = Echo(), list[str]()
    service.during = lambda _: service.publications.append((b"topic", b"1", b"payload"))

    def run(room: Room) -> None:
        sockets: Any = room.sockets
        sockets._jobs, sockets._events = Noting("reply", sockets._jobs, sent), Noting("result", sockets._events, sent)
        client = room.client()
        client.send(b"request")
        assert client.recv() == b"request"

    with_clients(directory, run, service)
    assert sent == ["result"] * 3 + ["reply"] * 2


def test_a_busy_daemon_leaves_turns_of_the_loop_to_others(directory: Path) -> None:
    """Timers, lifelines and HTTP need the loop too: between two turns of theirs messages get a bounded number."""
    ended = threading.Event()

    class Busy(Echo):
        drains = 0

        def background(self) -> bool:
            self.drains += 1
            return not ended.is_set()

    service = Busy()
    beats: list[int] = []

    def run(room: Room) -> None:
        loop = room.sockets._loop

        def beat() -> None:
            beats.append(service.drains)
            for _ in range(3):  # as threads do whose copies have ended
                room.sockets.post(lambda: room.sockets.wake())
            if len(beats) < 100 and service.drains < 2000:
                loop.call_soon(beat)
            else:
                ended.set()

        loop.call_soon_threadsafe(beat)
        assert ended.wait(10)

    with_clients(directory, run, service)
    assert max(after - before for before, after in pairwise(beats)) <= 3
    assert len(beats) == 100


@pytest.mark.parametrize("urgent", [False, True])
def test_what_follows_a_reply_is_put_off_unless_it_is_urgent(directory: Path, urgent: bool) -> None:
    """On few cores it would keep libzmq's thread from sending the reply."""
    service = Echo()
    service.urgent = urgent

    def run(room: Room) -> None:
        client = room.client()
        client.send(b"request")
        assert client.recv() == b"request"
        deadline = time.monotonic() + 10
        while "after" not in service.turns[service.turns.index("1 replies") :]:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    turns = with_clients(directory, run, service).turns
    assert turns[turns.index("1 replies") + 1] == ("after" if urgent else "0 replies")


def test_who_connects_again_under_its_own_name_is_answered(directory: Path) -> None:
    """As a client does whose connection broke: the daemon may not have noticed yet that the old one is gone."""

    def run(room: Room) -> None:
        for number in range(20):
            client = room.client(routing_id=b"k" + bytes(16))  # the old connection stays
            client.send(b"%d" % number)
            assert client.recv() == b"%d" % number

    with_clients(directory, run)


def test_connections_that_wait_for_their_admission_are_admitted_in_several_turns(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that connects in a loop keeps nothing else from its turn, and nobody from being admitted."""
    monkeypatch.setattr("kvoffd.server.sockets.ADMITTED_AT_ONCE", 1)

    def run(room: Room) -> None:
        clients = [room.client() for _ in range(30)]
        for number, client in enumerate(clients):
            client.send(b"%d" % number)
        assert [client.recv() for client in clients] == [b"%d" % number for number in range(30)]

    with_clients(directory, run)


class Counting:
    """A socket that counts the frames that it receives."""

    def __init__(self, socket: object) -> None:
        self._socket = socket
        self.received = 0

    def __getattr__(self, name: str) -> object:
        self.received += name == "recv"
        return getattr(self._socket, name)


def test_a_message_of_very_many_frames_leaves_turns_of_the_loop_to_others(directory: Path) -> None:
    """Its sender gets one reply, to an empty frame. Another request is answered once its frames are dropped."""
    service, frames, ended = Echo(), 8 * FRAMES_AT_ONCE, threading.Event()
    received: list[int] = []

    def run(room: Room) -> None:
        sockets: Any = room.sockets
        jobs = sockets._jobs = Counting(sockets._jobs)

        def beat() -> None:
            received.append(jobs.received)
            if not ended.is_set():
                sockets._loop.call_soon(beat)

        sender, other = room.client(), room.client()
        sockets._loop.call_soon_threadsafe(beat)
        sender.send_multipart([b"frame"] * frames)
        assert sender.recv() == b""
        other.send(b"other")
        assert other.recv() == b"other"
        sender.send(b"again")
        assert sender.recv() == b"again"
        ended.set()

    with_clients(directory, run, service)
    assert received[-1] > frames
    assert max(after - before for before, after in pairwise(received)) <= 2 * (FRAMES_AT_ONCE + 1)
