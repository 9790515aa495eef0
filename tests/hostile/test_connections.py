"""Attacks by connections alone."""

from __future__ import annotations

import time
from pathlib import Path

from kvoffd_proto.sockets import SocketPaths
from tests.hostile import peers
from tests.hostile.target import Target


def test_lifelines_that_come_and_go(target: Target) -> None:
    def attack(directory: Path) -> None:
        for _ in peers.for_seconds(1.0):
            peers.RawSession(directory).close()
            time.sleep(0.005)

    target.attack(attack)


def test_greetings_that_are_not_finished_or_none(target: Target) -> None:
    def attack(directory: Path) -> None:
        paths = SocketPaths(directory)
        for length in range(0, len(peers.GREETING), 7):
            for path in (paths.jobs, paths.events):
                peers.connect(path).sendall(peers.GREETING[:length])
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 65536, b"", b"\xff\0\0\0\0\0\0\0\1\x7f") * 12:
            peers.connect(paths.jobs).sendall(garbage)
        time.sleep(0.3)

    target.attack(attack)
