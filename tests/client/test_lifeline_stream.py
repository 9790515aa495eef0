"""When a lifeline that has ended means that the daemon touches no memory any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_client import lifeline_stream
from kvoffd_client.lifeline_stream import NEVER, LifelineStream
from kvoffd_proto.lifeline import Attached, FromDaemon, MemoryReleased, encode_frame
from kvoffd_proto.paths import SocketPaths
from tests.kit.waiting import wait_until

GRACE_S = lifeline_stream.DAEMON_END_GRACE_S
# Listens, says a line on each of its steps, and lives on with no descriptor of the stream.
LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
stream, _ = listener.accept()
for line in sys.stdin:
    stream.sendall(bytes.fromhex(line))
    if not line.strip():
        stream.close()
        listener.close()
"""


class Peer:
    """The daemon's end, in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "listens\n"

    def send(self, data: bytes) -> None:
        self.process.stdin.write(data.hex() + "\n")
        self.process.stdin.flush()

    def close_stream(self) -> None:
        self.send(b"")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    SocketPaths(tmp_path).jobs.touch()
    peer = Peer(SocketPaths(tmp_path).lifeline)
    yield peer
    peer.end()


Connect = Callable[[], LifelineStream]


@pytest.fixture
def connect(peer: Peer, tmp_path: Path) -> Iterator[Connect]:
    """Connects to the peer."""
    made: list[LifelineStream] = []

    def connect() -> LifelineStream:
        made.append(LifelineStream(SocketPaths(tmp_path)))
        return made[-1]

    yield connect
    for stream in made:
        stream.close()


def read_to_end(lifeline: LifelineStream) -> list[FromDaemon]:
    messages: list[FromDaemon] = []
    wait_until(lambda: (messages.extend(lifeline.read()), lifeline.ended)[1])
    return messages


def test_a_daemon_that_lives_has_released_nothing(peer: Peer, connect: Connect) -> None:
    lifeline = connect()
    assert not lifeline.released(time.monotonic())
    peer.send(encode_frame(MemoryReleased()))
    wait_until(lambda: list(lifeline.read()) == [MemoryReleased()])
    assert not lifeline.released(time.monotonic()), "the end comes after the frame"


def test_what_the_daemon_says_before_the_end_counts_at_once(peer: Peer, connect: Connect) -> None:
    lifeline = connect()
    peer.send(encode_frame(Attached(3)) + encode_frame(MemoryReleased()))
    peer.close_stream()
    assert read_to_end(lifeline) == [Attached(3), MemoryReleased()]
    assert lifeline.released(time.monotonic())
    assert peer.process.poll() is None


@pytest.mark.parametrize("before_linux_6_5", [False, True])
def test_an_end_without_a_word_waits_for_the_process(
    peer: Peer, connect: Connect, before_linux_6_5: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before_linux_6_5:  # the process is found by its number
        monkeypatch.setattr(lifeline_stream, "peer_pidfd", lambda stream: -1)
    lifeline = connect()
    peer.send(encode_frame(MemoryReleased()) + encode_frame(Attached(3)))
    peer.close_stream()
    read_to_end(lifeline)
    assert not lifeline.released(time.monotonic() + 100 * GRACE_S), "the process lives"
    assert lifeline.wake_at() == NEVER, "its end wakes the client, no clock does"
    peer.process.kill()  # a zombie's descriptors are closed
    wait_until(lambda: lifeline.released(time.monotonic()))
    assert os.waitid(os.P_PID, peer.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def test_a_number_that_may_be_anothers_by_now_is_not_waited_for(
    peer: Peer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pidfd_open

    def after_its_end(pid: int) -> int:
        pidfd = real(os.getpid())
        peer.process.kill()
        peer.process.wait(10)
        return pidfd

    monkeypatch.setattr(lifeline_stream, "peer_pidfd", lambda stream: -1)
    monkeypatch.setattr(os, "pidfd_open", after_its_end)
    lifeline = connect()
    read_to_end(lifeline)
    assert lifeline.wake_at() < NEVER


def test_a_process_that_the_kernel_does_not_show_has_a_grace(
    peer: Peer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LifelineStream, "_pidfd_of_peer", lambda stream: -1)
    lifeline = connect()
    assert lifeline.wake_at() == NEVER
    peer.close_stream()
    read_to_end(lifeline)
    ended = time.monotonic()
    assert ended < lifeline.wake_at() <= ended + GRACE_S
    assert not lifeline.released(ended)
    assert lifeline.released(lifeline.wake_at())
