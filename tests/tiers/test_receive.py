"""What one call of C receives of a value: every byte where it belongs, in whatever pieces it comes, and in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from kvoffd.pool.checksums import digest
from kvoffd.tiers.redis_store import Redis
from kvoffd.tiers.store import Credentials, StoreError

LENGTHS = 300, 0, 70_000, 5, 250_000


class Line:
    """A connection, and what is at its other end."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.redis = Redis("nowhere", 6379, 0, Credentials(), tls=False)
        self.redis._socket = ours
        self.pool = memoryview(bytearray(sum(LENGTHS)))
        ends = [sum(LENGTHS[: number + 1]) for number in range(len(LENGTHS))]
        self.views = [self.pool[end - length : end] for end, length in zip(ends, LENGTHS, strict=True)]

    def fill(self, patience_s: float) -> list[int]:
        return list(self.redis._fill(self.views, time.monotonic() + patience_s))


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.redis.close()
    line.theirs.close()


@pytest.mark.parametrize("piece", [100, 4097, 69_999, 1 << 20])
@pytest.mark.parametrize("received", [0, 299, 300, 40_000])
def test_a_value_is_received_whole_in_whatever_pieces_it_comes(line: Line, piece: int, received: int) -> None:
    data = Random(piece).randbytes(sum(LENGTHS))
    sent = data[received:] + b"beyond"
    line.redis._input += data[:received]

    def send() -> None:
        for at in range(0, len(sent), piece):
            line.theirs.sendall(sent[at : at + piece])

    thread = threading.Thread(target=send)
    thread.start()
    sums = line.fill(10.0)
    thread.join()
    assert line.pool == data
    for view, taken in zip(line.views, sums, strict=True):
        assert taken == digest(view) or (taken == 0 and len(view) < 241), "short ones are left to others"
    assert b"beyond".startswith(line.redis._input)
    assert line.redis._take(6, time.monotonic() + 10.0) == b"beyond"


@pytest.mark.parametrize("sent", [0, 1000])
def test_what_does_not_come_in_time_is_given_up(line: Line, sent: int) -> None:
    line.theirs.sendall(bytes(sent))
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        line.fill(0.1)
    assert caught.value.kind == "timeout"
    assert 0.1 <= time.monotonic() - began < 2.0
    assert line.redis._socket is None, "what comes later goes nowhere"


def test_a_connection_that_ends_in_a_value_is_lost(line: Line) -> None:
    line.theirs.sendall(bytes(1000))
    line.theirs.close()
    with pytest.raises(StoreError) as caught:
        line.fill(10.0)
    assert caught.value.kind == "disconnected"
    assert "closed" in caught.value.sentence
