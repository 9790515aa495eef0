"""Attacks on the lifeline socket: connections without end, and descriptors that are no memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffd_proto import lifeline
from kvoffd_proto.errors import ErrorCode
from kvoffd_proto.sockets import SocketPaths
from tests.hostile import peers
from tests.hostile.target import FLAGS, Target
from tests.kit.struct_wire import WireClient

MAX_SESSIONS = int(FLAGS["max_sessions"])
LINGER_S = 20


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """A TCP socket whose last close waits for LINGER_S: its peer does not read what it has sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
        sender.connect(listener.getsockname())
        peer, _ = listener.accept()
        with peer:
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 20))
            sender.setblocking(True)
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
            yield os.dup(sender.fileno())
            os.close(sender.detach())
            time.sleep(1.0)


def test_sessions_are_taken_and_lifelines_come_again_and_again(target: Target) -> None:
    def attack(directory: Path) -> None:
        held = [peers.RawSession(directory) for _ in range(MAX_SESSIONS)]
        while held:
            with contextlib.suppress(OSError):
                peers.connect(SocketPaths(directory).lifeline).close()

    with target.attacker(attack):
        time.sleep(0.5)
        asked = subprocess.run(
            [
                sys.executable,
                "-c",
                "from kvoffd_client.cli import main; main()",
                "health",
                "--directory",
                target.directory,
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert asked.returncode == 0, asked
        assert target.stats().sessions >= 16  # an administrator finds a place too


def attached(session: peers.RawSession, fd: int) -> None:
    refusal = session.attach(fd, 1)
    assert isinstance(refusal, lifeline.AttachRefused)
    assert refusal.code is ErrorCode.UNSAFE_SEGMENT


def garbage(session: peers.RawSession, fd: int) -> None:
    socket.send_fds(session.stream, [b"\xff" * 64], [fd])


def half_a_frame(session: peers.RawSession, fd: int) -> None:
    socket.send_fds(session.stream, [b"\0"], [fd])
    session.close()


@pytest.mark.parametrize("send", [attached, garbage, half_a_frame])
def test_a_socket_whose_close_waits(target: Target, send: Callable[[peers.RawSession, int], None]) -> None:
    def attack(directory: Path) -> None:
        session = peers.RawSession(directory)
        with lingering() as fd:
            send(session, fd)
            os.close(fd)

    target.attack(attack)


def test_its_own_end_of_the_lifeline(target: Target) -> None:
    """The daemon would hold the peer's end open, and never see the end of the session."""

    def attack(directory: Path) -> None:
        with WireClient(directory) as session:  # which has said Hello: no deadline ends it
            assert isinstance(session.attach(session.stream.fileno(), 1), lifeline.AttachRefused)
            session.send_fds(b"\0", [session.stream.fileno()] * 8)
            time.sleep(0.2)
            os._exit(0)

    target.attack(attack)
