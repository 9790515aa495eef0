"""The floor of all ZeroMQ messages: a process that sends as many bytes back as a request asks for.

The echo process does nothing but that: no decoding, no index, no copy. Requests go from
a DEALER to its ROUTER; the answer comes back the same way or, as completions do, from its PUB to a SUB.

Run as ``python -m tests.bench.daemon.echo DIRECTORY``; it ends when its standard input does.
"""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
import time
from enum import IntEnum
from pathlib import Path

import zmq

from kvoffd_client.session import Closing
from kvoffd_proto.paths import SocketPaths
from tests.bench.daemon.results import BenchFailed

ROOT = Path(__file__).parents[3]
HEADER_BYTES = 5
"""Of a request: four bytes for the size of the answer, one for the socket it comes from."""
TOPIC = b"session@0123456789012345678/1/"
"""As long as a session's topic."""
TIMEOUT_MS = 5_000
END_TIMEOUT_S = 30.0
POLL_MS = 100


class ReplySocket(IntEnum):
    """The socket from which the echo process answers."""

    ROUTER = 0
    PUB = 1


def serve(directory: Path) -> None:
    """Answer until standard input ends."""
    paths = SocketPaths(directory)
    context = zmq.Context()
    router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    for socket, path in ((router, paths.jobs), (publisher, paths.events)):
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_address(path))
    # The simplest loop there is: one blocking call to receive and one to send. Every POLL_MS it looks for its end.
    router.setsockopt(zmq.RCVTIMEO, POLL_MS)
    print("ready", flush=True)
    while True:
        try:
            sender, frame = router.recv_multipart()
        except zmq.Again:
            if select.select((sys.stdin,), (), (), 0)[0]:
                break
            continue
        answer = bytes(int.from_bytes(frame[:4], "little"))
        if frame[4] == ReplySocket.PUB:
            publisher.send_multipart((TOPIC, bytes(8), answer))
        else:
            router.send_multipart((sender, answer))
    context.destroy(linger=0)


def _address(socket_path: Path) -> str:
    return f"ipc://{socket_path}"


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> zmq.Socket[bytes]:
    return _connect(context, zmq.DEALER, SocketPaths(directory).jobs)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, socket_path: Path) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.connect(_address(socket_path))
    return socket


class ChildProcess(Closing):
    """``python -m MODULE``, which speaks in lines and ends when its standard input does."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = (sys.executable, "-m", module, *arguments)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def write_line(self) -> None:
        """Send an empty line."""
        self._stdin.write(b"\n")
        self._stdin.flush()

    def read_line(self, failure: str = "A process of the bench ended before its time; its error is above.") -> bytes:
        """Wait for a line. Raises BenchFailed with ``failure`` where the process ends instead."""
        line = self._stdout.readline()
        if not line:
            raise BenchFailed(failure)
        return line

    def end_input(self) -> None:
        """Let the process end, without waiting for it."""
        self._stdin.close()

    def close(self) -> None:
        self._stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()


class Echo(Closing):
    """The echo process and the client's sockets to it."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvoffd-echo-")
        self.directory = Path(self._directory.name)
        self._process = ChildProcess("tests.bench.daemon.echo", self._directory.name)
        self._context = zmq.Context()
        try:
            self._process.read_line("The echo process that measures the floor did not start; its error is above.")
        except BaseException:
            self.close()
            raise
        self._dealer = connect_dealer(self._context, self.directory)
        self._subscriber = _connect(self._context, zmq.SUB, SocketPaths(self.directory).events)
        self._subscriber.subscribe(TOPIC)
        self._wait_subscribed()

    def round_trip(self, request: bytes, reply_socket: ReplySocket = ReplySocket.ROUTER) -> float:
        """Send ``request`` (from ``echo_request``) and wait for its answer; return the seconds."""
        begin = time.perf_counter()
        self.send(request)
        self.receive(reply_socket)
        return time.perf_counter() - begin

    def send(self, request: bytes) -> None:
        self._dealer.send(request)

    def receive(self, reply_socket: ReplySocket) -> None:
        """Wait for one answer. Raises BenchFailed when none comes."""
        try:
            if reply_socket is ReplySocket.PUB:
                self._subscriber.recv_multipart()
            else:
                self._dealer.recv()
        except zmq.Again as error:
            raise BenchFailed(
                "The echo process that measures the floor does not answer; run the bench again."
            ) from error

    def _wait_subscribed(self) -> None:
        """PUB drops what it sends before it knows of the subscription: ask until something comes."""
        request = echo_request(HEADER_BYTES, 1, ReplySocket.PUB)
        for _ in range(TIMEOUT_MS // 10):
            self.send(request)
            if self._subscriber.poll(10):
                break
        while self._subscriber.poll(50):
            self.receive(ReplySocket.PUB)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._process.close()
        self._directory.cleanup()


def echo_request(request_bytes: int, answer_bytes: int, reply_socket: ReplySocket = ReplySocket.ROUTER) -> bytes:
    """Return a request of ``request_bytes`` (HEADER_BYTES or more) that asks for an answer of ``answer_bytes``."""
    header = answer_bytes.to_bytes(4, "little") + bytes([reply_socket])
    return header.ljust(request_bytes, b"\xa5")


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
