"""ZMTP as the daemon reads it, against libzmq's own bytes and against everything else; and whose turn it is."""

from __future__ import annotations

import socket
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvoffd.server.connections import ProcessQueue
from kvoffd_proto import zmtp

HELLO = zmtp.opening(b"DEALER")


def reader(max_frame_bytes: int = 100_000, max_frames: int = 4) -> zmtp.Input:
    return zmtp.Input({b"DEALER", b"SUB"}, max_frame_bytes, max_frames)


def taken(source: zmtp.Input) -> list[Any]:
    return list(iter(source.next, None))


@given(st.lists(st.lists(st.binary(max_size=255), max_size=2), max_size=5), st.binary(max_size=70_000), st.data())
def test_what_is_written_is_read_however_it_is_cut(early: list[list[bytes]], last: bytes, data: st.DataObject) -> None:
    messages = [[*frames, last] for frames in early]
    wire = HELLO + b"".join(map(zmtp.encode, messages))
    source, found, at = reader(), [], 0
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8))), len(wire)]:
        source.feed(wire[at:end])
        at = end
        found += taken(source)
    assert found == messages
    assert source.ready
    assert not source.waiting_bytes


@given(st.binary(max_size=300), st.booleans())
def test_garbage_is_refused_or_waits(garbage: bytes, greeted: bool) -> None:
    source = reader()
    source.feed((HELLO if greeted else b"") + garbage)
    try:
        taken(source)
    except zmtp.ZmtpError:
        pass
    assert source.waiting_bytes <= len(garbage) + len(HELLO)


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no greeting"),
        (b"\xff" + bytes(8) + b"\x7f\1", "version 3"),
        (HELLO[:12] + b"PLAIN" + HELLO[17:], "mechanism"),
        (HELLO[:64] + zmtp.encode([b"early"]), "before the handshake"),
        (zmtp.opening(b"PUSH"), "PUSH"),
        (HELLO + bytes([zmtp.COMMAND | zmtp.LONG]) + (1 << 40).to_bytes(8, "big"), "a command of"),
        (HELLO + bytes([zmtp.LONG]) + (1 << 40).to_bytes(8, "big"), "a frame of"),
        (HELLO + b"\x08\0", "flags"),
        (HELLO + b"\1\0" * 4, "frames"),
        (HELLO + bytes([zmtp.MORE | zmtp.LONG]) + (256).to_bytes(8, "big") + bytes(256), "frames"),
        (HELLO[:64] + bytes([zmtp.COMMAND, 9]) + b"\5READY\3ab", "metadata"),
    ],
)
def test_what_ends_a_connection(wire: bytes, why: str) -> None:
    source = reader()
    source.feed(wire)
    with pytest.raises(zmtp.ZmtpError, match=why):
        taken(source)


def test_a_frame_that_is_too_long_is_thrown_away_as_it_comes() -> None:
    source = reader(max_frame_bytes=1000)
    long = zmtp.encode([bytes(1500)])
    source.feed(HELLO + long[:400])
    assert taken(source) == [zmtp.TooLong(1500)]
    for _ in range(10):
        source.feed(long[400:410])
        assert taken(source) == []
        assert not source.waiting_bytes
    source.feed(long[500:] + zmtp.encode([b"next"]))
    assert taken(source) == [[b"next"]]


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.SUB])
def test_libzmq_is_understood_and_understands(kind: int, tmp_path: Any) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener, zmq.Context() as context, context.socket(kind) as client:
        listener.bind(path)
        listener.listen()
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.HEARTBEAT_IVL, 100)
        client.connect(f"ipc://{path}")
        if kind == zmq.SUB:
            client.setsockopt(zmq.SUBSCRIBE, b"topic")
        else:
            client.send_multipart([b"", b"request", bytes(70_000)])
        stream, _ = listener.accept()
        with stream:
            stream.sendall(zmtp.opening(b"PUB" if kind == zmq.SUB else b"ROUTER"))
            source, found = reader(), []
            while len(found) < 2:
                source.feed(stream.recv(65536))
                found += taken(source)
            pings = [one for one in found if isinstance(one, zmtp.Command) and one.name == b"PING"]
            assert pings
            found.remove(pings[0])
            assert found[0] == (
                zmtp.Command(b"SUBSCRIBE", b"topic") if kind == zmq.SUB else [b"", b"request", bytes(70_000)]
            )
            stream.sendall(zmtp.encode_command(b"PONG", b"") + zmtp.encode([b"topic", bytes(300)]))
            assert client.poll(5000)
            assert client.recv_multipart() == [b"topic", bytes(300)]


def test_processes_take_turns_by_the_time_that_they_take() -> None:
    queue, served = ProcessQueue(), []

    def process(name: str, cost_s: float, connections: int) -> None:
        made = SimpleNamespace(name=name, waiting=deque(), served_s=0.0)
        for _ in range(connections):
            queue.add(SimpleNamespace(process=made, cost_s=cost_s))  # type: ignore[arg-type]

    def serve(connection: Any) -> bool:
        time.sleep(connection.cost_s)
        served.append(connection.process.name)
        return True

    process("flood", 0.001, 50)
    process("large", 0.004, 1)
    process("polite", 0.001, 1)
    queue.serve(serve, time.monotonic() + 0.3)
    share = {name: served.count(name) for name in ("flood", "large", "polite")}
    assert 0.7 < share["polite"] / share["flood"] < 1.4
    assert 0.15 < share["large"] / share["polite"] < 0.4
