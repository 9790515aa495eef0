"""ZMTP as the daemon reads it, against libzmq's own bytes and against everything else; and whose turn it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
