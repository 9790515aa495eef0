"""The ZeroMQ sockets on a loop of their own, over a service that only answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvoffd.config import Config
from kvoffd.server import transport
from kvoffd.server.context import Outbox
from kvoffd.server.service import Service
from kvoffd.system.directory import DaemonDirectory
from kvoffd_proto import zmtp

REPLY_BYTES = 256 * 1024


class Answering:
    """A service that answers each request with as many bytes."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(config=Config(), outbox=Outbox())
        self.handled = 0

    def handle(self, sender: bytes, frame: bytes) -> None:
        self.handled += 1
        self.context.outbox.replies.append((sender, bytes(REPLY_BYTES)))

    def background(self) -> bool:
        return False

    def flush(self) -> Outbox:
        outbox, self.context.outbox = self.context.outbox, Outbox()
        return outbox

    def after_send(self) -> None:
        pass


def test_output_that_nobody_reads_is_bounded_over_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_ALL_UNSENT_BYTES", 4 * REPLY_BYTES)
    service = Answering()

    async def flood() -> int:
        directory = DaemonDirectory(tmp_path)
        sockets = transport.Transport(cast("Service", service), directory, 16)
        sockets.open()
        clients = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for client in clients:
            client.connect(str(directory.sockets.jobs))
            client.sendall(zmtp.opening(b"DEALER") + b"".join(zmtp.encode([b"ask"]) for _ in range(16)))
        await asyncio.sleep(0.5)
        waiting = service.handled
        for client in clients:
            client.setblocking(False)
        for _ in range(200):
            for client in clients:
                with contextlib.suppress(BlockingIOError):
                    while client.recv(1 << 20):
                        pass
            sockets.tick()
            await asyncio.sleep(0.005)
        for client in clients:
            client.close()
        await sockets.close(0.1)
        return waiting

    waiting = asyncio.run(flood())
    # Each socket takes some into the kernel's buffers before the first byte waits.
    assert 4 <= waiting <= 16, waiting
    assert service.handled == 64


def test_who_has_the_most_unread_output_is_cut_off_where_all_have_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each asks once, while it has nothing unread, and together they pass every bound."""
    monkeypatch.setattr(transport, "MAX_ALL_UNSENT_BYTES", 2 * REPLY_BYTES)
    monkeypatch.setattr(transport, "MAX_UNSENT_BYTES", REPLY_BYTES)
    service = Answering()

    async def ask() -> tuple[int, int]:
        directory = DaemonDirectory(tmp_path)
        sockets = transport.Transport(cast("Service", service), directory, 32)
        monkeypatch.setattr(sockets, "_behind", lambda process: False)  # as if each were a process of its own
        sockets.open()
        unread = 0
        clients = [socket.socket(socket.AF_UNIX) for _ in range(12)]
        for client in clients:
            client.connect(str(directory.sockets.jobs))
            client.sendall(zmtp.opening(b"DEALER") + zmtp.encode([b"ask"]) * 2)
            await asyncio.sleep(0.02)
            unread = max(unread, sockets._unsent_bytes)
        open_now = len(sockets._jobs.connections)
        for client in clients:
            client.close()
        await sockets.close(0.1)
        return unread, open_now

    unread, open_now = asyncio.run(ask())
    assert unread <= 3 * REPLY_BYTES
    assert 2 <= open_now < 12
