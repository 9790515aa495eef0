"""Attacks on the ZeroMQ sockets: connections, frames, subscriptions, and requests without end."""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffd_proto import codec
from kvoffd_proto import messages as m
from kvoffd_proto.sockets import SocketPaths
from tests.hostile import peers
from tests.hostile.target import DESCRIPTORS, Target
from tests.kit.struct_wire import WireClient

ATTACK_S = 2.0
BEFORE_S = 0.002
"""CPU time that the daemon may have before it answers the median request of a client beside a flood: 0.0002 to 0.0007
were seen, and 0.3 s before clients took turns."""


def flood(streams: list[socket.socket], data: bytes, *, read: bool = True) -> None:
    """Send the same over and over on all of them, and read what comes."""
    for stream in streams:
        stream.setblocking(False)
    while True:
        readable, writable, _ = select.select(streams if read else [], streams, [], 0.1)
        for stream in writable:
            with contextlib.suppress(OSError):
                stream.send(data)
        for stream in readable:
            with contextlib.suppress(OSError):
                stream.recv(1 << 20)


def both(directory: Path) -> Iterator[tuple[Path, bytes]]:
    paths = SocketPaths(directory)
    yield paths.jobs, b"DEALER"
    yield paths.events, b"SUB"


def test_connections_until_descriptors_run_out(target: Target) -> None:
    def attack(directory: Path) -> None:
        peers.take_all_descriptors()
        held = [stream for path, _ in both(directory) for stream in peers.connections(path, DESCRIPTORS, ATTACK_S / 2)]
        for number in peers.for_seconds(ATTACK_S):
            for path, _ in both(directory):
                held[number % len(held)].close()
                with contextlib.suppress(OSError):
                    held[number % len(held)] = peers.connect(path)

    with target.attacker(attack) as process:
        process.join(2 * ATTACK_S)
        assert peers.descriptors_of(target.pid) < DESCRIPTORS * 3 // 4
        with WireClient(target.directory) as newcomer:
            newcomer.ask(m.Health)


def test_connections_as_fast_as_it_goes(target: Target) -> None:
    def attack(directory: Path) -> None:
        paths = SocketPaths(directory)
        while True:
            for path in (paths.lifeline, paths.jobs, paths.events):
                with contextlib.suppress(OSError):
                    peers.connect(path).close()

    with target.attacker(attack):
        time.sleep(ATTACK_S)
        with WireClient(target.directory) as newcomer:
            newcomer.ask(m.Health)


def test_thirty_megabytes_of_subscriptions(target: Target) -> None:
    def attack(directory: Path) -> None:
        topics = (number.to_bytes(4, "big") + bytes(245) for number in range(120_000))
        data = b"".join(peers.zmtp_frame(b"\1" + topic) for topic in topics)
        with pytest.raises(OSError):  # noqa: PT011 - the daemon closes it
            peers.zmtp(SocketPaths(directory).events, b"SUB").sendall(data)

    target.attack(attack)


def test_a_message_of_millions_of_frames(target: Target) -> None:
    def attack(directory: Path) -> None:
        for path, kind in both(directory):
            with pytest.raises(OSError):  # noqa: PT011
                peers.zmtp(path, kind).sendall(peers.zmtp_frame(b"", peers.MORE) * 5_000_000)

    target.attack(attack)


def test_large_frames_that_are_never_finished(target: Target) -> None:
    def attack(directory: Path) -> None:
        size = 32 << 20
        streams = [peers.zmtp(SocketPaths(directory).jobs) for _ in range(20)]
        left = dict.fromkeys(streams, size - 1)
        for stream in streams:
            stream.sendall(bytes([peers.LONG]) + size.to_bytes(8, "big"))
            stream.setblocking(False)
        for _ in peers.for_seconds(ATTACK_S):
            for stream in streams:
                with contextlib.suppress(OSError):
                    left[stream] -= stream.send(bytes(min(left[stream], 1 << 18)))

    target.attack(attack)


def test_pings_and_replays_without_end(target: Target) -> None:
    ping = peers.zmtp_frame(b"\4PING" + bytes(18), peers.COMMAND)
    replay = peers.zmtp_frame(b"", peers.MORE) + peers.zmtp_frame(bytes(8))
    for data, read in ((ping, True), (ping, False), (replay, True), (replay, False)):

        def attack(directory: Path, data: bytes = data, read: bool = read) -> None:
            flood([peers.zmtp(path, kind) for path, kind in both(directory) for _ in range(5)], data * 100, read=read)

        with target.attacker(attack):
            time.sleep(ATTACK_S / 2)


def test_two_hundred_connections_of_requests_leave_others_their_share(target: Target) -> None:
    def attack(directory: Path) -> None:
        with WireClient(directory) as client:
            request = codec.encode(m.Health(1, client.token))
            streams = peers.connections(SocketPaths(directory).jobs, 200, ATTACK_S)
            for stream in streams:
                with contextlib.suppress(OSError):
                    stream.sendall(peers.zmtp_handshake())
            flood(streams, peers.zmtp_frame(request) * 50)

    clock = ~target.pid << 3 | 2  # CPUCLOCK_SCHED of linux/posix-timers.h: exact, and no time that others had the CPU
    took = []
    with target.attacker(attack), WireClient(target.directory) as client:
        time.sleep(1.0)
        for _ in peers.for_seconds(ATTACK_S):
            began = time.clock_gettime(clock)
            client.ask(m.Health)
            took.append(time.clock_gettime(clock) - began)
    assert statistics.median(took) <= BEFORE_S
